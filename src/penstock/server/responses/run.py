"""A response being made: one task that reads the turn, a log of its events, any number of readers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence

import msgspec

from penstock.server.errors import WireError, told
from penstock.server.parsing.custom import NO_CUSTOM
from penstock.server.parsing.events import Reasoning
from penstock.server.parsing.namespaces import NO_SPACES, Names
from penstock.server.responses.events import Item, ResponseWriter, final_kind
from penstock.server.responses.store import ResponseStore, Stored
from penstock.server.schema.responses import InputTokensDetails, OutputTokensDetails, ResponseObject, ResponseUsage
from penstock.server.transport.sse import encoder, frame
from penstock.server.turns.turn import Piece, Turn

BYTES_PER_CHAR = 64
"""An event is much longer than the text it carries; a reader's backlog is counted in bytes."""


def event_frame(event: Item) -> bytes:
    return frame(event, event["type"])


class ResponseRun:
    """Ends by itself. Without `background` it ends when its last reader has left.

    `items`: the conversation before the output. `response` is the object as it stands; `store` says whether it is kept.
    """

    def __init__(
        self, turn: Turn, response: ResponseObject, items: Sequence[Item], store: ResponseStore, max_stream_chars: int,
        custom: Mapping[str, bool] = NO_CUSTOM, spaces: Mapping[str, Names] = NO_SPACES,
    ) -> None:  # fmt: skip
        self.id = response.id
        self.turn = turn
        self.tenant = turn.call.tenant
        self.response = response
        self.frames: list[bytes] = []
        self.failure: WireError | None = None
        self.max_unread_bytes = BYTES_PER_CHAR * max_stream_chars
        self.num_readers = 0
        self.streamed = response.background
        self._items = list(items)
        self._store = store
        self._writer = ResponseWriter(custom=custom, spaces=spaces)
        self._reasoning_tokens = 0
        self._cancelled = False
        self._news = asyncio.Event()
        self.done = asyncio.Event()
        store.running[self.id] = self
        self._task = asyncio.ensure_future(self._run())

    def snapshot(self) -> ResponseObject:
        """The object now. It shares nothing that changes: encode it before the next await, or copy."""
        if self.done.is_set():
            return self.response
        return msgspec.structs.replace(self.response, output=self._writer.items)

    async def cancel(self) -> None:
        """Stop; what has come so far stays. Returns when it has ended."""
        self._cancelled = True
        self.turn.abort()
        await self.done.wait()

    async def wait(self) -> ResponseObject:
        """The final object. Cancelling this stops the run. Raises WireError if it failed."""
        self.num_readers += 1
        try:
            await self.done.wait()
        finally:
            self.leave()
        if self.failure is not None:
            raise self.failure
        return self.response

    def leave(self) -> None:
        """A reader has gone."""
        self.num_readers -= 1
        if self.num_readers == 0 and not self.response.background and not self.done.is_set():
            self._cancelled = True
            self.turn.abort()

    def reader(self, after: int = -1) -> Reader:
        """The events with sequence numbers above `after`, those of the past and those to come."""
        self.streamed = True
        return Reader(self, after + 1)

    # -- the task ------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        status = "completed"
        try:
            begun = self.response
            self._log([self._writer.say(kind, response=begun) for kind in ("created", "in_progress")])
            async for pieces in self.turn.pieces():
                for piece in pieces:
                    if piece.finish_reason in ("length", "repetition"):
                        status = "incomplete"
                    self._take(piece)
        except asyncio.CancelledError:
            self._cancelled = True
            raise
        except Exception as error:
            self.failure = told(error)
        finally:
            if self.failure is not None:
                status = "failed"
            if self._cancelled:
                status, self.failure = "cancelled", None
            self._finish(status)

    def _take(self, piece: Piece) -> None:
        thinking = self._writer.reasoning or any(isinstance(e, Reasoning) for e in piece.events)
        self._log(self._writer.feed(piece.events))
        if thinking and (self._writer.reasoning or not piece.events):
            self._reasoning_tokens += len(piece.delta.token_ids)

    def _finish(self, status: str) -> None:
        events = self._writer.finish("completed" if status == "completed" else "incomplete")
        usage, error = self.turn.usage(), None
        cached = usage.prompt_tokens_details.cached_tokens
        if self.failure is not None:
            error = {"code": "server_error", "message": str(self.failure)}
        self.response = msgspec.structs.replace(
            self.response,
            status=status,
            completed_at=int(time.time()) if status == "completed" else None,
            error=error,
            incomplete_details={"reason": "max_output_tokens"} if status == "incomplete" else None,
            output=self._writer.items,
            usage=ResponseUsage(
                input_tokens=usage.prompt_tokens,
                input_tokens_details=InputTokensDetails(
                    cached_tokens=cached, cache_write_tokens=sum(self.turn.written(cached).values())
                ),
                output_tokens=usage.completion_tokens,
                output_tokens_details=OutputTokensDetails(reasoning_tokens=self._reasoning_tokens),
                total_tokens=usage.total_tokens,
                weight_version=usage.weight_version,
                weight_versions=usage.weight_versions,
            ),
        )
        self._log([*events, self._writer.say(final_kind(status), response=self.response)])
        self._store.running.pop(self.id, None)
        if self.response.store:
            frames = tuple(self.frames) if self.streamed else ()
            items = encoder.encode([*self._items, *self.response.output])
            made = tuple(item["id"] for item in self.response.output)
            entry = Stored(self.id, encoder.encode(self.response), items, len(self._items), frames, made)
            self._store.put(self.tenant, entry)
        self.done.set()
        self._news.set()

    def _log(self, events: Sequence[Item]) -> None:
        self.frames += map(event_frame, events)
        self._news.set()

    async def more(self, number: int) -> bool:
        """Wait for the frame of this number. False: there will be none."""
        while len(self.frames) <= number and not self.done.is_set():
            self._news.clear()
            await self._news.wait()
        return len(self.frames) > number


class Reader:
    """One client that follows a run (`transport.sse.Streamed`)."""

    def __init__(self, run: ResponseRun, first: int) -> None:
        self._run = run
        self._next = first
        self._left = False
        run.num_readers += 1

    async def frames(self) -> AsyncGenerator[bytes, None]:
        while await self._run.more(self._next):
            piece = b"".join(self._run.frames[self._next :])
            self._next = len(self._run.frames)
            yield piece

    @property
    def too_slow(self) -> bool:
        return sum(map(len, self._run.frames[self._next :])) > self._run.max_unread_bytes

    def abort(self) -> None:
        if not self._left:
            self._left = True
            self._run.leave()


class Replayed:
    """The frames of a stored response (`transport.sse.Streamed`)."""

    too_slow = False

    def __init__(self, frames: Sequence[bytes]) -> None:
        self._frames = frames

    async def frames(self) -> AsyncGenerator[bytes, None]:
        for piece in self._frames:
            yield piece

    def abort(self) -> None:
        pass
