"""Engines of one server: what they are for, moves of what runs, and the three calls of microserving; for the admin key.

What routers send is token ids: whoever composes calls has to know the text of which he asks for parts.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from penstock.base.errors import EngineError, InputError
from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.engine.microserving import Microserving
from penstock.engine.stream import Stream
from penstock.server.context import Server
from penstock.server.routes.admin import for_admin
from penstock.text.validate import build_request

_numbers = itertools.count()


class RolesRequest(msgspec.Struct, forbid_unknown_fields=True):
    """`roles`: prefill, decode or mixed, by the number of the engine; who is not named keeps his."""

    roles: dict[int, str]


class MigrateRequest(msgspec.Struct, forbid_unknown_fields=True):
    """`request_id`: as `GET /admin/requests` shows it. `to`: the number of an engine."""

    request_id: str
    to: int


class PrepRecv(msgspec.Struct, forbid_unknown_fields=True):
    """`end`: of the tokens that it will get; all of them, by default."""

    engine: int
    prompt_token_ids: list[int]
    end: int | None = None


class RemoteSend(msgspec.Struct, forbid_unknown_fields=True):
    """`engine` computes, `to` gets."""

    engine: int
    to: int
    prompt_token_ids: list[int]
    end: int | None = None


class StartGenerate(msgspec.Struct, forbid_unknown_fields=True):
    """`generated`: tokens behind which it goes on. `seed`: with it, what is drawn is the same on every engine."""

    engine: int
    prompt_token_ids: list[int]
    generated: list[int] = []
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    ignore_eos: bool = False


async def roles(request: HttpRequest, server: Server) -> Any:
    asked = await _read(request, RolesRequest)
    server.client.handover.set_roles(asked.roles)
    return _roles(server)


async def shown(request: HttpRequest, server: Server) -> Any:
    return _roles(server)


def _roles(server: Server) -> Any:
    handover = server.client.handover
    found = [{"engine": r.number, "role": r.role, "state": r.state} for r in server.client.replicas]
    counts = {"prompts_passed_on": handover.num_passed, "requests_moved": handover.num_moved}
    return {"object": "list", "data": found, **counts}


async def migrate(request: HttpRequest, server: Server) -> Any:
    asked = await _read(request, MigrateRequest)
    moved = await server.client.handover.migrate(asked.request_id, asked.to)
    return {"object": "migration", **moved._asdict()}


async def prep_recv(request: HttpRequest, server: Server) -> Any:
    asked = await _read(request, PrepRecv)
    text = _request(server, asked.prompt_token_ids, SamplingParams(max_tokens=1))
    end = len(asked.prompt_token_ids) if asked.end is None else asked.end
    return {"matched": await Microserving(server.client).prep_recv(asked.engine, text, end)}


async def remote_send(request: HttpRequest, server: Server) -> Any:
    asked = await _read(request, RemoteSend)
    text = _request(server, asked.prompt_token_ids, SamplingParams(max_tokens=1))
    end = len(asked.prompt_token_ids) if asked.end is None else asked.end
    return {"matched": await Microserving(server.client).remote_send(asked.engine, text, end, asked.to)}


async def start_generate(request: HttpRequest, server: Server) -> Response:
    """A line of JSON for each news: new `token_ids`, and in the last one `finish_reason`, or `error`."""
    asked = await _read(request, StartGenerate)
    params = SamplingParams(
        max_tokens=asked.max_tokens, temperature=asked.temperature, top_p=asked.top_p, top_k=asked.top_k,
        seed=asked.seed, ignore_eos=asked.ignore_eos, detokenize=False,
    )  # fmt: skip
    text = _request(server, asked.prompt_token_ids, params)
    stream = Microserving(server.client).start_generate(asked.engine, text, params, asked.generated)
    return StreamingResponse(_lines(stream), media_type="application/x-ndjson")


async def _lines(stream: Stream) -> AsyncIterator[bytes]:
    try:
        async for deltas in stream.deltas():
            for delta in deltas:
                line = {"token_ids": delta.token_ids, "finish_reason": delta.finish_reason}
                yield msgspec.json.encode(line) + b"\n"
    except EngineError as error:
        yield msgspec.json.encode({"error": str(error)}) + b"\n"
    finally:
        stream.abort()


def _request(server: Server, ids: list[int], params: SamplingParams) -> Request:
    limits, tokenizer = server.service.limits, server.service.tokenizer
    return build_request(
        f"micro-{next(_numbers)}", ids, params, limits=limits, tokenizer=tokenizer, param="prompt_token_ids",
        arrival_s=server.service.clock.now(),
    )  # fmt: skip


async def _read(request: HttpRequest, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(await request.body() or b"{}", type=kind)
    except msgspec.MsgspecError as error:
        raise InputError(f"the body is not what this path takes: {error}", param="body") from None


ROUTES: list[BaseRoute] = [
    Route("/internal/roles", for_admin(roles), methods=["POST"]),
    Route("/internal/roles", for_admin(shown), methods=["GET"]),
    Route("/internal/migrate", for_admin(migrate), methods=["POST"]),
    Route("/internal/microserving/prep_recv", for_admin(prep_recv), methods=["POST"]),
    Route("/internal/microserving/remote_send", for_admin(remote_send), methods=["POST"]),
    Route("/internal/microserving/start_generate", for_admin(start_generate), methods=["POST"]),
]
