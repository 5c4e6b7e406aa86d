"""The ASGI application: routes, and around them request ids, keys and errors. One exception, one answer."""

from __future__ import annotations

import logging
import re
import secrets
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.server.context import ANYONE, Server
from penstock.server.errors import WireError, wire_error
from penstock.server.routes import (
    admin,
    batches,
    chat,
    completions,
    docs,
    embeddings,
    files,
    messages,
    models,
    ops,
    page,
    responses,
    text,
)

log = logging.getLogger("penstock.server")
_MODULES = (chat, completions, responses, messages, embeddings, models, text, files, batches, ops, docs, admin, page)
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def routes() -> list[BaseRoute]:
    return [route for module in _MODULES for route in module.ROUTES]


def make_app(server: Server) -> ASGIApp:
    """The application of a built server. `request.app.state.server` is `server` in every route."""
    app = Starlette(routes=routes())
    app.state.server = server
    app.router.redirect_slashes = False
    return Around(app, server)


def error_response(error: WireError, path: str) -> Response:
    body = msgspec.json.encode(error.body(path))
    return Response(body, status_code=error.status, media_type="application/json", headers=error.headers())


class Around:
    """Outermost: gives every answer its request id, asks for the key, turns what is raised into an error object."""

    def __init__(self, app: Starlette, server: Server) -> None:
        self.app = app
        self.server = server
        # Starlette's own handlers would answer 404, 405 and exceptions in shapes of their own.
        app.add_exception_handler(HTTPException, self._http)
        app.add_exception_handler(Exception, self._any)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        request_id = given if _ID.fullmatch(given) else "req-" + secrets.token_hex(12)
        state: dict[str, Any] = scope.setdefault("state", {})
        state["request_id"] = request_id
        state["tenant"] = ANYONE
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message.setdefault("headers", []).append((b"x-request-id", request_id.encode()))
            await send(message)

        try:
            keys = self.server.parts.get("keys")
            if keys is not None:
                state["tenant"] = keys.identify(scope)
            await self.app(scope, receive, send_with_id)
        except Exception as error:
            if started:
                raise  # the connection is closed: nothing true can be said any more
            response = error_response(self._told(error, scope["path"]), scope["path"])
            await response(scope, receive, send_with_id)

    def _told(self, error: BaseException, path: str) -> WireError:
        answer = wire_error(error)
        if answer.status == 500 and answer.code == "internal_error":
            log.error("%s failed", path, exc_info=error)
        return answer

    async def _any(self, request: Any, error: Exception) -> Response:
        return error_response(self._told(error, request.url.path), request.url.path)

    async def _http(self, request: Any, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.url.path
        said = {404: f"there is nothing at {path}", 405: f"{request.method} is not possible at {path}"}
        told = WireError(error.status_code, said.get(error.status_code, str(error.detail)))
        response = error_response(told, path)
        response.headers.update(dict(error.headers or {}))
        return response
