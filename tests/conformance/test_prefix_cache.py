"""Laws of every PrefixCache, with every EvictionPolicy: a cache that is registered is tested here.

The reference is a dictionary from (namespace, tokens) to slabs, told what was inserted and what was let go.
"""

from __future__ import annotations

from array import array
from random import Random
from typing import Any

import pytest

from penstock.core.protocols import EvictionPolicy, PrefixCache
from penstock.kv.eviction import EVICTION_POLICIES
from penstock.kv.prefix import PREFIX_CACHES
from penstock.kv.prefix.hash_chain import HashChain

KEEPING = [name for name in PREFIX_CACHES if name != "none"]


def make(name: str, block_size: int = 2, policy: str = "lru") -> PrefixCache:
    cache: PrefixCache = PREFIX_CACHES.get(name)(block_size, EVICTION_POLICIES.get(policy)())
    return cache


def ids(*tokens: int) -> array[int]:
    return array("I", tokens)


def put(cache: PrefixCache, tokens: array[int], first_slab: int, namespace: bytes = b"") -> Any:
    """Insert all whole blocks of `tokens` with slabs first_slab, first_slab + 1, ...; returns the held entry."""
    size = 2
    n = len(tokens) // size
    entry, found = cache.match(namespace, tokens, n, [], False)
    entry, _ = cache.acquire(namespace, entry, found, len(tokens))
    rest = tokens[found * size : n * size].tobytes()
    entry, _, _ = cache.insert(entry, rest, [(first_slab + i,) for i in range(found, n)])
    return entry


@pytest.mark.parametrize("name", PREFIX_CACHES.names())
@pytest.mark.parametrize("policy", EVICTION_POLICIES.names())
def test_the_interface_is_complete(name: str, policy: str) -> None:
    cache = make(name, policy=policy)
    assert cache.name == name
    rule: EvictionPolicy = EVICTION_POLICIES.get(policy)()
    assert rule.name == policy
    entry, slabs = cache.acquire(b"ns", None, 0, 5)
    assert slabs == []
    assert cache.checkpoint(entry) is None
    entry, existing, num_new = cache.insert(entry, ids(1, 2, 3, 4).tobytes(), [(0,), (1,)])
    assert existing == []
    assert num_new == (0 if name == "none" else 2)
    cache.share(entry)
    cache.check_invariants([entry, entry])
    assert cache.num_evictable == 0
    assert cache.evict(2) == ([], [])
    cache.release(entry)
    cache.release(entry)
    cache.check_invariants([])
    assert cache.num_evictable == num_new
    assert cache.num_query_tokens == 5
    assert cache.num_hit_tokens == 0
    assert cache.evict_checkpoint(None) is None
    assert [len(part) for part in cache.contents()] == [num_new, 0]
    assert len(cache.evict(5)[0]) == num_new
    assert cache.reset() == ([], [])


