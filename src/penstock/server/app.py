"""The ASGI application: routes, and around them request ids, keys and errors. One exception, one answer."""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock import __version__
from penstock.server.admission.choosing import choose, limited
from penstock.server.admission.gate import GENERATING, Gate
from penstock.server.admission.keys import Keys, is_loopback
from penstock.server.admission.limits import EXPOSED
from penstock.server.call import ANYONE, Tenant
from penstock.server.context import Server
from penstock.server.errors import WireError, wire_error
from penstock.server.routes import (
    admin,
    batches,
    chat,
    completions,
    decisions,
    docs,
    embeddings,
    files,
    finetuning,
    llama_server,
    message_batches,
    messages,
    models,
    ollama,
    ops,
    page,
    pooling,
    replicas,
    responses,
    text,
    tgi,
    weights,
)
from penstock.server.schema.openapi import Documentation
from penstock.server.transport.http_server import HttpServer, uvicorn_config
from penstock.server.transport.inner import TENANT
from penstock.server.transport.protocol import HttpLimits
from penstock.server.transport.sse import Gone
from penstock.server.transport.web_guard import WebGuard
from penstock.server.turns.defaults import found_defaults
from penstock.text.defaults import sampling_decision

log = logging.getLogger("penstock.server")
MODULES = (
    chat, completions, responses, messages, message_batches, embeddings, pooling, decisions, models, text, files,
    batches, finetuning, ollama, llama_server, tgi, ops, docs, admin, replicas, weights, page,
)  # fmt: skip
PROBE_CONNECTIONS = 128
PROBE_PATHS = ("/health", "/ready", "/metrics")
_EXPOSED = ("x-request-id", "retry-after", "x-penstock-weight-version", *EXPOSED)
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def routes() -> list[BaseRoute]:
    return [route for module in MODULES for route in module.ROUTES]


def make_app(server: Server) -> ASGIApp:
    """The application of a built server. `request.app.state.server` is `server` in every route, or the server of the
    model that a request is for."""
    known = routes()
    around = Around(server, lambda one: _app_of(one, known))
    server.parts["app"] = around
    server.parts["docs"] = Documentation(MODULES, __version__)
    for one in server.each:
        if (front := one.parts.get("front")) is not None:
            said = sampling_decision(found_defaults(one), front.sampling.generation_config)
            whose = f" of {one.model_name}" if server.others else ""
            log.info("where a request%s says nothing: %s (%s)", whose, said.value, said.why)
    if "batches" in server.parts:
        server.parts["batches"].start(around)
    origins = server.config.names("allowed_origins")
    if not origins:
        return around
    # Outside of everything else: a preflight carries no key.
    allowed = [origin.rstrip("/") for origin in origins]
    return CORSMiddleware(around, allowed, ("GET", "POST", "DELETE", "OPTIONS"), ("*",), expose_headers=_EXPOSED)


def make_probe_app(server: Server) -> ASGIApp:
    """The application of the second port: what operators and their programs ask for, and nothing else."""
    known = [route for module in (ops, admin) for route in module.ROUTES if isinstance(route, Route)]
    probes = [r for r in known if r.path in PROBE_PATHS or r.path.startswith("/admin/")]
    return Around(server, lambda one: _app_of(one, probes), probe=True)


def _app_of(server: Server, known: Sequence[BaseRoute]) -> Starlette:
    app = Starlette(routes=known)
    app.state.server = server
    app.router.redirect_slashes = False
    return app


def http_server(server: Server, *, probe: bool) -> HttpServer:
    """What answers for a built server: on one port, and with `probe` on a second one."""
    config, parts = server.config, server.parts
    parts["http"] = HttpLimits.of(config, config.max_connections)
    configs = [
        uvicorn_config(make_app(server), parts["http"], root_path=config.root_path.rstrip("/"), tls=parts.get("tls"))
    ]
    if probe:
        parts["probe_http"] = HttpLimits.of(config, PROBE_CONNECTIONS)
        configs.append(uvicorn_config(make_probe_app(server), parts["probe_http"], tls=parts.get("tls")))
    return HttpServer(*configs)


def allowed_methods(app: Starlette, path: str) -> list[str]:
    """What a path takes, over all its routes."""
    found: set[str] = set()
    for route in app.routes:
        if isinstance(route, Route) and route.path_regex.match(path):
            found |= route.methods or set()
    return sorted(found | {"OPTIONS"}) if found else []


