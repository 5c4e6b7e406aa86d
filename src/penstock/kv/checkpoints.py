"""Slots: one slab per sequence and slot group, and the checkpoints of it that the prefix cache keeps.

A recurrent state cannot be cut back to a shorter prefix. So it is copied where a prefix is likely to be met again,
always at block boundaries: where, a rule says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from penstock.base.registry import Registry
from penstock.core.protocols import PrefixCache
from penstock.core.sequence import Sequence
from penstock.kv.block_pool import BlockPool
from penstock.kv.cursor import PrefixCursor, PrefixMatch
from penstock.kv.outbox import Outbox


class CheckpointRule(Protocol):
    """Where sequences leave checkpoints. Made with the distance of checkpoints and the size of a block, in tokens."""

    branches: bool
    """Whether it asks where a sequence parts from what is known (`PrefixCursor.branch`)."""

    def next(self, seq: Sequence, start: int) -> int:
        """The first position behind `start` where one is due, or any behind `start` if there is none."""
        ...

    def goes_on(self, seq: Sequence, position: int) -> bool:
        """The one that is due here takes the place of the sequence's last such one."""
        ...


def prompt_end(seq: Sequence, block_size: int) -> int:
    """End of the last block of the prompt that a request with the same prompt could reuse."""
    return (seq.prompt_len - 1) // block_size * block_size


class AtDistances:
    """Every `distance` tokens, of prompts and of answers, and at the end of the prompt."""

    branches = False

    def __init__(self, distance: int, block_size: int) -> None:
        self._distance, self._block_size = distance, block_size

    def next(self, seq: Sequence, start: int) -> int:
        end = (start // self._distance + 1) * self._distance
        last = prompt_end(seq, self._block_size)
        return min(end, last) if last > start else end

    def goes_on(self, seq: Sequence, position: int) -> bool:
        return False


LAST = 32
"""Tokens. A state per block of one token would leave drafts no room; one per whole answer would miss the next turn."""


class AtBranches:
    """Two states of a sequence at most: where its prompt parts from known text, for others will do the same; and at the
    end of the last whole block of all, for its next turn. Source: Marconi, Pan et al., arXiv 2411.19379, section 4.1.

    Once a sequence has begun from the last state of another, this one stays, too: text parts there. The last state goes
    on by whole blocks, `LAST` tokens or the distance at a time, whichever is less: steps end there, drafts as well.
    """

    branches = True

    def __init__(self, distance: int, block_size: int) -> None:
        self._block_size = block_size
        self._stride = max(block_size, min(distance, LAST) // block_size * block_size)

    def next(self, seq: Sequence, start: int) -> int:
        branch = 0 if seq.node is None else seq.node.branch
        last = max(prompt_end(seq, self._block_size), (start // self._stride + 1) * self._stride)
        return min(branch, last) if branch > start else last

    def goes_on(self, seq: Sequence, position: int) -> bool:
        return bool(position != seq.node.branch)


CHECKPOINT_RULES: Registry[Callable[[int, int], CheckpointRule], None] = Registry("state checkpoint rule")
CHECKPOINT_RULES.add("distance", "penstock.kv.checkpoints:AtDistances")
CHECKPOINT_RULES.add("branch", "penstock.kv.checkpoints:AtBranches")


class Checkpoints:
    """Hands out slots and takes checkpoints.

    Args:
        groups: indices of the slot groups; with none of them, every method is a no-op.
        rule: where checkpoints stand.
    """

    def __init__(
        self,
        groups: tuple[int, ...],
        pools: list[BlockPool],
        cache: PrefixCache,
        outbox: Outbox,
        block_size: int,
        rule: CheckpointRule,
    ) -> None:
        self.groups = groups
        self.block_size = block_size
        self.rule = rule
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
        return min(n, self.rule.next(seq, start) - start) if self._keeps else n

    def branch(self, seq: Sequence, match: PrefixMatch, reusable: Callable[[Sequence], int]) -> int:
        """See `PrefixCursor.branch`. `reusable`: blocks that a sequence may take from the prefix cache."""
        if not (self._keeps and self.rule.branches):
            return 0
        _, known = self._cache.match(match.namespace, seq.token_ids, reusable(seq), seq.block_keys, False)
        known *= self.block_size
        return known if known > match.num_tokens else 0

    def _due(self, seq: Sequence, position: int) -> bool:
        return position > 0 and self.rule.next(seq, position - 1) == position

    def stage(self, seq: Sequence, start: int) -> None:
        """Copy the state between the step in flight, which ends at `start`, and the one being planned, which goes on.

        When the former is committed the slots have moved on already; only now can they be caught.
        """
        cursor: PrefixCursor = seq.node
        if cursor.staged is None and cursor.next_commit <= start and self._due(seq, start):
            slabs = self.copy(seq)
            if slabs is not None:
                cursor.staged = (start, slabs)

    def attach(self, seq: Sequence, cursor: PrefixCursor) -> tuple[int, ...] | None:
        """`seq` stands at a block boundary of the cache: keep a checkpoint there if one is due and there is room.

        Returns its slabs, or None.
        """
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
            if self.rule.goes_on(seq, position):
                self._go_on(cursor, slabs)
        if cursor.staged is not None and cursor.staged[0] <= position:
            self.drop_staged(cursor)
        return slabs

    def _go_on(self, cursor: PrefixCursor, slabs: tuple[int, ...]) -> None:
        if cursor.last is not None and self._cache.take_checkpoint(*cursor.last):
            self.drop(cursor.last[1])
        cursor.last = cursor.entry, slabs

    def drop_staged(self, cursor: PrefixCursor) -> None:
        if cursor.staged is not None:
            self.drop(cursor.staged[1])
            cursor.staged = None
