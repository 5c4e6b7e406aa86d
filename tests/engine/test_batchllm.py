"""Policy `batchllm`: which requests of a batch share which beginning, and what running them together saves."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator

import pytest

from penstock.core.request import Request
from penstock.core.sequence import Sequence
from penstock.sched.policy.prefix_groups import prefix_groups
from tests.engine.fake_model import VOCAB
from tests.engine.harness import Collector, Knobs, assert_idle, drain, fake_engine, request
from tests.engine.naive import fake_logits, generate
from tests.engine.policy_sim import LinearTimer, Played, ask, play, prompt

TIMER = LinearTimer(0.05, 0.002)
BLOCK = 16


def batch(seed: int, num_groups: int = 16, size: int = 9) -> list[Request]:
    """Groups of prompts with a beginning of 10 blocks, half of them with one of 3 more in every third; some that share
    nothing. Shuffled, and some groups generate fifteen times what others do."""
    rng = random.Random(seed)
    load = []
    for _ in range(num_groups):
        top, deep = prompt(rng, 10 * BLOCK), prompt(rng, 3 * BLOCK)
        much = rng.choice([0.2, 1, 3])
        for i in range(size):
            own = prompt(rng, rng.choice([16, 40, 80]))
            ids = top + (deep if i % 3 == 0 else []) + own
            load.append(request(ids, max_tokens=max(2, int(rng.choice([20, 40, 60]) * much)), arrival_s=0.0))
    load += [ask(rng, 0.0, rng.choice([50, 200]), rng.choice([10, 100])) for _ in range(20)]
    rng.shuffle(load)
    return load


def run(policy: str, load: list[Request], num_blocks: int = 150) -> Played:
    return play(policy, load, budget=256, max_num_seqs=32, num_blocks=num_blocks, timer=TIMER)


def computed_twice(played: Played, load: list[Request]) -> int:
    """Tokens that groups share and that were computed more than once. Those of who was preempted do not count: they are
    its own."""
    sequences = [Sequence(i, r, arrival=i) for i, r in enumerate(load)]
    again = 0
    for group in prefix_groups(sequences, BLOCK):
        times: dict[int, int] = defaultdict(int)
        for seq in group.members:
            for start, n in played.rows[seq.request.request_id]:
                for token in range(start, min(start + n, group.num_shared)):
                    times[token] += 1
        again += sum(n - 1 for n in times.values())
    return again


@pytest.mark.parametrize("seed", [1, 2])
def test_A19_no_shared_prefix_is_computed_twice_and_the_batch_ends_sooner(seed: int) -> None:
    """A cache of 150 blocks, a working set of 208 for the beginnings alone. Against order of arrival with an LRU cache:
    nothing of what a group shares is computed again, and the makespan is shorter. It is that of depth-first order,
    which finds as much, or less where memory leaves room for decodes beside prompts."""
    load = batch(seed)
    found = {name: run(name, load) for name in ("fcfs", "cache-aware:order=dfs", "batchllm")}
    spans = {name: round(played.makespan_s, 1) for name, played in found.items()}
    again = {name: computed_twice(played, load) for name, played in found.items()}
    print(spans, again, {name: round(played.hit_rate, 3) for name, played in found.items()})
    assert again["batchllm"] == 0
    assert again["fcfs"] > 16 * 160, "the cache holds all of it"
    assert spans["batchllm"] < 0.75 * spans["fcfs"]
    assert spans["batchllm"] < 1.01 * spans["cache-aware:order=dfs"]
    roomy = {name: run(name, load, 400).makespan_s for name in ("cache-aware:order=dfs", "batchllm")}
    print(roomy)
    assert roomy["batchllm"] < roomy["cache-aware:order=dfs"]


def test_A19_who_generates_much_goes_first() -> None:
    """Its decodes run beside the prompts of those behind: fewer steps than the other way round, the same work."""
    rng = random.Random(7)
    long = [request(prompt(rng, 40), max_tokens=300, arrival_s=0.0) for _ in range(12)]
    short = [request(prompt(rng, 300), max_tokens=4, arrival_s=0.0) for _ in range(60)]
    load = short + long
    sorted_, arrival = run("batchllm", load, 800), run("fcfs", load, 800)
    firsts = sorted(load, key=lambda r: sorted_.first_s[r.request_id])
    assert {r.request_id for r in firsts[:12]} == {r.request_id for r in long}
    print(len(sorted_.steps), len(arrival.steps))
    assert len(sorted_.steps) < 0.9 * len(arrival.steps)
    assert sorted_.num_tokens == arrival.num_tokens


def test_A19_a_round_takes_nobody_in_so_nobody_starves() -> None:
    """Who comes later and would go first is in the next round, behind all of this one."""
    rng = random.Random(3)
    patient = [request(prompt(rng, 320), max_tokens=4, arrival_s=0.0) for _ in range(30)]
    pushy = [request(prompt(rng, 20), max_tokens=60, arrival_s=0.3 + 0.1 * i) for i in range(120)]
    played = play("batchllm", patient + pushy, budget=256, max_num_seqs=8, num_blocks=400, timer=TIMER)
    last = max(played.first_s[r.request_id] for r in patient)
    ahead = sum(played.first_s[r.request_id] < last for r in pushy)
    print(last, ahead)
    assert ahead <= 8, "those who came before the round had begun"


def saving(groups: list[tuple[int, int]]) -> int:
    return sum((size - 1) * shared for size, shared in groups)


@pytest.mark.parametrize("seed", range(6))
def test_A19_groups_save_as_much_as_any_choice_of_one_level(seed: int) -> None:
    """Against all partitions of a few prompts: of each part, the blocks that all in it begin with."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(2) for _ in range(rng.choice([2, 3, 4])) for _ in range(4)] for _ in range(6)]
    prompts = [[bit for _ in range(4) for bit in (p[0],)] + p[4:] + [9] for p in prompts]
    sequences = [Sequence(i, request(p), arrival=i) for i, p in enumerate(prompts)]
    groups = prefix_groups(sequences, 4)
    assert sorted(s.seq_id for g in groups for s in g.members) == list(range(6))
    for group in groups:
        n = group.num_shared
        assert len({tuple(s.token_ids[:n]) for s in group.members}) == 1
    best = 0
    for parts in _partitions(sequences):
        best = max(best, saving([(len(part), _shared(part)) for part in parts]))
    assert saving([(len(g.members), g.num_shared) for g in groups]) == best


