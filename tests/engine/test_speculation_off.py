"""Speculation that does not pay ends, and then costs nothing: counted, not timed."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.core.batch import ScheduledRow, SchedulerOutput, StepOutput, Verified
from penstock.core.sequence import Sequence
from penstock.runner.runner import concerns_drafter
from penstock.sched.drafts.adaptive import FIRST_MEASURE, WARM_UP, AdaptiveDrafts
from penstock.sched.drafts.cost import StepCosts
from tests.engine.harness import request
from tests.engine.test_draft_controller import law

FIRST = 16
"""Tokens within which speculation that does not pay has ended."""
DRAFTED_FIRST, DRAFTED_LATER = 24, 8
"""Draft tokens of a sequence in them, at most: of the first requests of an engine, and of later ones."""
TURN = 192
"""Tokens within which it has begun again on a text that has become predictable."""


class Watched(AdaptiveDrafts):
    """Counts what it does."""

    num_decided = num_settled = 0

    def _decide(self, running: Any) -> Any:
        self.num_decided += 1
        return super()._decide(running)

    def _settle(self, now_s: float | None) -> None:
        self.num_settled += 1
        super()._settle(now_s)


class Engine:
    """Steps of `num_rows` sequences; a step takes `plain_s`, `token_s` more for every draft token, and `draft_s` for
    drafting."""

    def __init__(
        self, drafts: AdaptiveDrafts, num_rows: int = 1, *, plain_s: float, token_s: float, draft_s: float = 0.0
    ) -> None:
        self.drafts = drafts
        self.plain_s, self.token_s, self.draft_s = plain_s, token_s, draft_s
        self.now_s = 0.0
        self.num_steps = self.num_seqs = 0
        self.rows: list[Sequence] = []
        self.come(num_rows)

    def come(self, count: int) -> None:
        """`count` new requests; those before them have ended."""
        for seq in self.rows:
            self.drafts.forget(seq.seq_id)
        self.rows = [
            Sequence(self.num_seqs + i, request([3] * 8, max_tokens=99999), self.num_seqs + i) for i in range(count)
        ]
        self.num_seqs += count
        for seq in self.rows:
            seq.num_computed = 8
            seq.token_ids.append(4)

    def step(self, accepts: int) -> tuple[int, int]:
        """One step, of whose drafts the first `accepts` of each sequence are right: (draft tokens, tokens)."""
        rooms = self.drafts.begin_step(self.rows, self.now_s)
        rows, verified = [], []
        drafted = gained = 0
        for seq in self.rows:
            room = rooms.get(seq.seq_id, (0, 0))[0]
            rows.append(ScheduledRow(seq.seq_id, seq.num_computed, 1, 1, num_drafts=room, draft_depth=room))
            right = min(room, accepts)
            if room:
                verified.append(Verified(seq.seq_id, [4] * (1 + right), room, 1 + right))
            drafted, gained = drafted + room, gained + right
            seq.num_computed += 1 + right
            seq.token_ids.extend([4] * (1 + right))
        draft_s = self.draft_s if drafted else 0.0
        took_s = self.plain_s + self.token_s * drafted + draft_s
        self.now_s += took_s
        self.num_steps += 1
        result = StepOutput(self.num_steps, verified=verified, duration_s=took_s, draft_s=draft_s)
        self.drafts.observe(SchedulerOutput(self.num_steps, scheduled=rows), result)
        return drafted, len(self.rows) + gained

    def run(self, count: int, accepts: int) -> list[tuple[int, int]]:
        return [self.step(accepts) for _ in range(count)]


COSTS = {
    "nano, ngram": {"plain_s": 0.0004, "token_s": 0.00006, "draft_s": 0.00006},
    "nano, a draft model": {"plain_s": 0.0004, "token_s": 0.00006, "draft_s": 0.0012},
    "0.5B, ngram": {"plain_s": 0.03, "token_s": 0.002, "draft_s": 0.0001},
}


@pytest.mark.parametrize("trusted", [True, False], ids=["timer is right", "no timer"])
@pytest.mark.parametrize("num_rows", [1, 8])
@pytest.mark.parametrize("name", COSTS)
def test_where_nothing_is_accepted_it_ends_within_sixteen_tokens(name: str, num_rows: int, trusted: bool) -> None:
    cost = COSTS[name]
    timer = law(base_s=cost["plain_s"], token_s=cost["token_s"]) if trusted else None
    engine = Engine(Watched(5, 63, timer=timer), num_rows, **cost)
    first = sum(drafted for drafted, _ in engine.run(FIRST, 0))
    assert first <= DRAFTED_FIRST * num_rows, first
    engine.run(300, 0)
    late = engine.run(2000, 0)
    assert sum(drafted > 0 for drafted, _ in late) <= 0.01 * len(late)
    assert sum(drafted for drafted, _ in late) <= 0.01 * sum(tokens for _, tokens in late)
    engine.come(num_rows)  # what earlier requests have shown counts for new ones from their first token on
    assert sum(drafted for drafted, _ in engine.run(FIRST, 0)) <= DRAFTED_LATER * num_rows


@pytest.mark.parametrize("num_rows", [1, 8])
def test_drafts_that_are_right_and_cost_more_than_they_bring_end_too(num_rows: int) -> None:
    """One accepted token for three plain steps' time."""
    engine = Engine(Watched(5, 63), num_rows, plain_s=0.0004, token_s=0.0, draft_s=0.0008)
    steps = engine.run(FIRST, 1)
    assert sum(drafted > 0 for drafted, _ in steps) <= 6
    late = engine.run(2000, 1)
    assert sum(drafted > 0 for drafted, _ in late) <= 0.01 * len(late)