def _shape_path(method: str, path: str) -> str:
    """Whose clients read an error: at / those of TGI, if they post something, and else the page."""
    return "/generate" if path == "/" and method == "POST" else path


def error_response(error: WireError, path: str) -> Response:
    body = msgspec.json.encode(error.body(path))
    return Response(body, status_code=error.status, media_type="application/json", headers=error.headers())


class Around:
    """Outermost: gives every answer its request id, asks for the key, turns what is raised into an error object.

    Starlette's own middleware is left out: it would answer exceptions in shapes of its own, and raise them again.
    `probe`: this is the second port, where `PROBE_PATHS` need no key.
    """

    def __init__(self, server: Server, app_of: Callable[[Server], Starlette], *, probe: bool = False) -> None:
        self.app = app_of(server)
        self.server = server
        self._apps = {one.model_name: app_of(one) for one in server.others}
        self._probe = probe
        self._guard = WebGuard(server.config)
        if not (probe or is_loopback(server.config.host)):
            self._guard.learn_full_name()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self.app
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        request_id = given if _ID.fullmatch(given) else "req-" + secrets.token_hex(12)
        state: dict[str, Any] = scope.setdefault("state", {})
        state["request_id"] = request_id
        state["tenant"] = ANYONE
        state["probe"] = self._probe
        state["keep_alive_s"] = self.server.config.sse_keep_alive_interval
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        started = False
        server, app = self.server, self.app
        gate: Gate | None = server.parts.get("admission")

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = message.setdefault("headers", [])
                headers.append((b"x-request-id", request_id.encode()))
                if (version := server.weight_version) is not None:
                    headers.append((b"x-penstock-weight-version", version.encode()))
                if gate is not None:
                    headers += gate.headers(state["tenant"], path)
                ignored = state.get("ignored")
                if ignored:
                    headers.append((b"x-ignored-fields", ", ".join(ignored).encode()))
                if message["status"] >= 400:
                    for listener in server.on_refused:
                        listener(scope, message["status"], state.get("error"))
            await send(message)

        try:
            if TENANT in scope:
                state["tenant"] = scope[TENANT]
            else:
                state["tenant"] = self._identify(scope, path)
            if server.others:
                server, receive = await choose(server, scope, receive)
                gate = server.parts.get("admission")
                app = scope["app"] = self._apps.get(server.model_name, app)
                state["tenant"] = limited(state["tenant"], server.model_name)
            if gate is not None and scope["method"] == "POST" and path in GENERATING:
                await gate.enter(scope)
            await app.router(scope, receive, send_with_id)
        except (Gone, ClientDisconnect):
            return  # nobody reads an answer
        except Exception as error:
            if started:
                raise  # the connection is closed: nothing true can be said any more
            await self._answer(error, scope)(scope, receive, send_with_id)

    def _identify(self, scope: Scope, path: str) -> Tenant:
        """Raises WireError."""
        keys: Keys | None = self.server.parts.get("keys")
        open_here = self._probe and path in PROBE_PATHS
        tenant = ANYONE if keys is None or open_here else keys.identify(scope)
        if tenant is ANYONE and (keys is None or open_here or not keys.has_users):
            self._guard.check(scope)
        return tenant

    def _answer(self, error: Exception, scope: Scope) -> Response:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if isinstance(error, HTTPException):
            return self._http(error, scope["method"], path)
        answer = scope["state"]["error"] = wire_error(error)
        if answer.status == 500 and answer.code == "internal_error":
            log.error("%s failed", path, exc_info=error)
        response = error_response(answer, _shape_path(scope["method"], path))
        if answer.status in (413, 415):
            response.headers["connection"] = "close"  # the rest of the body is not read
        return response

    def _http(self, error: HTTPException, method: str, path: str) -> Response:
        """Starlette's own: no such path, or not with this method."""
        headers = {name.lower(): value for name, value in (error.headers or {}).items()}
        if error.status_code == 405:
            headers["allow"] = ", ".join(allowed_methods(self.app, path))
            if method == "OPTIONS":
                return Response(status_code=204, headers=headers)
        shown = path[:200]
        said = {404: f"there is nothing at {shown}", 405: f"{method} is not possible at {shown}"}
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        told = WireError(error.status_code, said.get(error.status_code, str(error.detail)), code=code)
        response = error_response(told, _shape_path(method, path))
        response.headers.update(headers)
        return response