def _partitions(sequences: list[Sequence]) -> Iterator[list[list[Sequence]]]:
    """All 203 of six."""
    if not sequences:
        yield []
        return
    first, rest = sequences[0], sequences[1:]
    for parts in _partitions(rest):
        yield [[first], *parts]
        for i, part in enumerate(parts):
            yield [*parts[:i], [first, *part], *parts[i + 1 :]]


def _shared(members: list[Sequence]) -> int:
    least = min(s.num_known - 1 for s in members) // 4
    return 4 * next(n for n in range(least, -1, -1) if len({tuple(s.token_ids[: 4 * n]) for s in members}) == 1)


def test_A19_a_longer_beginning_is_chosen_where_it_saves_more() -> None:
    """Two families of four that share a block, and 9 more each among themselves: two groups of 40 tokens, not one of 4.
    With one member more than they, the ones that share only the block stay a group."""
    head, one, two = [1] * 4, [2] * 36, [3] * 36
    deep = [head + family + [7, i] for family in (one, two) for i in range(4)]
    flat = [head + [20 + i] * 2 for i in range(5)]
    made = [Sequence(i, request(p), arrival=i) for i, p in enumerate(deep + flat)]
    found = sorted((g.num_shared, len(g.members)) for g in prefix_groups(made, 4))
    assert found == [(4, 5), (40, 4), (40, 4)]


def test_A19_blocks_are_shared_only_where_the_cache_shares_them() -> None:
    """Other namespaces, requests that read no cache, and what is not a whole block belong to no group."""
    ids = [4] * 12
    salted = [request(ids, namespace=bytes([i])) for i in range(3)]
    scored = [request(ids, num_prompt_logprobs=1) for _ in range(3)]
    short = [request([4, 5, 6, i]) for i in range(3)]
    made = [Sequence(i, r, arrival=i) for i, r in enumerate(salted + scored + short)]
    assert [g.num_shared for g in prefix_groups(made, 4)] == [0] * 9
    same = [Sequence(i, request(ids), arrival=i) for i in range(3)]
    (group,) = prefix_groups(same, 4)
    assert (group.num_shared, len(group.members)) == (8, 3)
    assert group.ratio == pytest.approx(3 * 16 / (8 + 3 * 4))


def test_A19_tokens_are_those_of_the_naive_loop() -> None:
    """[EX] groups in memory for a few of them, joined while it runs."""
    rng = random.Random(11)
    core, _ = fake_engine(Knobs(policy="batchllm", num_blocks=30, block_size=4, budget=16, max_num_seqs=4))
    stems = [[rng.randrange(3, VOCAB) for _ in range(12)] for _ in range(4)]
    load, collector = [], Collector()
    for _ in range(50):
        own = [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 9))]
        load.append(request(rng.choice(stems) + own, max_tokens=rng.randrange(1, 12)))
        core.add(load[-1])
        if rng.random() < 0.3:
            collector.take(core.step())
    drain(core, collector)
    assert_idle(core)
    for one in load:
        got = collector.requests[one.request_id]
        assert (got.tokens[0], got.reasons[0]) == generate(fake_logits, one)
