"""EngineClient: what a server talks to. Requests go in, text comes out, whatever happens to the engine in between.

It remembers of every live request what it takes to begin again: the request itself, the tokens that were sent on, the
text state. So a dead engine costs its clients a pause: the next one is given the same requests with their tokens so far
(`Request.resume`), and Philox counters make the rest the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.base.errors import EngineError
from penstock.core.messages import EngineInfo, EngineSnapshot, Outputs
from penstock.core.output import BeamSearchOutput, Logprob, RequestOutput
from penstock.core.request import Abort, Control, Intake, Request
from penstock.engine.client import OutputProcessor
from penstock.engine.link import Down, Link

if TYPE_CHECKING:
    from penstock.base.clock import Clock
    from penstock.core.sampling import SamplingParams
    from penstock.text.tokenizer import Tokenizer


@dataclass
class Delta:
    """What is new of one sample since the last look. `logprobs` has one entry per token of `token_ids`."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Stream:
    """One request's way back. Iterate `deltas()` or await `result()`; `abort()` may be called at any time.

    Nothing is queued here: what a slow reader has not seen stays in the request's own output, which is bounded by its
    max_tokens, and comes in one piece. `unread_chars` tells how far it is behind.
    """

    def __init__(self, client: EngineClient, request: Request) -> None:
        self.request = request
        self.request_id = request.request_id
        self._client = client
        self._news = asyncio.Event()
        self._seen: dict[int, _Cursor] = {i: _Cursor() for i in range(request.n)}
        self.final: RequestOutput | None = None
        self.call: Any = None
        """What the server knows about it."""
        self.ended = False
        self.rest: list[Delta] = []
        """The last deltas, if it ended while nobody looked."""
        self._endings: list[Callable[[], None]] = []
        self.error: str | None = None
        """Why it ended without the model's doing; None if it did not. Set with the last delta."""

    def notify(self) -> None:
        self._news.set()

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
        self._news.set()

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """Yields what is new of any sample, until all have ended. Leaving it early aborts the request.

        Raises EngineError if the engine failed for good, or if this request ended with an error.
        """
        try:
            while self.final is None:
                await self._news.wait()
                self._news.clear()
                fresh = self._client.take(self)
                if fresh:
                    yield fresh
            if self.error is not None:
                raise EngineError(self.error)
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
            raise EngineError(self.error or "the beam search was aborted")
        finally:
            self.abort()

    def abort(self, reason: str = "abort") -> None:
        """Give it up; KV memory is free one step later. Nothing happens if it has ended."""
        self._client.abort(self.request_id, reason)

    @property
    def output(self) -> RequestOutput:
        """Everything so far."""
        return self.final if self.final is not None else self._client.output(self.request_id)

    @property
    def unread_chars(self) -> int:
        return 0 if self.final is not None else self._client.unread_chars(self)


@dataclass
class _Cursor:
    pieces: int = 0
    tokens: int = 0
    ended: bool = False


