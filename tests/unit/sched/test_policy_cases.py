"""Single cases that tell a policy from one that lacks a part of it: each fails where that part is taken away."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.core.sequence import Sequence, Status
from penstock.engine import beam
from penstock.engine.beams import Beams
from penstock.kv.eviction.lfu import LFU
from penstock.sched.policy.fair import Fair
from penstock.sched.policy.splitfuse import SplitFuse
from penstock.sched.preempt import prefers_swap
from penstock.sim.goodput import find_goodput
from penstock.sim.metrics import Slo, within
from tests.engine.harness import Knobs, fake_engine, request

# -- fair share: who comes back --------------------------------------------------------------------------------------


def waiting(number: int, tenant: str, num_prompt: int = 10) -> Sequence:
    return Sequence(number, request([3] * num_prompt, max_tokens=4, tenant=tenant), arrival=number)


def served(policy: Fair, counters: dict[str, float], *, queued: tuple[str, ...]) -> None:
    """Tenants that have received so much; those of `queued` had somebody waiting in the last step."""
    for number, (tenant, counter) in enumerate(counters.items()):
        share = policy._share(waiting(1000 + number, tenant))
        share.counter, share.queued = counter, tenant in queued


def test_who_was_away_has_earned_no_credit() -> None:
    """VTC, algorithm 2, lines 7 to 14: a tenant that comes back is lifted to the smallest counter in the queue."""
    policy = Fair()
    served(policy, {"here": 500.0, "too": 900.0, "back": 20.0}, queued=("here", "too"))
    queue = [waiting(0, "here"), waiting(1, "too"), waiting(2, "back")]
    order = policy.order([], queue)
    assert policy.counter("back") == 500.0
    assert [s.request.tenant for s in order] == ["here", "back", "too"], "first come where counters are equal"


def test_who_has_had_more_is_not_let_down_to_the_others() -> None:
    policy = Fair()
    served(policy, {"here": 500.0, "back": 800.0}, queued=("here",))
    policy.order([], [waiting(0, "here"), waiting(1, "back")])
    assert policy.counter("back") == 800.0


def test_into_an_empty_queue_one_comes_where_the_last_one_left_it() -> None:
    """Lines 8 and 9: the queue was empty; the counter of the last tenant that left it is the floor."""
    policy = Fair()
    served(policy, {"last": 700.0, "back": 20.0}, queued=("last",))
    policy.order([], [waiting(1, "back")])
    assert policy.counter("back") == 700.0


def test_a_newcomer_begins_at_the_smallest_counter_of_those_that_wait() -> None:
    policy = Fair()
    served(policy, {"a": 300.0, "b": 900.0}, queued=("a", "b"))
    policy.order([], [waiting(0, "a"), waiting(1, "b"), waiting(2, "new")])
    assert policy.counter("new") == 300.0, "not at the largest: it would wait for what it never had"


# -- beams: how lengths are weighed ----------------------------------------------------------------------------------


def test_a_score_is_of_the_tokens_without_the_end() -> None:
    assert beam.final_score(-6.0, 5, True, 1.0) == pytest.approx(-6.0 / 4)
    assert beam.final_score(-6.0, 5, False, 1.0) == pytest.approx(-6.0 / 5)
    assert beam.final_score(-6.0, 5, False, 2.0) == pytest.approx(-6.0 / 25)
    assert beam.final_score(-6.0, 5, False, 0.0) == -6.0
    assert beam.final_score(-6.0, 1, True, 1.0) == -6.0, "nothing but an end"


def finished(hypotheses: list[tuple[list[int], float, str]], penalty: float) -> list[tuple[list[int], float, str]]:
    """What a request of a prompt of one token and two beams answers, given what its beams came to."""
    emitted: list[Any] = []
    scheduler: Any = SimpleNamespace(stats=SimpleNamespace(num_finished=0), remove=lambda seq: None)
    asked = request([3], max_tokens=9, beam_width=2, length_penalty=penalty)
    group = SimpleNamespace(request=asked, live={}, completed=hypotheses)
    beams = Beams(scheduler, {asked.request_id: group}, {}, lambda *a: None, emitted)  # type: ignore[arg-type,return-value,dict-item]
    beams._finish(group)  # type: ignore[arg-type]
    return list(emitted[0].beams)


SHORT, LONG, ENDED = ([4, 5], -2.0, "length"), ([4, 5, 6, 7, 8], -3.2, "length"), ([4, 5, 6, 2], -2.4, "stop")


@pytest.mark.parametrize(
    ("penalty", "order"),
    # Over 3, 6 and 4 tokens (the prompt has one; the end is not counted): -0.667, -0.533, -0.6 with a penalty of 1.
    [(0.0, [SHORT, ENDED]), (1.0, [LONG, ENDED]), (3.0, [LONG, ENDED])],
)
def test_the_length_penalty_decides_the_order(penalty: float, order: list[Any]) -> None:
    assert finished([SHORT, LONG, ENDED], penalty) == order


def test_an_end_that_was_counted_would_change_the_order() -> None:
    """-2.4 over 4 tokens is -0.6 and worse than -0.55; over 5, with the end, it would be -0.48 and better."""
    other = ([4, 5, 6], -2.2, "length")
    assert finished([ENDED, other], 1.0) == [other, ENDED]


# -- goodput ---------------------------------------------------------------------------------------------------------


def result(ttft_s: list[float], tpot_s: list[float]) -> Any:
    """Requests of eleven tokens, one a second."""
    arrival = np.arange(len(ttft_s), dtype=np.float64)
    first = arrival + np.array(ttft_s)
    rows = SimpleNamespace(
        arrival_s=arrival, first_token_s=first, finish_s=first + 10 * np.array(tpot_s),
        num_output=np.full(len(first), 11), num_prompt=np.full(len(first), 5),
    )  # fmt: skip
    sized = type("Rows", (), {"__len__": lambda self: len(first), **vars(rows)})()
    return SimpleNamespace(requests=sized)


def test_goodput_asks_for_both_limits() -> None:
    slo = Slo(ttft_s=1.0, tpot_s=0.1)
    found = within(result([0.5, 1.5, 0.5, 1.5], [0.05, 0.05, 0.2, 0.2]), slo)
    assert found.tolist() == [True, False, False, False]


def test_goodput_stops_where_tokens_come_too_slowly_though_first_ones_are_in_time() -> None:
    """First tokens never wait; the time per token grows with the rate: the limit is 0.1 s, reached at four times."""
    found = find_goodput(lambda factor: result([0.1] * 20, [0.025 * factor] * 20), Slo(ttft_s=1.0, tpot_s=0.1))
    assert found.best is not None
    assert found.best.factor == pytest.approx(4.0, rel=0.03)


# -- least frequently used, with ageing ------------------------------------------------------------------------------


def scored(uses: list[int], half_life: float = 16.0) -> float:
    policy, entry = LFU(half_life), SimpleNamespace(tick=0.0)
    policy.on_insert(entry, uses[0])
    for tick in uses[1:]:
        policy.on_hit(entry, tick)
    return policy.key(entry)


def test_what_was_hot_once_does_not_stay() -> None:
    assert scored(list(range(20))) < scored([400, 410]), "twenty uses long ago count less than two of late"
    assert scored(list(range(20))) > scored([20, 21]), "at the same time, more uses count more"


def test_a_score_is_the_sum_over_uses_that_halve() -> None:
    """log2 of the sum of 2 ** (tick / half life): three uses, by hand."""
    assert scored([0, 16, 48]) == pytest.approx(math.log2(2**0 + 2**1 + 2**3))


# -- preemption: where the victim goes -------------------------------------------------------------------------------


def test_who_is_preempted_comes_back_ahead_of_all_who_came_later() -> None:
    core, _ = fake_engine(Knobs(block_size=4, num_blocks=64, budget=64, max_num_seqs=2, prefix_cache="none"))
    load = [request([3 + i] * 8, max_tokens=20, request_id=f"q{i}") for i in range(5)]
    for r in load:
        core.add(r)
    core.step()
    scheduler = core.scheduler
    victim = scheduler.running[-1]
    assert victim.request.request_id == "q1"
    scheduler.preempt(victim)
    assert [s.request.request_id for s in scheduler.waiting] == ["q1", "q2", "q3", "q4"]


# -- swap or recompute, near where both cost the same ----------------------------------------------------------------


@pytest.mark.parametrize(("share", "swaps"), [(0.9, True), (1.1, False)])
def test_A08_the_cheaper_way_near_break_even(share: float, swaps: bool) -> None:
    """Both ways of the copy are counted: out now and back later together cost `share` of computing it again."""
    num_tokens, recompute_s = 40, 0.25
    timer = SimpleNamespace(copy_s=lambda num_bytes: share * recompute_s / 2, step_s=lambda shape: recompute_s)
    core, _ = fake_engine(Knobs(block_size=4, host_blocks=40, preemption="auto"))
    core.scheduler.timer = timer
    assert prefers_swap(core.scheduler.preemption_mode, core.scheduler.timer, core.kv.swaps, num_tokens) is swaps


# -- SplitFuse: the target moves slowly ------------------------------------------------------------------------------


def prefilling(num_prompt: int) -> Sequence:
    seq = waiting(0, "t", num_prompt)
    seq.status, seq.tables = Status.RUNNING, [object()]
    return seq


def target(policy: SplitFuse, running: list[Sequence]) -> float:
    policy.order(running, [])
    return policy._target


def test_the_target_of_a_step_goes_a_share_of_the_way() -> None:
    policy = SplitFuse(backlog_steps=10, gain=0.25)
    policy.num_tokens(prefilling(8), 8, 512)  # hears of the budget
    crowd = [prefilling(2000)]  # 200 tokens a step are wanted
    assert target(policy, crowd) == pytest.approx(50.0)
    assert target(policy, crowd) == pytest.approx(87.5)
    assert target(policy, []) == pytest.approx(65.625), "and sinks as slowly"


def test_a_backlog_beyond_the_budget_takes_all_of_it_at_once() -> None:
    policy = SplitFuse(backlog_steps=10, gain=0.25)
    policy.num_tokens(prefilling(8), 8, 512)
    assert target(policy, [prefilling(6000)]) == 512.0
