"""Whether a request should be taken on where some engines compute prompts and others decode: before a prompt is spent.

A prompt that is computed for an answer that nobody has room for is work thrown away. So the load of the engines that
decode is looked at when a request comes: as it is (`NOW`), or as it is expected to be when the request's prompt will
have been computed (`PREDICTED`): who ends until then has left, and who is ahead of it in the queue of prompts has come.
As it is now says little where prompts take long: the engines that decode look empty while a wave of prompts is on its
way, all are taken on, then none (Mooncake's fluctuation).

Source: Qin et al., Mooncake, arXiv 2407.00079, sections 7.2 to 7.4 (early rejection; fluctuation; prediction of the
load by a uniform time that answers take). Here each answer has its own expected length.

Whole numbers alone: tokens, sequences, microseconds; prompts in nanoseconds a token.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heapreplace
from itertools import accumulate

NOW, PREDICTED = "now", "predicted"
MODES = (NOW, PREDICTED)


@dataclass(frozen=True)
class PoolSpeed:
    """Engines that compute prompts, and engines that decode; one that does both counts twice.

    Attributes:
        prefills, decodes: how many there are, at least 1 each.
        slots, kv_tokens: sequences, and tokens of memory, of all that decode together.
        prompt_token_ns: of one engine.
        step_us: of a step of one engine in which so many sequences decode.
    """

    prefills: int
    decodes: int
    slots: int
    kv_tokens: int
    prompt_token_ns: int
    step_us: Callable[[int], int]


@dataclass(frozen=True)
class PoolRequest:
    """`prompt`: tokens left to compute (0: it decodes); `out`: tokens left to generate; `held`: tokens of memory that
    it comes to; `width`: sequences."""

    prompt: int
    out: int
    held: int
    width: int = 1


@dataclass(frozen=True)
class PoolVerdict:
    """`ready_us`: from now until its prompt is computed. `retry_us`: when it would be taken on, if nobody else comes;
    None: it is now."""

    ready_us: int
    retry_us: int | None = None
    why: str = ""


class _Changes:
    """Sequences and tokens of memory that come (or go) by a moment. `changes`: (when, sequences, tokens)."""

    def __init__(self, changes: Iterable[tuple[int, int, int]]) -> None:
        rows = sorted(changes)
        self.times = [at_us for at_us, _, _ in rows]
        self._widths = [0, *accumulate(width for _, width, _ in rows)]
        self._held = [0, *accumulate(held for _, _, held in rows)]

    def until(self, at_us: int) -> tuple[int, int]:
        """Of all, those up to then."""
        count = bisect_right(self.times, at_us)
        return self._widths[count], self._held[count]


class PoolForecast:
    """The engines as they are expected to be. `waiting`: those without a first token, first come, first served;
    `decoding`: the others."""

    def __init__(self, speed: PoolSpeed, waiting: Iterable[PoolRequest], decoding: Iterable[PoolRequest]) -> None:
        self._speed = speed
        there = list(decoding)
        self._pace_us = self._step_us(sum(one.width for one in there) or 1)
        stays = [(0, one) for one in there]
        self._free = [0] * speed.prefills
        """A heap: when each engine that computes prompts has done those that wait."""
        for one in waiting:
            ready_us = self._ready_us(one)
            heapreplace(self._free, ready_us)
            stays.append((ready_us, one))
        self._begins = _Changes((at_us, one.width, one.held) for at_us, one in stays)
        self._ends = _Changes((at_us + one.out * self._pace_us, one.width, one.held) for at_us, one in stays)

    def judge(
        self, new: PoolRequest, *, mode: str = PREDICTED, ttft_us: int | None = None, tpot_us: int | None = None
    ) -> PoolVerdict:  # fmt: skip
        """Whether a newcomer will find its place to decode, its first token within `ttft_us` and a step of at most
        `tpot_us`. With nothing to do, engines take whatever comes."""
        ready_us, own_us = self._ready_us(new), new.prompt * self._speed.prompt_token_ns // 1000
        if not self._ends.times:
            return PoolVerdict(ready_us)
        waits_us, why = 0, ""
        if ttft_us is not None and ready_us > max(ttft_us, own_us):
            waits_us = ready_us - max(ttft_us, own_us)
            why = f"its first token would take about {_s(ready_us)} s, and {_s(ttft_us)} s were asked for"
        why = why or self._problem(new, ready_us if mode == PREDICTED else 0, tpot_us)
        if not why:
            return PoolVerdict(ready_us)
        # When somebody who decodes ends, there may be a place; by then others may have come, whose prompts were ahead.
        later_us = own_us if mode == PREDICTED else 0
        ends = self._ends.times[bisect_right(self._ends.times, waits_us + later_us) :]
        for try_us in (waits_us, *(end_us - later_us for end_us in ends)):
            looked_us = max(self._free[0], try_us) + own_us if mode == PREDICTED else try_us
            if not self._problem(new, looked_us, tpot_us):
                return PoolVerdict(ready_us, max(1, try_us), why)
        return PoolVerdict(ready_us, max(1, try_us), why)

    def occupancy(self, at_us: int) -> tuple[int, int]:
        """(sequences that decode then, tokens of memory that they come to)."""
        (came, came_held), (gone, gone_held) = self._begins.until(at_us), self._ends.until(at_us)
        return came - gone, came_held - gone_held

    def _problem(self, new: PoolRequest, at_us: int, tpot_us: int | None) -> str:
        """What would be wrong if it began to decode then; "" if nothing."""
        speed, (width, held) = self._speed, self.occupancy(at_us)
        if not width:
            return ""
        if width + new.width > speed.slots:
            return f"it would decode beside {width} others, and there is room for {speed.slots} in all"
        if held + new.held > speed.kv_tokens:
            return f"others would hold {held} of {speed.kv_tokens} tokens of memory, and it needs {new.held}"
        if tpot_us is not None and (step_us := self._step_us(width + new.width)) > tpot_us:
            return f"a token would take about {_s(step_us)} s, and {_s(tpot_us)} s were asked for"
        return ""

    def _ready_us(self, one: PoolRequest) -> int:
        return self._free[0] + one.prompt * self._speed.prompt_token_ns // 1000

    def _step_us(self, width: int) -> int:
        return self._speed.step_us(-(-width // self._speed.decodes))


def _s(us: int) -> str:
    return f"{us / 1e6:.3g}"
