"""Keeps a recurrent state longer, the more work it saves: states are of one size, however many tokens lie behind them.

A checkpoint counts as last used `RETAIN` ticks later per token that would have to be read again without it: those back
to the checkpoint before it on its path. Blocks of keys and values go by recency: each saves as much as any other.
Source: Marconi, Pan et al., arXiv 2411.19379, section 4.2 (recency plus alpha times FLOPs saved per byte; within one
model tokens say the same but for the quadratic part of attention, which is left out).
"""

from __future__ import annotations

from typing import Any

from penstock.kv.prefix.node import TOKEN_BYTES

RETAIN = 0.2
"""Ticks per token. A tick is an operation of the cache; a request makes about three. The best of 0.0002 to 0.2 on
Mooncake's conversations, where longer prompts are those that come back (docs/concepts/recurrent-state.md)."""


class Flops:
    """Orders entries by the tick of their last use, checkpoints by that and by the tokens that they save."""

    name = "flops"
    request_priority = 0

    def __init__(self, retain: float = RETAIN) -> None:
        self._retain = retain

    def on_insert(self, entry: Any, tick: int) -> None:
        entry.tick = tick

    def on_hit(self, entry: Any, tick: int) -> None:
        entry.tick = tick

    def key(self, entry: Any) -> float:
        node = getattr(entry, "node", None)
        if node is None:
            return float(entry.tick)
        block = len(node.tokens) / TOKEN_BYTES / max(1, node.end - node.start)
        before = node.parent
        while before is not None and before.checkpoint is None:
            before = before.parent
        return float(entry.tick + self._retain * block * (node.end - (0 if before is None else before.end)))
