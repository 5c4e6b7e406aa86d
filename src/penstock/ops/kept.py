"""Where a layer keeps newest and first tokens beside its codes (`core.mixers.attention.Attention.caches`)."""

from __future__ import annotations

from typing import NamedTuple


class Kept(NamedTuple):
    """The newest `recent` tokens are in the `layer`-th layer of window group `group`, the first `sinks` in the
    `sink_layer`-th of slot group `sink_group` (-1: none).

    The token at position p reads float16 from position `whole(p)` on, the sinks as float16, and codes between them.
    That follows from p alone, so no chunk, batch or page can change what it reads.
    """

    recent: int
    group: int
    layer: int
    sinks: int = 0
    sink_group: int = -1
    sink_layer: int = 0

    def whole(self, position: int, block_size: int) -> int:
        """The first position that the token at `position` reads from the window: where a block begins."""
        return max(0, position + 1 - self.recent) // block_size * block_size
