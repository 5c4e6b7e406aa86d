"""Slots: one slab per sequence and slot group, and the checkpoints of it that the prefix cache keeps.

A recurrent state cannot be cut back to a shorter prefix. So it is copied where a prefix is likely to be met again:
every `checkpoint_tokens` tokens and at the end of the prompt, always at block boundaries.
"""

from __future__ import annotations

from typing import Any

from penstock.core.protocols import PrefixCache
from penstock.core.sequence import Sequence
from penstock.kv.block_pool import BlockPool
from penstock.kv.cursor import PrefixCursor
from penstock.kv.outbox import Outbox


class Checkpoints:
    """Hands out slots and takes checkpoints.

    Args:
        groups: indices of the slot groups; with none of them, every method is a no-op.
        checkpoint_tokens: distance of checkpoints, a multiple of `block_size`.
    """

    def __init__(
        self,
        groups: tuple[int, ...],
        pools: list[BlockPool],
        cache: PrefixCache,
        outbox: Outbox,
        block_size: int,
        checkpoint_tokens: int,
    ) -> None:
        self.groups = groups
        self.block_size = block_size
        self.checkpoint_tokens = checkpoint_tokens
        self._pools = pools
        self._cache = cache
        self._outbox = outbox
        self._keeps = bool(groups) and cache.name != "none"

    def room(self, reserved: int) -> int:
        """Sequences that could get slots now, if `reserved` checkpoints must stay."""
        spare = self._cache.num_checkpoints - reserved
        return min(self._pools[g].num_free + spare for g in self.groups)

    def take(self, keep: Any = None) -> tuple[int, ...] | None:
        """A slab of every slot group, or None. Gives up checkpoints for it, but not that of entry `keep`."""
        while any(self._pools[g].num_free < 1 for g in self.groups):
            slabs = self._cache.evict_checkpoint(keep)
            if slabs is None:
                return None
            self.drop(slabs)
        taken = (self._pools[g].alloc_slab() for g in self.groups)
        return tuple(slab for slab in taken if slab is not None)

    def drop(self, slabs: tuple[int, ...]) -> None:
        """Free a checkpoint's slabs. At once: no table ever showed them to a step."""
        for g, slab in zip(self.groups, slabs, strict=True):
            self._pools[g].unref(slab, unseen=True)

    def copy(self, seq: Sequence) -> tuple[int, ...] | None:
        """New slabs with the state that `seq` has when the step being planned begins, or None."""
        slabs = self.take()
        if slabs is not None:
            for g, slab in zip(self.groups, slabs, strict=True):
                self._outbox.copy_slab(g, seq.tables[g].ids[0], slab)
        return slabs

    def fill(self, slabs: tuple[int, ...], state: tuple[int, ...] | None) -> None:
        """Make new slots begin as a checkpoint, or as zeros."""
        for j, g in enumerate(self.groups):
            if state is None:
                self._outbox.zero_slabs(g, [slabs[j]])
            else:
                self._outbox.copy_slab(g, state[j], slabs[j])

    def cut(self, seq: Sequence, start: int, n: int) -> int:
        """Shorten a chunk of `n` tokens from `start` so that it ends at the next checkpoint; at least 1."""
        if not self._keeps:
            return n
        end = (start // self.checkpoint_tokens + 1) * self.checkpoint_tokens
        last = self._prompt_end(seq)
        if last > start:
            end = min(end, last)
        return min(n, end - start)

    def _prompt_end(self, seq: Sequence) -> int:
        """End of the last block of the prompt that a request with the same prompt could reuse."""
        return (seq.prompt_len - 1) // self.block_size * self.block_size

    def _due(self, seq: Sequence, position: int) -> bool:
        return position > 0 and (position % self.checkpoint_tokens == 0 or position == self._prompt_end(seq))

    def stage(self, seq: Sequence, start: int) -> None:
        """Copy the state between the step in flight, which ends at `start`, and the one being planned, which goes on.

        When the former is committed the slots have moved on already; only now can they be caught.
        """
        cursor: PrefixCursor = seq.node
        if cursor.staged is None and cursor.next_commit <= start and self._due(seq, start):
            slabs = self.copy(seq)
            if slabs is not None:
                cursor.staged = (start, slabs)

    def attach(self, seq: Sequence, cursor: PrefixCursor) -> None:
        """`seq` stands at a block boundary of the cache: keep a checkpoint there if one is due and there is room."""
        position = seq.num_computed
        wanted = position == cursor.num_blocks * self.block_size and self._due(seq, position)
        wanted = wanted and self._cache.checkpoint(cursor.entry) is None
        slabs = None
        if wanted and cursor.staged is not None and cursor.staged[0] == position:
            slabs, cursor.staged = cursor.staged[1], None
        elif wanted and seq.num_inflight == 0:
            slabs = self.copy(seq)
        if slabs is not None:
            self._cache.add_checkpoint(cursor.entry, slabs)
        if cursor.staged is not None and cursor.staged[0] <= position:
            self.drop_staged(cursor)

    def drop_staged(self, cursor: PrefixCursor) -> None:
        if cursor.staged is not None:
            self.drop(cursor.staged[1])
            cursor.staged = None
