"""Requests go where the beginning of their prompt lies, unless that engine is loaded much more than the others.

What lies where is what was placed there: each engine's blocks, newest last, as many as its KV memory has. The engine
forgets the oldest first, and so does this; a block that was wanted again is new again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from penstock.route.router import EngineLoad, RoutedRequest, RoutePolicy

IMBALANCE_TOKENS = 4096
"""Tokens to be computed that an engine may have more than the least loaded one, besides those that it saves."""
DEFAULT_BLOCKS = 1 << 16


class PrefixRoute(RoutePolicy):
    """Cost of an engine: tokens of the prompt that it would have to compute, and the tokens that wait there already."""

    reads_blocks = True

    def __init__(self) -> None:
        self._blocks: dict[int, OrderedDict[int, None]] = {}
        self._capacity: dict[int, int] = {}

    def matched(self, number: int, blocks: Sequence[int]) -> int:
        """Blocks from the beginning on that engine `number` has."""
        own = self._blocks.get(number)
        if not own:
            return 0
        count = 0
        for block in blocks:
            if block not in own:
                break
            count += 1
        return count

    def choose(self, asked: RoutedRequest, loads: Sequence[EngineLoad]) -> int:
        for load in loads:
            self._capacity[load.number] = load.kv_blocks or DEFAULT_BLOCKS
        saved = [self.matched(load.number, asked.blocks) * load.block_size for load in loads]
        if not any(saved):  # among equals, where least would have to be forgotten
            held = [len(self._blocks.get(load.number, ())) for load in loads]
            return min(range(len(loads)), key=lambda i: (loads[i].tokens, loads[i].requests, held[i]))
        least = min(load.waiting_tokens for load in loads)
        best = max(range(len(loads)), key=lambda i: (saved[i], -loads[i].tokens))
        if loads[best].waiting_tokens - least <= saved[best] + IMBALANCE_TOKENS:
            return best
        return min(range(len(loads)), key=lambda i: (loads[i].waiting_tokens - saved[i], loads[i].tokens))

    def placed(self, asked: RoutedRequest, number: int) -> None:
        own = self._blocks.setdefault(number, OrderedDict())
        for block in reversed(asked.blocks):  # the beginning is the last to be forgotten
            own[block] = None
            own.move_to_end(block)
        while len(own) > self._capacity.get(number, DEFAULT_BLOCKS):
            own.popitem(last=False)

    def gone(self, number: int) -> None:
        self._blocks.pop(number, None)
