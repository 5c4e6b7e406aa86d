"""When a request that comes now would have its first token: the queue is played forward, with measured step times.

Whoever has no token yet enters one after the other, as soon as there is a place and memory; its prompt is computed in
chunks, beside which those that run decode on and end. What steps take is measured (`sched.costs`); how many tokens
somebody will still generate is what is expected of it. Nothing is known of prefixes but what `seen` remembers.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from penstock.sched.costs import step_s


@dataclass(frozen=True)
class EngineSpeed:
    """What limits an engine. `decode`, `prefill_token_s`: see `sched.costs.LearntCosts`; `step_limit_s`: how long a
    step with prompt tokens may be while somebody decodes. Units: sequences, tokens, seconds."""

    slots: int
    kv_tokens: int
    max_chunk: int
    decode: list[float] = field(default_factory=list)
    prefill_token_s: float = 0.0
    step_limit_s: float = 0.1
    min_chunk: int = 32
    _steps: dict[int, float] = field(default_factory=dict, compare=False)
    """A memo."""

    @property
    def known(self) -> bool:
        return bool(self.decode) or self.prefill_token_s > 0

    def decode_s(self, num_running: int) -> float:
        """Seconds of a step in which so many sequences decode."""
        seconds = self._steps.get(num_running)
        if seconds is None:
            seconds = self._steps[num_running] = step_s(self.decode, num_running)
        return seconds

    def prefill_s(self, num_tokens: float, num_running: int) -> tuple[float, float]:
        """(seconds, steps) to compute so many tokens of prompts beside so many sequences that decode. A part of a step
        is what others' prompts leave of it."""
        base_s, chunk = self.decode_s(num_running), max(1, self.max_chunk - num_running)
        if num_running and self.prefill_token_s > 0:
            fits = int(max(0.0, self.step_limit_s - base_s) / self.prefill_token_s)
            chunk = max(1, min(chunk, max(self.min_chunk, fits)))
        steps = num_tokens / chunk
        return num_tokens * self.prefill_token_s + steps * base_s, steps

    def first_s(self, num_tokens: float, num_running: int) -> float:
        """Seconds from the beginning of such a prompt to its first token: it comes at the end of a step."""
        work_s, steps = self.prefill_s(num_tokens, num_running)
        return work_s + max(0.0, math.ceil(steps) - steps) * self.decode_s(max(1, num_running))

    def alone_s(self, num_tokens: float) -> float:
        """Seconds to the first token of a prompt of so many tokens with nothing else to do."""
        return max(num_tokens * self.prefill_token_s, self.decode_s(1))


@dataclass(slots=True)
class Generating:
    """One that has a token: tokens it will still generate in each of its sequences, and tokens of memory it holds."""

    left: float
    width: int
    held: float


@dataclass(slots=True)
class Wait:
    """One that has none. `prompt`: tokens to compute; `held`: tokens of memory it will come to; `due_s`: when its
    first token is due, seconds from now."""

    prompt: float
    width: int
    out: float
    held: float
    due_s: float = math.inf


@dataclass(slots=True)
class ForecastEntry:
    """When somebody can start, how many run then, when its first token comes; seconds from now."""

    start_s: float
    num_running: int
    first_s: float
    due_s: float


