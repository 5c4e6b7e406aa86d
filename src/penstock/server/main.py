"""`penstock serve`: listen, start the engine, answer until told to end, and end without dropping anybody."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import time

import uvloop

from penstock.base.memory import trim
from penstock.config import ServeConfig
from penstock.core.messages import EngineInfo
from penstock.engine.spawn import Spawned
from penstock.launch.running import RunningServer, announce_running, end_running, started
from penstock.launch.store import ModelStore
from penstock.server.admission.arguments import hide_keys
from penstock.server.app import http_server
from penstock.server.build import build, close
from penstock.server.context import Server
from penstock.server.transport.connections import want_files
from penstock.server.transport.listen import Sockets

log = logging.getLogger("penstock.server")
EXIT_OK, EXIT_ENGINE_FAILED = 0, 3


def serve(config: ServeConfig, sockets: Sockets, spare: Spawned | None = None) -> int:
    """Run until SIGTERM or SIGINT. Returns the exit status. Raises ConfigError, ModelError, ... before it listens.

    `sockets`: bound, and the caller's to close. `spare`: an engine process that was spawned already, by this thread.
    """
    hide_keys()
    want_files(config.server.max_connections)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(config, sockets, spare))


async def _serve(config: ServeConfig, sockets: Sockets, spare: Spawned | None) -> int:
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
    try:
        sockets.listen()
        http = http_server(server, probe=sockets.probe is not None)
        running = asyncio.create_task(http.serve(sockets=sockets.all))
        while not http.started and not running.done():
            await asyncio.sleep(0.005)
        trim()
        gc.freeze()  # as in the engine's process: collections need not look at what stays
        server.closers.append(Presence(server, config.engine.model.model, sockets).stop)
        announce(server, sockets)
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
        return EXIT_ENGINE_FAILED if server.client.state == "failed" and not server.others else EXIT_OK
    finally:
        told.cancel()
        await close(server)


async def _failed(server: Server) -> None:
    """Returns when no model can be answered any more; with several, one that is given up may come back."""
    while server.others or server.client.state != "failed":
        await asyncio.sleep(0.2)


async def drain(server: Server, hurry: asyncio.Event) -> None:
    """Take nothing new; let what runs end, until the limit or a second signal."""
    for one in server.each:
        one.draining = True
        one.service.drain()
    ends_s = time.monotonic() + server.config.shutdown_timeout
    num = _num_live(server)
    if num:
        log.warning("shutting down: %d requests may end within %g s", num, server.config.shutdown_timeout)
    while _num_live(server) and time.monotonic() < ends_s and not hurry.is_set():
        await asyncio.sleep(0.02)
    if _num_live(server):
        log.warning("shutting down: %d requests are aborted", _num_live(server))


def _num_live(server: Server) -> int:
    return sum(one.client.num_live for one in server.each)


def _kv_memory(info: EngineInfo) -> str:
    """What KV may take, and why that much."""
    limit = info.memory_bytes.get("kv_limit", 0) / 2**20
    why = {name: text for name, _, text in info.decisions}.get("kv_cache_memory_bytes", "as the settings say")
    return f"KV memory: {limit:,.0f} MiB {why}"


def _positions(info: EngineInfo) -> str:
    """A line for a model whose positions go by max_model_len and differ from those of a shorter one."""
    found = [text for name, value, text in info.decisions if name == "rope_regime" and value == "extended"]
    return f"positions: {found[0]}\n" if found else ""


def _others(server: Server) -> str:
    """A line for several models: which start on demand, and what all may take."""
    if server.models is None or not server.others:
        return ""
    names = ", ".join(one.model_name for one in server.others)
    limits = ", ".join(f"{limit / 2**30:.1f} GiB{' of ' * bool(place)}{place}" for place, limit in
                       server.models.limits.items())  # fmt: skip
    return f"and on demand: {names}; all models together may take {limits}\n"


def announce(server: Server, sockets: Sockets) -> None:
    """Tell people where it listens and what to try, on standard output."""
    scheme = "https" if server.config.ssl_certfile else "http"
    if server.config.uds is not None:
        where, option = "http://localhost", f"--unix-socket {server.config.uds} "
    else:
        where, option = f"{scheme}://{_address(sockets.main)}", ""
    info = server.client.info
    assert info is not None
    key = ' -H "Authorization: Bearer $PENSTOCK_API_KEY"' if server.parts.get("keys") is not None else ""
    chat = server.service.chat_template is not None
    path, body = ("chat/completions", '"messages": [{"role": "user", "content": "Hello!"}]') if chat else (
        "completions", '"prompt": "Once upon a time"'
    )  # fmt: skip
    probes = "" if sockets.probe is None else f"probes and /admin on {scheme}://{_address(sockets.probe)}\n"
    sys.stdout.write(
        f"penstock serves {server.model_name} on {where} ({info.num_params / 1e6:,.1f} M parameters, {info.dtype}, "
        f"context {info.max_model_len}, {info.num_blocks} blocks of {info.block_size} tokens)\n"
        f"{_kv_memory(info)}\n"
        f"{_positions(info)}"
        f"{_others(server)}"
        f"{probes}try:  curl {option}{where}/v1/{path} -H 'Content-Type: application/json'{key} \\\n"
        f"        -d '{{{body}, \"max_tokens\": 64}}'\n"
        f"or open {where}/ in a browser\n"
    )
    sys.stdout.flush()


class Presence:
    """The file by which `penstock ps` and `stop` find this server, kept up to date; its model is in use meanwhile."""

    def __init__(self, server: Server, model: str, sockets: Sockets) -> None:
        uds, main, pid = server.config.uds, sockets.main, os.getpid()
        self._hold = ModelStore().hold(*(one.parts["front"].path for one in server.each))
        names = [name for one in server.each for name in (one.model_name, *one.aliases)]
        self._entry = RunningServer(
            pid=pid, started=started(pid) or "", model=model, names=names,
            where=os.path.abspath(uds) if uds else _address(main), port=0 if uds else main.getsockname()[1],
            since_s=time.time(), models=self._states(server),
        )  # fmt: skip
        self._server = server
        self._known = announce_running(self._entry)
        self._task = asyncio.create_task(self._keep())

    async def _keep(self) -> None:
        while self._known:
            await asyncio.sleep(1.0)
            now = (_num_live(self._server), self._states(self._server))
            if (self._entry.num_live, self._entry.models) != now:
                self._entry.num_live, self._entry.models = now
                await asyncio.to_thread(announce_running, self._entry)

    @staticmethod
    def _states(server: Server) -> dict[str, str]:
        return {model.name: model.state for model in server.models or ()} if server.others else {}

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        end_running(self._entry.pid)
        self._hold.close()


def _address(sock: socket.socket) -> str:
    """Where people of this machine reach it: host and port."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"{host}:{port}"