@pytest.mark.parametrize("name", KEEPING)
def test_found_after_exactly_these_tokens(name: str) -> None:
    cache = make(name)
    put(cache, ids(1, 2, 3, 4, 5, 6), 10)
    for tokens, found in [
        (ids(1, 2, 3, 4, 5, 6), 3), (ids(1, 2, 3, 4, 5, 7), 2), (ids(1, 2, 3, 4), 2), (ids(1, 2), 1),
        (ids(1, 2, 3), 1), (ids(1, 3, 3, 4), 0), (ids(3, 4, 5, 6), 0), (ids(1, 2, 5, 6), 1),
    ]:  # fmt: skip
        entry, num_blocks = cache.match(b"", tokens, len(tokens) // 2, [], False)
        assert num_blocks == found, tokens
        assert (entry is None) == (found == 0)
        assert cache.match(b"other", tokens, len(tokens) // 2, [], False) == (None, 0)
    entry, num_blocks = cache.match(b"", ids(1, 2, 3, 4, 5, 6), 2, [], False)
    assert num_blocks == 2  # no more than asked for
    entry, slabs = cache.acquire(b"", entry, num_blocks, 6)
    assert slabs == [(10,), (11,)]
    assert cache.path(entry) == slabs
    assert cache.num_hit_tokens == 4


@pytest.mark.parametrize("name", KEEPING)
def test_entries_survive_splits_and_growth_of_others(name: str) -> None:
    cache = make(name)
    long = put(cache, ids(*range(12)), 0)
    match, n = cache.match(b"", ids(*range(10)), 5, [], False)
    fork = put(cache, ids(0, 1, 2, 3, 50, 51), 100)
    middle, slabs = cache.acquire(b"", match, n, 10)  # what was matched before the split
    assert slabs == [(0,), (1,), (2,), (3,), (4,)]
    assert cache.path(long) == [(i,) for i in range(6)]
    assert cache.path(fork) == [(0,), (1,), (102,)]
    cache.check_invariants([long, middle, fork])
    grown, existing, num_new = cache.insert(middle, ids(10, 11, 60, 61).tobytes(), [(7,), (8,)])
    assert (existing, num_new) == ([(5,)], 1)
    cache.check_invariants([long, grown, fork])
    assert cache.path(grown) == [*cache.path(long), (8,)]
    for entry in (long, grown, fork):
        cache.release(entry)
    cache.check_invariants([])


@pytest.mark.parametrize("name", KEEPING)
def test_paths_give_way_from_their_ends_and_never_under_a_holder(name: str) -> None:
    cache = make(name)
    cache.release(put(cache, ids(*range(8)), 0))
    entry, n = cache.match(b"", ids(*range(4)), 2, [], False)
    assert cache.num_idle(entry, n) == 2
    held, _ = cache.acquire(b"", entry, n, 4)
    assert cache.num_idle(entry, n) == 0
    assert cache.num_evictable == 2
    version = cache.version
    assert cache.evict(1) == ([(3,)], [])
    assert cache.version != version
    assert cache.evict(5) == ([(2,)], [])
    assert cache.num_evictable == 0
    cache.release(held)
    assert cache.evict(5) == ([(1,), (0,)], [])
    assert cache.contents() == ([], [])
    cache.check_invariants([])


def test_policies_choose_whom() -> None:
    for policy, first in [("lru", 20), ("fifo", 10)]:
        for name in KEEPING:
            cache = make(name, policy=policy)
            for slab, tokens in [(10, ids(1, 1)), (20, ids(2, 2)), (30, ids(3, 3))]:
                cache.release(put(cache, tokens, slab))
            entry, n = cache.match(b"", ids(1, 1), 1, [], False)
            cache.release(cache.acquire(b"", entry, n, 2)[0])  # used again
            assert cache.evict(1) == ([(first,)], []), (name, policy)


def test_what_was_held_until_now_was_used_until_now() -> None:
    for policy, first in [("lru", 20), ("fifo", 10)]:
        for name in KEEPING:
            cache = make(name, policy=policy)
            held = put(cache, ids(1, 1), 10)
            cache.release(put(cache, ids(2, 2), 20))
            cache.release(held)
            assert cache.evict(1) == ([(first,)], []), (name, policy)


@pytest.mark.parametrize("name", KEEPING)
def test_a_split_changes_nobody_s_turn(name: str) -> None:
    cache = make(name, policy="fifo")
    old = put(cache, ids(1, 1), 10)
    cache.release(put(cache, ids(2, 2, 3, 3), 20))
    entry, n = cache.match(b"", ids(2, 2, 9, 9), 2, [], False)
    cache.release(cache.acquire(b"", entry, n, 4)[0])  # splits a run
    assert cache.evict(1) == ([(21,)], [])
    cache.release(old)
    assert cache.evict(1) == ([(10,)], [])
    cache.check_invariants([])


@pytest.mark.parametrize("name", KEEPING)
def test_every_length_of_run_and_of_match(name: str) -> None:
    for length in range(1, 20):
        cache = make(name)
        cache.release(put(cache, ids(*range(2 * length)), 0))
        for common in range(length + 1):
            tokens = ids(*range(2 * common), *range(900, 900 + 2 * (length - common)))
            assert cache.match(b"", tokens, length, [], False)[1] == common


@pytest.mark.parametrize("name", KEEPING)
def test_checkpoints(name: str) -> None:
    cache = make(name)
    entry = put(cache, ids(1, 2, 3, 4), 0)
    cache.add_checkpoint(entry, (7,))
    assert cache.checkpoint(entry) == (7,)
    entry, _, _ = cache.insert(entry, ids(5, 6, 7, 8).tobytes(), [(2,), (3,)])
    assert cache.checkpoint(entry) is None
    tokens = ids(*range(1, 9))
    assert cache.match(b"", tokens, 4, [], False)[1] == 4
    found, n = cache.match(b"", tokens, 4, [], True)
    assert n == 2
    assert cache.match(b"", tokens, 1, [], True) == (None, 0)
    assert cache.match(b"", ids(1, 2, 3, 9), 2, [], True) == (None, 0)
    cache.add_checkpoint(entry, (8,))
    assert cache.num_checkpoints == 2
    cache.check_invariants([entry])
    held, _ = cache.acquire(b"", found, n, 8)  # was used last, so the other goes first, although its entry is held
    assert cache.evict_checkpoint(None) == (8,)
    assert cache.evict_checkpoint(held) is None
    assert cache.num_checkpoints == 1
    cache.check_invariants([entry, held])
    cache.release(entry)
    cache.release(held)
    assert cache.contents()[1] == [(7,)]
    assert cache.evict(9) == ([(3,), (2,), (1,), (0,)], [(7,)])
    assert cache.num_checkpoints == 0
    cache.check_invariants([])


@pytest.mark.parametrize("name", KEEPING)
@pytest.mark.parametrize("policy", EVICTION_POLICIES.names())
@pytest.mark.parametrize("seed", range(3))
def test_B06_random_work_against_a_dictionary(name: str, policy: str, seed: int) -> None:
    drive(make(name, policy=policy), Random(seed), exact=True)


@pytest.mark.parametrize("modulus", [1, 2, 7])
@pytest.mark.parametrize("policy", EVICTION_POLICIES.names())
def test_B05_random_work_with_colliding_hashes(modulus: int, policy: str) -> None:
    def weak(parent: bytes, tokens: bytes) -> bytes:
        return bytes([(31 * sum(parent) + 7 * tokens[0] + tokens[4]) % modulus])

    cache = HashChain(2, EVICTION_POLICIES.get(policy)(), weak)
    assert isinstance(cache, HashChain)
    drive(cache, Random(modulus), exact=False)


def drive(cache: PrefixCache, rng: Random, *, exact: bool) -> None:
    """Random holders, inserts, evictions and checkpoints. `exact`: the cache may refuse nothing."""
    known: dict[tuple[bytes, bytes], tuple[int, int]] = {}  # path -> slabs
    owner: dict[tuple[int, int], tuple[bytes, bytes]] = {}
    marks: dict[tuple[int, ...], tuple[bytes, bytes]] = {}
    held: list[tuple[Any, bytes, bytes]] = []
    next_slab = 0
    num_hits = num_evicted = 0

    def let_go(blocks: list[tuple[int, ...]], checkpoints: list[tuple[int, ...]]) -> None:
        standing = {path for _, ns, raw in held for path in [(ns, raw[: 8 * i]) for i in range(len(raw) // 8 + 1)]}
        for slabs in blocks:
            path = owner.pop(slabs)  # type: ignore[arg-type]
            assert path not in standing, "evicted under a holder"
            assert not any(ns == path[0] and raw != path[1] and raw.startswith(path[1]) for ns, raw in known), (
                "evicted before what follows it"
            )
            del known[path]
        for slabs in checkpoints:
            del marks[slabs]

    for i in range(1200):
        action = rng.randrange(12)
        namespace = rng.choice([b"", b"", b"ns"])
        tokens = array("I", [rng.randrange(2) for _ in range(2 * rng.randint(1, 8))])
        raw = tokens.tobytes()
        if action < 6:
            at_checkpoint = rng.random() < 0.3
            limit = rng.randint(0, len(tokens) // 2)
            entry, n = cache.match(namespace, tokens, limit, [], at_checkpoint)
            best = 0
            while best < limit and (namespace, raw[: 8 * (best + 1)]) in known:
                best += 1
            if at_checkpoint:
                while best and (namespace, raw[: 8 * best]) not in marks.values():
                    best -= 1
            assert n == best, "not the longest prefix"
            idle = cache.num_idle(entry, n)
            before = cache.num_evictable
            entry, slabs = cache.acquire(namespace, entry, n, len(tokens))
            assert before - cache.num_evictable == idle
            assert slabs == [known[namespace, raw[: 8 * (b + 1)]] for b in range(n)]
            num_hits += n
            held.append((entry, namespace, raw[: 8 * n]))
        elif action < 8 and held:
            entry, namespace, done = held.pop(rng.randrange(len(held)))
            num_blocks = rng.randint(1, 4)
            more = array("I", [rng.randrange(2) for _ in range(2 * num_blocks)]).tobytes()
            mine = [(next_slab + b, next_slab + b + 5000) for b in range(num_blocks)]
            next_slab += num_blocks
            entry, existing, num_new = cache.insert(entry, more, list(mine))
            assert not exact or len(existing) + num_new == num_blocks
            for b in range(len(existing) + num_new):
                path = (namespace, done + more[: 8 * (b + 1)])
                if b < len(existing):
                    assert known[path] == existing[b]
                else:
                    assert path not in known
                    known[path] = mine[b]
                    owner[mine[b]] = path
            held.append((entry, namespace, done + more[: 8 * (len(existing) + num_new)]))
        elif action == 8 and held:
            cache.release(held.pop(rng.randrange(len(held)))[0])
        elif action == 9 and held:
            entry, namespace, done = rng.choice(held)
            if rng.random() < 0.3:
                cache.share(entry)
                held.append((entry, namespace, done))
            elif done and cache.checkpoint(entry) is None:
                marks[(i,)] = (namespace, done)
                cache.add_checkpoint(entry, (i,))
        elif action == 10:
            wanted, can = rng.randint(1, 6), cache.num_evictable
            blocks, checkpoints = cache.evict(wanted)
            assert len(blocks) == min(wanted, can), "num_evictable was not exact"
            let_go(blocks, checkpoints)
            num_evicted += len(blocks)
        elif action == 11 and rng.random() < 0.3:
            keep = rng.choice(held)[0] if held else None
            kept = None if keep is None else cache.checkpoint(keep)
            slabs_gone = cache.evict_checkpoint(keep)
            assert slabs_gone is None or slabs_gone != kept
            assert slabs_gone is not None or cache.num_checkpoints <= (kept is not None)
            let_go([], [] if slabs_gone is None else [slabs_gone])
        if len(held) > 10:
            cache.release(held.pop(rng.randrange(len(held)))[0])
        if i == 800:
            blocks, checkpoints = cache.reset()
            assert sorted(blocks) == sorted(known.values())
            assert sorted(checkpoints) == sorted(marks)
            for mapping in (known, owner, marks):
                mapping.clear()
            held.clear()
        for entry, namespace, done in held:
            assert cache.path(entry) == [known[namespace, done[: 8 * (b + 1)]] for b in range(len(done) // 8)]
        cache.check_invariants([entry for entry, _, _ in held])
        blocks, checkpoints = cache.contents()
        assert sorted(blocks) == sorted(known.values())
        assert cache.num_checkpoints == len(checkpoints) == len(marks)
    assert num_hits > (50 if exact else 0)
    assert num_evicted > (50 if exact else 0)
    for entry, _, _ in held:
        cache.release(entry)
    assert cache.num_evictable == len(known)
    cache.evict(len(known))
    assert cache.contents() == ([], [])
    cache.check_invariants([])