class QueueForecast:
    """The queue as it will be served. `by_due`: who is due first goes first; otherwise in the order given."""

    def __init__(
        self, speed: EngineSpeed, running: Iterable[Generating], waiting: Iterable[Wait], *, by_due: bool = False
    ) -> None:
        self.speed = speed
        self.by_due = by_due
        self._time_s = 0.0
        self._step = 0.0
        self._ends = [(run.left, n, run.width, run.held) for n, run in enumerate(running)]
        heapify(self._ends)
        self._running = sum(width for _, _, width, _ in self._ends)
        self._held = sum(held for _, _, _, held in self._ends)
        self._num = len(self._ends)
        self.entries: list[ForecastEntry] = []
        for wait in sorted(waiting, key=lambda w: w.due_s) if by_due else waiting:
            self._enter(wait)
        self._dues = [entry.due_s for entry in self.entries]
        self._tail: tuple[float, int] | None = None

    # -- what would become of a newcomer ------------------------------------------------------------------------

    def start(self, prompt: float, width: int, due_s: float = math.inf) -> tuple[float, int]:
        """(seconds until a newcomer's prompt is begun, how many run then)."""
        at = self._place(due_s)
        if at < len(self.entries):
            entry = self.entries[at]
            return entry.start_s, entry.num_running
        if width == 1 and self._held + prompt <= self.speed.kv_tokens and self._running < self.speed.slots:
            return self._time_s, self._running
        if width == 1 and self._tail is not None:
            return self._tail
        found = self._wait_for_place(list(self._ends), prompt, width)
        if width == 1:
            self._tail = found
        return found

    @property
    def empty(self) -> bool:
        """Nobody runs or waits."""
        return not self._ends and not self.entries

    def first_s(self, prompt: float, width: int, due_s: float = math.inf, bias: float = 1.0) -> float:
        """Seconds until a newcomer's first token; waiting takes `bias` times as long as it says."""
        start_s, num_running = self.start(prompt, width, due_s)
        return bias * start_s + self.speed.first_s(prompt, num_running)

    def makes_late(self, prompt: float, width: int, due_s: float) -> bool:
        """Whether somebody behind a newcomer, who would be in time, would not be because of it."""
        at = self._place(due_s)
        if at == len(self.entries):
            return False
        work_s = self.speed.prefill_s(prompt, self.entries[at].num_running)[0]
        return any(0 <= entry.due_s - entry.first_s < work_s for entry in self.entries[at:])

    def possible_in_s(
        self, prompt: float, width: int, ttft_s: float, tpot_s: float = math.inf, bias: float = 1.0
    ) -> float:
        """Seconds after which a newcomer has its first token within `ttft_s`, and its pace, if nobody else comes.
        `bias`: as in `first_s`."""
        start_s, num_running = self.start(prompt, width)
        ends, step, time_s = list(self._ends), self._step, self._time_s
        running = self._running
        while True:
            if time_s >= start_s or not ends:
                num_running = min(num_running, running)
                work_s, at_s = self.speed.first_s(prompt, num_running), max(start_s, time_s)
                if work_s <= ttft_s and self.speed.decode_s(num_running + width) <= tpot_s:
                    # It may come so much earlier as it may wait, but no earlier than this few run.
                    wait_s = max(0.0, ttft_s - work_s)
                    return max(0.0, bias * at_s - wait_s) if at_s == start_s else bias * at_s
                if not ends:
                    return bias * at_s
            end, _, ended, _ = heappop(ends)
            time_s += max(0.0, end - step) * self.speed.decode_s(running)
            step, running = max(step, end), running - ended

    def add(self, wait: Wait) -> None:
        """A newcomer was taken on. With `by_due` it stands last until the line is made anew."""
        self._enter(wait)
        self._tail = None

    # -- playing forward -----------------------------------------------------------------------------------------

    def _place(self, due_s: float) -> int:
        return bisect_right(self._dues, due_s) if self.by_due else len(self.entries)

    def _enter(self, wait: Wait) -> None:
        while self._ends and self._is_full(self._running, self._held, wait.prompt, wait.width):
            self._time_s += self._next_end_s()
            self._end_one()
        start_s, num_running = self._time_s, self._running
        work_s, steps = self.speed.prefill_s(wait.prompt, num_running)
        self._time_s += work_s
        self._step += steps
        while self._ends and self._ends[0][0] <= self._step:
            self._end_one()
        self._num += 1
        heappush(self._ends, (self._step + wait.out, self._num, wait.width, wait.held))
        self._running += wait.width
        self._held += wait.held
        first_s = start_s + self.speed.first_s(wait.prompt, num_running)
        self.entries.append(ForecastEntry(start_s, num_running, first_s, wait.due_s))

    def _is_full(self, running: int, held: float, prompt: float, width: int) -> bool:
        return running > 0 and (running + width > self.speed.slots or held + prompt > self.speed.kv_tokens)

    def _next_end_s(self) -> float:
        return max(0.0, self._ends[0][0] - self._step) * self.speed.decode_s(self._running)

    def _end_one(self) -> None:
        end, _, width, held = heappop(self._ends)
        self._step = max(self._step, end)
        self._running -= width
        self._held -= held

    def _wait_for_place(
        self, ends: list[tuple[float, int, int, float]], prompt: float, width: int
    ) -> tuple[float, int]:
        time_s, step, running, held = self._time_s, self._step, self._running, self._held
        while ends and self._is_full(running, held, prompt, width):
            end, _, ended, freed = heappop(ends)
            time_s += max(0.0, end - step) * self.speed.decode_s(running)
            step, running, held = max(step, end), running - ended, held - freed
        return time_s, running
