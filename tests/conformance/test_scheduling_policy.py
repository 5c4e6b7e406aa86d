"""What every scheduling policy owes, whatever order it prefers. Being registered enrols it."""

from __future__ import annotations

import random

import pytest

from penstock.base.errors import ConfigError
from penstock.core.request import Control
from penstock.core.sequence import Sequence, Status
from penstock.engine.record import Recorder, replay
from penstock.kv.manager import KVManager
from penstock.sched.policy import POLICIES, make_policy
from tests.engine.fake_model import VOCAB, spec
from tests.engine.harness import Collector, Knobs, assert_idle, drain, fake_engine, plain_core, request
from tests.engine.naive import fake_logits, generate
from tests.engine.policy_sim import ask, play, poisson
from tests.unit.kv.test_kv_model import make_groups


@pytest.fixture(params=POLICIES.names())
def policy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def _sequences(n: int, computed: list[int], status: Status = Status.RUNNING, first: int = 0) -> list[Sequence]:
    out = []
    for i in range(first, first + n):
        prompt = request([3] * (5 + i % 50), max_tokens=4, priority=i % 3, arrival_s=0.1 * i)
        seq = Sequence(i, prompt, arrival=i)
        seq.num_computed = computed[i % len(computed)]
        seq.tables = [object()] if status is Status.RUNNING else []
        seq.status = status
        out.append(seq)
    return out


@pytest.mark.parametrize("with_memory", [False, True])
def test_order_is_a_selection_without_repeats(policy: str, with_memory: bool) -> None:
    p = make_policy(policy)
    if with_memory:
        p.begin_step(0.5, KVManager(make_groups(1), [32], 4))
    running = sorted(_sequences(6, [0, 4, 9]), key=p.key)
    waiting = sorted(_sequences(400, [0], Status.WAITING, first=6), key=p.key)
    order = p.order(running, waiting)
    assert len({id(s) for s in order}) == len(order)
    assert {id(s) for s in order} <= {id(s) for s in running + waiting}
    assert {id(s) for s in running} <= {id(s) for s in order}, "a running sequence must not be forgotten"
    assert p.order([], waiting), "an empty engine must let somebody in"
    assert {id(s) for s in p.order(running, [])} == {id(s) for s in running}


def test_num_tokens_stays_within_lag_and_budget(policy: str) -> None:
    p = make_policy(policy)
    (seq,) = _sequences(1, [0])
    for lag in (1, 2, 7):
        for budget in (1, 3, 50):
            assert 0 <= p.num_tokens(seq, lag, budget) <= min(lag, budget)


def test_who_is_first_in_an_empty_step_gets_tokens(policy: str) -> None:
    p = make_policy(policy)
    for budget in (1, 16, 300):
        waiting = sorted(_sequences(30, [0], Status.WAITING), key=p.key)
        head = p.order([], waiting)[0]
        assert p.num_tokens(head, head.num_known, budget) >= 1


def test_victim_is_another_running_sequence_and_the_first_comer_is_safe(policy: str) -> None:
    p = make_policy(policy)
    running = sorted(_sequences(5, [4]), key=p.key)
    for needy in running:
        victim = p.victim(running, needy)
        assert victim is None or (victim is not needy and victim in running)
        assert victim is not running[0], "if the first can be preempted by others, two can starve each other"
    assert p.victim(running, running[0]) is not None


def test_displacement_is_one_way(policy: str) -> None:
    """Whom a newcomer displaces cannot displace it in turn, comes later in the policy's order and can be taken."""
    p = make_policy(policy)
    everybody = _sequences(24, [4])
    for newcomer in everybody:
        running = sorted((s for s in everybody if s is not newcomer), key=p.key)
        victim = p.displaced(running, newcomer)  # type: ignore[attr-defined]
        if victim is not None:
            assert victim in running
            assert p.key(victim) > p.key(newcomer)
            assert p.displaced([newcomer], victim) is None  # type: ignore[attr-defined]
            for seq in everybody:
                seq.num_inflight = 1
            assert p.displaced(running, newcomer) is None, "a step works on it"  # type: ignore[attr-defined]
            for seq in everybody:
                seq.num_inflight = 0


