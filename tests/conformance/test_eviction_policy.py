"""What every eviction policy owes, whomever it prefers, and where each wins and loses. Being registered enrols it.

`test_prefix_cache.py` and the state machine of `test_kv_machine.py` run all of them too: no holder loses a block, ends
of paths go first, histories survive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest

from penstock.core.protocols import EvictionPolicy
from penstock.kv.eviction import EVICTION_POLICIES
from penstock.kv.manager import KVManager
from penstock.kv.prefix import PREFIX_CACHES
from penstock.kv.prefix.queue import EvictionQueue
from tests.conformance.test_prefix_cache import ids, put
from tests.unit.kv.test_kv_loads import BLOCK, multi_turn, serve, tokens
from tests.unit.kv.test_kv_model import make_groups

TREES = ("radix", "hash")


@pytest.fixture(params=EVICTION_POLICIES.names())
def policy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Entry:
    """All that a policy may touch."""

    __slots__ = ("tick",)

    def __init__(self) -> None:
        self.tick: Any = 0


class Queued(Entry):
    """The same with what a queue owns."""

    __slots__ = ("queued", "rank")

    def __init__(self) -> None:
        super().__init__()
        self.queued = self.rank = 0


def make(policy: str) -> EvictionPolicy:
    rule: EvictionPolicy = EVICTION_POLICIES.get(policy)()
    assert rule.name == policy
    return rule


def random_life(policy: str, seed: int) -> list[tuple[list[Any], list[Any]]]:
    """What a cache under random use gives up, in order."""
    cache = PREFIX_CACHES.get("radix")(2, make(policy))
    rng = Random(seed)
    held: list[Any] = []
    gone = []
    for i in range(400):
        held.append(put(cache, ids(*[rng.randrange(3) for _ in range(2 * rng.randint(1, 6))]), 10 * i))
        if len(held) > 4:
            cache.release(held.pop(rng.randrange(len(held))))
        if cache.num_evictable > 20:
            gone.append(cache.evict(rng.randint(1, 8)))
    return gone


def test_the_order_is_total_and_repeatable(policy: str) -> None:
    assert random_life(policy, 3) == random_life(policy, 3)
    assert len(random_life(policy, 3)) > 10
    rule = make(policy)
    entries = [Entry() for _ in range(20)]
    rng = Random(1)
    for tick, entry in enumerate(entries, 1):
        rule.on_insert(entry, tick)
    for tick in range(21, 300):
        rule.on_hit(rng.choice(entries), tick)
    keys = [rule.key(e) for e in entries]
    assert all((a < b) + (a > b) + (a == b) == 1 for a in keys for b in keys)


def test_a_key_changes_by_its_own_entry_s_use_only(policy: str) -> None:
    """The queue keeps the key of the moment of pushing, so an entry must not age by being left alone."""
    rule = make(policy)
    left_alone, other = Entry(), Entry()
    rule.on_insert(left_alone, 1)
    rule.on_hit(left_alone, 2)
    before = rule.key(left_alone)
    rule.on_insert(other, 3)
    for tick in range(4, 2000):
        rule.on_hit(other, tick)
    assert rule.key(left_alone) == before


def test_use_never_hurts(policy: str) -> None:
    rule = make(policy)
    entry = Entry()
    rule.on_insert(entry, 5)
    for tick in range(6, 3000, 7):
        before = rule.key(entry)
        rule.on_hit(entry, tick)
        assert rule.key(entry) >= before


def test_a_root_is_used_but_never_inserted(policy: str) -> None:
    rule = make(policy)
    root = Entry()
    rule.on_hit(root, 9)
    rule.key(root)


def test_nobody_who_was_hot_stays_for_ever(policy: str) -> None:
    rule = make(policy)
    hot, fresh = Entry(), Entry()
    rule.on_insert(hot, 1)
    for tick in range(2, 500):
        rule.on_hit(hot, tick)
    rule.on_insert(fresh, 500 + 8192)
    assert rule.key(fresh) > rule.key(hot), "8,192 operations after its last use a hot entry outlives a new one"


@pytest.mark.parametrize("name", TREES)
def test_holders_are_safe_and_ends_go_first(policy: str, name: str) -> None:
    cache = PREFIX_CACHES.get(name)(2, make(policy))
    held = put(cache, ids(1, 2, 3, 4), 0)
    longer = put(cache, ids(1, 2, 3, 4, 5, 6, 7, 8), 0)
    for _ in range(5):  # hot, and still no way out of the order
        entry, n = cache.match(b"", ids(1, 2, 3, 4, 5, 6), 3, [], False)
        cache.release(cache.acquire(b"", entry, n, 6)[0])
    cache.release(put(cache, ids(9, 9), 90))
    cache.release(longer)
    blocks, _ = cache.evict(99)
    assert sorted(blocks) == [(2,), (3,), (90,)]
    assert blocks.index((3,)) < blocks.index((2,))
    cache.release(held)
    assert cache.evict(99)[0] == [(1,), (0,)]
    cache.check_invariants([])


@pytest.mark.parametrize("name", TREES)
def test_a_manager_under_pressure_keeps_its_books(policy: str, name: str) -> None:
    kv = KVManager(make_groups(1), [300], BLOCK, prefix_cache=name, eviction=policy)
    rate = serve(kv, multi_turn(6), 4)  # checks the invariants on its way
    assert kv.stats().num_evicted_blocks > 300
    assert rate > 0.5, "eviction as bad as having no cache"


# -- where each wins and loses ---------------------------------------------------------------------------------------


def zipf_and_scans(seed: int) -> Iterator[tuple[list[int], list[int]]]:
    """40 system prompts, popular like 1/rank, and as many long one-time prompts between them."""
    rng = Random(seed)
    stems = [tokens(rng, 200, 300) for _ in range(40)]
    weights = [1 / (i + 1) for i in range(40)]
    for _ in range(500):
        if rng.random() < 0.5:
            yield tokens(rng, 300, 600), tokens(rng, 5, 10)
        else:
            yield rng.choices(stems, weights)[0] + tokens(rng, 10, 30), tokens(rng, 5, 10)


def drifting(seed: int) -> Iterator[tuple[list[int], list[int]]]:
    """Eight system prompts in turn, all replaced every hundred requests."""
    rng = Random(seed)
    for _ in range(6):
        stems = [tokens(rng, 200, 300) for _ in range(8)]
        for _ in range(100):
            yield rng.choice(stems) + tokens(rng, 10, 30), tokens(rng, 5, 10)


def hit_rates(load: Callable[[int], Iterator[tuple[list[int], list[int]]]], num_slabs: int) -> dict[str, float]:
    rates = {
        policy: serve(KVManager(make_groups(1), [num_slabs], BLOCK, eviction=policy), load(6), 4)
        for policy in EVICTION_POLICIES.names()
    }
    print(load.__name__, {policy: round(rate, 3) for policy, rate in rates.items()})
    return rates


def test_frequency_wins_where_popularity_lasts() -> None:
    """One-time prompts flush a cache that goes by recency; uses protect what is shared."""
    rates = hit_rates(zipf_and_scans, 300)
    assert rates["lfu"] > 1.2 * rates["lru"]
    assert rates["priority"] > 1.1 * rates["lru"]
    assert rates["lfu"] > rates["priority"]


@pytest.mark.parametrize(("load", "num_slabs"), [(drifting, 120), (multi_turn, 300)])
def test_recency_wins_where_the_load_moves_on(load: Any, num_slabs: int) -> None:
    """Past uses say nothing of the future: counting them keeps the dead. The price of `lfu` and `priority`."""
    rates = hit_rates(load, num_slabs)
    assert rates["lru"] >= max(rates.values())
    assert rates["lru"] > rates["priority"] > rates["lfu"]


def test_important_requests_keep_their_entries() -> None:
    """With the owner naming the request's priority, the entry that a better one used outlives equal ones."""
    rule: Any = make("priority")
    plain, important, dropped = Entry(), Entry(), Entry()
    for tick, (entry, level) in enumerate([(important, -1), (plain, 0), (dropped, 3)], 1):
        rule.request_priority = level
        rule.on_insert(entry, tick)
    assert rule.key(dropped) < rule.key(plain) < rule.key(important)
    rule.request_priority = 5
    rule.on_hit(important, 4)
    assert rule.key(important) > rule.key(plain), "a worse request took the rank away"


def test_an_entry_that_went_over_to_another_queue_is_gone_from_the_first(policy: str) -> None:
    """Heaps forget lazily, by numbers; two queues must not give the same ones."""
    first, second = EvictionQueue(make(policy)), EvictionQueue(make(policy))
    entry, other = Queued(), Queued()
    for one in (entry, other):
        make(policy).on_insert(one, 1)
    first.push(entry)
    first.discard(entry)
    second.push(entry)
    first.push(other)
    assert first.entries() == [other]
    assert (first.pop(), first.pop(), second.pop()) == (other, None, entry)
