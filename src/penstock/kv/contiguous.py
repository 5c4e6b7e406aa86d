"""Baseline: one run of consecutive slabs per sequence, reserved before anybody knows how long the sequence will be.

What serving systems did before paging, and what paging is measured against; nothing here is meant for use. Sources:
FasterTransformer reserves the longest possible sequence; Orca's variants "Max", "Pow2" and "Oracle" are those of the
vLLM paper, arXiv 2309.06180, section 6.1 (there Pow2 rounds the true length of the answer up, which nobody can know;
here it rounds up what is known by now, and moves when that is outgrown). Reserving what is predicted: Jin et al., S3,
arXiv 2306.06000, section 4.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Literal

from penstock.base.errors import EngineError
from penstock.core.cache_spec import CacheGroup, without_windows
from penstock.core.lengths import room_for
from penstock.core.sequence import NEVER, Sequence
from penstock.kv.block_table import BlockTable
from penstock.kv.cursor import PrefixCursor, PrefixMatch
from penstock.kv.manager import KVManager

Reserve = Literal["max", "pow2", "oracle", "predicted"]


class ContiguousManager(KVManager):
    """A KVManager whose sequences own runs. No prefix cache, no sharing, no ragged tables: a fork copies its parent.

    Sliding windows free nothing here: what was reserved stays, and the tokens that left a window with it.

    A sequence's tables hold its whole run from admission on; blocks are zeroed when tokens first reach them ("opened"),
    so that a long reservation costs memory, as it did, and no time. First fit, lowest addresses first.

    Args:
        groups, num_slabs, block_size, slot_checkpoint_tokens, host_slabs, tier: as for KVManager.
        max_model_len: longest sequence in tokens.
        reserve: tokens that admission reserves. max: max_model_len; oracle: prompt + max_tokens (but the last token,
            whose keys nobody reads): the truth if every answer runs to its limit; pow2: the next power of two of the
            length so far; predicted: prompt + what `Request.expected_tokens` says, twice as much each time that is
            outgrown (S3). Outgrown runs are copied into longer ones, or their sequence has to leave.
    """

    def __init__(
        self,
        groups: Seq[CacheGroup],
        num_slabs: Seq[int],
        block_size: int,
        *,
        max_model_len: int,
        reserve: Reserve = "max",
        slot_checkpoint_tokens: int = 512,
        host_slabs: Seq[int] | None = None,
        tier: str = "host",
    ) -> None:
        super().__init__(
            without_windows(groups),
            num_slabs,
            block_size,
            prefix_cache="none",
            slot_checkpoint_tokens=slot_checkpoint_tokens,
            host_slabs=host_slabs,
            tier=tier,
        )
        self.max_model_len = max_model_len
        self.reserve = reserve
        self.num_moved_blocks = 0
        """Blocks copied because their sequence outgrew its run, since start (of one paged group)."""
        self._opened: dict[int, int] = {}  # blocks by seq_id
        self._num_opened = 0

    # -- how much ------------------------------------------------------------------------------------------------

    def reservation(self, seq: Sequence, num_tokens: int = 0) -> int:
        """Blocks that `seq` reserves, now or when it must hold `num_tokens` tokens."""
        known = max(seq.num_known, num_tokens)
        if self.reserve == "max":
            tokens = self.max_model_len
        elif self.reserve == "oracle":
            tokens = seq.prompt_len + seq.request.max_tokens - 1
        elif self.reserve == "predicted":
            room = room_for(seq.request, known - seq.prompt_len)
            tokens = min(seq.prompt_len + room - 1, self.max_model_len)
        else:
            tokens = min(1 << (known - 1).bit_length(), self.max_model_len)
        least = min((self.pools[g].num_slabs for g in self._paged), default=0)
        return max(self._blocks(known), min(self._blocks(tokens), least))

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _find(self, num_blocks: int, owner: Sequence | None = None) -> list[int] | None:
        """Where a run begins in each paged group, `owner`'s own slabs counted as free; None if one has no such run."""
        firsts = []
        for g in self._paged:
            first = self.pools[g].find_run(num_blocks, owner.tables[g].ids if owner else ())
            if first is None:
                return None
            firsts.append(first)
        return firsts

    # -- admission -----------------------------------------------------------------------------------------------

    def can_admit(self, seq: Sequence, match: PrefixMatch, num_tokens: int) -> bool:
        """Whether a run is free. The scheduler's margin for samples is not asked for: each takes a run of its own."""
        if self._slots and self._states.room(reserved=0) < 1:
            return False
        return self._find(self.reservation(seq)) is not None

    def admit(self, seq: Sequence, match: PrefixMatch) -> None:
        """Give `seq` its run and its slots. Mutates and raises as KVManager does; EngineError without a run, too."""
        num_blocks = self.reservation(seq)
        firsts = self._find(num_blocks)
        if firsts is None:
            raise EngineError(f"{seq} was admitted although no run of {num_blocks} blocks is free")
        super().admit(seq, match)
        self._settle(seq, firsts, num_blocks)

    def _settle(self, seq: Sequence, firsts: list[int], num_blocks: int) -> None:
        for g, first in zip(self._paged, firsts, strict=True):
            ids = self.pools[g].alloc_run(first, num_blocks)
            seq.tables[g].ids = ids
            self.outbox.table(seq.seq_id, g, 0, ids)
        self._opened[seq.seq_id] = 0

    # -- growth --------------------------------------------------------------------------------------------------

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Make tokens up to `num_tokens` writable. Free inside the reservation; False if no longer run is to be had."""
        if not super().grow(seq, num_tokens):
            return False
        first, end = self._opened[seq.seq_id], self._blocks(num_tokens)
        if end > first:
            for g in self._paged:
                self.outbox.zero_slabs(g, seq.tables[g].ids[first:end])
            self._open(seq, end)
        return True

    def _open(self, seq: Sequence, end: int) -> None:
        self._num_opened += end - self._opened[seq.seq_id]
        self._opened[seq.seq_id] = end

    def _grow(self, seq: Sequence, first: int, end: int) -> bool:
        if all(end <= seq.tables[g].num_blocks for g in self._paged):
            return True
        num_blocks = self.reservation(seq, end * self.block_size)
        firsts = self._find(num_blocks, seq)
        if firsts is None:
            return False
        for g, start in zip(self._paged, firsts, strict=True):
            self._move(seq, g, start, num_blocks)
        return True

    def _move(self, seq: Sequence, g: int, first: int, num_blocks: int) -> None:
        """Copy what was opened into a new run, which may overlap the old one: in the order that overwrites nothing.

        A step in flight that still writes the old run is done before the copies: a rank works in order.
        """
        table, pool = seq.tables[g], self.pools[g]
        old: list[int] = table.ids
        new = pool.alloc_run(first, num_blocks, old)
        moves = list(zip(old[: self._opened[seq.seq_id]], new, strict=False)) if new[0] != old[0] else []
        for src, dst in moves if new[0] < old[0] else reversed(moves):
            self.outbox.copy_slab(g, src, dst)
        if g == self._paged[0]:
            self.num_moved_blocks += len(moves)
        kept = set(new)
        pool.unref_slabs(slab for slab in reversed(old) if slab not in kept)
        table.ids = new
        self.outbox.table(seq.seq_id, g, 0, new)

    # -- forks, release ------------------------------------------------------------------------------------------

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """`child` gets a run of its own and copies of all that is computed. False, and nothing changed: no room.

        Mutates: child.tables, node, num_computed, num_cached, writable, taint_start.
        """
        assert parent.tables, f"{parent} owns nothing to fork"
        assert not child.tables, f"{child} owns memory already"
        assert parent.num_inflight == 0, f"{parent} is forked while a step works on it"
        num_blocks = self.reservation(child, parent.num_computed)
        firsts = self._find(num_blocks)
        slots = self._states.copy(parent) if firsts is not None else None
        if firsts is None or slots is None:
            return False
        child.tables = [BlockTable() for _ in self.groups]
        for g, slab in zip(self._slots, slots, strict=True):
            child.tables[g].ids = [slab]
            self.outbox.table(child.seq_id, g, 0, [slab])
        self._settle(child, firsts, num_blocks)
        used = self._blocks(parent.num_computed)
        for g in self._paged:
            for src, dst in zip(parent.tables[g].ids[:used], child.tables[g].ids, strict=False):
                self.outbox.copy_slab(g, src, dst)
        self._open(child, used)
        child.node = PrefixCursor(None, 0, NEVER, self._leaving.generation)
        child.num_computed = parent.num_computed
        child.num_cached = child.writable = 0
        child.taint_start = parent.taint_start
        return True

    def make_ragged(self, seq: Sequence, group_index: int) -> bool:
        """Runs cannot be broken into pages."""
        return False

    def release(self, seq: Sequence) -> None:
        self._num_opened -= self._opened.pop(seq.seq_id, 0)
        super().release(seq)

    # -- books ---------------------------------------------------------------------------------------------------

    def num_stranded(self, seq: Sequence) -> int:
        """Free blocks of a paged group if no run is long enough for a waiting `seq`: nobody can use them; else 0."""
        if not self._paged or self._find(self.reservation(seq)) is not None:
            return 0
        return self.pools[self._paged[0]].num_free

    def check_invariants(self, live: Iterable[Sequence]) -> None:
        """As for KVManager; also that runs are runs, that all that is written was zeroed, and that no run is lost."""
        live = list(live)
        super().check_invariants(live)
        owners = [seq for seq in live if seq.tables]
        assert self._opened.keys() == {seq.seq_id for seq in owners}, "runs are owned by sequences without memory"
        assert self._num_opened == sum(self._opened.values()), "opened blocks are miscounted"
        for seq in owners:
            opened = self._opened[seq.seq_id]
            assert opened * self.block_size >= seq.num_computed + seq.num_inflight, f"{seq} writes what was not zeroed"
            for g in self._paged:
                ids = seq.tables[g].ids
                assert ids == list(range(ids[0], ids[0] + len(ids))), f"{seq}: the run of group {g} has holes"
                assert opened <= len(ids), f"{seq}: more of group {g} is opened than there is"
