"""Which of several models a request is for: by the name in its body, or by `?model=`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from urllib.parse import parse_qs

import msgspec
from starlette.requests import Request
from starlette.types import Message, Receive, Scope

from penstock.base.errors import RefusedError
from penstock.server.admission.gate import GENERATING
from penstock.server.call import Tenant
from penstock.server.context import Server
from penstock.server.schema.decode import read_body

NAMING = GENERATING | {
    "/v1/messages/count_tokens", "/v1/responses/input_tokens", "/tokenize", "/detokenize", "/apply-template",
    "/api/show", "/api/pull",
}  # fmt: skip
"""Paths whose body names a model."""
_SHOWN = 20  # names in a message


class _Named(msgspec.Struct):
    model: Any = None
    name: Any = None


async def choose(server: Server, scope: Scope, receive: Receive) -> tuple[Server, Receive]:
    """The model's server, and what reads the body again if it was read here. `server`: the first model's.

    Raises RefusedError (404) for a name that nothing has here, and as `read_body`.
    """
    if scope["method"] == "POST" and scope["path"].removeprefix(scope.get("root_path", "")) in NAMING:
        body = await read_body(Request(scope, receive), server.config.max_body_bytes)
        return _of(server, _name_in(body)), _again(body, receive)
    asked = parse_qs(scope["query_string"].decode("latin-1")).get("model") if scope["query_string"] else None
    return (_of(server, asked[0]) if asked else server), receive


def _name_in(body: bytes) -> str | None:
    """None for a body that is wrong, too: whoever reads it says so."""
    try:
        found = msgspec.json.decode(body, type=_Named)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    name = found.model or found.name
    return name if isinstance(name, str) else None


def _again(body: bytes, receive: Receive) -> Receive:
    given = False

    async def read() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return read


def _of(server: Server, name: str | None) -> Server:
    assert server.models is not None
    found = server.models.find(name)
    if found is None:
        if server.config.any_model_name:
            return server
        raise unknown_model(name or "", [name for one in server.each for name in one.names])
    return next(one for one in server.each if one.model_name == found.name)


def unknown_model(name: str, served: list[str]) -> RefusedError:
    more = f" and {len(served) - _SHOWN} more" if len(served) > _SHOWN else ""
    return RefusedError(
        f"the model {name[:80]!r} is not served here; served is {', '.join(served[:_SHOWN])}{more}",
        status=404, code="model_not_found", param="model",
    )  # fmt: skip


def limited(tenant: Tenant, model: str) -> Tenant:
    """With the limits that its key has for this model."""
    for name, tokens_per_minute, max_concurrent in tenant.by_model:
        if name == model:
            return replace(tenant, tokens_per_minute=tokens_per_minute, max_concurrent=max_concurrent)
    return tenant
