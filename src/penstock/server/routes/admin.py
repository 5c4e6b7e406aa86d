"""Routes for the admin key. Without such a key they do not exist."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from penstock.base.errors import InputError
from penstock.core.request import Control
from penstock.server.adapters import Adapters
from penstock.server.call import Tenant
from penstock.server.context import Server
from penstock.server.errors import WireError

if TYPE_CHECKING:
    from penstock.server.several.models import Models
    from penstock.server.several.served import ServedModel

Handler = Callable[[Request, Server], Awaitable[Any]]


class AbortRequest(msgspec.Struct):
    """`request_id`: as `GET /admin/requests` shows it, or the X-Request-Id that the client sent or was given."""

    request_id: str


def for_admin(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    async def checked(request: Request) -> Response:
        server: Server = request.app.state.server
        keys = server.parts.get("keys")
        if keys is None or not keys.has_admin:
            raise WireError(404, f"there is nothing at {request.url.path}", code="not_found")
        tenant: Tenant = request.scope["state"]["tenant"]
        if not tenant.admin:
            raise WireError(403, "this needs the admin key", code="permission_denied")
        found = await handler(request, server)
        if isinstance(found, Response):
            return found
        return Response(msgspec.json.encode(found), media_type="application/json")

    return checked


async def reset_prefix_cache(request: Request, server: Server) -> Any:
    server.client.control(Control(kind="reset_prefix_cache"))
    return {"object": "reset_prefix_cache", "done": True}


class EvictRequest(msgspec.Struct, forbid_unknown_fields=True):
    """`tenant`: its blocks alone, by the name of its key; `unused_for`: seconds for which nobody has used them."""

    tenant: str | None = None
    unused_for: float = 0.0


async def evict_prefix_cache(request: Request, server: Server) -> Any:
    asked = msgspec.json.decode(await request.body() or b"{}", type=EvictRequest)
    if not asked.unused_for >= 0:
        raise InputError("unused_for must be a number of seconds from 0", param="unused_for")
    server.client.control(Control(kind="evict_prefix_cache", label=asked.tenant, age_s=asked.unused_for))
    return {"object": "evict_prefix_cache", "done": True}


async def abort(request: Request, server: Server) -> Any:
    asked = msgspec.json.decode(await request.body(), type=AbortRequest)
    found = [s for one in server.each for s in one.client.streams if asked.request_id in _names(s)]
    for stream in found:
        stream.abort()
    if not found:
        raise WireError(404, "no such request is running", code="not_found", param="request_id")
    return {"object": "abort", "aborted": [stream.request_id for stream in found]}


async def requests(request: Request, server: Server) -> Any:
    now = server.service.clock.now()
    rows = []
    for model, stream in [(one.model_name, stream) for one in server.each for stream in one.client.streams]:
        call = stream.call
        rows.append(
            {
                "id": stream.request_id,
                "request_id": None if call is None else call.facts.get("http_request_id"),
                "model": model,
                "endpoint": "" if call is None else call.endpoint,
                "tenant": "" if call is None else call.tenant.name,
                "age_s": round(now - stream.request.arrival_s, 3),
                "prompt_tokens": len(stream.request.prompt_token_ids),
                "max_tokens": stream.request.max_tokens,
                "n": stream.request.n,
                "state": "running" if stream.started else "waiting",
            }
        )
    return {"object": "list", "data": rows}


async def sleep(request: Request, server: Server) -> Any:
    """vLLM's. `?level=1`: KV and caches are given back; 2: the engine ends. What runs ends first."""
    level = request.query_params.get("level", "1")
    if level not in ("1", "2"):
        raise InputError("level must be 1 (KV is given back) or 2 (the engine ends)", param="level")
    models, model = _models(server)
    await models.sleep(model, int(level))
    return {"is_sleeping": True}


async def wake_up(request: Request, server: Server) -> Any:
    """Answers when the model is ready."""
    models, model = _models(server)
    await models.awake(model)
    return {"is_sleeping": False}


async def is_sleeping(request: Request, server: Server) -> Any:
    return {"is_sleeping": _models(server)[1].level > 0}


def _models(server: Server) -> tuple[Models, ServedModel]:
    from penstock.server.admission.waking import models_of  # who never lets a model sleep has no use for it

    models = models_of(server)
    return models, models.served[server.model_name]


class LoadAdapter(msgspec.Struct):
    """vLLM's shape. `lora_path`: below the folder that `lora_root` names."""

    lora_name: str
    lora_path: str


class UnloadAdapter(msgspec.Struct):
    """vLLM's shape. `lora_int_id` says nothing here."""

    lora_name: str
    lora_int_id: int | None = None


async def load_adapter(request: Request, server: Server) -> Any:
    asked = msgspec.json.decode(await request.body(), type=LoadAdapter)
    if any(asked.lora_name in one.names for one in (server.first or server).each if one is not server):
        raise InputError(f"lora_name: {asked.lora_name[:80]} is the name of another model here", param="lora_name")
    await _adapters(server).load(asked.lora_name, asked.lora_path)
    return f"Success: LoRA adapter '{asked.lora_name}' added successfully."


async def unload_adapter(request: Request, server: Server) -> Any:
    """Answers once no request has it any more."""
    asked = msgspec.json.decode(await request.body(), type=UnloadAdapter)
    await _adapters(server).unload(asked.lora_name, server.client.streams)
    return f"Success: LoRA adapter '{asked.lora_name}' removed successfully."


def _adapters(server: Server) -> Adapters:
    if server.adapters is None:
        raise WireError(404, "this server has no adapters; start it with --enable-lora", code="not_found")
    return server.adapters


def _names(stream: Any) -> tuple[str, ...]:
    call = stream.call
    return (stream.request_id, "" if call is None else call.facts.get("http_request_id") or "")


async def freeze(request: Request, server: Server) -> Any:
    """Knobs stay as they are until `/admin/adaptive/thaw`."""
    return _frozen(server, "freeze")


async def thaw(request: Request, server: Server) -> Any:
    return _frozen(server, "thaw")


def _frozen(server: Server, kind: str) -> Any:
    if not server.client.snapshot.knobs:
        raise WireError(404, "this engine is not in adaptive mode; start it with --adaptive", code="not_found")
    server.client.control(Control(kind=kind))
    return {"object": "adaptive", "frozen": kind == "freeze"}


ROUTES: list[BaseRoute] = [
    Route("/admin/adaptive/freeze", for_admin(freeze), methods=["POST"]),
    Route("/admin/adaptive/thaw", for_admin(thaw), methods=["POST"]),
    Route("/admin/requests", for_admin(requests), methods=["GET"]),
    Route("/admin/abort", for_admin(abort), methods=["POST"]),
    Route("/admin/evict_prefix_cache", for_admin(evict_prefix_cache), methods=["POST"]),
    Route("/v1/load_lora_adapter", for_admin(load_adapter), methods=["POST"]),
    Route("/v1/unload_lora_adapter", for_admin(unload_adapter), methods=["POST"]),
    Route("/sleep", for_admin(sleep), methods=["POST"]),
    Route("/wake_up", for_admin(wake_up), methods=["POST"]),
    Route("/is_sleeping", for_admin(is_sleeping), methods=["GET"]),
    Route("/admin/reset_prefix_cache", for_admin(reset_prefix_cache), methods=["POST"]),
]
