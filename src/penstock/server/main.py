"""`penstock serve`: listen, start the engine, answer until told to end, and end without dropping anybody."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator

import uvicorn
import uvloop

from penstock.base.errors import ConfigError
from penstock.base.memory import trim
from penstock.config import ServeConfig, ServerConfig
from penstock.core.messages import EngineInfo
from penstock.engine.spawn import Spawned
from penstock.server.app import make_app
from penstock.server.build import build, close
from penstock.server.context import Server
from penstock.server.protocol import uvicorn_config

log = logging.getLogger("penstock.server")
EXIT_OK, EXIT_ENGINE_FAILED = 0, 3


def serve(config: ServeConfig, spare: Spawned | None = None) -> int:
    """Run until SIGTERM or SIGINT. Returns the exit status. Raises ConfigError, ModelError, ... before it listens.

    `spare`: an engine process that was spawned already, by this thread.
    """
    sock = bind(config.server)  # before the model is loaded: a port that is taken should be known at once
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(config, sock, spare))
    finally:
        sock.close()
        if config.server.uds is not None:
            with contextlib.suppress(OSError):
                os.unlink(config.server.uds)


def bind(config: ServerConfig) -> socket.socket:
    """A bound socket that does not listen yet. Raises ConfigError that says what to change."""
    if config.uds is not None:
        return _bind_unix(config.uds)
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(
            f"host: {config.host} is no address of this machine: {error.strerror}", field="host"
        ) from None
    sock = socket.socket(family, kind, proto)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port: {config.port} is in use on {config.host}; choose another with --port (0: any that is free)",
                field="port",
            ) from None
        if error.errno == errno.EACCES:
            raise ConfigError(f"port: {config.port} needs privileges; choose one from 1024", field="port") from None
        raise ConfigError(f"host: cannot listen on {config.host}: {error.strerror}", field="host") from None
    return sock


def _bind_unix(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if os.path.exists(path):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                try:
                    probe.connect(path)
                except ConnectionRefusedError:
                    os.unlink(path)  # left over from a server that was killed
                else:
                    raise ConfigError(f"uds: another server listens on {path}", field="uds")
        sock.bind(path)
        os.chmod(path, 0o600)
    except OSError as error:
        sock.close()
        raise ConfigError(f"uds: cannot listen on {path}: {error.strerror}", field="uds") from None
    return sock


class _Uvicorn(uvicorn.Server):
    """Signals are ours."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(config: ServeConfig, sock: socket.socket, spare: Spawned | None) -> int:
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    signals = 0

    def on_signal() -> None:
        nonlocal signals
        signals += 1
        stopping.set()
        if signals > 1:
            second.set()

    second = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    building = asyncio.create_task(build(config, spare=spare))
    told = asyncio.create_task(stopping.wait())
    await asyncio.wait({building, told}, return_when=asyncio.FIRST_COMPLETED)
    if not building.done():
        building.cancel()
        await asyncio.gather(building, return_exceptions=True)
        return 128 + signal.SIGINT
    server = building.result()
    http = _Uvicorn(uvicorn_config(server, make_app(server)))
    running = asyncio.create_task(http.serve(sockets=[sock]))
    try:
        while not http.started and not running.done():
            await asyncio.sleep(0.005)
        trim()
        gc.freeze()  # as in the engine's process: collections need not look at what stays
        announce(server, sock)
        failed = asyncio.create_task(_failed(server))
        await asyncio.wait({running, told, failed}, return_when=asyncio.FIRST_COMPLETED)
        if not stopping.is_set() and failed.done():
            # Streams have been told; a restart by whoever watches this process is the only help.
            log.error("the engine is gone for good: %s", server.client.reason)
            await asyncio.sleep(1.0)
        await drain(server, second)
        failed.cancel()
        http.should_exit = True
        http.force_exit = second.is_set()
        await running
        return EXIT_ENGINE_FAILED if server.client.state == "failed" else EXIT_OK
    finally:
        told.cancel()
        await close(server)


async def _failed(server: Server) -> None:
    while server.client.state != "failed":
        await asyncio.sleep(0.2)


async def drain(server: Server, hurry: asyncio.Event) -> None:
    """Take nothing new; let what runs end, until the limit or a second signal."""
    server.draining = server.service.draining = True
    ends_s = time.monotonic() + server.config.shutdown_timeout
    num = server.client.num_live
    if num:
        log.warning("shutting down: %d requests may end within %g s", num, server.config.shutdown_timeout)
    while server.client.num_live and time.monotonic() < ends_s and not hurry.is_set():
        await asyncio.sleep(0.02)
    if server.client.num_live:
        log.warning("shutting down: %d requests are aborted", server.client.num_live)


def _kv_memory(info: EngineInfo) -> str:
    """What KV may take, and why that much."""
    limit = info.memory_bytes.get("kv_limit", 0) / 2**20
    why = {name: text for name, _, text in info.decisions}.get("kv_cache_memory_bytes", "as the settings say")
    return f"KV memory: {limit:,.0f} MiB {why}"


def announce(server: Server, sock: socket.socket) -> None:
    """Tell people where it listens and what to try, on standard output."""
    scheme = "https" if server.config.ssl_certfile else "http"
    if server.config.uds is not None:
        where, option = "http://localhost", f"--unix-socket {server.config.uds} "
    else:
        host, port = sock.getsockname()[:2]
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
        where, option = f"{scheme}://{host}:{port}", ""
    info = server.client.info
    assert info is not None
    key = ' -H "Authorization: Bearer $PENSTOCK_API_KEY"' if server.parts.get("keys") is not None else ""
    chat = server.service.chat_template is not None
    path, body = ("chat/completions", '"messages": [{"role": "user", "content": "Hello!"}]') if chat else (
        "completions", '"prompt": "Once upon a time"'
    )  # fmt: skip
    sys.stdout.write(
        f"penstock serves {server.model_name} on {where} ({info.num_params / 1e6:,.1f} M parameters, {info.dtype}, "
        f"context {info.max_model_len}, {info.num_blocks} blocks of {info.block_size} tokens)\n"
        f"{_kv_memory(info)}\n"
        f"try:  curl {option}{where}/v1/{path} -H 'Content-Type: application/json'{key} \\\n"
        f"        -d '{{{body}, \"max_tokens\": 64}}'\n"
        f"or open {where}/ in a browser\n"
    )
    sys.stdout.flush()
