"""Routers that look at the loads alone."""

from __future__ import annotations

import random
from collections.abc import Sequence

from penstock.route.router import EngineLoad, RoutedRequest, RoutePolicy

SEED = 0


class InTurn(RoutePolicy):
    """One after the other."""

    reads_loads = reads_tokens = False

    def __init__(self) -> None:
        self._next = 0

    def choose(self, asked: RoutedRequest, loads: Sequence[EngineLoad]) -> int:
        self._next += 1
        return (self._next - 1) % len(loads)


class ByChance(RoutePolicy):
    """Anyone, by chance: what others are compared with."""

    reads_loads = reads_tokens = False

    def __init__(self) -> None:
        self._rng = random.Random(SEED)

    def choose(self, asked: RoutedRequest, loads: Sequence[EngineLoad]) -> int:
        return self._rng.randrange(len(loads)) if len(loads) > 1 else 0


class FewestRequests(RoutePolicy):
    """Whoever has fewest that are not finished; the first of those."""

    reads_tokens = False

    def choose(self, asked: RoutedRequest, loads: Sequence[EngineLoad]) -> int:
        return min(range(len(loads)), key=lambda i: loads[i].requests)


class LeastTokens(RoutePolicy):
    """Whoever has fewest tokens, of prompts and generated: a long prompt counts for more than a short one."""

    def choose(self, asked: RoutedRequest, loads: Sequence[EngineLoad]) -> int:
        return min(range(len(loads)), key=lambda i: (loads[i].tokens, loads[i].requests))


class LeastKV(RoutePolicy):
    """Whoever has the smallest part of its KV memory in use; the fewest requests among equals."""

    def choose(self, asked: RoutedRequest, loads: Sequence[EngineLoad]) -> int:
        return min(range(len(loads)), key=lambda i: (kv_permille(loads[i]), loads[i].requests))


class PowerOfTwo(RoutePolicy):
    """The better of two that are drawn: nearly as good as the best of all, and no herd runs to one whose news are old.

    Source: Mitzenmacher, The Power of Two Choices in Randomized EngineLoad Balancing (2001).
    """

    def __init__(self) -> None:
        self._rng = random.Random(SEED)

    def choose(self, asked: RoutedRequest, loads: Sequence[EngineLoad]) -> int:
        if len(loads) == 1:
            return 0
        one, other = self._rng.sample(range(len(loads)), 2)
        return min(one, other, key=lambda i: (loads[i].requests, loads[i].tokens, i))


def kv_permille(load: EngineLoad) -> int:
    """Of its KV memory, what its requests hold, by what was placed there or what it said, whichever is more."""
    if not load.kv_blocks:
        return load.requests
    return 1000 * max(load.kv_used, -(-load.tokens // load.block_size)) // load.kv_blocks
