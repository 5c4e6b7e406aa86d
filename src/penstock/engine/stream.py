"""Stream: one request's way back to whoever asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.base.errors import ConvictedError, EngineError, EngineGoneError
from penstock.core.batch import TokenLogprobs
from penstock.core.output import BeamSearchOutput, EngineOutput, RequestMetrics, RequestOutput
from penstock.core.request import Request


@dataclass
class Delta:
    """What is new of one sample since the last look. `logprobs` has one entry per token of `token_ids`."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class Cursor:
    """How much of a sample has been seen: pieces of text, tokens, and whether its end has."""

    pieces: int = 0
    tokens: int = 0
    ended: bool = False


class Client(Protocol):
    """Whose stream it is: an `EngineClient`, which knows what came of every live request."""

    def take(self, stream: Stream) -> list[Delta]: ...

    def take_beams(self, stream: Stream) -> BeamSearchOutput | None: ...

    def take_pooled(self, stream: Stream) -> EngineOutput | None: ...

    def abort(self, request_id: str, reason: str = ...) -> None: ...

    def output(self, request_id: str) -> RequestOutput: ...

    def num_cached(self, stream: Stream) -> int: ...

    def metrics(self, stream: Stream) -> RequestMetrics: ...

    def started(self, stream: Stream) -> bool: ...

    def weight_versions(self, stream: Stream) -> list[list[tuple[int, int, str]]] | None: ...

    def unread_chars(self, stream: Stream) -> int: ...


class Stream:
    """One request's way back. Iterate `deltas()` or await `result()`; `abort()` may be called at any time.

    Nothing is queued here: what a slow reader has not seen stays in the request's own output, which is bounded by its
    max_tokens, and comes in one piece. `unread_chars` tells how far it is behind.

    `forgets`: log-probabilities are dropped once they were read; the final output has none then.
    """

    def __init__(self, client: Client, request: Request) -> None:
        self.request = request
        self.request_id = request.request_id
        self._client = client
        self._news = asyncio.Event()
        self.seen: dict[int, Cursor] = {i: Cursor() for i in range(request.n)}
        self.final: RequestOutput | None = None
        self.forgets = False
        self.chars_per_token = 0
        """What a token counts for in `unread_chars` besides its text: more than nothing where its id is sent too."""
        self.call: Any = None
        """What the server knows about it."""
        self.session = ""
        """Whose it is, where its client says so (`route.session`)."""
        self.replica: Any = None
        """The engine that has it (`engine.replica.Replica`)."""
        self.num_replays = 0
        """Engines that died under it."""
        self.ended = False
        self.prompt_logprobs: list[TokenLogprobs | None] = []
        """As they came so far; of the first token there are none."""
        self.rest: list[Delta] = []
        """The last deltas, if it ended while nobody looked."""
        self._listener: Callable[[], None] | None = None
        self._endings: list[Callable[[], None]] = []
        self.error: str | None = None
        """Why it ended without the model's doing; None if it did not. Set with the last delta."""
        self.engine_gone = False
        """It ended because the engine did: the same request may succeed elsewhere, or later."""
        self.convicted = False
        """It ended because engines died of it, or of its like."""
        self.aborted = ""
        """Why a request whose result comes in one piece was given up."""

    def notify(self) -> None:
        self._news.set()
        if self._listener is not None:
            self._listener()

    def listen(self, f: Callable[[], None]) -> None:
        """Call `f` whenever `fresh` may have something; also now, as it may have already. Instead of `deltas`."""
        self._listener = f
        f()

    def fresh(self) -> list[Delta]:
        """What is new now. Raises EngineError with the end of a request that failed."""
        found = self._client.take(self)
        if self.final is not None and not found and self.error is not None:
            raise self.failure(self.error)
        return found

    def on_end(self, f: Callable[[], None]) -> None:
        """Call `f` once when the request has ended, however it does; at once if it has."""
        if self.ended:
            f()
        else:
            self._endings.append(f)

    def end(self) -> None:
        """The client forgets this stream."""
        self.ended = True
        for f in self._endings:
            f()
        self._endings.clear()
        self.notify()

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """Yields what is new of any sample, until all have ended. Leaving it early aborts the request.

        Raises EngineError if the engine failed for good, or if this request ended with an error.
        """
        try:
            while self.final is None or self.rest:  # it may end while its reader is busy
                await self._news.wait()
                self._news.clear()
                fresh = self._client.take(self)
                if fresh:
                    yield fresh
            if self.error is not None:
                raise self.failure(self.error)
        finally:
            if self.final is None:
                self.abort()

    async def result(self) -> RequestOutput:
        """The whole output. Cancelling aborts the request. Raises EngineError."""
        async for _ in self.deltas():
            pass
        assert self.final is not None
        return self.final

    async def beams(self) -> BeamSearchOutput:
        """The hypotheses of a beam search. Raises EngineError."""
        try:
            while not self.ended:
                await self._news.wait()
                self._news.clear()
                found = self._client.take_beams(self)
                if found is not None:
                    return found
            raise self.failure(self.error or "the beam search was aborted")
        finally:
            self.abort()

    async def pooled(self) -> bytes:
        """The pooled hidden state, float32. Cancelling aborts the request. Raises EngineError."""
        try:
            while not self.ended:
                await self._news.wait()
                self._news.clear()
                found = self._client.take_pooled(self)
                if found is not None:
                    if found.error is not None:
                        raise EngineError(found.error)
                    return found.pooled
            raise self.failure(self.error or "the request was aborted")
        finally:
            self.abort()

    def failure(self, message: str) -> EngineError:
        if self.convicted:
            return ConvictedError(message)
        return EngineGoneError(message) if self.engine_gone else EngineError(message)

    def abort(self, reason: str = "abort") -> None:
        """Give it up; KV memory is free one step later. Nothing happens if it has ended."""
        self._client.abort(self.request_id, reason)

    @property
    def output(self) -> RequestOutput:
        """Everything so far."""
        return self.final if self.final is not None else self._client.output(self.request_id)

    @property
    def num_cached_tokens(self) -> int:
        return self.final.num_cached_tokens if self.final is not None else self._client.num_cached(self)

    @property
    def metrics(self) -> RequestMetrics:
        """The request's own: it goes on counting."""
        return self.final.metrics if self.final is not None else self._client.metrics(self)

    @property
    def weight_versions(self) -> list[list[tuple[int, int, str]]] | None:
        """`CompletionOutput.weight_versions` of each sample so far; None where nobody wants to know."""
        return self._client.weight_versions(self)

    @property
    def started(self) -> bool:
        """Whether it has got a token, or has ended."""
        return self.ended or self._client.started(self)

    @property
    def unread_chars(self) -> int:
        return 0 if self.final is not None else self._client.unread_chars(self)
