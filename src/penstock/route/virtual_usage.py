"""Llumnix' virtual usage: what a request takes, and what is kept free for it.

Source: Sun et al., Llumnix, arXiv 2406.03243, section 4.4 and algorithm 1: the load of an engine is the sum of the
virtual usages of its requests; one that waits is given the memory that it wants, and one of high priority a headroom,
so that nobody is placed beside it who would need that; who has most room for each request is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.route.router import EngineLoad, RoutedRequest

HEADROOM_PERMILLE = 250
"""Of an engine's memory that a request of high priority keeps free."""


class VirtualUsage:
    def __init__(self) -> None:
        self._headroom: dict[int, int] = {}
        """Permille that engines keep free for requests of high priority that were placed there last."""

    def choose(self, asked: RoutedRequest, loads: Sequence[EngineLoad]) -> int:
        return max(range(len(loads)), key=lambda i: (self.freeness(loads[i], asked), -loads[i].number))

    def freeness(self, load: EngineLoad, asked: RoutedRequest) -> int:
        """Tokens of room for each request there, the new one among them: (memory - virtual usage) / requests."""
        blocks = load.kv_blocks or 1 << 16
        memory = blocks * load.block_size
        kept = memory * self._headroom.get(load.number, 0) // 1000 if load.requests else 0
        usage = max(load.tokens, load.kv_used * load.block_size) + load.waiting_tokens + asked.num_tokens + kept
        return (memory - usage) // (load.requests + 1)

    def placed(self, asked: RoutedRequest, number: int) -> None:
        self._headroom[number] = HEADROOM_PERMILLE if asked.priority < 0 else 0

    def gone(self, number: int) -> None:
        self._headroom.pop(number, None)
