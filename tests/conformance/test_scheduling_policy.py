"""What every scheduling policy owes, whatever order it prefers. Being registered enrols it."""

from __future__ import annotations

import random

import pytest

from penstock.core.request import Control
from penstock.core.sequence import Sequence, Status
from penstock.sched.policy import POLICIES
from tests.engine.fake_model import VOCAB
from tests.engine.harness import Collector, Knobs, assert_idle, drain, fake_engine, request
from tests.engine.naive import fake_logits, generate


@pytest.fixture(params=POLICIES.names())
def policy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def _sequences(n: int, computed: list[int]) -> list[Sequence]:
    out = []
    for i in range(n):
        seq = Sequence(i, request([3] * (5 + i), max_tokens=4), arrival=i)
        seq.num_computed = computed[i % len(computed)]
        seq.tables = [object()]
        seq.status = Status.RUNNING
        out.append(seq)
    return out


def test_order_is_a_selection_without_repeats(policy: str) -> None:
    p = POLICIES.get(policy)()
    running, waiting = _sequences(6, [0, 4, 9]), _sequences(4, [0])
    order = p.order(running, waiting)
    assert len({id(s) for s in order}) == len(order)
    assert {id(s) for s in order} <= {id(s) for s in running + waiting}
    assert {id(s) for s in running} <= {id(s) for s in order}, "a running sequence must not be forgotten"
    assert p.order([], waiting), "an empty engine must let somebody in"


def test_num_tokens_stays_within_lag_and_budget(policy: str) -> None:
    p = POLICIES.get(policy)()
    (seq,) = _sequences(1, [0])
    for lag in (1, 2, 7):
        for budget in (1, 3, 50):
            assert 0 <= p.num_tokens(seq, lag, budget) <= min(lag, budget)


def test_victim_is_another_running_sequence_and_the_first_comer_is_safe(policy: str) -> None:
    p = POLICIES.get(policy)()
    running = sorted(_sequences(5, [4]), key=p.key)
    for needy in running:
        victim = p.victim(running, needy)
        assert victim is None or (victim is not needy and victim in running)
        assert victim is not running[0], "if the first can be preempted by others, two can starve each other"
    assert p.victim(running, running[0]) is not None


def test_every_policy_serves_everybody_the_same_tokens(policy: str) -> None:
    """Scarce memory, preemptions, late arrivals: all finish, all with their own tokens, nobody waits for ever."""
    rng = random.Random(4)
    core, _ = fake_engine(Knobs(policy=policy, num_blocks=18, block_size=4, budget=12, max_num_seqs=5))
    load = [
        request([rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 30))], max_tokens=rng.randrange(1, 20))
        for _ in range(60)
    ]
    collector = Collector()
    todo = list(load)
    while todo:
        core.add(todo.pop(0))
        for _ in range(rng.randrange(0, 5)):
            if core.has_work:
                collector.take(core.step())
        if core.groups and rng.random() < 0.3:
            core.add(Control(kind="preempt", request_id=rng.choice(sorted(core.groups))))
    drain(core, collector, limit=5000)
    assert_idle(core)
    for r in load:
        got = collector.requests[r.request_id]
        assert (got.tokens[0], got.reasons[0]) == generate(fake_logits, r)
