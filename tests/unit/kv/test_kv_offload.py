"""Prefix trees that reach into a tier: where runs are cut, and what must not be found without what it follows."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.kv.eviction import EVICTION_POLICIES
from penstock.kv.prefix import PREFIX_CACHES
from penstock.kv.prefix.tree import PrefixTree
from tests.conformance.test_prefix_cache import ids, put

both = pytest.mark.parametrize("name", ["radix", "hash"])


class Shelf:
    """An offload with room for so many blocks: block `(s,)` of the device gets the name `(100 + s,)`.

    `is_read`: loads hold what is dropped.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self.is_read = False
        self.kept: set[tuple[int, ...]] = set()

    @property
    def num_free(self) -> int:
        return self.room - len(self.kept)

    @property
    def num_kept(self) -> int:
        return len(self.kept)

    def keep(self, blocks: list[tuple[int, ...]]) -> list[tuple[int, ...]] | None:
        if len(blocks) > self.num_free:
            return None
        copies = [(100 + block[0],) for block in blocks]
        self.kept.update(copies)
        return copies

    def drop(self, copies: list[tuple[int, ...]]) -> None:
        for copy in copies:
            self.kept.remove(copy)
            self.room -= self.is_read


def tree(name: str, room: int) -> tuple[PrefixTree, Shelf]:
    cache: PrefixTree = PREFIX_CACHES.get(name)(2, EVICTION_POLICIES.get("lru")())
    shelf = Shelf(room)
    offload: Any = shelf
    cache.offload = offload
    return cache, shelf


def found(cache: PrefixTree, *tokens: int) -> tuple[int, list[int]]:
    """Blocks of a text on the device, and the names of those that go on in the tier."""
    text = ids(*tokens)
    entry, n = cache.match(b"", text, len(text) // 2, [], False)
    entry, _ = cache.acquire(b"", entry, n, 0)
    copies = cache.stored(entry, text, len(text) // 2)
    cache.check_invariants([entry])
    cache.release(entry)
    cache.check_invariants([])
    return n, [copy[0] for copy in copies]


TEXT = (1, 1, 2, 2, 3, 3, 4, 4)


@both
def test_the_end_of_a_path_goes_first_and_the_device_comes_first(name: str) -> None:
    cache, shelf = tree(name, 9)
    cache.release(put(cache, ids(*TEXT), 0))
    assert found(cache, *TEXT) == (4, [])
    assert cache.evict(1) == ([(3,)], [])
    assert found(cache, *TEXT) == (3, [103])
    assert cache.evict(2) == ([(2,), (1,)], [])
    assert found(cache, *TEXT) == (1, [101, 102, 103])
    assert found(cache, *TEXT[:6]) == (1, [101, 102])
    assert found(cache, 1, 1, 2, 2, 3, 3, 9, 9) == (1, [101, 102])
    assert found(cache, 1, 1, 9, 9, 3, 3) == (1, []), "what follows other tokens is not what follows these"
    assert cache.evict(9) == ([(0,)], [])
    assert found(cache, *TEXT) == (0, [100, 101, 102, 103])
    assert cache.num_evictable == 0
    assert sorted(cache.copies()) == sorted(shelf.kept)


@both
def test_who_computes_blocks_of_the_tier_puts_its_own_in_their_place(name: str) -> None:
    """Of a run of four that left the device at once, another text has two in common."""
    cache, shelf = tree(name, 9)
    cache.release(put(cache, ids(*TEXT), 0))
    cache.evict(4)
    entry, n = cache.match(b"", ids(*TEXT), 4, [], False)
    assert (entry, n) == (None, 0)
    root, _ = cache.acquire(b"", None, 0, 0)
    entry, existing, num_new = cache.insert(root, ids(1, 1, 2, 2, 7, 7).tobytes(), [(50,), (51,), (52,)])
    assert (existing, num_new) == ([], 3)
    cache.check_invariants([entry])
    assert shelf.kept == {(102,), (103,)}
    assert cache.path(entry) == [(50,), (51,), (52,)]
    cache.release(entry)
    assert found(cache, *TEXT) == (2, [102, 103])
    assert cache.evict(1) == ([(52,)], [])
    assert found(cache, 1, 1, 2, 2, 7, 7) == (2, [152])


@both
def test_a_text_that_only_looks_like_the_end_of_another_does_not_find_it(name: str) -> None:
    """(1 2 3) and then (4) are in the tier, in two runs; a text with other tokens in place of 3 goes on with 4, too."""
    cache, _ = tree(name, 9)
    cache.release(put(cache, ids(*TEXT[:6]), 0))
    cache.release(put(cache, ids(*TEXT), 0))
    cache.evict(1)
    cache.evict(3)
    assert found(cache, *TEXT) == (0, [100, 101, 102, 103])
    assert found(cache, 1, 1, 2, 2, 9, 9, 4, 4) == (0, [100, 101])


@both
def test_a_full_tier_gives_up_ends_of_paths_for_what_comes(name: str) -> None:
    cache, shelf = tree(name, 2)
    cache.release(put(cache, ids(*TEXT), 0))
    cache.evict(2)
    assert found(cache, *TEXT) == (2, [102, 103])
    cache.evict(1)
    assert found(cache, *TEXT) == (1, [101, 102])
    cache.evict(1)
    assert found(cache, *TEXT) == (0, [100, 101])
    assert len(shelf.kept) == 2


@both
def test_of_a_run_that_the_tier_cannot_hold_the_beginning_stays(name: str) -> None:
    cache, shelf = tree(name, 2)
    cache.release(put(cache, ids(*TEXT), 0))
    assert len(cache.evict(4)[0]) == 4
    assert found(cache, *TEXT) == (0, [100, 101])
    assert shelf.kept == {(100,), (101,)}


@both
def test_what_cannot_be_kept_takes_with_it_what_follows_it(name: str) -> None:
    """The end of the path is dropped for it, but loads still read there, so that there is no room. What is left of the
    path in the tier goes on from a block that is forgotten."""
    cache, shelf = tree(name, 2)
    cache.release(put(cache, ids(*TEXT), 0))
    cache.evict(2)
    shelf.is_read = True
    cache.evict(1)
    assert found(cache, *TEXT) == (1, [])
    assert not shelf.kept
    assert cache.num_evictable == 1


@both
def test_a_reset_forgets_the_tier(name: str) -> None:
    cache, shelf = tree(name, 9)
    cache.release(put(cache, ids(*TEXT), 0))
    held = put(cache, ids(5, 5, 6, 6), 20)
    cache.evict(2)
    assert len(shelf.kept) == 2
    blocks, _ = cache.reset()
    assert sorted(blocks) == [(0,), (1,), (20,), (21,)]
    assert not shelf.kept
    assert found(cache, *TEXT) == (0, [])
    assert held is not None