def test_where_nobody_drafts_the_controller_only_counts() -> None:
    drafts = Watched(5, 63)
    engine = Engine(drafts, plain_s=0.0004, token_s=0.0001)
    engine.run(400, 0)
    decided, settled = drafts.num_decided, drafts.num_settled
    for _ in range(40):
        engine.run(50, 0)
        engine.come(1)
    assert drafts.num_decided - decided <= 2000 / 32
    assert drafts.num_settled - settled <= 2000 / 16


def test_a_request_with_a_deadline_is_looked_at_at_once() -> None:
    """Also where nobody drafts, and whether it comes beside another or in its place."""
    hurried: set[int] = set()
    drafts = Watched(5, 63, slo_of=lambda seq: 0.0001 if seq.seq_id in hurried else None)
    engine = Engine(drafts, plain_s=0.0004, token_s=0.0001)
    engine.run(1000, 0)
    while not drafts._num_skipped:
        engine.step(0)
    engine.come(1)
    drafts._refused = 1.0  # whoever comes promises no more
    before = drafts.num_decided
    engine.run(1, 0)
    assert drafts.num_decided == before, "without one it is not"
    hurried.add(engine.num_seqs)
    engine.come(1)
    engine.run(1, 0)
    assert drafts.num_decided == before + 1


@pytest.mark.parametrize("num_rows", [1, 8])
@pytest.mark.parametrize("name", ["nano, ngram", "0.5B, ngram"])
def test_where_drafts_are_accepted_it_goes_on(name: str, num_rows: int) -> None:
    engine = Engine(Watched(5, 63), num_rows, **COSTS[name] | {"token_s": COSTS[name]["token_s"] / num_rows})
    steps = engine.run(400, 5)
    assert sum(tokens for _, tokens in steps) >= 2.5 * num_rows * len(steps)
    assert all(drafted for drafted, _ in steps[WARM_UP + FIRST_MEASURE + 4 : WARM_UP + FIRST_MEASURE + 8])


@pytest.mark.parametrize("name", ["nano, ngram", "0.5B, ngram"])
def test_a_text_that_becomes_predictable_turns_it_on_again(name: str) -> None:
    engine = Engine(Watched(5, 63), **COSTS[name])
    engine.run(1000, 0)
    tokens, on = 0, False
    while tokens < TURN:
        drafted, new = engine.step(5)
        tokens += new
        on = drafted >= 3
    assert on
    assert sum(new for _, new in engine.run(50, 5)) > 150
    engine.run(FIRST, 0)
    assert sum(drafted for drafted, _ in engine.run(50, 0)) <= 4, "and back"


def test_plain_steps_behind_drafts_do_not_make_plain_decoding_slow() -> None:
    """They take longer than others; what counts is the lower of the two, and either alone where there is no other."""
    costs = StepCosts(law(base_s=0.001, token_s=1e-9))
    costs.observe(1, 100, 1, 0.0015, after_drafts=True)
    assert costs.seconds(1, 100, 1) == pytest.approx(0.0015, rel=0.01)
    assert costs.seconds(1, 100, 5) == pytest.approx(0.0015, rel=0.01), "nothing nearer is known"
    costs.observe(1, 100, 1, 0.001)
    costs.observe(1, 100, 5, 0.002)
    assert costs.seconds(1, 100, 1) == pytest.approx(0.001, rel=0.01)
    assert costs.seconds(1, 100, 5) == pytest.approx(0.002, rel=0.01)
    costs.observe(1, 100, 1, 0.0012)
    costs.observe(1, 100, 1, 0.0012)
    for _ in range(5):
        costs.observe(1, 100, 1, 0.0008, after_drafts=True)
    assert costs.seconds(1, 100, 1) == pytest.approx(0.0008, rel=0.01), "the machine has become faster"


