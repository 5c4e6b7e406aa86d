"""EngineClient: what a server talks to. Requests go in, text comes out, whatever happens to the engine in between.

It remembers of every live request what it takes to begin again: the request itself, the tokens that were sent on, the
text state. So a dead engine costs its clients a pause: the next one is given the same requests with their tokens so far
(`Request.resume`), and Philox counters make the rest the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.base.errors import EngineGoneError, InputError
from penstock.core.messages import EngineInfo, EngineSnapshot, Outputs
from penstock.core.output import (
    BeamSearchOutput,
    CompletionOutput,
    EngineOutput,
    RequestMetrics,
    RequestOutput,
)
from penstock.core.request import Abort, Control, Intake, Request
from penstock.engine.blackbox import handle_of
from penstock.engine.client import OutputProcessor, Tally
from penstock.engine.link import Down, Link
from penstock.engine.replay import Replay, resumed
from penstock.engine.stream import Delta, Stream

if TYPE_CHECKING:
    from penstock.base.clock import Clock
    from penstock.core.sampling import SamplingParams
    from penstock.text.tokenizer import Tokenizer

log = logging.getLogger("penstock.engine")

UNREADY_AFTER_S = 4.0
"""Seconds without a sign of life from which an engine is not ready: known well within five."""
CHARS_PER_LOGPROB = 64
"""An entry takes about as many bytes, whether it is kept as numbers or as JSON."""
GUILTY = (
    "the engine failed twice while it worked on this request, the second time on nothing else; it will not be tried "
    "a third time"
)


FinishListener = Callable[[Stream, RequestOutput], None]
MessageListener = Callable[[Outputs, Tally], None]


class EngineClient:
    """Follows requests through an engine behind a `Link`. All methods belong to the event loop's thread.

    The listeners in `on_finish` are called with every request's last output, however it ended: metrics and logs hang
    there. That of a beam search has its hypotheses as `outputs`.
    """

    def __init__(
        self,
        link: Link,
        tokenizer: Tokenizer | None,
        clock: Clock,
        *,
        on_finish: FinishListener | None = None,
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
        self.on_finish: list[FinishListener] = [] if on_finish is None else [on_finish]
        self.on_message: list[MessageListener] = []
        """Called with every message of the engine and what it brought: live metrics hang there."""
        self.num_restarts = 0
        self.last_outputs_s = 0.0
        self._processor = OutputProcessor(tokenizer, clock)
        self._streams: dict[str, Stream] = {}
        self._epoch = 0
        self._replay = Replay(self._processor, link.send, self._all_clear)

    # -- life ----------------------------------------------------------------------------------------------------

    def use_tokenizer(self, tokenizer: Tokenizer | None) -> None:
        """Before the first request: for a client that was made before its tokenizer was read."""
        self._processor.tokenizer = tokenizer

    async def start(self) -> EngineInfo:
        """Returns when the engine is ready. Raises what keeps it from starting."""
        await self.link.start(self)
        assert self.info is not None
        return self.info

    async def stop(self) -> None:
        """End the engine; whatever still runs ends with an error."""
        self.state, self.reason = "stopped", "the server is shutting down"
        await self.link.close()
        self._end_all(self.reason, gone=True)

    def ready(self) -> tuple[bool, str]:
        """Whether new requests are being worked on now, and if not, why."""
        if self.state != "ready":
            return False, self.reason or f"the engine is {self.state}"
        age_s = self.link.progress_age_s()
        if age_s >= UNREADY_AFTER_S:
            return False, f"the engine has not moved for {age_s:.0f} s"
        return True, ""

    def on_up(self, info: EngineInfo, epoch: int) -> None:
        self.info, self._epoch = info, epoch
        self.reason = "requests that may have crashed the engine are tried one by one"
        self._replay.begin(stream.request for stream in list(self._streams.values()))

    def _all_clear(self) -> None:
        """The engine may be given everything that lives."""
        if self.state not in ("starting", "restarting"):
            return
        self.state, self.reason = "ready", ""
        again = [resumed(s.request, self._processor.live(s.request_id)) for s in self._streams.values()]
        items: list[Intake] = [request for request in again if request is not None]
        if items:
            self.link.send(items)

    def on_loading(self, done: int, total: int) -> None:
        self.loading = (done, total)

    def on_down(self, down: Down) -> None:
        self.reason = down.reason
        handles = set(down.suspects)
        guilty = self._replay.crashed([i for i in self._streams if handle_of(i) in handles] if handles else [])
        if down.fatal:
            self.state = "failed"
            self._end_all("the engine failed again and again and is given up; try again later", gone=True)
            return
        self.state = "restarting"
        self.num_restarts += 1
        for stream in self._streams.values():
            stream.num_replays += 1
        if guilty is not None:
            log.error("request %s is given up: the engine died twice with it, the second time alone", guilty)
            self._end(self._streams[guilty], GUILTY)

    # -- requests ------------------------------------------------------------------------------------------------

    @property
    def num_live(self) -> int:
        return len(self._streams)

    @property
    def streams(self) -> list[Stream]:
        """Everything that lives."""
        return list(self._streams.values())

    def started(self, stream: Stream) -> bool:
        return self._processor.live(stream.request_id).metrics.first_token_s is not None

    def submit(self, request: Request, params: SamplingParams | None, text: str | None = None) -> Stream:
        """Take a checked request in. `params` is None for beam search and pooling.

        Raises EngineGoneError if the engine is gone, InputError if the request's id is in use.
        """
        if self.state in ("failed", "stopped"):
            raise EngineGoneError(f"the engine is not there: {self.reason}")
        if request.request_id in self._streams:
            raise InputError(f"request id {request.request_id!r} is in use", param="request_id")
        stream = self._streams[request.request_id] = Stream(self, request)
        self._processor.add(request, params, text)
        stream.prompt_logprobs = self._processor.live(request.request_id).prompt_logprobs
        if self.state == "ready":
            self.link.send([request])
        return stream  # otherwise it is sent with `on_up`

    def abort(self, request_id: str, reason: str = "abort") -> None:
        """Drop a request: its reader has gone, or its time is up."""
        stream = self._streams.get(request_id)
        if stream is None:
            return
        if self.state == "ready" or request_id == self._replay.trial:
            self.link.send([Abort(request_id=request_id, reason=reason)])
        if not stream.request.whole:
            self._processor.end(request_id, reason)
            self._finish(stream)
        else:
            stream.aborted = reason
            self._drop(stream)
            self._report_whole(stream, reason, None)

    def control(self, item: Control) -> None:
        if self.state == "ready":
            self.link.send([item])

    def on_outputs(self, message: Outputs) -> None:
        if message.epoch != self._epoch:
            return
        self.last_outputs_s = self.clock.now()
        if message.snapshot is not None:
            self.snapshot = message.snapshot
        tally = self._processor.tally = Tally() if self.on_message else None
        outputs = self._replay.sift(message.outputs)
        for request_id in self._processor.process(outputs):
            stream = self._streams.get(request_id)
            if stream is not None:
                stream.notify()
        if tally is not None:
            for listener in self.on_message:
                listener(message, tally)
        if self._processor.aborts:
            orders: list[Intake] = list(self._processor.aborts)
            self._processor.aborts.clear()
            self.link.send(orders)
        self._replay.after(outputs)

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
        for index, cursor in stream.seen.items():
            sample = live.samples[index]
            tokens = sample.token_ids[cursor.tokens :]
            text = "".join(sample.text[cursor.pieces :])
            ended = sample.finish_reason is not None and not cursor.ended
            if not (tokens or text or ended):
                continue
            asked = live.params is not None and live.params.logprobs is not None
            logprobs = None
            if asked:
                logprobs = sample.logprobs if stream.forgets else sample.logprobs[cursor.tokens :]
            if stream.forgets:
                sample.logprobs = []
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
        self._report_whole(stream, "stop", None, found)
        return found

    def take_pooled(self, stream: Stream) -> EngineOutput | None:
        if stream.request_id not in self._streams or not self._processor.is_finished(stream.request_id):
            return None
        found = self._processor.pooled_output(stream.request_id)
        self._drop(stream)
        self._report_whole(stream, found.finish_reason or "stop", found.error)
        return found

    def output(self, request_id: str) -> RequestOutput:
        return self._processor.output(request_id, keep=True)

    def num_cached(self, stream: Stream) -> int:
        return self._processor.live(stream.request_id).num_cached

    def metrics(self, stream: Stream) -> RequestMetrics:
        return self._processor.live(stream.request_id).metrics

    def unread_chars(self, stream: Stream) -> int:
        """Characters that are kept for the stream's reader: text, log-probabilities and, where they are sent, ids."""
        live = self._processor.live(stream.request_id)
        total = 0
        for i, cursor in stream.seen.items():
            sample = live.samples[i]
            total += sum(map(len, sample.text[cursor.pieces :]))
            total += stream.chars_per_token * (len(sample.token_ids) - cursor.tokens)
            unread = sample.logprobs if stream.forgets else sample.logprobs[cursor.tokens :]
            total += CHARS_PER_LOGPROB * sum(1 + len(entry.top_ids) for entry in unread)
        return total

    # -- endings -------------------------------------------------------------------------------------------------

    def _finish(self, stream: Stream) -> None:
        stream.rest = self._collect(stream)
        output = self._processor.output(stream.request_id, logprobs=not stream.forgets)
        stream.final, stream.error = output, output.error
        self._drop(stream)
        self._report(stream, output)

    def _report_whole(
        self, stream: Stream, reason: str, error: str | None, beams: BeamSearchOutput | None = None
    ) -> None:
        """Tell `on_finish` of a request that has no deltas: a beam search, or pooling."""
        request = stream.request
        prompt = request.prompt_token_ids
        metrics = RequestMetrics(arrival_s=request.arrival_s, finished_s=self.clock.now())
        outputs = [CompletionOutput(index=0, text="", token_ids=[], finish_reason=reason)]
        if beams is not None and beams.sequences:
            outputs = [
                CompletionOutput(i, s.text or "", s.tokens[len(prompt) :], finish_reason=s.finish_reason)
                for i, s in enumerate(beams.sequences)
            ]
        output = RequestOutput(request.request_id, None, prompt, None, outputs, True, metrics, error=error)
        self._report(stream, output)

    def _report(self, stream: Stream, output: RequestOutput) -> None:
        for listener in self.on_finish:
            listener(stream, output)

    def _drop(self, stream: Stream) -> None:
        self._streams.pop(stream.request_id, None)
        self._processor.discard(stream.request_id)
        self._replay.ended(stream.request_id)
        stream.end()

    def _end_all(self, message: str, *, gone: bool = False) -> None:
        for stream in list(self._streams.values()):
            stream.engine_gone = gone
            self._end(stream, message)

    def _end(self, stream: Stream, message: str) -> None:
        if stream.request.whole:
            stream.error = message
            self._drop(stream)
            self._report_whole(stream, "error", message)
        elif self._processor.is_finished(stream.request_id):
            self._finish(stream)  # it had ended, but nobody has looked yet
        else:
            self._processor.end(stream.request_id, "error", message)
            self._finish(stream)
