"""The sketch of the prefix tree that the page draws: true, and bounded however large the tree is."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest

from penstock.kv.eviction import EVICTION_POLICIES
from penstock.kv.prefix import PREFIX_CACHES

BLOCK = 4


def grow(name: str, prompts: list[list[int]]) -> tuple[Any, list[Any]]:
    """A cache that has seen `prompts` (whole blocks), and what its holders hold."""
    cache = PREFIX_CACHES.get(name)(BLOCK, EVICTION_POLICIES.get("lru")())
    held = []
    for number, tokens in enumerate(prompts):
        ids = array("I", tokens)
        entry, found = cache.match(b"", ids, len(tokens) // BLOCK, [], False)
        entry, _ = cache.acquire(b"", entry, found, len(tokens))
        rest = [(1000 * number + i,) for i in range(len(tokens) // BLOCK - found)]
        if rest:
            entry, _, _ = cache.insert(entry, ids[found * BLOCK :].tobytes(), rest)
        held.append(entry)
    return cache, held


def test_a_fork_is_drawn_with_its_trunk_before_its_branches() -> None:
    trunk = list(range(12))
    cache, held = grow("radix", [trunk + [100] * 8, trunk + [200] * 4])
    assert cache.sketch(48) == [(0, 3, 2), (1, 2, 1), (1, 1, 1)]
    for entry in held:
        cache.release(entry)
    assert cache.sketch(48) == [(0, 3, 0), (1, 2, 0), (1, 1, 0)]


@pytest.mark.parametrize("name", ["radix", "hash"])
def test_a_large_tree_is_cut_but_what_is_shown_is_connected(name: str) -> None:
    rng = random.Random(2)
    prompts = [[rng.randrange(3) for _ in range(BLOCK * rng.randrange(1, 9))] for _ in range(400)]
    cache, _ = grow(name, prompts)
    whole = cache.sketch(10**6)
    assert sum(blocks for _, blocks, _ in whole) == len(cache.contents()[0])
    cut = cache.sketch(48)
    assert len(cut) == 48 < len(whole)
    deepest = -1
    for depth, blocks, holders in cut:
        assert depth <= deepest + 1, "a branch without its trunk"
        assert blocks > 0
        assert holders > 0
        deepest = depth


def test_no_cache_has_no_tree() -> None:
    cache, _ = grow("none", [[1] * 8])
    assert cache.sketch(48) == []
