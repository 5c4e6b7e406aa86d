"""Single cases of scheduling and of its draft controllers, each without an engine."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

import numpy as np
import pytest

from penstock.core.sequence import Sequence
from penstock.core.step_shape import StepShape
from penstock.sched.budget import SecondsBudget
from penstock.sched.drafts.acceptance import LEVELS, AcceptanceModel
from penstock.sched.drafts.cost import DraftCosts, StepCosts
from penstock.sched.drafts.fixed import FixedDrafts
from penstock.sched.drafts.limit import DraftLimit
from penstock.sched.drafts.planner import Planner
from penstock.sched.drafts.probes import Probes
from penstock.sched.drafts.slo import SloProgress
from penstock.sched.drafts.state import SequenceState, tightened
from penstock.sched.policy.dynamic import Dynamic
from penstock.sched.reserve import Reserve
from tests.engine.harness import request
from tests.engine.test_seconds_budget import Linear


def decoding(number: int, max_tokens: int = 100, num_generated: int = 1) -> Sequence:
    seq = Sequence(number, request([3] * 8, max_tokens=max_tokens), arrival=number)
    seq.token_ids.extend([5] * num_generated)
    seq.num_computed = len(seq.token_ids) - 1
    return seq


class Tiles:
    """Five tokens take as long as one; what is beyond them, 0.2 s each."""

    def step_s(self, shape: StepShape) -> float:
        return max(1.0, 0.2 * shape.num_tokens)

    def copy_s(self, num_bytes: int) -> float:
        return 0.0


# -- drafts ------------------------------------------------------------------------------------------------------


def test_a_batch_of_just_the_limit_still_drafts() -> None:
    """vLLM's disable_by_batch_size: beyond it nobody drafts; 0 is no limit."""
    drafts = FixedDrafts(3, 2, max_batch=2)
    assert drafts.begin_step([decoding(i) for i in range(2)]) == dict.fromkeys(range(2), (3, 2))
    assert drafts.begin_step([decoding(i) for i in range(3)]) == {}
    assert len(FixedDrafts(3, 2).begin_step([decoding(i) for i in range(50)])) == 50


def test_with_a_limit_of_none_nobody_drafts_and_whoever_decides_is_not_asked() -> None:
    asked = []

    class Decides(FixedDrafts):
        def begin_step(self, running: Seq[Sequence], now_s: float | None = None) -> Mapping[int, tuple[int, int]]:
            asked.append(now_s)
            return super().begin_step(running, now_s)

    limit = DraftLimit(Decides(3, 2), 4)
    seqs = [decoding(i) for i in range(2)]
    assert limit.begin_step(seqs, 1.0) == dict.fromkeys(range(2), (3, 2))
    limit.most = 1
    assert limit.begin_step(seqs, 2.0) == dict.fromkeys(range(2), (1, 2))
    limit.most = 0
    assert limit.begin_step(seqs, 3.0) == {}
    assert asked == [1.0, 2.0]


def test_beside_prompts_only_drafts_that_earn_their_time_are_made() -> None:
    """Four drafts are free alone; beside prompt tokens each takes 0.2 s, which 3.1 tokens a second would fill with
    0.62."""
    planner = Planner(StepCosts(Tiles()), DraftCosts())
    chances = np.array([[0.9, 0.7, 0.4, 0.1]])
    assert planner.plan(chances, 100, 0, 1.0) == [4]
    assert planner.plan(chances, 100, 50, 1.0) == [2]


def test_a_probe_pays_for_the_drafting_as_well() -> None:
    drafts = DraftCosts()
    for _ in range(9):
        drafts.observe(1, 1, 0.25)
    costs = StepCosts(Tiles())
    probes = Probes(costs, drafts, 1, 1)
    probes.exploration_s = 10.0
    track = SequenceState(0, 1, 0)
    assert probes.add(rooms := {}, [track], 0, 100, 0, 0.0)
    assert (rooms, track.probed) == ({0: (1, 1)}, True)
    probes.pay(1)
    assert probes.exploration_s == pytest.approx(10.0 - 0.25), "a token more in the step is free here"
    probes.pay(1)
    assert probes.exploration_s == pytest.approx(10.0 - 0.25), "once"


