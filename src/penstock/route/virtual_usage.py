"""Llumnix' virtual usage: what a request takes, and what is kept free for it.

Source: Sun et al., Llumnix, arXiv 2406.03243, section 4.4 and algorithm 1: the load of an engine is the sum of the
virtual usages of its requests; one that waits is given the memory that it wants, and one of high priority a headroom,
so that nobody is placed beside it who would need that; who has most room for each request is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.route.router import EngineLoad, RoutedRequest, RoutePolicy

HEADROOM_PERMILLE = 250
"""Of an engine's memory that a request of high priority keeps free."""


class VirtualUsage(RoutePolicy):
    def choose(self, asked: RoutedRequest, loads: Sequence[EngineLoad]) -> int:
        return max(range(len(loads)), key=lambda i: (self.freeness(loads[i], asked), -loads[i].number))

    def freeness(self, load: EngineLoad, asked: RoutedRequest) -> int:
        """Tokens of room for each request there, the new one among them: (memory - virtual usage) / requests."""
        memory = (load.kv_blocks or 1 << 16) * load.block_size
        kept = memory * HEADROOM_PERMILLE // 1000 if load.urgent else 0
        wanted = max(load.tokens, load.kv_used * load.block_size + load.waiting_tokens) + asked.num_tokens
        return (memory - wanted - kept) // (load.requests + 1)
