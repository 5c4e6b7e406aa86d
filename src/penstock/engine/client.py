"""The client's side of the engine: ids become text, stop strings end samples, outputs take vLLM's shape.

Nothing here can change a token. A stop string is found in text, so it ends a sample here; the engine is then told to
stop, and whatever it still sends for that sample is dropped (docs/concepts/the-step.md).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec.structs import replace

from penstock.core.output import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    EngineOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
)
from penstock.core.qoe import Delivery, Expected
from penstock.core.request import Abort, Request
from penstock.core.weight_swap import FIRST_VERSION, SWAPPED
from penstock.text.detokenize import IncrementalDetokenizer
from penstock.text.stop import StopMatcher
from penstock.text.validate import stop_strings

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.base.clock import Clock
    from penstock.core.batch import TokenLogprobs
    from penstock.core.sampling import SamplingParams
    from penstock.core.weight_swap import WeightsOrder
    from penstock.text.tokenizer import Tokenizer


@dataclass
class Tally:
    """What one message of the engine brought, for whoever counts. `gaps_s`: seconds between tokens of a sample.

    `begun`: requests whose first token it was.
    """

    num_tokens: int = 0
    gaps_s: list[float] = field(default_factory=list)
    begun: list[Live] = field(default_factory=list)


@dataclass
class Sample:
    """One sample's text so far."""

    index: int
    detokenizer: IncrementalDetokenizer | None
    stops: StopMatcher | None
    token_ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """As they came, of every token; only those that nobody has read, where what was read is forgotten."""
    shown: list[dict[int, Logprob]] = field(default_factory=list)
    """The same as vLLM's dictionaries, as far as they have been asked for."""
    cumulative_logprob: float = 0.0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    last_s: float | None = None
    """When its last token came."""
    delivery: Delivery | None = None
    """What its reader has got; None: nobody said what he expects."""
    before: list[tuple[int, str]] = field(default_factory=list)
    """(tokens, version) whenever weights were swapped under it: how many it had, and over which."""

    def versions(self, now: str) -> list[tuple[int, int, str]]:
        """`CompletionOutput.weight_versions`; `now`: the version in force."""
        runs: list[tuple[int, int, str]] = []
        for end, version in [*self.before, (len(self.token_ids), now)]:
            start = runs[-1][1] if runs else 0
            if end > start:
                runs.append((start, end, version))
        return runs

    def add_text(self, delta: str, num_tokens: int) -> str | None:
        """Take in the text of `num_tokens` more tokens; returns the stop string it completed, if any."""
        if self.stops is None:
            self.text.append(delta)
            return None
        emit, hit = self.stops.feed(delta, num_tokens)
        self.text.append(emit)
        return hit

    def end(self, reason: str, stop_reason: int | str | None) -> None:
        self.finish_reason, self.stop_reason = reason, stop_reason


class Live:
    """A request whose output is still being put together."""

    def __init__(self, request: Request, params: SamplingParams | None, prompt: str | None, samples: list[Sample]):
        self.request = request
        self.params = params
        self.prompt = prompt
        self.samples = samples
        self.prompt_logprobs: list[TokenLogprobs | None] = [None]
        self.prompt_shown: list[dict[int, Logprob] | None] = []
        self.metrics = RequestMetrics(arrival_s=request.arrival_s)
        self.num_cached = 0
        self.error: str | None = None
        self.version = ""
        """Of the weights, where its result came in one piece."""


def _ended(live: Live) -> bool:
    """Whether all of its samples have."""
    return None not in [sample.finish_reason for sample in live.samples]


