"""A running server inside this process, on a real socket, for tests and for programs that want one beside them."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
import traceback
from types import TracebackType

import uvicorn

from penstock.config import ServeConfig
from penstock.engine.link import Link
from penstock.server.app import http_server
from penstock.server.build import build, close
from penstock.server.context import Server
from penstock.server.transport.http_server import loop_factory

STOP_S = 60.0
"""A server that takes longer to stop hangs; without a limit nobody would hear where."""


class LiveServer:
    """`with LiveServer(config) as live: live.url`. Its event loop runs in a thread of its own."""

    def __init__(self, config: ServeConfig, link: Link | None = None) -> None:
        self._config = config
        self._link = link
        self._up = threading.Event()
        self._error: BaseException | None = None
        self._uvicorn: uvicorn.Server | None = None
        self._thread = threading.Thread(target=self._run, name="penstock-live", daemon=True)
        self.server: Server | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.url = self.probe_url = ""

    def __enter__(self) -> LiveServer:
        self._thread.start()
        self._up.wait()
        if self._error is not None:
            raise self._error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._uvicorn is not None:
            self._uvicorn.should_exit = True
        self._thread.join(STOP_S)
        if self._thread.is_alive():
            raise RuntimeError(f"the server has not stopped within {STOP_S:g} s:\n{self._where()}")

    def _where(self) -> str:
        """What its tasks wait for, and where each thread is."""
        tasks = asyncio.all_tasks(self.loop) if self.loop is not None else ()
        out = [f"{task.get_coro()!r} {task.get_stack()}\n" for task in tasks]
        frames = sys._current_frames()
        for thread in threading.enumerate():
            if frame := frames.get(thread.ident or 0):
                out += [f"{thread.name}:\n", *traceback.format_stack(frame)[-3:]]
        return "".join(out)

    def _run(self) -> None:
        try:
            # uvloop hears of children that end in the main thread only.
            factory = loop_factory() if self._config.server.engine_in_process else None
            with asyncio.Runner(loop_factory=factory) as runner:
                runner.run(self._main())
        except BaseException as error:
            self._error = error
        finally:
            self._up.set()

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.server = await build(self._config, link=self._link)
        try:
            listening = socket.create_server((self._config.server.host, self._config.server.port))
            host, port = listening.getsockname()[:2]
            scheme = "http" if self.server.parts.get("tls") is None else "https"
            self.url = f"{scheme}://{host}:{port}"
            sockets, probe_port = [listening], self._config.server.probe_port
            if probe_port is not None:
                sockets.append(socket.create_server((host, probe_port)))
                self.probe_url = f"{scheme}://{host}:{sockets[1].getsockname()[1]}"
            self._uvicorn = http_server(self.server, probe=probe_port is not None)
            asyncio.get_running_loop().call_later(0.01, self._up.set)
            await self._uvicorn.serve(sockets=sockets)
        finally:
            await close(self.server)
