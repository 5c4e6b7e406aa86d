"""Server-sent events, and answers that are given up when their reader goes away."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

encoder = msgspec.json.Encoder()
DONE = b"data: [DONE]\n\n"
EVENTS, LINES = "text/event-stream", "application/x-ndjson"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: clients pass over it, proxies see that the connection is alive."""
POLL_S = 0.5
"""How often a stream's backlog is looked at."""


class Gone(Exception):
    """The client has closed the connection: nobody reads the answer."""


def frame(value: Any, event: str | None = None) -> bytes:
    """One event; `event` is its name, for clients that want one."""
    head = b"" if event is None else b"event: " + event.encode() + b"\n"
    return head + b"data: " + encoder.encode(value) + b"\n\n"


def as_json(value: Any) -> Response:
    """A whole answer."""
    return Response(encoder.encode(value), media_type="application/json")


class Streamed(Protocol):
    """An answer that comes in pieces."""

    def frames(self) -> AsyncGenerator[bytes, None]:
        """Turns its own errors into frames: nothing may come out of it."""
        ...

    @property
    def too_slow(self) -> bool:
        """The client is further behind than it may be."""
        ...

    def abort(self) -> None:
        """Does nothing if it has ended."""
        ...


class EventStream(Response):
    """Sends what `source` yields, each piece at once; aborts it when the client goes away or does not read."""

    def __init__(self, source: Streamed, media_type: str = EVENTS) -> None:
        super().__init__(None, headers={"cache-control": "no-cache", "x-accel-buffering": "no"}, media_type=media_type)
        del self.headers["content-length"]
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        interval_s = scope.get("state", {}).get("keep_alive_s", 0.0) if self.media_type == EVENTS else 0.0
        writer = asyncio.ensure_future(self._write(send, interval_s))
        reader = asyncio.ensure_future(left(receive))
        try:
            while True:
                done, _ = await asyncio.wait({writer, reader}, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
                if writer in done:
                    writer.result()
                if done:
                    return
                if self._source.too_slow:
                    raise ConnectionAbortedError("the client does not read its stream")
        finally:
            # Ends what runs, also if the writer has not come to its first piece.
            self._source.abort()
            reader.cancel()
            writer.cancel()
            await asyncio.wait({writer, reader})

    async def _write(self, send: Send, interval_s: float) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        frames = self._source.frames()
        async with aclosing(kept_alive(frames, interval_s) if interval_s else frames) as pieces:
            async for piece in pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def kept_alive(frames: AsyncGenerator[bytes, None], interval_s: float) -> AsyncGenerator[bytes, None]:
    """`frames`, and a comment whenever none has come for `interval_s` seconds."""

    async def following() -> bytes | None:
        return await anext(frames, None)

    async with aclosing(frames):
        waiting = asyncio.ensure_future(following())
        try:
            while True:
                done, _ = await asyncio.wait({waiting}, timeout=interval_s)
                if not done:
                    yield KEEP_ALIVE
                elif (piece := waiting.result()) is None:
                    return
                else:
                    yield piece
                    waiting = asyncio.ensure_future(following())
        finally:
            waiting.cancel()
            await asyncio.wait({waiting})


async def left(receive: Receive) -> None:
    """Returns when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns; it is cancelled when the client goes away before. Raises Gone, and what `work` raises."""
    task = asyncio.ensure_future(work)
    reader = asyncio.ensure_future(left(request.receive))
    try:
        await asyncio.wait({task, reader}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Gone
        return task.result()
    finally:
        reader.cancel()
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


class ChunkWriter:
    """Chunks of OpenAI's streams: what is the same in all of them is encoded once.

    `with_usage`: each has a field `usage`, null where `chunk` is given none.
    """

    def __init__(self, head: dict[str, Any], *, with_usage: bool) -> None:
        self._head = b"data: " + encoder.encode(head)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if with_usage else b"]}\n\n"

    def chunk(self, choice: bytes, usage: Any = None) -> bytes:
        """`choice`: one encoded choice, or nothing."""
        if usage is None:
            return self._head + choice + self._tail
        return self._head + choice + b'],"usage":' + encoder.encode(usage) + b"}\n\n"
