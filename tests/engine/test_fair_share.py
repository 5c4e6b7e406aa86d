"""The policy `fair` on a virtual clock: one tenant floods, the others do not feel it, and nobody starves."""

from __future__ import annotations

import random
from statistics import median
from typing import Any

import msgspec
import pytest

from penstock.base.errors import ConfigError
from penstock.core.adapter import AdapterRef
from penstock.core.request import Request
from penstock.core.sequence import Sequence, Status
from penstock.sched.policy import make_policy
from penstock.sched.policy.fair import Fair
from tests.engine.fake_model import VOCAB
from tests.engine.harness import Collector, Knobs, assert_idle, drain, fake_engine, request
from tests.engine.naive import fake_logits, generate
from tests.engine.policy_sim import play, poisson, prompt

STEP_S = 0.010 + 0.00002 * 256
"""The longest step: a full budget."""


def asks(
    tenant: str, rng: random.Random, times: list[float], num_in: int, num_out: int, weight: float = 1.0
) -> list[Request]:
    return [request(prompt(rng, num_in), max_tokens=num_out, arrival_s=t, tenant=tenant, weight=weight) for t in times]


def merged(*loads: list[Request]) -> list[Request]:
    return sorted((r for load in loads for r in load), key=lambda r: r.arrival_s)


@pytest.mark.parametrize("num_blocks", [4000, 150])
def test_one_flood_does_not_touch_another_tenants_first_token(num_blocks: int) -> None:
    """p50 TTFT of one request per second at most 1.5 times idle plus one step, with long outputs in all places too."""
    rng = random.Random(1)
    quiet = asks("quiet", rng, [0.5 + i for i in range(6)], 200, 20)
    flood = asks("flood", rng, poisson(rng, 40, 6), 100, 120)
    machine: dict[str, Any] = {"budget": 256, "max_num_seqs": 16, "num_blocks": num_blocks}
    idle = median(play("fair", quiet, **machine).ttft_s(quiet))
    p50 = {policy: median(play(policy, merged(quiet, flood), **machine).ttft_s(quiet)) for policy in ("fair", "fcfs")}
    print(f"idle {idle:.4f} s", {name: round(value, 4) for name, value in p50.items()})
    assert p50["fair"] <= 1.5 * idle + STEP_S
    assert p50["fcfs"] > 10 * idle, "no flood"


def test_two_floods_share_by_weight_and_neither_starves() -> None:
    """Both always have work: the service of the one with weight 3 is three times that of the other."""
    rng = random.Random(2)
    light = asks("one", rng, poisson(rng, 40, 8), 60, 30)
    heavy = asks("three", rng, poisson(rng, 40, 8), 60, 30, weight=3)
    played = play("fair", merged(light, heavy), budget=128, max_num_seqs=8)
    done = {name: sum(played.end_s[r.request_id] < 8 for r in load) for name, load in (("1", light), ("3", heavy))}
    print(done)
    assert 2.3 < done["3"] / done["1"] < 3.7


def with_adapters(load: list[Request], numbers: list[int]) -> list[Request]:
    """The same requests, with these adapters in turn."""
    refs = [AdapterRef(b"adapter %d" % n, str(n), 1000) for n in numbers]
    rules = [msgspec.structs.replace(r.rules, adapter=refs[i % len(refs)]) for i, r in enumerate(load)]
    return [msgspec.structs.replace(r, rules=own) for r, own in zip(load, rules, strict=True)]


def test_a_tenants_share_is_one_over_all_of_its_adapters() -> None:
    """Four adapters earn no more than one; weight 3 is three times the service, whatever they name."""
    rng = random.Random(2)
    for weight, low, high in ((1.0, 0.8, 1.25), (3.0, 2.3, 3.7)):
        many = with_adapters(asks("many", rng, poisson(rng, 40, 4), 60, 30, weight=weight), [0, 1, 2, 3])
        one = with_adapters(asks("one", rng, poisson(rng, 40, 4), 60, 30), [5])
        played = play("fair", merged(many, one), budget=128, max_num_seqs=8, max_adapters=2)
        done = [sum(played.end_s[r.request_id] < 4 for r in load) for load in (many, one)]
        print(done)
        assert low < done[0] / done[1] < high


def test_a_flood_over_many_adapters_does_not_keep_another_tenants_adapter_out() -> None:
    rng = random.Random(1)
    quiet = with_adapters(asks("quiet", rng, [0.5 + i for i in range(6)], 200, 20), [9])
    flood = with_adapters(asks("flood", rng, poisson(rng, 40, 6), 100, 120), [0, 1, 2, 3])
    machine: dict[str, Any] = {"budget": 256, "max_num_seqs": 16, "num_blocks": 4000, "max_adapters": 4}
    idle = median(play("fair", quiet, **machine).ttft_s(quiet))
    p50 = median(play("fair", merged(quiet, flood), **machine).ttft_s(quiet))
    print(f"idle {idle:.4f} s, beside a flood {p50:.4f} s")
    assert p50 <= 1.5 * idle + STEP_S


def test_long_prompts_of_one_tenant_do_not_delay_short_ones_of_another() -> None:
    rng = random.Random(3)
    long = asks("long", rng, [0.1 * i for i in range(40)], 4000, 4)
    short = asks("short", rng, [0.55 + i for i in range(5)], 60, 4)
    played = play("fair", merged(long, short), budget=256, num_blocks=40_000)
    assert max(played.ttft_s(short)) < 4 * STEP_S