# -- the engine ------------------------------------------------------------------------------------------------------


class Switch:
    """Drafts in the steps that `on` says. `on`: of a step's number."""

    name = "switch"

    def __init__(self, on: Any) -> None:
        self._on, self._step = on, 0

    def begin_step(self, running: Any, now_s: float | None = None) -> Mapping[int, tuple[int, int]]:
        self._step += 1
        if not self._on(self._step):
            return {}
        return {s.seq_id: (4, 4) for s in running if s.is_decoding and not s.num_inflight}

    def observe(self, output: Any, result: Any) -> None: ...

    def forget(self, seq_id: int) -> None: ...


METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix"},
    "draft-model": {"method": "draft-model", "model": "pico"},
    "specinfer": {"method": "specinfer", "model": "pico,ngram"},
    "eagle": {"method": "eagle", "heads": "nano-eagle"},
    "medusa": {"method": "medusa", "heads": "nano-medusa"},
    "lookahead": {"method": "lookahead"},
    "reference": {"method": "reference"},
}
PROMPTS = ["Once upon a time there was a dog. The dog", "One two three one two three one", "Lily and Tom"]


def engine(method: str | None) -> LLM:
    speculative = None if method is None else METHODS[method]
    return LLM(
        "nano", max_model_len=256, max_num_seqs=4, block_size=16, num_gpu_blocks_override=96, threads=1,
        enable_prefix_caching=False, speculative_config=speculative,
    )  # fmt: skip


def said(llm: LLM, temperature: float) -> list[list[int]]:
    params = [SamplingParams(temperature=temperature, max_tokens=48, seed=i, ignore_eos=True) for i in range(3)]
    return [list(out.outputs[0].token_ids) for out in llm.generate(PROMPTS, params)]


@pytest.fixture(scope="module")
def plain() -> LLM:
    return engine(None)


@pytest.mark.parametrize("method", METHODS)
def test_tokens_are_the_same_wherever_it_is_switched(method: str, plain: LLM) -> None:
    llm = engine(method)
    core = llm.engine.core
    for temperature in (0.0, 0.8):
        wanted = said(plain, temperature)
        for seed in range(3):
            rng = random.Random(seed)
            turns = [rng.random() < 0.5 for _ in range(400)]
            core.scheduler.drafts = Switch(lambda step, turns=turns: turns[step // (1 + 3 * (step % 2))])
            before = core.stats.num_drafts
            assert said(llm, temperature) == wanted, (method, temperature, seed)
            assert core.stats.num_drafts > before
    assert core.executor.runner.drafter is not None, "the drafter has failed"  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", METHODS)
def test_without_drafts_a_step_does_what_it_does_without_speculation(method: str, plain: LLM) -> None:
    """No call of the drafter but where rows or pages come and go, the same kernels, and the same cache groups."""
    llm = engine(method)
    core = llm.engine.core
    core.scheduler.drafts = Switch(lambda step: False)
    runner = core.executor.runner  # type: ignore[attr-defined]
    drafter, batch, steps = runner.drafter, runner._batch, []
    heard = tracked = asked = greedy = 0
    inner_track, inner_propose, inner_execute = drafter.track, drafter.propose, runner.execute
    inner_greedy, inner_build = runner._greedy.run_greedy, batch.build

    def track(output: Any) -> None:
        nonlocal tracked
        tracked += 1
        inner_track(output)

    def propose(jobs: Any) -> Any:
        nonlocal asked
        asked += 1
        return inner_propose(jobs)

    def execute(output: Any) -> Any:
        nonlocal heard
        heard += concerns_drafter(output)
        steps.append(bool(output.page_ops or output.added or output.removed))
        return inner_execute(output)

    def run_greedy(plan: Any, planes: Any) -> Any:
        nonlocal greedy
        greedy += 1
        return inner_greedy(plan, planes)

    def build(*args: Any) -> Any:
        made = inner_build(*args)
        assert len(made[0].groups) == len(plain.engine.core.executor.runner.rows.groups)  # type: ignore[attr-defined]
        return made

    drafter.track, drafter.propose, runner.execute = track, propose, execute
    runner._greedy.run_greedy, batch.build = run_greedy, build
    core.executor._runner = runner
    assert said(llm, 0.0) == said(plain, 0.0)
    assert asked == 0
    assert tracked == heard == sum(steps)
    assert tracked <= 15, "a block has sixteen tokens, and three rows have forty-eight each"
    assert greedy >= 47, "of every row's tokens all but the first, and some of those, in greedy steps"
