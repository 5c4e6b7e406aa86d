"""Requests that call a tool in the middle: they stop, and go on with its result; and conversations whose answer calls
one, which go on with another request. What becomes of their cache meanwhile?

Kept on the device it takes room for as long as the call lasts; dropped it has to be computed again, copied to a tier
and back it takes the time of the copies. Whatever wastes least memory for least time is chosen, at the pace that was
measured. Sources: INFERCEPT, arXiv 2402.01869, section 4 (the three wastes); LAMPS, arXiv 2410.18248, section 3.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, NamedTuple, Protocol

from penstock.core.sequence import Sequence, Status
from penstock.sched.costs import LearntCosts
from penstock.sched.pace import StepPace

if TYPE_CHECKING:
    from penstock.core.batch import SchedulerOutput, StepOutput
    from penstock.core.events import EngineStats
    from penstock.core.protocols import StepTimer
    from penstock.core.request import ApiCall
    from penstock.kv.manager import KVManager

PRESERVE, DISCARD, SWAP = "preserve", "discard", "swap"
LOOK_S = 1.0
"""How often a loop that has nothing else to do looks whether a call of unknown length has ended."""


class OpenCall(NamedTuple):
    """`until_s`: when the call ends. None: somebody says so (`Control`)."""

    seq: Sequence
    call: ApiCall
    until_s: float | None


class PauseCase(NamedTuple):
    """What is known when a call begins. Units: tokens and seconds. `mine`: tokens that the sequence has computed;
    `others`: those of everybody else who has memory; `pause_s`: how long the call is expected to last;
    `compute_s`, `copy_s`: to compute `mine` again, and to copy it one way, None: there is no room for it."""

    mine: int
    others: int
    pause_s: float
    compute_s: float
    copy_s: float | None


def wastes(case: PauseCase) -> dict[str, float]:
    """Memory over time that nobody has anything of, in token-seconds, of each way (INFERCEPT, equations 1 to 3).

    Whoever computes again, or copies, holds memory meanwhile that is of no use yet, and keeps the others' from use.
    """
    everybody = case.mine + case.others
    found = {PRESERVE: case.pause_s * case.mine, DISCARD: case.compute_s * everybody}
    if case.copy_s is not None:
        found[SWAP] = 2 * case.copy_s * everybody
    return found


class Queues(Protocol):
    """The scheduler, as far as calls concern it."""

    kv: KVManager
    stats: EngineStats

    @property
    def running(self) -> Seq[Sequence]: ...

    def appended(self, seq: Sequence, token_ids: list[int]) -> None: ...

    def preempt(self, seq: Sequence, *, swap: bool | None = None) -> None: ...


class Pauses:
    """A part of the scheduler.

    Attributes:
        mode: `preserve`, `discard`, `swap`, or `auto`, the way that wastes least.
        chosen: calls by what became of their cache, since start.
        pace: what steps and copies have taken.
        watches: somebody wants to know the pace.
    """

    def __init__(self, scheduler: Queues, timer: StepTimer | None, mode: str = "auto") -> None:
        self.mode = mode
        self.chosen: Counter[str] = Counter()
        self.pace = StepPace(timer)
        self.costs = LearntCosts()
        self._scheduler = scheduler
        self._calling: dict[int, Sequence] = {}
        """Sequences that have calls before them, or are in one."""
        self._pauses: dict[int, OpenCall] = {}
        self.watches = False

    def entered(self, seq: Sequence) -> None:
        """A sequence is queued."""
        if seq.num_calls < len(seq.request.calls):
            self._calling[seq.seq_id] = seq

    def forget(self, seq: Sequence) -> None:
        self._calling.pop(seq.seq_id, None)
        self._pauses.pop(seq.seq_id, None)

    def begin_step(self, now_s: float) -> None:
        """Calls that have ended are over, and who has come to one begins it. Mutates: sequences, queues."""
        if not self._calling:
            return
        for pause in [p for p in self._pauses.values() if p.until_s is not None and p.until_s <= now_s]:
            self.end(pause.seq, pause.call.result)
        for seq in [s for s in self._calling.values() if s.seq_id not in self._pauses and s.num_inflight == 0]:
            call = seq.request.calls[seq.num_calls]
            if seq.num_generated >= call.after and seq.status in (Status.RUNNING, Status.WAITING):
                until_s = None if call.pause_s is None else now_s + call.pause_s
                self._pauses[seq.seq_id] = OpenCall(seq, call, until_s)
                seq.held = True
                if seq.status is Status.RUNNING:
                    self._settle(seq, call)

    def end(self, seq: Sequence, result: list[int]) -> None:
        """Its call is over, and `result` follows what it had. Nothing, if it is in none."""
        if self._pauses.pop(seq.seq_id, None) is None:
            return
        seq.num_calls += 1
        seq.held = False
        if result:
            seq.token_ids.extend(result)
            self._scheduler.appended(seq, result)
        if seq.num_calls == len(seq.request.calls):
            del self._calling[seq.seq_id]

    def wake_s(self, now_s: float) -> float | None:
        """When a call ends next, or may have; None if nobody is in one."""
        if not self._pauses:
            return None
        return min(now_s + LOOK_S if p.until_s is None else p.until_s for p in self._pauses.values())

    def case(self, seq: Sequence, call: ApiCall) -> PauseCase:
        kv, mine = self._scheduler.kv, seq.num_computed
        others = sum(s.num_computed for s in self._scheduler.running if s is not seq)
        num_bytes = kv.swaps.num_bytes(mine)
        copy_s = self.pace.copy_s(num_bytes) if kv.swaps.fits(mine) else None
        return PauseCase(mine, others, call.expected_s, self.pace.compute_s(mine), copy_s)

    def between(self, namespace: bytes, tokens: list[int], expected_s: float) -> None:
        """The tool that the end of `tokens` calls is expected to answer in so many seconds. What becomes of the blocks
        that nobody else's text goes on from? Kept they leave last until then; copied they go down a tier at once,
        dropped they leave first. Mutates: the prefix cache."""
        kv = self._scheduler.kv
        self.watches = True
        entry = kv.hints.find(namespace, tokens)
        if entry is None or not kv.hints.num_alone(entry):
            return
        mine = kv.hints.num_alone(entry) * kv.block_size
        others = sum(s.num_computed for s in self._scheduler.running)
        copies = kv.hints.moves and kv.swaps.fits(mine)
        copy_s = self.pace.copy_s(kv.swaps.num_bytes(mine)) if copies else None
        way = self._way(PauseCase(mine, others, expected_s, self.pace.compute_s(mine), copy_s))
        kv.hints.wait(entry, expected_s if way == PRESERVE else None, moves=way == SWAP)
        kv.hints.counts[f"pause_{way}"] += 1

    def _way(self, case: PauseCase) -> str:
        way = self.mode
        if way == "auto":
            found = wastes(case)
            way = min(found, key=lambda name: found[name])
        self.chosen[way] += 1
        return way

    def _settle(self, seq: Sequence, call: ApiCall) -> None:
        way = self._way(self.case(seq, call))
        if way != PRESERVE:
            self._scheduler.preempt(seq, swap=way == SWAP)

    def observe(self, output: SchedulerOutput, result: StepOutput) -> None:
        """What a step took: `result` is in the log of a run, so that a replay decides the same."""
        if rows := output.scheduled:
            num_tokens = sum([row.num_tokens for row in rows])
            num_decodes = len(rows) if num_tokens == len(rows) else sum([row.num_tokens == 1 for row in rows])
            decode_s = self.costs.observe(num_decodes, num_tokens - num_decodes, result.duration_s)
            if num_tokens > num_decodes:
                self.costs.took(num_tokens, result.duration_s)
            stats = self._scheduler.stats
            stats.decode_s += decode_s
            stats.prefill_s += result.duration_s - decode_s
        if self._calling or self.watches:
            self.pace.observe(output, result.duration_s, self._scheduler.kv.swaps.page_bytes)


def tokens_left(seq: Sequence) -> int:
    """Tokens that may follow the one that comes next: before the end, and before the next call."""
    calls = seq.request.calls
    most = seq.request.max_tokens
    if seq.num_calls < len(calls):
        most = min(most, calls[seq.num_calls].after)
    return most - seq.num_generated - 1
