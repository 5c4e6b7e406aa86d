"""uvicorn's server with our protocol, on one port or two."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import uvicorn

from penstock.server.transport.protocol import HttpLimits, LimitedProtocol

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from penstock.server.transport.tls import Tls


def uvicorn_config(app: ASGIApp, limits: HttpLimits, *, root_path: str = "", tls: Tls | None = None) -> uvicorn.Config:
    """How uvicorn has to run an application: this protocol, no websockets, TLS if there is any.

    The sockets, the signals and the loop (`loop_factory`) are the caller's.
    """
    config = uvicorn.Config(
        app,
        http=cast("type[asyncio.Protocol]", partial(LimitedProtocol, limits=limits)),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        root_path=root_path,
        # Longer than clients keep idle connections: then it is they who close them, and no request meets a closed one.
        timeout_keep_alive=75,
        timeout_graceful_shutdown=1,
    )
    config.load()
    config.ssl = tls.context if tls is not None else None
    return config


class HttpServer(uvicorn.Server):
    """One socket for each configuration. The signals are the caller's."""

    def __init__(self, *configs: uvicorn.Config, handshake_s: float = 10.0) -> None:
        super().__init__(configs[0])
        self._configs = configs
        self._handshake_s = handshake_s

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.servers = []
        loop = asyncio.get_running_loop()
        for config, sock in zip(self._configs, sockets or (), strict=True):
            listening = await loop.create_server(
                partial(_make_protocol, config, self.server_state), sock=sock, ssl=config.ssl, backlog=config.backlog,
                ssl_handshake_timeout=None if config.ssl is None else self._handshake_s,
            )  # fmt: skip
            self.servers.append(listening)
        self.started = True


def _make_protocol(config: uvicorn.Config, server_state: Any) -> asyncio.Protocol:
    make = cast("Callable[..., asyncio.Protocol]", config.http_protocol_class)
    return make(config=config, server_state=server_state, app_state={})


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's loop where there is one; None is asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    return cast("Callable[[], asyncio.AbstractEventLoop]", uvloop.new_event_loop)