def test_an_absence_earns_no_credit() -> None:
    """Whoever comes late shares from then on; it is not given what the other had before."""
    rng = random.Random(4)
    early = asks("early", rng, [0.02 * i for i in range(350)], 50, 20)
    late = asks("late", rng, [4 + 0.02 * i for i in range(150)], 50, 20)
    played = play("fair", merged(early, late), budget=128, max_num_seqs=8)
    done = [sum(4 < played.end_s[r.request_id] < 7 for r in load) for load in (early, late)]
    print(done)
    assert 0.7 < done[0] / done[1] < 1.4


def test_tenants_displace_each_other_without_losing_tokens() -> None:
    """Scarce places and memory, three tenants of different weights: everybody ends with its own tokens."""
    rng = random.Random(5)
    core, _ = fake_engine(Knobs(policy="fair", num_blocks=20, block_size=4, budget=12, max_num_seqs=4))
    load, collector = [], Collector()
    for _ in range(90):
        own = [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 24))]
        name = rng.choice(["a", "a", "a", "a", "b", "c"])
        weight = {"a": 1.0, "b": 2.0, "c": 0.3}[name]
        load.append(request(own, max_tokens=rng.randrange(1, 20), n=rng.choice([1, 1, 1, 2]), tenant=name,
                            weight=weight))  # fmt: skip
        core.add(load[-1])
        for _ in range(rng.randrange(0, 7)):
            collector.take(core.step())
    drain(core, collector, limit=6000)
    assert_idle(core)
    assert core.stats.num_preemptions > 10
    for r in load:
        got = collector.requests[r.request_id]
        if r.n == 1:
            assert (got.tokens[0], got.reasons[0]) == generate(fake_logits, r)


def running(tenants: str, weight: float = 1.0) -> list[Sequence]:
    out = []
    for i, tenant in enumerate(tenants):
        seq = Sequence(i, request([3] * 8, tenant=tenant, weight=weight), arrival=i)
        seq.num_computed, seq.tables, seq.status = 4, [object()], Status.RUNNING
        out.append(seq)
    return out


def test_nobody_is_displaced_in_turn() -> None:
    """Taking a place needs a surplus of two; after that, the loser has no claim on the winner."""
    newcomer = Sequence(99, request([3] * 8, tenant="b"), arrival=99)
    p = Fair()
    p.order(running("aaab"), [newcomer])
    assert p.displaced(running("aa"), newcomer) is not None
    assert p.displaced(running("a"), newcomer) is None
    assert p.displaced(running("aab"), newcomer) is None
    victim = p.displaced(running("aaab"), newcomer)
    assert victim is not None
    assert (victim.request.tenant, victim.arrival) == ("a", 2)
    assert p.displaced([*running("aa"), newcomer], victim) is None


def test_memory_comes_from_whoever_has_most_and_never_from_the_oldest_of_equals() -> None:
    p = Fair()
    seqs = running("abaab")
    assert p.victim(seqs, seqs[1]) is seqs[3], "a has three places, b two"
    assert p.victim(seqs, seqs[0]) is seqs[3], "its own youngest"
    two = running("ab")
    assert p.victim(two, two[0]) is two[1]
    assert p.victim(two, two[1]) is None


def test_service_is_charged_once_and_cached_tokens_are_free() -> None:
    """8 prompt tokens and 5 generated ones at 2 each, halved by a weight of 2; of the same prompt again its end."""
    core, _ = fake_engine(Knobs(policy="fair", block_size=4, budget=64))
    policy = core.scheduler.policy.inner  # type: ignore[attr-defined]
    assert isinstance(policy, Fair)
    ids = list(range(3, 11))
    for expected in (8 + 2 * 5, 8 + 2 * 5 + 4 + 2 * 5):
        core.add(request(ids, max_tokens=5, tenant="t", weight=2))
        core.add(request([5], max_tokens=7, tenant="other"))
        drain(core, Collector(), limit=100)
        core.add(request([6], max_tokens=1, tenant="third"))
        drain(core, Collector(), limit=100)
        assert abs(policy.counter("t") - expected / 2) <= 1
    with pytest.raises(ConfigError, match="output_cost"):
        make_policy("fair:output_cost=0")


def test_J30_two_backlogged_tenants_stay_within_the_bound_of_the_paper() -> None:
    """The paper's bound: while both wait, their services differ by at most 2 max(w_p L, w_q M); M tokens run at once.

    Service is counted here from what each step does, not by the policy.
    """
    rng = random.Random(6)
    num_blocks, block_size, longest = 60, 4, 60
    core, _ = fake_engine(Knobs(policy="fair", num_blocks=num_blocks, block_size=block_size, budget=32, max_num_seqs=8))
    names, seen = ("a", "b"), {"a": 0.0, "b": 0.0}
    done: dict[int, int] = {}

    def add(name: str) -> None:
        num_in = rng.randrange(1, longest) if name == "a" else rng.randrange(1, 8)
        own = [rng.randrange(3, VOCAB) for _ in range(num_in)]
        core.add(request(own, max_tokens=rng.randrange(1, 40), tenant=name, eos=()))

    for name in names * 30:
        add(name)
    bound = 2 * max(longest, 2 * num_blocks * block_size)
    worst = 0.0
    for _ in range(1500):
        core.step()
        for seq in list(core.scheduler.running):
            charged = done.get(seq.seq_id, seq.num_cached)
            for at in range(charged, seq.num_computed):
                seen[seq.request.tenant] += 1.0 if at < seq.prompt_len else 2.0
            done[seq.seq_id] = max(charged, seq.num_computed)
        waiting = {s.request.tenant for s in core.scheduler.waiting}
        for name in names:
            if sum(s.request.tenant == name for s in core.scheduler.waiting) < 10:
                add(name)
        if waiting == set(names):
            worst = max(worst, abs(seen["a"] - seen["b"]))
    print(f"services {seen}, largest difference {worst:.0f}, bound {bound}")
    assert min(seen.values()) > 20 * longest, "they were served"
    assert worst <= bound
