"""The KV manager under loads: memory use (B03) and prefix hits (B06), counted, with no clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

import pytest

from penstock.core.sequence import Sequence
from penstock.kv.manager import KVManager
from tests.unit.kv.test_kv_model import make_groups, make_seq, run, start, started

BLOCK = 16


def num_allocated(kv: KVManager) -> int:
    """Token slots of one layer that sequences hold."""
    return kv.stats().groups[0].used * kv.block_size


@pytest.mark.parametrize("prefix", ["radix", "none"])
def test_B03_memory_use_at_saturation(prefix: str) -> None:
    """Utilisation >= 95 %, at most block_size - 1 wasted slots per sequence, >= 2x the batch of reservation."""
    rng = Random(3)
    max_len = 2048
    num_slabs = 1024
    kv = KVManager(make_groups(2), [num_slabs], BLOCK, prefix_cache=prefix)
    running: list[Sequence] = []
    ends: dict[int, int] = {}
    waiting: list[Sequence] = []
    next_id = 0
    stored_sum = allocated_sum = saturated_sum = batch_sum = saturated_steps = 0

    def fill() -> None:
        nonlocal next_id
        while True:
            if not waiting:
                # most are short, a few long: 16 ... 1,000 tokens of prompt, about as many to come
                prompt = [rng.randrange(30_000) for _ in range(min(1000, max(16, int(rng.lognormvariate(4.8, 0.9)))))]
                waiting.append(make_seq(next_id, prompt))
                ends[next_id] = min(max_len, len(prompt) + min(1000, max(8, int(rng.lognormvariate(4.8, 0.9)))))
                next_id += 1
            seq = waiting[0]
            if not start(kv, seq):
                return
            waiting.pop(0)
            run(kv, seq)
            running.append(seq)

    for step in range(400):
        fill()
        for seq in list(running):
            if seq.num_known >= ends[seq.seq_id]:
                kv.release(seq)
                running.remove(seq)
                continue
            if seq not in running:
                continue
            while not kv.grow(seq, seq.num_known + 1):
                victim = running.pop()
                kv.release(victim)
                waiting.insert(0, victim)
                if victim is seq:
                    break
            else:
                seq.token_ids.append(rng.randrange(30_000))
                run(kv, seq)
        stored = sum(seq.num_computed for seq in running)
        allocated = num_allocated(kv)
        assert allocated - stored <= (BLOCK - 1) * len(running)
        for seq in running:
            assert 0 <= seq.tables[0].num_blocks * BLOCK - seq.num_computed <= BLOCK - 1
        if step % 100 == 0:
            kv.check_invariants(running)
        kv.drain()
        if step >= 50:
            stored_sum += stored
            allocated_sum += allocated
            saturated_sum += num_slabs * BLOCK
            batch_sum += len(running)
            saturated_steps += 1
    assert stored_sum / allocated_sum >= 0.95
    assert stored_sum / saturated_sum >= 0.90  # of all memory, what waits for the head of the queue included
    assert batch_sum / saturated_steps >= 2 * (num_slabs * BLOCK // max_len)


def serve(kv: KVManager, requests: Iterator[tuple[list[int], list[int]]], concurrency: int) -> float:
    """Run (prompt, output) pairs, `concurrency` at a time. Returns the share of prompt tokens found in the cache."""
    queried = hit = 0
    running: list[Sequence] = []
    for i, (prompt, output) in enumerate(requests):
        if len(running) == concurrency:
            kv.release(running.pop(0))
        seq = started(kv, i, prompt)
        queried += len(prompt)
        hit += seq.num_cached
        run(kv, seq)
        assert kv.grow(seq, len(prompt) + len(output))
        seq.token_ids.extend(output)
        run(kv, seq, seq.num_known - 1)  # the last token sampled is never computed
        running.append(seq)
        kv.drain()
        if i % 100 == 0:
            kv.check_invariants(running)
    for seq in running:
        kv.release(seq)
    kv.check_invariants([])
    return hit / queried


Load = Callable[[int], Iterator[tuple[list[int], list[int]]]]


def tokens(rng: Random, low: int, high: int) -> list[int]:
    return [rng.randrange(30_000) for _ in range(rng.randint(low, high))]


def multi_turn(seed: int) -> Iterator[tuple[list[int], list[int]]]:
    """80 conversations of 6 turns, a dozen at a time; every turn repeats all that was said."""
    rng = Random(seed)
    systems = [tokens(rng, 100, 150) for _ in range(3)]
    active: list[tuple[list[int], int]] = []
    started = 0
    while active or started < 80:
        while len(active) < 12 and started < 80:
            active.append((list(rng.choice(systems)), 6))
            started += 1
        history, turns = active.pop(rng.randrange(len(active)))
        prompt = history + tokens(rng, 20, 60)
        output = tokens(rng, 10, 60)
        yield prompt, output
        if turns > 1:
            active.append((prompt + output, turns - 1))


def few_shot(seed: int) -> Iterator[tuple[list[int], list[int]]]:
    """30 tasks, each a long list of examples and 20 questions; four tasks are worked on at a time."""
    rng = Random(seed)
    todo = [(tokens(rng, 400, 800), 20) for _ in range(30)]
    active: list[tuple[list[int], int]] = []
    while active or todo:
        while len(active) < 4 and todo:
            active.append(todo.pop())
        examples, left = active.pop(rng.randrange(len(active)))
        yield examples + tokens(rng, 20, 40), tokens(rng, 5, 15)
        if left > 1:
            active.append((examples, left - 1))


@pytest.mark.parametrize("prefix", ["radix", "hash"])
@pytest.mark.parametrize(("load", "num_slabs"), [(multi_turn, 300), (few_shot, 200)])
def test_B06_hit_rate_of_a_small_cache(prefix: str, load: Load, num_slabs: int) -> None:
    unbounded = KVManager(make_groups(1), [20_000], BLOCK, prefix_cache=prefix)
    best = serve(unbounded, load(6), 4)
    assert unbounded.stats().num_evicted_blocks == 0
    kept = unbounded.stats().groups[0].evictable
    kv = KVManager(make_groups(1), [num_slabs], BLOCK, prefix_cache=prefix)
    rate = serve(kv, load(6), 4)
    assert num_slabs < kept / 7, "the cache is not small"
    assert kv.stats().num_evicted_blocks > num_slabs
    assert best > 0.5
    assert rate >= 0.9 * best
    print(f"{prefix}: {rate:.3f} of {best:.3f} with {num_slabs} of {kept} blocks")


def test_B06_least_recently_used_beats_first_in_first_out() -> None:
    rates = {
        policy: serve(KVManager(make_groups(1), [320], BLOCK, eviction=policy), multi_turn(6), 4)
        for policy in ("lru", "fifo")
    }
    assert rates["lru"] > 1.02 * rates["fifo"]
    print(rates)
