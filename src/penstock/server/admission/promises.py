"""Promised times: whether a request's first token, and its pace, can be in time; if not, when they could be.

What can never be is a mistake of the request (400), what cannot be now is refused at once (429), with the time at which
it can be if nobody else comes. Each prediction is compared with what became of it, and corrects the next ones.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from penstock.base.errors import InputError
from penstock.core.request import Request
from penstock.engine.frontend import EngineClient
from penstock.server.admission.forecast import EngineSpeed, Generating, QueueForecast, Wait
from penstock.server.admission.seen import SeenPrefixes
from penstock.server.distribution import TTFT_S, Distribution

if TYPE_CHECKING:
    from penstock.core.messages import EngineInfo

RATIOS = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)
"""Upper bounds of what a time to the first token was, by what was predicted."""
ALPHA = 0.1
WAITED_S = 0.05
"""What shorter waits were by their prediction says nothing: a step is as long."""
SURE = 0.8
"""What is called impossible is faster than this part of the fastest that was ever measured."""
LINE_S, ENTRY_S, FEW = 0.02, 0.0005, 32
"""The queue is played forward anew when it has changed, or after so many seconds; if it has more than a few requests,
only after so many seconds for each of them."""


@dataclass(eq=False)
class PromisedRequest:
    """How far a request that was taken on has come, as seen from here. `work`: prompt tokens that were left to compute
    at the last look; `out`: tokens that each of its sequences will probably come to."""

    request: Request
    width: int
    work: float
    out: float
    predicted_s: float | None = None
    """Seconds to its first token, from its admission on; None: nothing was known. `turn_s`: of these, until its turn,
    before that was corrected by `bias`."""
    turn_s: float = 0.0
    bias: float = 1.0
    admitted_s: float = 0.0
    started_s: float | None = None


class Progressing(Protocol):
    """What the gate keeps of a request."""

    progress: PromisedRequest


@dataclass(frozen=True)
class PromiseVerdict:
    """`ttft_s`: predicted, from now; `turn_s`: see `PromisedRequest`. `retry_s`: when it can be; None: it is now."""

    ttft_s: float
    turn_s: float
    retry_s: float | None = None
    why: str = ""


class PromiseKeeper:
    """Belongs to the event loop's thread. `by_due`: the engine serves whoever is due first first."""

    def __init__(self, client: EngineClient, info: EngineInfo, *, by_due: bool, tpot_s: float | None) -> None:
        self._client, self._info = client, info
        self._by_due, self._tpot_s = by_due, tpot_s
        self._kv_tokens = info.kv_capacity_tokens or info.num_blocks * max(1, info.block_size)
        self.seen = SeenPrefixes(self._kv_tokens if info.caches_prefixes else 0)
        self.ratios, self.predicted, self.errors = Distribution(RATIOS), Distribution(TTFT_S), Distribution(TTFT_S)
        """Times to the first token by what was predicted; predictions; how far off they were, in seconds."""
        self.bias = 1.0
        """What waiting has taken, by what was predicted."""
        self._lengths: dict[int, float] = {}
        """Mean generated tokens, by what was asked for at most (in powers of two)."""
        self._fastest_token_s = self._fastest_step_s = math.inf
        self._line: QueueForecast | None = None
        self._line_s = -math.inf
        self._dirty = True

    @property
    def _facts(self) -> EngineInfo:
        """Of the engine that is there now, if it is not the first one."""
        return getattr(self._client, "info", None) or self._info

    # -- what is known -------------------------------------------------------------------------------------------

    def speed(self, share: float = 1.0) -> EngineSpeed:
        """Of the engine, or of a part of it. Until it has been measured, as the cost model has it."""
        info, seen = self._facts, self._client.snapshot
        decode, token_s = seen.decode_s, seen.prefill_token_s
        longest = info.alone_s[-1] if info.alone_s else (1, 0.0)
        if not decode and info.alone_s:
            decode = [info.alone_s[0][1]]
        if not token_s:
            token_s = longest[1] / longest[0]
        slots = max(1, info.max_num_seqs)
        if self._by_due and self._tpot_s is not None:
            while slots > 1 and EngineSpeed(1, 1, 1, decode).decode_s(slots) > self._tpot_s:
                slots //= 2
        limit_s = min(0.1, self._tpot_s) if self._by_due and self._tpot_s is not None else 0.1
        return EngineSpeed(
            max(1, int(slots * share)), int(self._kv_tokens * share), info.max_num_batched_tokens or 512, decode,
            token_s / share, limit_s, max(1, info.block_size),
        )  # fmt: skip

    def work(self, request: Request, num_shared: int = 0) -> float:
        """Prompt tokens that probably have to be computed."""
        known = self.seen.num_known(request.namespace, request.prompt_token_ids) if request.reads_cache else 0
        return len(request.prompt_token_ids) - max(known, num_shared)

    def expected(self, request: Request) -> float:
        """Tokens that a sample will probably come to."""
        if request.expected_tokens:
            return float(min(request.expected_tokens, request.max_tokens))
        return min(float(request.max_tokens), self._lengths.get(request.max_tokens.bit_length(), math.inf))

    def line(self, entries: Iterable[Progressing], now: float, share: float = 1.0) -> QueueForecast:
        """The queue of `entries` (in order of arrival) on this part of the engine. Mutates: their progress."""
        speed = self.speed(share)
        running, waiting = [], []
        for entry in entries:
            p = entry.progress
            prompt = len(p.request.prompt_token_ids)
            if p.started_s is not None:
                done = (now - p.started_s) / max(1e-6, speed.decode_s(speed.slots))
                left = min(max(p.out - done, p.out / 8), p.request.max_tokens - done)
                running.append(Generating(max(1.0, left), p.width, prompt + p.out))
            else:
                slo_s = p.request.slo_ttft_s
                due_s = math.inf if slo_s is None else p.request.arrival_s + slo_s - now
                waiting.append(Wait(p.work, p.width, p.out, prompt + p.out, due_s))
        return QueueForecast(speed, running, waiting, by_due=self._by_due)

    def whole_line(self, entries: Collection[Progressing], now: float) -> QueueForecast:
        """`line` of all, played anew only where something has changed."""
        age_s, num = now - self._line_s, len(entries)
        due = self._dirty if num <= FEW else age_s >= ENTRY_S * num
        if self._line is None or due or age_s >= max(LINE_S, ENTRY_S * num):
            self._line, self._line_s, self._dirty = self.line(entries, now), now, False
        return self._line

    def changed(self) -> None:
        """Somebody had a first token or has ended."""
        self._dirty = True

    def added(self, progress: PromisedRequest) -> None:
        """Somebody was taken on."""
        if self._line is None or self._by_due:
            self._line = None
        else:
            held = len(progress.request.prompt_token_ids) + progress.out
            self._line.add(Wait(progress.work, progress.width, progress.out, held))

    def advance(self, unstarted: Iterable[Progressing], num_running: int, seconds: float) -> None:
        """So much time has passed: prompts of those first in the queue are computed by so much more."""
        speed = self.speed()
        work_s, _ = speed.prefill_s(speed.max_chunk, num_running)
        tokens = seconds * speed.max_chunk / work_s if work_s > 0 else 0.0
        for n, entry in enumerate(unstarted):
            if tokens <= 0 or n >= speed.slots - num_running:
                break
            p = entry.progress
            done = min(tokens, max(0.0, p.work - 1))
            p.work -= done
            tokens -= done

    # -- judging -------------------------------------------------------------------------------------------------

    def check_possible(self, request: Request, work: float) -> None:
        """Raises InputError for what no empty engine could keep."""
        snapshot = self._client.snapshot
        info = self._facts
        measured_s = min((s for s in snapshot.decode_s[:1] if s > 0), default=math.inf)
        model_s = info.alone_s[0][1] if info.alone_s else math.inf
        self._fastest_step_s = min(self._fastest_step_s, measured_s, model_s)
        if snapshot.prefill_token_s > 0:
            self._fastest_token_s = min(self._fastest_token_s, snapshot.prefill_token_s)
        step_s = 0.0 if math.isinf(self._fastest_step_s) else SURE * self._fastest_step_s
        token_s = 0.0 if math.isinf(self._fastest_token_s) else SURE * self._fastest_token_s
        least_s = max(step_s, work * token_s)
        if request.slo_ttft_s is not None and request.slo_ttft_s < least_s:
            raise InputError(
                f"ttft_slo_ms is {1000 * request.slo_ttft_s:g}, and the {work:.0f} prompt tokens that have to be "
                f"computed take about {_ms(least_s / SURE)} ms here with nothing else to do; ask for no less than that",
                param="ttft_slo_ms",
            )
        if request.slo_tpot_s is not None and not info.drafts and request.slo_tpot_s < step_s:
            raise InputError(
                f"tpot_slo_ms is {1000 * request.slo_tpot_s:g}, and a token takes about {_ms(step_s / SURE)} ms here "
                "with nothing else to do; ask for no less than that", param="tpot_slo_ms",
            )  # fmt: skip

    def judge(self, request: Request, work: float, width: int, now: float, line: QueueForecast) -> PromiseVerdict:
        """Whether it can keep what it was promised, if it is taken on now."""
        left_s = math.inf if request.slo_ttft_s is None else request.arrival_s + request.slo_ttft_s - now
        turn_s, num_running = line.start(work, width, left_s)
        ttft_s = self.bias * turn_s + line.speed.first_s(work, num_running)
        if (request.slo_ttft_s is None and request.slo_tpot_s is None) or line.empty:
            return PromiseVerdict(ttft_s, turn_s)
        why = ""
        if ttft_s > left_s:
            why = f"its first token would take about {_s(ttft_s)} s, and {_s(request.slo_ttft_s or 0)} s were asked for"
        elif self._by_due and line.makes_late(work, width, left_s):
            why = "it would make others late that were promised their first token in time"
        elif request.slo_tpot_s is not None and not self._facts.drafts:
            pace_s = line.speed.decode_s(num_running + width)
            if pace_s > request.slo_tpot_s:
                why = f"a token would take about {_s(pace_s)} s, and {_s(request.slo_tpot_s)} s were asked for"
        if not why:
            return PromiseVerdict(ttft_s, turn_s)
        # A new try has all of its time again.
        whole_s, tpot_s = request.slo_ttft_s or math.inf, request.slo_tpot_s or math.inf
        return PromiseVerdict(ttft_s, turn_s, line.possible_in_s(work, width, whole_s, tpot_s, self.bias), why)

    # -- what became of it ---------------------------------------------------------------------------------------

    def began(self, progress: PromisedRequest, ttft_s: float) -> None:
        """Its first token came so many seconds after its admission."""
        predicted_s = progress.predicted_s
        if predicted_s is None or predicted_s <= 0 or ttft_s <= 0:
            return
        self.ratios.observe(ttft_s / predicted_s)
        self.errors.observe(abs(ttft_s - predicted_s))
        if progress.turn_s >= WAITED_S:
            own_s = predicted_s - progress.bias * progress.turn_s
            ratio = (ttft_s - own_s) / progress.turn_s
            self.bias += ALPHA * (min(3.0, max(0.5, ratio)) - self.bias)

    def ended(self, progress: PromisedRequest, lengths: list[int], token_ids: list[int]) -> None:
        """Its samples came to so many tokens; `token_ids`: those of the first one."""
        bucket = progress.request.max_tokens.bit_length()
        for length in filter(None, lengths):
            old = self._lengths.get(bucket, float(length))
            self._lengths[bucket] = old + ALPHA * (length - old)
        self.seen.add(progress.request.namespace, [*progress.request.prompt_token_ids, *token_ids])


def _s(seconds: float) -> str:
    return f"{seconds:.3g}"


def _ms(seconds: float) -> str:
    return f"{math.ceil(1000 * seconds * 10) / 10:g}"