def test_a_wait_ends_by_itself(policy: str) -> None:
    p = make_policy(policy)
    assert p.not_before_s([], []) is None, "nobody waits, nothing to wait for"  # type: ignore[attr-defined]
    waiting = sorted(_sequences(3, [0], Status.WAITING), key=p.key)
    until = p.not_before_s([], waiting)  # type: ignore[attr-defined]
    assert until is None or until < 60
    assert p.not_before_s(_sequences(1, [5]), waiting) is None, "what runs is kept waiting"  # type: ignore[attr-defined]


def test_every_policy_serves_everybody_the_same_tokens(policy: str) -> None:
    """Scarce memory, preemptions, late arrivals: all finish, all with their own tokens, nobody waits for ever."""
    rng = random.Random(4)
    core, _ = fake_engine(Knobs(policy=policy, num_blocks=18, block_size=4, budget=12, max_num_seqs=5))
    load = [
        request(
            [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 30))],
            max_tokens=rng.randrange(1, 20),
            priority=rng.randrange(3),
        )
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


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.sampled
def test_a_recorded_run_replays_to_the_same_schedule(policy: str, depth: int) -> None:
    """A policy looks at nothing but what is recorded: no clock of its own, no order of memory addresses."""
    knobs = Knobs(policy=policy, num_blocks=20, block_size=4, budget=12, max_num_seqs=4, depth=depth)
    core, _ = fake_engine(knobs)
    core.recorder = Recorder()
    rng = random.Random(8)
    stems = [[rng.randrange(3, VOCAB) for _ in range(16)] for _ in range(3)]
    emitted = []
    todo = 30
    while todo or core.has_work:
        if todo and rng.random() < 0.6:
            own = [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 9))]
            kw = {"priority": rng.randrange(3), "max_tokens": rng.randrange(1, 12)}
            core.add(request(rng.choice(stems) + own, arrival_s=core.clock.now(), **kw))
            todo -= 1
        emitted += core.step()
    again = replay(core.recorder.iterations, lambda e, c: plain_core(spec(slots=False), knobs, e, c), depth=depth)
    assert again == emitted


def test_virtual_time_is_repeatable_and_everybody_ends(policy: str) -> None:
    rng = random.Random(2)
    load = [ask(rng, t, rng.choice([20, 200]), rng.choice([3, 30])) for t in poisson(rng, 15, 3)]
    runs = [play(policy, load, num_blocks=60, max_num_seqs=6, budget=64) for _ in range(2)]
    assert runs[0].steps == runs[1].steps
    assert runs[0].end_s == runs[1].end_s


def test_knobs_come_with_the_name() -> None:
    p = make_policy("dynamic:timeout_s=0.5, size=3")
    assert (p.name, p.timeout_s, p.size) == ("dynamic", 0.5, 3)  # type: ignore[attr-defined]
    assert make_policy("fcfs").name == "fcfs"
    for name, needle in [
        ("lifo", "unknown"), ("lifo:size=1", "unknown"), ("fcfs:size=1", "it has none"), ("dynamic:sise=1", "size"),
        ("dynamic:size=many", "not int"), ("dynamic:size=1.5", "not int"), ("dynamic:size", "not int"),
        ("dynamic:size=0", "at least one"), ("dynamic:timeout_s=nan", "negative"), ("priority:ageing_s=0", "starve"),
        ("cache-aware:order=bfs", "dfs"), ("cache-aware:window=0", "at least 1"), ("splitfuse:gain=2", "range"),
    ]:  # fmt: skip
        with pytest.raises(ConfigError, match=needle):
            make_policy(name)
