"""Catalogue row B32: which recurrent states the prefix cache keeps, by Marconi's rules and without them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random

import pytest

from penstock.kv.eviction.flops import RETAIN, Flops
from penstock.kv.manager import KVManager
from penstock.kv.prefix import PREFIX_CACHES
from tests.conformance.test_prefix_cache import ids, put
from tests.shared import shared
from tests.unit.kv.test_kv_loads import BLOCK, few_shot, multi_turn, serve
from tests.unit.kv.test_kv_manager import CACHES
from tests.unit.kv.test_kv_model import computed, make_groups, make_seq, run, started

Requests = Iterator[tuple[list[int], list[int]]]


def manager(num_slots: int, rule: str, *, num_blocks: int = 600, distance: int = BLOCK, eviction: str = "lru",
            block_size: int = BLOCK, prefix_cache: str = "radix") -> KVManager:  # fmt: skip
    return KVManager(
        make_groups(1, 0, 1), [num_blocks, num_slots], block_size, slot_checkpoint_rule=rule,
        slot_checkpoint_tokens=distance, eviction=eviction, prefix_cache=prefix_cache,
    )  # fmt: skip


@pytest.mark.parametrize("cache", CACHES)
def test_chunks_end_at_the_branch_and_then_at_every_block_behind_the_prompt(cache: str) -> None:
    kv = manager(8, "branch", block_size=4, distance=4, prefix_cache=cache)
    first = computed(kv, 0, list(range(22)))
    seq = started(kv, 1, [*range(10), *range(50, 63)])
    assert (seq.num_computed, seq.node.branch) == (0, 8)
    ends, at = [], 0
    while at < 30:
        at += kv.cut(seq, at, 100)
        ends.append(at)
    assert ends == [8, 20, 24, 28, 32]
    run(kv, seq)
    assert kv.match(make_seq(2, list(range(22)))).num_tokens == 20
    assert kv.match(make_seq(2, [*range(10), 77, 78])).num_tokens == 8
    kv.check_invariants([first, seq])


def test_a_sequence_keeps_two_states_and_one_that_was_used_stays() -> None:
    kv = manager(8, "branch", block_size=4, distance=4)
    seq = computed(kv, 0, list(range(9)))
    for token in range(9, 40):
        assert kv.grow(seq, token + 1)
        seq.token_ids.append(token)
        run(kv, seq)
    assert kv.stats().groups[1].evictable == 1
    assert kv.match(make_seq(1, list(range(50)))).num_tokens == 40
    assert kv.match(make_seq(1, list(range(39)))).num_tokens == 0
    other = started(kv, 1, list(range(50)))
    assert other.num_computed == 40
    for token in range(40, 60):
        assert kv.grow(seq, token + 1)
        seq.token_ids.append(token + 1000)
        run(kv, seq)
    assert kv.match(make_seq(2, list(range(50)))).num_tokens == 40
    assert kv.stats().groups[1].evictable == 2
    kv.check_invariants([seq, other])


@pytest.mark.parametrize(("load", "num_slots"), [(multi_turn, 16), (multi_turn, 40), (few_shot, 16)])
def test_B32_hit_rate_beats_fine_grained_checkpoints_at_equal_bytes(load: object, num_slots: int) -> None:
    """Equal pools of blocks and of states; a state at every block, at every fourth, or by the rule."""
    assert callable(load)
    every, fourth = (serve(manager(num_slots, "distance", distance=n * BLOCK), load(6), 4) for n in (1, 4))
    by_rule = serve(manager(num_slots, "branch", eviction="flops"), load(6), 4)
    print(f"{num_slots} states: every block {every:.3f}, every fourth {fourth:.3f}, by the rule {by_rule:.3f}")
    assert by_rule > 1.2 * max(every, fourth)


def lengths(seed: int) -> Requests:
    """Short chats that never come back, and documents about which three questions are asked, far apart."""
    rng = Random(seed)
    documents: list[tuple[list[int], int]] = []
    for i in range(700):
        if i % 7 == 0:
            documents.append(([rng.randrange(30_000) for _ in range(1200)], 3))
        if i % 3 == 0 and documents:
            text, left = documents.pop(0)
            yield text + [rng.randrange(30_000) for _ in range(20)], [1] * 4
            if left > 1:
                documents.append((text, left - 1))
        else:
            yield [rng.randrange(30_000) for _ in range(40)], [1] * 40


def test_B32_states_of_long_texts_outlive_those_of_short_ones() -> None:
    lru, flops = (
        serve(manager(20, "branch", num_blocks=8000, eviction=name), lengths(3), 4) for name in ("lru", "flops")
    )
    print(f"lru {lru:.3f}, flops {flops:.3f}")
    assert flops > 1.2 * lru


def test_the_policy_counts_tokens_back_to_the_state_before() -> None:
    cache = PREFIX_CACHES.get("radix")(2, Flops())
    near = put(cache, ids(1, 2, 3, 4), 0)
    cache.add_checkpoint(near, (1,))
    far = put(cache, ids(1, 2, 3, 4, *range(20)), 10)
    cache.add_checkpoint(far, (2,))
    policy = cache.policy
    assert policy.key(far.checkpoint) - far.checkpoint.tick == pytest.approx(RETAIN * 20)
    assert policy.key(near.checkpoint) - near.checkpoint.tick == pytest.approx(RETAIN * 4)
    assert policy.key(near) == near.tick


def conversations(count: int) -> Requests:
    """Mooncake's conversations, a token for each of its blocks of 512."""
    fresh = 10_000_000
    with shared("data", "traces", "mooncake_conversation.jsonl").open() as lines:
        for line, _ in zip(lines, range(count), strict=False):
            request = json.loads(line)
            output = max(1, request["output_length"] // 512)
            yield [*request["hash_ids"], fresh], [fresh + 1 + i for i in range(output)]
            fresh += output + 1


def test_B32_hit_rate_on_real_conversations() -> None:
    shared("data", "traces", "mooncake_conversation.jsonl")

    def rate(rule: str, eviction: str) -> float:
        kv = manager(200, rule, num_blocks=9000, distance=1, eviction=eviction, block_size=1)
        return serve(kv, conversations(1500), 4)

    every, by_rule = rate("distance", "lru"), rate("branch", "lru")
    print(f"every block {every:.3f}, by the rule {by_rule:.3f}")
    assert by_rule > 1.2 * every
