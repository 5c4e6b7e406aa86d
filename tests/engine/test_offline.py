"""Offline work beside online requests: what it gets, and what they do not feel of it.

Virtual time: a step takes 50 ms plus 2 ms per token, about what a small model takes on two cores.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

import pytest

from penstock.core.batch import ScheduledRow, SchedulerOutput
from penstock.core.request import Request
from penstock.core.sequence import Sequence, Status
from penstock.engine.record import Recorder, replay
from penstock.sched.offline import WithOffline, online
from penstock.sched.policy import POLICIES, make_policy
from penstock.sched.policy.fcfs import Fcfs
from tests.engine.fake_model import VOCAB, spec
from tests.engine.harness import Collector, Knobs, assert_idle, drain, fake_engine, plain_core, request
from tests.engine.naive import fake_logits, generate
from tests.engine.policy_sim import LinearTimer, Played, ask, play, quantile

TIMER = LinearTimer(0.05, 0.002)
MACHINE = {"budget": 256, "max_num_seqs": 24, "num_blocks": 700, "timer": TIMER}
NEVER_DUE = 1e6
STAND_STILL = ("static", "dynamic", "multi-bin", "length-aware")
"""Policies under which whoever waits seldom enters while others run, so that nobody has to give way."""


def bursts(rng: random.Random, rate_hz: float, seconds: float, cv: float = 3.0) -> list[float]:
    """Arrival times with gamma gaps: clusters, and silence between them."""
    shape, now, times = 1 / cv**2, 0.0, []
    while (now := now + rng.gammavariate(shape, 1 / (rate_hz * shape))) < seconds:
        times.append(now)
    return times


def both(seed: int, num_offline: int = 150) -> tuple[list[Request], list[Request]]:
    rng = random.Random(seed)
    on = [ask(rng, t, rng.choice([100, 200, 400]), rng.choice([20, 50, 100])) for t in bursts(rng, 0.4, 120)]
    off = [
        ask(rng, 0.0, rng.choice([100, 300, 600]), rng.choice([50, 100, 150]), offline_s=NEVER_DUE)
        for _ in range(num_offline)
    ]
    return on, off


def merged(*loads: Seq[Request]) -> list[Request]:
    return sorted((r for load in loads for r in load), key=lambda r: r.arrival_s)


def done_by(played: Played, load: Seq[Request], end_s: float) -> int:
    """Generated tokens of those that have ended by then."""
    return sum(r.max_tokens for r in load if played.end_s[r.request_id] <= end_s)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_A18_offline_work_fills_the_gaps_of_a_bursty_load(seed: int) -> None:
    """Offline tokens/s > 0 in the gaps while online p99 TTFT grows by at most 10 %. Without a class it grows much more,
    so there was something to be shielded from."""
    on, off = both(seed)
    alone = play("fcfs", on, **MACHINE)
    beside = play("fcfs", merged(on, off), offline="fcfs", **MACHINE)
    p99 = {name: quantile(p.ttft_s(on), 0.99) for name, p in (("alone", alone), ("beside", beside))}
    last = max(beside.end_s[r.request_id] for r in on)
    rate = done_by(beside, off, last) / last
    print({k: round(v, 3) for k, v in p99.items()}, f"{rate:.1f} offline tokens/s while {alone.busy_s / last:.0%} busy")
    assert p99["beside"] <= 1.1 * p99["alone"]
    if seed == 1:
        mixed = play("fcfs", merged(on, off), **MACHINE)
        assert quantile(mixed.ttft_s(on), 0.99) > 5 * p99["alone"], "nothing to be shielded from"
    assert rate > 5
    assert beside.stats.num_offline_tokens >= sum(len(r.prompt_token_ids) for r in off)


@pytest.mark.parametrize(("depth", "step_s"), [(1, 0.1), (1, 0.4), (2, 0.1)])
def test_A18_who_comes_online_waits_for_one_short_step(depth: int, step_s: float) -> None:
    """However much is offline, and however long its prompts: at most `step_s`, or two steps of one token, for each
    step in flight."""
    rng = random.Random(depth)
    on = [ask(rng, 20.0 + 10 * i + rng.random(), 100, 2) for i in range(30)]
    off = [ask(rng, 0.0, rng.choice([50, 1500]), 100, offline_s=NEVER_DUE) for _ in range(60)]
    played = play("fcfs", merged(on, off), offline="fcfs", step_s=step_s, depth=depth, **MACHINE)
    own_s = TIMER.base_s + 100 * TIMER.token_s
    waits = [t - own_s for t in played.ttft_s(on)]
    print(max(waits), played.num_preemptions)
    assert max(waits) <= depth * max(step_s, 2 * TIMER.step_s_of(1)) + 1e-9
    assert max(waits) > 0.3 * step_s, "nobody came while offline work ran"


@pytest.mark.parametrize("slowdown", [0.0, 0.1, 0.5])
def test_A18_streams_are_no_slower_than_they_may_be(slowdown: float) -> None:
    """Beside decodes of online requests a step takes `slowdown` longer at most, and 0 means that nothing runs then."""
    rng = random.Random(3)
    on = [ask(rng, 10.0, 50, 200) for _ in range(4)]
    off = [ask(rng, 0.0, 400, 100, offline_s=NEVER_DUE) for _ in range(20)]
    played = play("fcfs", merged(on, off), offline="fcfs", slowdown=slowdown, **MACHINE)
    end = max(played.end_s[r.request_id] for r in on)
    first = max(played.first_s[r.request_id] for r in on)
    steps = [n for t, n in played.steps if first <= t < end]
    limit_s = (1 + slowdown) * TIMER.step_s_of(4)
    took = [TIMER.step_s_of(n) for n in steps]
    assert max(took) <= limit_s + 1e-9, (max(took), limit_s)
    extra = sum(n - 4 for n in steps)
    print(slowdown, extra, "offline tokens beside", len(steps), "steps")
    assert (extra > 0) == (slowdown > 0)


def test_A18_no_offline_token_beside_a_prompt() -> None:
    """While a prompt of an online request waits or is computed, offline work has no row: its first token comes as if
    there were nobody else."""
    rng = random.Random(8)
    on = [ask(rng, 5.0, 2000, 10)]
    off = [ask(rng, 0.0, 300, 100, offline_s=NEVER_DUE) for _ in range(20)]
    played = play("fcfs", merged(on, off), offline="fcfs", **MACHINE)
    first = played.first_s[on[0].request_id]
    begun = first - sum(TIMER.step_s_of(n) for n in (256,) * 7 + (2000 - 7 * 256,))
    assert [n for t, n in played.steps if begun - 1e-9 <= t < first - 1e-9] == [256] * 7 + [208]


def test_A18_memory_and_places_are_given_up_at_once() -> None:
    """All of both is taken by offline work; who comes online is in the very next step, the newest have left, and what
    they had is computed again only as far as somebody has taken it."""
    rng = random.Random(2)
    core, _ = fake_engine(Knobs(num_blocks=40, block_size=4, budget=32, max_num_seqs=4))
    off = [request(_ids(rng, 24), max_tokens=16, offline_s=NEVER_DUE, request_id=f"off{i}") for i in range(4)]
    for one in off:
        core.add(one)
    collector = Collector()
    while len(core.scheduler.running) < 4 or any(not s.is_decoding for s in core.scheduler.running):
        collector.take(core.step())
    on = request(_ids(rng, 20), max_tokens=4, request_id="on")
    core.add(on)
    collector.take(core.step())
    running = [s.request.request_id for s in core.scheduler.running]
    assert "on" in running
    assert running == ["on", "off0", "off1", "off2"], "not the newest"
    assert collector.requests["on"].tokens[0], "its first token came with the step after its arrival"
    assert core.stats.num_offline_preemptions == core.stats.num_preemptions == 1
    hits = core.stats.num_prefix_hit_tokens
    drain(core, collector)
    found = core.stats.num_prefix_hit_tokens - hits
    assert found >= 24, "it found what it had computed of its prompt"
    for one in (*off, on):
        assert collector.requests[one.request_id].tokens[0] == generate(fake_logits, one)[0]
    assert_idle(core)


@pytest.mark.parametrize("seed", [1, 3])
def test_A18_short_memory_is_as_short_for_online_requests_as_without_offline_work(seed: int) -> None:
    """What the newest of them sets aside, and how often one has to leave for another, is as it were alone."""
    on, off = both(seed, 80)
    tight = MACHINE | {"num_blocks": 120}
    alone, beside = play("fcfs", on, **tight), play("fcfs", merged(on, off), offline="fcfs", **tight)
    ratio = sum(beside.ttft_s(on)) / sum(alone.ttft_s(on))
    print(ratio, alone.num_preemptions, beside.num_preemptions, beside.stats.num_offline_preemptions)
    assert beside.num_preemptions - beside.stats.num_offline_preemptions <= alone.num_preemptions
    assert beside.stats.num_offline_preemptions > 0
    assert ratio < 1.03


def test_a_machine_whose_steps_are_long_anyway_still_runs_many_at_once() -> None:
    """If one token takes 0.3 s, most of it for all rows together, a limit of 0.1 s must not mean one row at a time."""
    rng = random.Random(6)
    off = [ask(rng, 0.0, 16, 60, offline_s=NEVER_DUE) for _ in range(64)]
    slow = MACHINE | {"timer": LinearTimer(0.3, 0.005), "max_num_seqs": 64}
    behind, plain = play("fcfs", off, offline="fcfs", **slow), play("fcfs", off, **slow)
    print(behind.makespan_s, plain.makespan_s)
    assert behind.makespan_s < 1.6 * plain.makespan_s


def test_no_more_offline_sequences_hold_memory_than_can_run() -> None:
    """27 tokens fit into a step alone; who has no part in one should not hold blocks either."""
    rng = random.Random(6)
    off = [ask(rng, 0.0, 16, 200, offline_s=NEVER_DUE) for _ in range(64)]
    played = play("fcfs", off, offline="fcfs", **(MACHINE | {"max_num_seqs": 64}))
    assert 20 <= played.stats.peak_running <= 28


def test_samples_are_of_the_class_of_the_first() -> None:
    """Who is due before it forks has samples that are online, too."""
    core, _ = fake_engine(Knobs(num_blocks=64, block_size=4, budget=16, max_num_seqs=4))
    core.add(request([5] * 6, max_tokens=6, n=2, offline_s=0.0))
    while len(core.scheduler.running) < 2:
        core.step()
    assert not any(seq.offline for seq in core.scheduler.running)
    drain(core, Collector())


def test_a_step_is_no_larger_than_what_is_known_of_the_pace() -> None:
    """Durations that fall with the number of tokens (noise) say nothing of ten times as many."""
    core, _ = fake_engine(Knobs(num_blocks=64, block_size=4, budget=4096, max_num_seqs=4))
    core.add(request([5] * 6, max_tokens=6, offline_s=NEVER_DUE))
    drain(core, Collector())
    pace, policy = core.scheduler.pauses.pace, core.scheduler.offline
    assert policy is not None
    for tokens, seconds in [(8, 0.02), (9, 0.019)] * 100:
        pace.observe(_step(tokens), seconds, [1])
        core.stats.num_scheduled_tokens += tokens
        policy.begin_step(0.0, core.kv)
    assert (pace.tokens_within(0.1) or 0) > 100
    assert policy._alone() == 18
    for tokens, seconds in [(10, 0.02), (20, 0.03)] * 100:
        pace.observe(_step(tokens), seconds, [1])
    assert pace.tokens_within(0.1) in (89, 90)
    assert pace.tokens_within(0.0) == 0


def _step(num_tokens: int) -> SchedulerOutput:
    return SchedulerOutput(step=0, scheduled=[ScheduledRow(0, 0, num_tokens, 1)])


def test_A18_what_offline_work_had_waits_in_the_tier_behind() -> None:
    """Online requests take all memory. With `enable_hierarchical_cache` the full blocks of whom they displaced come
    back from the host (they were kept as it grew); without it they are computed again."""
    computed = {}
    for host in (0, 64):
        rng = random.Random(5)
        core, _ = fake_engine(
            Knobs(num_blocks=24, block_size=4, budget=32, max_num_seqs=4, host_blocks=host, offload=host > 0)
        )
        off = request(_ids(rng, 60), max_tokens=12, offline_s=NEVER_DUE)
        core.add(off)
        collector = Collector()
        while not core.scheduler.running or not core.scheduler.running[0].num_generated:
            collector.take(core.step())
        for _ in range(3):
            core.add(request(_ids(rng, 24), max_tokens=4))
        drain(core, collector)
        assert collector.requests[off.request_id].tokens[0] == generate(fake_logits, off)[0]
        assert core.stats.num_offline_preemptions == 1
        computed[host] = core.stats.num_offline_tokens
    print(computed)
    assert computed[0] > computed[64]
    assert computed[64] <= 60 + 12 + 8, "more than a block or two was computed twice"


def test_A18_nobody_is_offline_for_ever() -> None:
    """Online requests alone are more than the engine can do. Who has been offline for as long as it said is served like
    them, in its turn."""
    rng = random.Random(4)
    on = [ask(rng, 0.25 * i, 300, 30) for i in range(200)]
    ends = {}
    for patience_s in (5.0, 20.0, NEVER_DUE):
        late = ask(rng, 0.0, 300, 30, offline_s=patience_s)
        played = play("fcfs", [late, *on], offline="fcfs", **(MACHINE | {"max_num_seqs": 8}))
        ends[patience_s] = played.end_s[late.request_id]
        last = max(played.end_s[r.request_id] for r in on)
    print(ends, last)
    assert ends[5.0] < 40
    assert ends[5.0] < ends[20.0] < 60 < ends[NEVER_DUE]


@pytest.mark.parametrize("policy", [*POLICIES.names(), "fastserve:batch=2,spare=0.3,quantum_s=0.04,starvation_s=0.01"])
def test_A18_tokens_and_schedules_do_not_depend_on_the_class(policy: str) -> None:
    """[EX] Scarce memory, both classes, some due while they wait or run: all tokens are those of the naive loop, and
    the log of the run decides the same again. Whatever policy is within."""
    rng = random.Random(9)
    knobs = Knobs(num_blocks=24, block_size=4, budget=16, max_num_seqs=4, depth=2, policy=policy, host_blocks=40)
    core, _ = fake_engine(knobs)
    core.recorder = Recorder()
    load, collector, emitted = [], Collector(), []
    for _ in range(60):
        due = rng.choice([None, 0.0, 0.05, NEVER_DUE])
        kw = {"max_tokens": rng.randrange(1, 20), "n": rng.choice([1, 1, 2]), "offline_s": due}
        load.append(request(_ids(rng, rng.randrange(1, 30)), arrival_s=core.clock.now(), temperature=0.0, **kw))
        core.add(load[-1])
        for _ in range(rng.randrange(3)):
            emitted += core.step()
    while core.has_work:
        emitted += core.step()
    collector.take(emitted)
    assert_idle(core)
    assert core.stats.num_offline_preemptions > 0 or policy in STAND_STILL
    for one in load:
        if one.n == 1:
            got = collector.requests[one.request_id]
            assert (got.tokens[0], got.reasons[0]) == generate(fake_logits, one)
    again = replay(core.recorder.iterations, lambda e, c: plain_core(spec(slots=False), knobs, e, c), depth=2)
    assert again == emitted


def test_offline_work_runs_if_online_requests_cannot() -> None:
    """Somebody online waits for what only the end of an offline request frees: a hold would be for ever."""

    class Shy(WithOffline):
        """No online request enters while anybody runs (as without a place for its adapter)."""

        def order(self, running: Seq[Sequence], waiting: Seq[Sequence]) -> list[Sequence]:
            found = super().order(running, waiting)
            return [s for s in found if s.offline or s.status is not Status.WAITING or not running]

        def displaced(self, running: Seq[Sequence], newcomer: Sequence) -> Sequence | None:
            return None

    core, _ = fake_engine(Knobs(num_blocks=64, block_size=4, budget=16, max_num_seqs=4))
    shy = Shy(make_policy("fcfs"), make_policy("fcfs"), step_s=0.1, slowdown=0.1)
    core.scheduler.policy = core.scheduler.offline = shy
    shy.queues = core.scheduler
    collector = Collector()
    off, on = request([3] * 9, max_tokens=5, offline_s=NEVER_DUE), request([4] * 9, max_tokens=5)
    core.add(off)
    collector.take(core.step())
    core.add(on)
    drain(core, collector, limit=200)
    for one in (off, on):
        assert collector.requests[one.request_id].tokens[0] == generate(fake_logits, one)[0]


def test_offline_work_runs_while_a_batch_waits_for_company() -> None:
    """Policy `dynamic` waits half a second for a second request; offline work has that time."""
    rng = random.Random(1)
    on = [ask(rng, 1.0, 20, 4)]
    off = [ask(rng, 0.0, 100, 40, offline_s=NEVER_DUE) for _ in range(4)]
    policy = "dynamic:timeout_s=0.5,size=2"
    played = play(policy, merged(on, off), offline="fcfs", **MACHINE)
    assert played.first_s[on[0].request_id] >= 1.5
    assert any(1.0 < t < 1.5 for t, _ in played.steps)


def test_whom_a_policy_pauses_and_sends_back_is_online() -> None:
    """Its estimates, its order of who yields and whom it sends back know nothing of offline work."""
    seen: list[list[int]] = []

    class Telling(Fcfs):
        def leaves(self, running: Seq[Sequence], waiting: Seq[Sequence]) -> Seq[Sequence]:
            seen.append([seq.seq_id for seq in (*running, *waiting)])
            return running

        def next_run_s(self, seqs: Seq[Sequence]) -> list[float]:
            seen.append([seq.seq_id for seq in seqs])
            return [float(seq.seq_id) for seq in seqs]

    policy = WithOffline(Telling(), make_policy("fcfs"), step_s=0.1, slowdown=0.1)
    early, late = Sequence(0, request([3], offline_s=NEVER_DUE), arrival=0), Sequence(1, request([3]), arrival=1)
    assert policy.leaves([late, early], [early]) == [late]
    assert policy.next_run_s([early, late]) == [float("inf"), 1.0]
    assert seen == [[1], [1]]
    assert policy.outranks(late, early), "online work is never taken the memory of by offline work that came before"
    assert not policy.outranks(early, late)


def test_queues_have_offline_work_at_their_end() -> None:
    policy = WithOffline(make_policy("priority"), make_policy("fcfs"), step_s=0.1, slowdown=0.1)
    made = [
        Sequence(i, request([3], priority=5 - i, offline_s=NEVER_DUE if i % 2 else None), arrival=i) for i in range(6)
    ]
    queue = sorted(made, key=policy.key)
    assert [s.seq_id for s in queue] == [4, 2, 0, 1, 3, 5]
    assert online(queue) == 3
    assert online(queue[:3]) == 3
    assert online([]) == 0
    assert policy.name == "priority"


def _ids(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(3, VOCAB) for _ in range(n)]