class OutputProcessor:
    """Turns EngineOutputs into RequestOutputs. One per front end; not thread-safe.

    `aborts` collects what the engine must be told; the owner hands them in and clears the list. `beams` keeps the last
    output of finished beam searches (and of pooling) until `beam_output` (`pooled_output`) takes it.
    """

    def __init__(self, tokenizer: Tokenizer | None, clock: Clock) -> None:
        self.tokenizer = tokenizer
        self.clock = clock
        self.aborts: list[Abort] = []
        self.tally: Tally | None = None
        """Where `process` counts; None: nobody wants to know."""
        self.beams: dict[str, EngineOutput] = {}
        self._live: dict[str, Live] = {}
        self.version = FIRST_VERSION
        """Of the weights that what comes now was computed over."""
        self.orders: dict[str, WeightsOrder] = {}
        """Swaps that were ordered, by the names of their news."""
        self.order: WeightsOrder | None = None
        """The last one that was carried out."""
        self.on_swap: Callable[[str, EngineOutput], None] = lambda _, __: None
        """Called with the name of an order and what came of it."""

    def add(self, request: Request, params: SamplingParams | None, prompt: str | None) -> None:
        """Begin to follow a request. `params` is None for beam search and for pooling."""
        samples = [self._sample(i, request, params) for i in range(request.n)] if params is not None else []
        if request.expected_ttft_s is not None and request.expected_tds is not None:
            reader = Expected(request.expected_ttft_s, request.expected_tds)
            for sample in samples:
                sample.delivery = Delivery(request.arrival_s, reader)
        self._live[request.request_id] = Live(request, params, prompt, samples)

    def _sample(self, index: int, request: Request, params: SamplingParams) -> Sample:
        if self.tokenizer is None or not params.detokenize:
            return Sample(index, None, None)
        # The prompt decides how the first generated piece reads: after a word, its leading space counts.
        detokenizer = IncrementalDetokenizer(
            self.tokenizer,
            params.skip_special_tokens,
            params.spaces_between_special_tokens,
            prompt_ids=request.prompt_token_ids,
        )
        stops = stop_strings(params)
        matcher = StopMatcher(stops, params.include_stop_str_in_output, params.min_tokens) if stops else None
        return Sample(index, detokenizer, matcher)

    def process(self, outputs: list[EngineOutput]) -> list[str]:
        """Take in a step's news. Returns the ids of the requests that changed, in order."""
        touched: dict[str, None] = {}
        for out in outputs:
            live = self._live.get(out.request_id)
            if live is None:
                if out.finish_reason == SWAPPED:
                    self._swapped(out)
                continue  # ended here already: overshoot is dropped
            touched[out.request_id] = None
            if live.params is not None:
                self._take(live, out)
            elif out.finish_reason is not None:
                self.beams[out.request_id] = out
                live.version = self.version
        return list(touched)

    def _swapped(self, out: EngineOutput) -> None:
        """What follows in the engine's news was computed over other weights."""
        order = self.orders.pop(out.request_id, None)
        if order is not None and not order.version:
            order = replace(order, version=str(out.stop_reason)[:12])
        if order is not None and out.error is None:
            for live in self._live.values():
                for sample in live.samples:
                    if sample.token_ids:
                        sample.before.append((len(sample.token_ids), self.version))
            self.order, self.version = order, order.version
        self.on_swap(out.request_id, out)

    def version_of(self, live: Live) -> str:
        """Of the weights over which the newest token of a request was computed."""
        runs = [s.versions(self.version) for s in live.samples if s.before]
        return runs[-1][-1][2] if runs else live.version or self.version

    def end(self, request_id: str, reason: str, error: str | None = None) -> None:
        """End what still runs of a request, here alone: the engine is told by whoever decides so."""
        live = self._live[request_id]
        live.error = error
        live.metrics.finished_s = self.clock.now()
        for sample in live.samples:
            if sample.finish_reason is None:
                self._flush(live, sample, reason, None)

    def discard(self, request_id: str) -> None:
        self._live.pop(request_id, None)
        self.beams.pop(request_id, None)

    # -- one output ----------------------------------------------------------------------------------------------

    def _take(self, live: Live, out: EngineOutput) -> None:
        now = self.clock.now()
        params = live.params
        assert params is not None
        if out.error is not None:
            live.error = out.error
            for sample in live.samples:
                if sample.finish_reason is None:
                    sample.end("error", None)
            live.metrics.finished_s = now
            return
        if out.prompt_logprobs:
            live.prompt_logprobs += out.prompt_logprobs
        sample = live.samples[out.index]
        if sample.finish_reason is not None:
            return
        if out.num_preemptions > live.metrics.num_preemptions:
            live.metrics.num_preemptions = out.num_preemptions
        if out.num_drafted:
            live.metrics.num_drafts += 1
            live.metrics.num_draft_tokens += out.num_drafted
            live.metrics.num_accepted_tokens += out.num_accepted
        if out.token_ids:
            if live.metrics.first_token_s is None:
                live.metrics.first_token_s = now
                live.metrics.scheduled_s = out.scheduled_s
                live.num_cached = out.num_cached_tokens
                if self.tally is not None:
                    self.tally.begun.append(live)
            if self.tally is not None:
                self.tally.num_tokens += len(out.token_ids)
                if sample.last_s is not None:
                    self.tally.gaps_s.append((now - sample.last_s) / len(out.token_ids))
                sample.last_s = now
            if sample.delivery is not None:
                sample.delivery.take(len(out.token_ids), now)
            self._tokens(live, sample, out)
        elif live.metrics.first_token_s is None:  # a request that only brings blocks ends so
            live.num_cached = max(live.num_cached, out.num_cached_tokens)
        if out.finish_reason is not None and sample.finish_reason is None:
            self._flush(live, sample, out.finish_reason, out.stop_reason)
        if live.samples[out.index].finish_reason is not None and _ended(live):
            live.metrics.finished_s = now
            live.metrics.quality = min((s.delivery.quality for s in live.samples if s.delivery), default=None)

    def _tokens(self, live: Live, sample: Sample, out: EngineOutput) -> None:
        taken = self._text(live, sample, out)
        sample.token_ids += out.token_ids[:taken]
        for entry in out.logprobs[:taken]:
            sample.logprobs.append(entry)
            sample.cumulative_logprob += entry.logprob

    def _text(self, live: Live, sample: Sample, out: EngineOutput) -> int:
        """Take in the text of new tokens. Returns how many belong to the sample: those up to a stop string."""
        params = live.params
        assert params is not None
        ids = out.token_ids
        if sample.detokenizer is None:
            return len(ids)
        if sample.stops is None and out.finish_reason is None and len(ids) == 1:  # nearly always
            sample.text.append(sample.detokenizer.add_one(ids[0]))
            return 1
        if out.finish_reason == "stop" and not params.include_stop_str_in_output:
            ids = ids[:-1]  # the engine stops at an id: the model's end, or one of the request
        for i, token_id in enumerate(ids):  # one by one: the matcher counts tokens for min_tokens
            hit = sample.add_text(sample.detokenizer.add_one(token_id), 1)
            if hit is not None:
                sample.end("stop", hit)
                if out.finish_reason is None:
                    self.aborts.append(Abort(request_id=out.request_id, index=sample.index, reason="stop"))
                return i + 1
        return len(out.token_ids)

    def _flush(self, live: Live, sample: Sample, reason: str, stop_reason: int | str | None) -> None:
        """The sample ends: give out the text that waited for a next token that never comes."""
        if sample.detokenizer is not None:
            hit = sample.add_text(sample.detokenizer.flush(), 0)
            if hit is not None:
                sample.end("stop", hit)
                return
            if sample.stops is not None:
                sample.text.append(sample.stops.flush())
        sample.end(reason, stop_reason)

    def _shown(self, sample: Sample, *, ranked: bool) -> list[dict[int, Logprob]]:
        sample.shown += [self._entry(entry, ranked=ranked) for entry in sample.logprobs[len(sample.shown) :]]
        return sample.shown

    def _prompt_shown(self, live: Live) -> list[dict[int, Logprob] | None]:
        fresh = live.prompt_logprobs[len(live.prompt_shown) :]
        live.prompt_shown += [None if entry is None else self._entry(entry) for entry in fresh]
        return live.prompt_shown

    def _entry(self, entry: TokenLogprobs, *, ranked: bool = True) -> dict[int, Logprob]:
        """A position's dictionary: the likeliest tokens, or the named ones (not `ranked`), and the chosen one."""
        out = {
            token_id: Logprob(logprob, rank if ranked else None, self._piece(token_id))
            for rank, (token_id, logprob) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), 1)
        }
        if not ranked or entry.token_id not in out:
            out[entry.token_id] = Logprob(entry.logprob, entry.rank, self._piece(entry.token_id))
        return out

    def _piece(self, token_id: int) -> str | None:
        return None if self.tokenizer is None else self.tokenizer.token_text(token_id)

    # -- what the front end returns ------------------------------------------------------------------------------

    def is_finished(self, request_id: str) -> bool:
        live = self._live[request_id]
        if live.params is None:
            return request_id in self.beams
        return live.metrics.finished_s is not None

    def find(self, request_id: str) -> Live | None:
        """The state of a request, if it is still followed."""
        return self._live.get(request_id)

    def live(self, request_id: str) -> Live:
        """The state of a request that is still followed."""
        return self._live[request_id]

    def output(self, request_id: str, *, keep: bool = False, logprobs: bool = True) -> RequestOutput:
        """The request's output so far; finished requests are forgotten by this call unless `keep`.

        `logprobs`: False leaves them out, where they have been read as they came.
        """
        live = self._live[request_id]
        params = live.params
        assert params is not None
        finished = self.is_finished(request_id)
        if finished and not keep:
            del self._live[request_id]
        wants_logprobs = params.tells_logprobs and logprobs
        wants_prompt = params.prompt_logprobs is not None and logprobs
        return RequestOutput(
            request_id=request_id,
            prompt=live.prompt,
            prompt_token_ids=live.request.prompt_token_ids,
            prompt_logprobs=self._prompt_shown(live) if wants_prompt else None,
            outputs=[
                CompletionOutput(
                    index=s.index,
                    text="".join(s.text),
                    token_ids=s.token_ids,
                    cumulative_logprob=s.cumulative_logprob if params.tells_logprobs else None,
                    logprobs=self._shown(s, ranked=not params.logprob_token_ids) if wants_logprobs else None,
                    finish_reason=s.finish_reason,
                    stop_reason=s.stop_reason,
                    weight_versions=s.versions(self.version),
                )
                for s in live.samples
            ],
            finished=finished,
            metrics=live.metrics,
            num_cached_tokens=live.num_cached,
            error=live.error,
            weight_version=self.version_of(live),
        )

    def pooled_output(self, request_id: str) -> EngineOutput:
        """A finished pooling request's last news: vector, or error; the request is forgotten by this call."""
        del self._live[request_id]
        return self.beams.pop(request_id)

    def beam_output(self, request_id: str) -> BeamSearchOutput:
        """A finished beam search (no sequences if it failed); the request is forgotten by this call."""
        live, out = self._live.pop(request_id), self.beams.pop(request_id)
        prompt_ids = live.request.prompt_token_ids
        sequences = []
        for ids, score, reason in out.beams:
            text = None
            if self.tokenizer is not None:
                shown = ids
                beam = live.request.beam
                ends = reason == "stop" and ids and beam is not None and not beam.include_stop_str_in_output
                if ends:
                    shown = ids[:-1]
                detokenizer = IncrementalDetokenizer(self.tokenizer, prompt_ids=prompt_ids)
                text = detokenizer.add(shown) + detokenizer.flush()
            sequences.append(BeamSearchSequence([*prompt_ids, *ids], score, text, reason))
        return BeamSearchOutput(sequences)
