"""A front end's end of the connection to one engine process: frames, and what the engine says of its beginning."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

import msgspec

from penstock.base.errors import EngineError
from penstock.core.messages import EngineInfo, Failed, Loading, Outputs, Ready
from penstock.engine import wire
from penstock.engine.link import Listener

log = logging.getLogger("penstock.engine")
ENDED = "the engine process ended while it was starting; see its last words above"


class EngineConnection(asyncio.Protocol):
    """Of one engine, from its first word to its last, which `gone` marks."""

    def __init__(self, listener: Listener) -> None:
        self.gone = asyncio.Event()
        """Set when the other end is closed."""
        self.ready: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self._listener = listener
        self._transport: asyncio.WriteTransport | None = None
        self._splitter = wire.Splitter()

    def write(self, message: Any) -> None:
        """Never blocks; what a dead engine is told is lost."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(wire.frame(message))

    async def hang_up(self) -> None:
        """Returns when the descriptor is closed. `ready` will not come any more."""
        self.ready.cancel()  # nobody waits for it any more
        if self._transport is not None:
            self._transport.abort()
            await self.gone.wait()  # only then its descriptor is closed

    def broken(self) -> None:
        """What came in makes no sense."""
        raise NotImplementedError

    # -- asyncio.Protocol ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's is one in deed, not by descent

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._splitter.feed(data):
                self._take(wire.from_engine.decode(frame))
        except (msgspec.MsgspecError, EngineError) as error:
            log.error("the engine process does not speak our language: %s", error)
            self.broken()

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone.set()
        if not self.ready.done():
            self.ready.set_exception(EngineError(ENDED))

    def _take(self, message: Any) -> None:
        match message:
            case Outputs():
                self._listener.on_outputs(message)
            case Loading():
                self._listener.on_loading(message.done, message.total)
            case Ready():
                if not self.ready.done():
                    self.ready.set_result(message.info)
            case Failed():
                if not self.ready.done():
                    self.ready.set_exception(wire.error_of(message))