def test_who_was_not_probed_is_not_taken_for_a_failed_probe() -> None:
    """Drafts that were planned and came out wrong: the next probe is two steps on, not four."""
    probes = Probes(StepCosts(Tiles()), DraftCosts(), 4, 4)
    planned, probed = SequenceState(0, 1, 0), SequenceState(1, 2, 0)
    probed.probed = True
    probes.heard([planned, probed], [0.5, 0.5], [0.3, 0.3], step=10)
    assert (planned.interval, planned.due_at) == (2, 12)
    assert (probed.interval, probed.due_at) == (4, 14)


def test_others_give_up_as_many_drafts_as_a_late_one_needs() -> None:
    """Behind its promise by 1.6 tokens: two drafts that are nearly sure. Who has time gives two of its own."""
    late, early = SequenceState(0, 1, 0, SloProgress(1.0)), SequenceState(1, 2, 0)
    assert late.slo is not None
    late.slo.add(2.0, 1)
    rooms = {1: (4, 4)}
    tightened(rooms, [late, early], [[0.9, 0.9, 0.9], [0.8, 0.6, 0.4, 0.3]], 1.0, 1.6, 8)
    assert rooms == {0: (2, 2), 1: (2, 2)}


@pytest.mark.parametrize("count", [2, len(LEVELS), 12])
def test_sequences_learn_together_what_they_learn_alone(count: int) -> None:
    together, alone = AcceptanceModel(4, 4), AcceptanceModel(4, 4)
    slots = [together.add() for _ in range(count)]
    assert slots == [alone.add() for _ in range(count)]
    right = [i % 4 for i in range(count)]
    wrong = [i % 2 for i in range(count)]
    together.learn(slots, right, wrong, [1] * count)
    for slot, r, w in zip(slots, right, wrong, strict=True):
        alone.learn([slot], [r], [w], [1])
    assert together.chances[slots] == pytest.approx(alone.chances[slots])


# -- policies ----------------------------------------------------------------------------------------------------


def test_a_batch_need_not_wait() -> None:
    assert Dynamic(timeout_s=0.0).not_before_s([], [decoding(0)]) == decoding(0).request.arrival_s


def test_a_reserve_of_nothing_stays_nothing_and_others_jump_when_somebody_is_thrown_out() -> None:
    nothing, usual = Reserve(0.0), Reserve(0.5)
    running = [decoding(i, max_tokens=100, num_generated=70) for i in range(3)]
    for reserve in (nothing, usual):
        reserve.forced_out(running)
    assert (nothing.share, nothing.tokens(running, decoding(9))) == (0.0, 0)
    assert usual.share == pytest.approx(0.9), "70 tokens and 20 more, of 100"
    assert usual.tokens(running, decoding(9)) == int(0.9 * (3 * 30 + 99))


@pytest.mark.parametrize("block_size", [1, 2, 3])
def test_a_step_of_small_blocks_is_filled_to_the_token(block_size: int) -> None:
    """Half a block is less than two tokens: the search ends at the last token that fits."""
    budget = SecondsBudget(Linear(base_s=0, row_s=0), block_size)
    for tokens in (1, 7, 50, 333):
        budget.begin((tokens + 0.5) * 1e-3)
        assert budget.fit(0, 1000) == max(tokens, block_size)


class Weighing:
    """A timer by which every part of a step's shape counts, and keeps the last shape that it was asked about."""

    def step_s(self, shape: StepShape) -> float:
        self.shape = shape
        return 0.0

    def copy_s(self, num_bytes: int) -> float:
        return 0.0


def test_decodes_added_at_once_are_those_added_one_by_one() -> None:
    """In all five numbers by which a step is timed; a prefill and earlier decodes are in the step already."""
    shapes = []
    for at_once in (True, False):
        timer = Weighing()
        budget = SecondsBudget(timer, 16)
        budget.begin(1.0)
        budget.add(100, 30, False)
        budget.add(6, 1, True)
        if at_once:
            budget.add_decodes(3, 8 + 21 + 4)
        else:
            for start in (7, 20, 3):
                budget.add(start, 1, True)
        budget.fit(0, 5)
        shapes.append(timer.shape)
    assert shapes[0] == shapes[1] == StepShape(39, 6, 175, 3465 + 7 + 33 + 15, 5)