class EngineClient:
    """Follows requests through an engine behind a `Link`. All methods belong to the event loop's thread.

    `on_finish` is called with every request's last output, however it ended: metrics and logs hang there.
    """

    def __init__(
        self,
        link: Link,
        tokenizer: Tokenizer | None,
        clock: Clock,
        *,
        on_finish: Callable[[Stream, RequestOutput], None] | None = None,
    ) -> None:
        self.link = link
        self.clock = clock
        self.info: EngineInfo | None = None
        self.snapshot = EngineSnapshot()
        self.state = "starting"
        """starting, ready, restarting, failed or stopped."""
        self.reason = ""
        """Why it is not ready."""
        self.loading = (0, 0)
        self.on_finish = on_finish
        self.num_restarts = 0
        self.last_outputs_s = 0.0
        self._processor = OutputProcessor(tokenizer, clock)
        self._streams: dict[str, Stream] = {}
        self._epoch = 0

    # -- life ----------------------------------------------------------------------------------------------------

    async def start(self) -> EngineInfo:
        """Returns when the engine is ready. Raises what keeps it from starting."""
        await self.link.start(self)
        assert self.info is not None
        return self.info

    async def stop(self) -> None:
        """End the engine; whatever still runs ends with an error."""
        self.state, self.reason = "stopped", "the server is shutting down"
        await self.link.close()
        self._end_all(self.reason)

    def on_up(self, info: EngineInfo, epoch: int) -> None:
        self.info, self._epoch = info, epoch
        self.state, self.reason = "ready", ""
        self._replay()

    def on_loading(self, done: int, total: int) -> None:
        self.loading = (done, total)

    def on_down(self, down: Down) -> None:
        self.reason = down.reason
        if down.fatal:
            self.state = "failed"
            self._end_all(f"the engine failed: {down.reason}")
        else:
            self.state = "restarting"
            self.num_restarts += 1

    # -- requests ------------------------------------------------------------------------------------------------

    @property
    def num_live(self) -> int:
        return len(self._streams)

    def submit(self, request: Request, params: SamplingParams | None, text: str | None = None) -> Stream:
        """Take a checked request in. `params` is None for beam search. Raises EngineError if the engine is gone."""
        if self.state in ("failed", "stopped"):
            raise EngineError(self.reason)
        assert request.request_id not in self._streams, f"request id {request.request_id!r} is in use"
        stream = self._streams[request.request_id] = Stream(self, request)
        self._processor.add(request, params, text)
        if self.state == "ready":
            self.link.send([request])
        return stream  # otherwise it is sent with `on_up`

    def abort(self, request_id: str, reason: str = "abort") -> None:
        """Drop a request: its reader has gone, or its time is up."""
        stream = self._streams.get(request_id)
        if stream is None:
            return
        if self.state == "ready":
            self.link.send([Abort(request_id=request_id, reason=reason)])
        if stream.request.beam is None:
            self._processor.end(request_id, reason)
            self._finish(stream)
        else:
            self._drop(stream)

    def control(self, item: Control) -> None:
        if self.state == "ready":
            self.link.send([item])

    def on_outputs(self, message: Outputs) -> None:
        if message.epoch != self._epoch:
            return
        self.last_outputs_s = self.clock.now()
        if message.snapshot is not None:
            self.snapshot = message.snapshot
        for request_id in self._processor.process(message.outputs):
            stream = self._streams.get(request_id)
            if stream is not None:
                stream.notify()
        if self._processor.aborts:
            orders: list[Intake] = list(self._processor.aborts)
            self._processor.aborts.clear()
            self.link.send(orders)

    # -- what streams ask for ------------------------------------------------------------------------------------

    def take(self, stream: Stream) -> list[Delta]:
        """What `stream` has not seen yet; with its last piece `stream.final` (and `error`) are set."""
        if stream.request_id not in self._streams:
            fresh, stream.rest = stream.rest, []
            return fresh
        fresh = self._collect(stream)
        if self._processor.is_finished(stream.request_id):
            self._finish(stream)
        return fresh

    def _collect(self, stream: Stream) -> list[Delta]:
        live = self._processor.live(stream.request_id)
        fresh = []
        for index, cursor in stream._seen.items():
            sample = live.samples[index]
            tokens = sample.token_ids[cursor.tokens :]
            text = "".join(sample.text[cursor.pieces :])
            ended = sample.finish_reason is not None and not cursor.ended
            if not (tokens or text or ended):
                continue
            asked = live.params is not None and live.params.logprobs is not None
            logprobs = sample.logprobs[cursor.tokens :] if asked else None
            cursor.tokens, cursor.pieces = len(sample.token_ids), len(sample.text)
            cursor.ended = cursor.ended or ended
            reasons = (sample.finish_reason, sample.stop_reason) if ended else (None, None)
            fresh.append(Delta(index, text, tokens, logprobs, *reasons))
        return fresh

    def take_beams(self, stream: Stream) -> BeamSearchOutput | None:
        if stream.request_id not in self._streams or not self._processor.is_finished(stream.request_id):
            return None
        found = self._processor.beam_output(stream.request_id)
        self._drop(stream)
        return found

    def output(self, request_id: str) -> RequestOutput:
        return self._processor.output(request_id, keep=True)

    def unread_chars(self, stream: Stream) -> int:
        live = self._processor.live(stream.request_id)
        return sum(sum(map(len, live.samples[i].text[c.pieces :])) for i, c in stream._seen.items())

    # -- endings -------------------------------------------------------------------------------------------------

    def _finish(self, stream: Stream) -> None:
        stream.rest = self._collect(stream)
        output = self._processor.output(stream.request_id)
        stream.final, stream.error = output, output.error
        self._drop(stream)
        if self.on_finish is not None:
            self.on_finish(stream, output)

    def _drop(self, stream: Stream) -> None:
        self._streams.pop(stream.request_id, None)
        self._processor.discard(stream.request_id)
        stream.end()

    def _end_all(self, message: str) -> None:
        for stream in list(self._streams.values()):
            if stream.request.beam is not None:
                stream.error = message
                self._drop(stream)
                continue
            self._processor.end(stream.request_id, "error", message)
            self._finish(stream)

    def _replay(self) -> None:
        """Give a new engine everything that lives."""
        items: list[Intake] = [stream.request for stream in self._streams.values()]
        if items:
            self.link.send(items)
