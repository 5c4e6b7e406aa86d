"""Requests go where the beginning of their prompt lies, unless that engine is loaded much more than the others.

What lies where, engines tell (`told`): what they hold, and besides what was placed there and is being computed. Of one
that does not tell, what was placed there counts: its blocks, newest last, as many as its KV memory has; it forgets the
oldest first, and so does this.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence

from penstock.route.router import EngineLoad, RoutedRequest, RoutePolicy

IMBALANCE_TOKENS = 4096
"""Tokens to be computed that an engine may have more than the least loaded one, besides those that it saves."""
DEFAULT_BLOCKS = 1 << 16


class PrefixRoute(RoutePolicy):
    """Who gains most: tokens of the prompt that it has, less those that it would forget for the rest; unless others
    have much less to compute already."""

    reads_blocks = True

    def __init__(self) -> None:
        self._held: dict[int, set[int]] = {}
        """Of those that tell."""
        self._coming: dict[int, dict[int, int]] = {}
        """Blocks that requests there are about to leave behind, and how many of them each."""
        self._theirs: dict[tuple[int, int], Sequence[int]] = {}
        """The blocks of one request (by its identity) in `_coming` of an engine."""
        self._blocks: dict[int, OrderedDict[int, None]] = {}
        """Of those that do not tell."""
        self._capacity: dict[int, int] = {}

    def matched(self, number: int, blocks: Sequence[int]) -> int:
        """Blocks from the beginning on that engine `number` has."""
        held, coming = self._held.get(number), self._coming.get(number, {})
        return _leading(blocks, self._blocks.get(number, {}) if held is None else held, coming)

    def choose(self, asked: RoutedRequest, loads: Sequence[EngineLoad]) -> int:
        for load in loads:
            self._capacity[load.number] = load.kv_blocks or DEFAULT_BLOCKS
        saved = [self.matched(load.number, asked.blocks) * load.block_size for load in loads]
        if not any(saved):  # among equals, where least would have to be forgotten
            held = [self.num_held(load.number) for load in loads]
            return min(range(len(loads)), key=lambda i: (loads[i].tokens, loads[i].requests, held[i]))
        least = min(load.waiting_tokens for load in loads)
        gained = [self._gain(load, asked, saved[i]) for i, load in enumerate(loads)]
        best = max(range(len(loads)), key=lambda i: (gained[i], saved[i], -loads[i].tokens))
        if loads[best].waiting_tokens - least <= saved[best] + IMBALANCE_TOKENS:
            return best
        return min(range(len(loads)), key=lambda i: (loads[i].waiting_tokens - saved[i], loads[i].tokens))

    def _gain(self, load: EngineLoad, asked: RoutedRequest, saved: int) -> int:
        """Tokens that need not be computed, less those of others that would be forgotten for the rest: a beginning that
        all share must not fill one engine while others have room."""
        taken = self.num_held(load.number) + len(self._coming.get(load.number, ()))
        room = max(0, self._capacity[load.number] - taken) * load.block_size
        return saved - max(0, asked.num_tokens - saved - room)

    def num_held(self, number: int) -> int:
        """Blocks that engine `number` has, as far as is known."""
        held = self._held.get(number)
        return len(self._blocks.get(number, ()) if held is None else held)

    def placed(self, asked: RoutedRequest, number: int) -> None:
        if number not in self._held:
            self._placed_unheard(asked, number)
            return
        coming = self._coming.setdefault(number, {})
        new = asked.blocks[_leading(asked.blocks, self._held[number], ()) :]
        for block in new:
            coming[block] = coming.get(block, 0) + 1
        self._theirs[id(asked), number] = new

    def ended(self, asked: RoutedRequest, number: int) -> None:
        coming = self._coming.get(number, {})
        for block in self._theirs.pop((id(asked), number), ()):
            left = coming.get(block, 0) - 1
            if left > 0:
                coming[block] = left
            else:
                coming.pop(block, None)

    def told(self, number: int, stored: Sequence[int], removed: Sequence[int], *, cleared: bool = False) -> None:
        if cleared or number not in self._held:
            self._held[number] = set()
            self._blocks.pop(number, None)
        held = self._held[number]
        held.update(stored)
        held.difference_update(removed)

    def gone(self, number: int) -> None:
        for known in (self._held, self._coming, self._blocks):
            known.pop(number, None)

    def _placed_unheard(self, asked: RoutedRequest, number: int) -> None:
        own = self._blocks.setdefault(number, OrderedDict())
        for block in reversed(asked.blocks):  # the beginning is the last to be forgotten
            own[block] = None
            own.move_to_end(block)
        while len(own) > self._capacity.get(number, DEFAULT_BLOCKS):
            own.popitem(last=False)


def _leading(blocks: Sequence[int], own: Container[int], coming: Container[int]) -> int:
    """How many from the beginning on are there or on their way."""
    for count, block in enumerate(blocks):
        if block not in own and block not in coming:
            return count
    return len(blocks)
