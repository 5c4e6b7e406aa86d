"""Speculation on the virtual clock: texts whose drafts are right or wrong by a rule, and a run over one of them.

Whether a draft is right is settled per sequence and position before the run (except for `Spiteful`), so that every
controller meets the same text.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from penstock.base.clock import VirtualClock
from penstock.config import EngineConfig
from penstock.core.model_spec import ModelSpec
from penstock.core.protocols import DraftController, StepTimer
from penstock.core.request import Request
from penstock.core.sampling import TokenRules
from penstock.engine.core import EngineCore
from penstock.engine.record import Recorder
from penstock.executor.sim import DraftOutcomes, SimExecutor
from penstock.launch.assemble import engine_core
from penstock.plan.resolve import Plan

Marks = tuple[bytearray, bytearray]
"""Per position: whether a draft for it is right; whether the drafter has drafts that begin there."""
LENGTH = 1 << 12


@lru_cache(maxsize=512)
def _settled(marks: Callable[[random.Random], Marks], seed: int) -> Marks:
    """Remembered, as every controller that is compared meets the same text; nobody writes to it."""
    return marks(random.Random(seed))


class SettledText:
    """`marks(rng)` makes one sequence's LENGTH marks. `draft_cost(room, num_rows)`: seconds."""

    def __init__(
        self, seed: int, marks: Callable[[random.Random], Marks], draft_cost: Callable[[int, int], float]
    ) -> None:
        self._seed = seed
        self._marks = marks
        self.draft_s = draft_cost
        self._sequences: dict[int, Marks] = {}

    def draft(self, seq_id: int, position: int, room: int) -> tuple[int, int]:
        found = self._sequences.get(seq_id)
        if found is None:
            found = self._sequences[seq_id] = _settled(self._marks, self._seed * 1_000_003 + seq_id)
        right, has = found
        if not has[position % LENGTH]:
            return 0, 0
        accepted = 0
        while accepted < room and right[(position + accepted) % LENGTH]:
            accepted += 1
        return room, accepted


class SpitefulText:
    """Right as long as nobody drafts: `patience` tokens without a draft earn `lure` right drafts, then all are wrong.

    No controller can win here; it can only lose less.
    """

    def __init__(self, patience: int, lure: int, draft_cost: Callable[[int, int], float]) -> None:
        self._patience, self._lure = patience, lure
        self.draft_s = draft_cost
        self._sequences: dict[int, tuple[int, int]] = {}

    def draft(self, seq_id: int, position: int, room: int) -> tuple[int, int]:
        last, lure = self._sequences.get(seq_id, (0, 0))
        if position - last > self._patience:
            lure = self._lure
        accepted = min(room, lure)
        self._sequences[seq_id] = (position + accepted, lure - accepted)
        return room, accepted


def repetitive(rng: random.Random) -> Marks:
    """Runs of some 80 right drafts, one to four wrong ones between them; the drafter always has some."""
    right = bytearray()
    while len(right) < LENGTH:
        right += b"\1" * max(1, round(rng.expovariate(1 / 80))) + b"\0" * rng.randint(1, 4)
    return right[:LENGTH], bytearray(b"\1" * LENGTH)


def ordinary(rng: random.Random) -> Marks:
    """Three of ten positions have drafts, and each draft is right with probability 0.6."""
    right = bytearray(rng.random() < 0.6 for _ in range(LENGTH))
    return right, bytearray(rng.random() < 0.3 for _ in range(LENGTH))


def steady(rng: random.Random) -> Marks:
    """Drafts everywhere, each right with probability 0.7: a draft model."""
    return bytearray(rng.random() < 0.7 for _ in range(LENGTH)), bytearray(b"\1" * LENGTH)


def switching(rng: random.Random) -> Marks:
    """Stretches of 20 to 200 tokens in which all drafts are wrong or nearly all right: each makes the last a lie."""
    right = bytearray()
    good = rng.random() < 0.5
    while len(right) < LENGTH:
        share = 0.98 if good else 0.0
        right += bytearray(rng.random() < share for _ in range(rng.randint(20, 200)))
        good = not good
    return right[:LENGTH], bytearray(b"\1" * LENGTH)


def hopeless(rng: random.Random) -> Marks:
    """No draft is ever right."""
    return bytearray(LENGTH), bytearray(b"\1" * LENGTH)


TEXTS: dict[str, Callable[[random.Random], Marks]] = {
    "repetitive": repetitive, "ordinary": ordinary, "steady": steady, "switching": switching, "hopeless": hopeless,
}  # fmt: skip
SPITEFUL = "spiteful"


def make_text(name: str, seed: int, draft_cost: Callable[[int, int], float]) -> DraftOutcomes:
    if name == SPITEFUL:
        return SpitefulText(8 + seed, 4 + seed, draft_cost)
    return SettledText(seed, TEXTS[name], draft_cost)


class DraftRun(NamedTuple):
    """`seconds` of virtual time for `num_tokens`; `tpot_s`: per request, seconds per token after its first one."""

    num_tokens: int
    seconds: float
    num_steps: int
    num_draft_steps: int
    tpot_s: dict[str, float]

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


def draft_engine(
    config: EngineConfig,
    spec: ModelSpec,
    plan: Plan,
    timer: StepTimer,
    text: DraftOutcomes,
    drafts: DraftController | None,
) -> EngineCore:
    """The engine that serves, on a simulated device that drafts as `text` does."""
    clock = VirtualClock()
    executor = SimExecutor(timer, clock, vocab_size=spec.vocab_size, drafts=text)
    return engine_core(config, plan, executor, clock, timer=timer, seconds_budget=False, drafts=drafts)


def run_drafts(core: EngineCore, requests: list[Request], recorder: Recorder | None = None) -> DraftRun:
    """All requests at once, to the end; as many run side by side as the engine's `max_num_seqs`."""
    core.recorder = recorder
    for request in requests:
        core.add(request)
    first: dict[str, float] = {}
    tpot: dict[str, float] = {}
    counts: dict[str, int] = {}
    steps = draft_steps = 0
    while core.has_work:
        before = core.stats.num_spec_steps
        outs = core.step()
        now = core.clock.now()
        steps += 1
        draft_steps += core.stats.num_spec_steps - before
        for out in outs:
            name = out.request_id
            first.setdefault(name, now)
            counts[name] = counts.get(name, 0) + len(out.token_ids)
            if out.finish_reason is not None:
                tpot[name] = (now - first[name]) / max(1, counts[name] - 1)
    return DraftRun(sum(counts.values()), core.clock.now(), steps, draft_steps, tpot)


def plain_requests(count: int, num_prompt: int, num_output: int) -> list[Request]:
    return [
        Request(
            request_id=f"r{i}", prompt_token_ids=[(7 * i + j) % 97 + 3 for j in range(num_prompt)],
            rules=TokenRules(), max_tokens=num_output,
        )
        for i in range(count)
    ]  # fmt: skip
