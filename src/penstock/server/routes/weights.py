"""Weights swapped, and generation held, while the server runs: SGLang's paths and vLLM's, for the admin key."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.routing import BaseRoute, Route

from penstock.base.errors import InputError, PenstockError
from penstock.core.weight_swap import WeightsOrder
from penstock.server.context import Server
from penstock.server.errors import WireError
from penstock.server.routes.admin import for_admin

_VERSION = re.compile(r"[\w.:/@+-]{1,128}", re.ASCII)
_POLL_S = 0.02
_SGLANG = {"abort": "abort", "retract": "retract", "in_place": None}
_VLLM = {"abort": "abort", "wait": "wait", "keep": None}


class UpdateWeights(msgspec.Struct, forbid_unknown_fields=True):
    """SGLang's shape. `model_path`: below the folder that `weights_root` names. `weight_version`: what answers call
    these weights; by default the beginning of the hash of their content.

    Requests that run end over the old weights, and those that come wait for that, unless `abort_all_requests`; or
    `in_place`: they go on over the new ones, their keys and values computed again unless `recompute_kv` is false.
    """

    model_path: str
    load_format: str | None = None
    abort_all_requests: bool = False
    weight_version: str | None = None
    in_place: bool = False
    recompute_kv: bool = True
    is_async: bool = False
    torch_empty_cache: bool = False
    flush_cache: bool = True

    def mode(self) -> str:
        """Raises InputError."""
        if self.load_format not in (None, "auto"):
            raise InputError("load_format: weights are read by what the files are; leave it out", param="load_format")
        if self.abort_all_requests and self.in_place:
            raise InputError("in_place: nothing goes on where abort_all_requests; leave one of them out",
                             param="in_place")  # fmt: skip
        if not self.recompute_kv and not self.in_place:
            raise InputError("recompute_kv is about requests that go over to other weights: it needs in_place",
                             param="recompute_kv")  # fmt: skip
        if self.weight_version is not None and not _VERSION.fullmatch(self.weight_version):
            raise InputError("weight_version: 1 to 128 letters, digits and . _ - : / @ + are needed",
                             param="weight_version")  # fmt: skip
        if self.abort_all_requests:
            return "abort"
        return "wait" if not self.in_place else "recompute" if self.recompute_kv else "keep"


class PauseGeneration(msgspec.Struct, forbid_unknown_fields=True):
    """SGLang's shape. `mode`: abort, retract (they are computed again) or in_place."""

    mode: str = "abort"


async def update_weights(request: Request, server: Server) -> Any:
    """Answers once they serve. Whatever fails, the old ones serve on."""
    asked = msgspec.json.decode(await request.body(), type=UpdateWeights)
    mode = asked.mode()
    root = server.config.weights_root
    if root is None:
        raise WireError(404, "weights are taken up below a folder that weights_root names, and the server was started "
                        "without one", code="not_found")  # fmt: skip
    path = await asyncio.to_thread(below, root, asked.model_path)
    order = WeightsOrder(str(path), asked.weight_version or "", mode)
    try:
        done = await server.client.swap_weights(order)
    except PenstockError as error:
        if getattr(error, "status", None) is not None:
            raise
        raise InputError(f"model_path: {_without(str(error), str(path), asked.model_path)}",
                         param="model_path") from None  # fmt: skip
    content = None if done.facts is None else done.facts.content
    return {
        "success": True, "message": "Succeeded to update model weights.", "weight_version": done.version,
        "content": content, "num_paused_requests": 0,
    }  # fmt: skip


def below(root: str, path: str) -> Path:
    """`path`, relative to `root` or below it, once all links are followed, its files too. Raises InputError."""
    top = Path(root).resolve()
    found = (top / path).resolve()
    outside = InputError("model_path: it leads out of the folder that weights_root names", param="model_path")
    if not found.is_relative_to(top):
        raise outside
    if not found.exists():
        raise InputError("model_path: there is nothing", param="model_path")
    if found.is_dir() and not all(part.resolve().is_relative_to(top) for part in found.iterdir()):
        raise outside
    return found


def _without(text: str, path: str, given: str) -> str:
    """Where things are stays private."""
    return text.replace(path, given)


async def weight_version(request: Request, server: Server) -> Any:
    return {"weight_version": server.client.weight_version}


async def pause_generation(request: Request, server: Server) -> Any:
    asked = msgspec.json.decode(await request.body() or b"{}", type=PauseGeneration)
    await _pause(server, _SGLANG, asked.mode)
    return {"status": "ok", "message": "Generation paused successfully."}


async def pause(request: Request, server: Server) -> Any:
    """vLLM's: `?mode=abort`, `wait` (for those that run) or `keep`."""
    await _pause(server, _VLLM, request.query_params.get("mode", "abort"))
    return {"status": "paused"}


async def _pause(server: Server, modes: dict[str, str | None], mode: str) -> None:
    if mode not in modes:
        raise InputError(f"mode: {mode[:40]!r} is none of {', '.join(modes)}", param="mode")
    client = server.client
    running = [stream for stream in client.streams if modes[mode] == "abort" or stream.started]
    client.hold(modes[mode])
    if modes[mode] in ("abort", "wait"):
        while client.paused and any(not stream.ended for stream in running):
            await asyncio.sleep(_POLL_S)


async def go_on(request: Request, server: Server) -> Any:
    server.client.go_on()
    return {"status": "ok", "message": "Generation continued successfully."}


async def resume(request: Request, server: Server) -> Any:
    server.client.go_on()
    return {"status": "resumed"}


async def is_paused(request: Request, server: Server) -> Any:
    return {"is_paused": server.client.paused}


ROUTES: list[BaseRoute] = [
    Route("/update_weights_from_disk", for_admin(update_weights), methods=["POST"]),
    Route("/get_weight_version", for_admin(weight_version), methods=["GET"]),
    Route("/pause_generation", for_admin(pause_generation), methods=["POST"]),
    Route("/continue_generation", for_admin(go_on), methods=["POST"]),
    Route("/pause", for_admin(pause), methods=["POST"]),
    Route("/resume", for_admin(resume), methods=["POST"]),
    Route("/is_paused", for_admin(is_paused), methods=["GET"]),
]
