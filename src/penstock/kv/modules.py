"""Texts that are computed each by itself and stand anywhere in prompts: modules.

Keys are kept raw (`model.emitter.Reading`), so the pages of a text do not depend on where it stands. The tokens of a
module see their own module alone: while they run, the rank sees a sequence that begins there (`TableUpdate.dropped`
says how many tokens lie before it). So a module has the bits that it would have as the beginning of a prompt, whether
it was computed here, or elsewhere and copied: it is looked up, and kept, as such a beginning. What a request computes
behind its first module depends on where modules end, which is in its `taint`: nobody else meets it.

With `Request.recompute` some tokens of modules behind the first are computed again once all are there
(`runner.blending`). Which ones depends on all modules, so of such a beginning all or nothing is taken from the cache,
and none of it enters the cache before.
Sources: Prompt Cache, Gim et al., arXiv 2311.04934, section 3; CacheBlend, Yao et al., arXiv 2405.16444, section 4.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any, NamedTuple

from penstock.base.hashing import digest
from penstock.core.batch import TableUpdate
from penstock.core.cache_spec import CacheGroup
from penstock.core.page_ops import AnyPageOp, BlendOp
from penstock.core.sequence import NEVER, Sequence
from penstock.kv.cursor import PrefixMatch
from penstock.kv.manager import KVManager
from penstock.kv.room import Want
from penstock.kv.stats import KVStats


class PromptModule(NamedTuple):
    """Tokens [start, end) of a prompt: whole blocks."""

    start: int
    end: int


class Placed:
    """A sequence with modules that owns memory. `told`: the first token that the rank sees of it; None: it has not been
    told. `num_kept`: modules that need not be put into the cache any more. `blended`: nothing of them is to be
    computed again."""

    __slots__ = ("blended", "modules", "num_kept", "seq", "told")

    def __init__(self, seq: Sequence) -> None:
        self.seq = seq
        self.modules = modules_of(seq)
        self.num_kept = 0
        self.told: int | None = None
        self.blended = not seq.request.recompute or seq.num_computed >= self.end

    @property
    def end(self) -> int:
        """Where the last module ends."""
        return self.modules[-1].end

    def at(self, position: int) -> int | None:
        """Which module has the token at this position; None: it stands behind them."""
        return next((i for i, module in enumerate(self.modules) if position < module.end), None)


class ModuleKVManager(KVManager):
    """A KVManager for models with full groups alone, whose keys are raw.

    Attributes:
        num_module_tokens, num_module_hits: tokens of modules of requests that were admitted (again, if they had been
            preempted), and those that were copied from the prefix cache instead of computed.
        num_blended: tokens that were computed again in the whole context.
    """

    def __init__(self, groups: Seq[CacheGroup], num_slabs: Seq[int], block_size: int, **options: Any) -> None:
        super().__init__(groups, num_slabs, block_size, **options)
        assert len(self._full) == len(self.groups), "modules are for models whose layers all see their whole context"
        self.num_module_tokens = self.num_module_hits = self.num_blended = 0
        self._placed: dict[int, Placed] = {}

    def match(self, seq: Sequence) -> PrefixMatch:
        found = super().match(seq)
        if seq.request.recompute and found.num_tokens < seq.request.modules[-1]:
            return PrefixMatch(0, found.namespace, None, found.version)
        return found

    def admit(self, seq: Sequence, match: PrefixMatch) -> None:
        super().admit(seq, match)
        if seq.request.modules:
            placed = self._placed[seq.seq_id] = Placed(seq)
            self.num_module_tokens += max(0, placed.end - seq.num_computed)
            if not placed.blended:
                seq.node.next_commit = NEVER

    def restore(self, seq: Sequence) -> bool:
        placed, swapped = self._placed.get(seq.seq_id), seq.swapped is not None
        there = super().restore(seq)
        if placed is not None and swapped and not placed.blended:
            self._is_blended(placed)  # else it had not been swapped
        if there and placed is not None:
            self._copy(placed)
            seq.num_cached = max(seq.num_cached, seq.num_computed)
        return there

    def cut(self, seq: Sequence, start: int, n: int) -> int:
        """As `KVManager.cut`; a chunk has tokens of one module, and none begins before the one before has ended."""
        n = super().cut(seq, start, n)
        placed = self._placed.get(seq.seq_id)
        for module in () if placed is None else placed.modules:
            if start < module.end:
                return min(n, module.end - start) if start > module.start or not seq.num_inflight else 0
            if start == module.end == placed.end and seq.num_inflight:  # type: ignore[union-attr]
                return 0
        return n

    def commit(self, seq: Sequence) -> None:
        super().commit(seq)
        placed = self._placed.get(seq.seq_id)
        if placed is None or placed.num_kept == len(placed.modules):
            return
        while placed.num_kept < len(placed.modules) and placed.modules[placed.num_kept].end <= seq.num_computed:
            self._keep(placed, placed.modules[placed.num_kept])
            placed.num_kept += 1
        if not seq.num_inflight:
            self._copy(placed)

    def swap_out(self, seq: Sequence) -> bool:
        placed = self._placed.get(seq.seq_id)
        return (placed is None or placed.blended) and super().swap_out(seq)

    def release(self, seq: Sequence) -> None:
        """What stands behind a first module goes before others: it can be put together again."""
        if self._placed.pop(seq.seq_id, None) is not None:
            self.hints.demote(seq)
        super().release(seq)

    def drain(self) -> tuple[list[TableUpdate], list[AnyPageOp]]:
        tables, ops = super().drain()
        if not self._placed:
            return tables, ops
        news = {update.seq_id for update in tables}
        for seq_id, placed in self._placed.items():
            at = placed.at(placed.seq.num_computed)
            first = 0 if at is None else placed.modules[at].start
            if first != (placed.told or 0) or (first and seq_id in news):
                tables = [update for update in tables if update.seq_id != seq_id]
                tables += self._tables_from(placed.seq, first)
            placed.told = first
            if at is None and not placed.blended:
                ops.append(self._blend(placed))
        return tables, ops

    def stats(self) -> KVStats:
        return replace(
            super().stats(), num_module_tokens=self.num_module_tokens, num_module_hit_tokens=self.num_module_hits,
            num_blended_tokens=self.num_blended,
        )  # fmt: skip

    # -- inside --------------------------------------------------------------------------------------------------

    def _tables_from(self, seq: Sequence, first: int) -> list[TableUpdate]:
        """The tables of `seq` from token `first` on, as if there were none before."""
        found = []
        for g, table in enumerate(seq.tables):
            lines = [table.ids] if table.layers is None else table.layers
            for line, ids in enumerate(lines):
                own = -1 if table.layers is None else line
                found.append(TableUpdate(seq.seq_id, g, 0, ids[first // self.block_size :], own, first))
        return found

    def _namespace(self, seq: Sequence) -> bytes:
        """Where modules are kept: with the beginnings of prompts without modules."""
        return digest(seq.request.namespace, seq.request.plain_taint.encode())

    def _text(self, seq: Sequence, module: PromptModule) -> array[int]:
        return seq.token_ids[module.start : module.end]

    def _copy(self, placed: Placed) -> None:
        """Blocks of modules that the prefix cache has, from where `seq` stands on, are copied instead of computed.

        Mutates: seq.num_computed, its tables. A module is left as it is if there is no memory for all of what is found.
        """
        seq = placed.seq
        if not seq.request.reads_cache:
            return
        while (at := placed.at(seq.num_computed)) is not None and not seq.num_computed % self.block_size:
            module = placed.modules[at]
            done = (seq.num_computed - module.start) // self.block_size
            end = module.end if seq.taint_start is None else min(module.end, seq.taint_start)
            most = (end - module.start) // self.block_size
            namespace = self._namespace(seq)
            entry, found = self.cache.match(namespace, self._text(seq, module), most, [], False)
            if found <= done:
                return
            self.hints.asked_by(seq.request)
            entry, blocks = self.cache.acquire(namespace, entry, found, found * self.block_size)
            first = seq.num_computed // self.block_size
            there = self.grow(seq, module.start + found * self.block_size)
            if there:
                for j, g in enumerate(self._paged):
                    for number, block in enumerate(blocks[done:]):
                        self._copy_block(seq, g, block[j], first + number)
            # Those that lose their memory from here on lose it behind these copies (`Outbox`).
            self.cache.release(entry)
            if not there:
                return
            self.num_module_hits += (found - done) * self.block_size
            seq.num_computed = module.start + found * self.block_size
            if found == most and placed.num_kept == at:
                placed.num_kept = at + 1

    def _blend(self, placed: Placed) -> BlendOp:
        self._is_blended(placed)
        seq = placed.seq
        num = math.ceil(seq.request.recompute * (placed.end - placed.modules[0].end) - 1e-9)
        self.num_blended += num
        return BlendOp(seq.seq_id, tuple(module.end for module in placed.modules), num)

    def _is_blended(self, placed: Placed) -> None:
        """Its modules may enter the prefix cache from the next commit on."""
        cursor = placed.seq.node
        placed.blended = True
        if cursor.holding and cursor.generation == self._leaving.generation:
            cursor.next_commit = (cursor.num_blocks + 1) * self.block_size

    def _copy_block(self, seq: Sequence, group: int, slab: int, number: int) -> None:
        table = seq.tables[group]
        if table.layers is None:
            self.outbox.copy_slab(group, slab, table.ids[number])
            return
        width = self.pools[group].pages_per_slab
        for layer, pages in enumerate(table.layers):
            self.outbox.copy_page(group, slab * width + layer, pages[number])

    def _keep(self, placed: Placed, module: PromptModule) -> None:
        """Copy what the prefix cache lacks of a module into it, if there is room, as the beginning of a prompt."""
        seq = placed.seq
        tables = [seq.tables[g] for g in self._paged]
        if seq.taint_start is not None and seq.taint_start < module.end:
            return
        if any(table.layers is not None for table in tables):
            return  # as with all that has pages of its own
        namespace, text, size = self._namespace(seq), self._text(seq, module), self.block_size
        num_blocks = len(text) // size
        entry, known = self.cache.match(namespace, text, num_blocks, [], False)
        missing = num_blocks - known
        if not missing:
            return
        self.hints.asked_by(seq.request)
        entry, _ = self.cache.acquire(namespace, entry, known, known * size)
        if self._room.reserve([Want(g, missing, 0) for g in self._paged]):
            columns = []
            for g, table in zip(self._paged, tables, strict=True):
                slabs = self.pools[g].alloc_slabs(missing)
                assert slabs is not None
                for src, dst in zip(table.ids[module.start // size + known : module.end // size], slabs, strict=True):
                    self.outbox.copy_slab(g, src, dst)
                columns.append(slabs)
            blocks: list[tuple[int, ...]] = list(zip(*columns, strict=True))
            entry, existing, num_new = self.cache.insert(entry, text[known * size :].tobytes(), blocks)
            kept = slice(len(existing), len(existing) + num_new)
            for g, slabs in zip(self._paged, columns, strict=True):
                self.pools[g].unref_slabs([slab for slab in slabs if slab not in slabs[kept]])
        self.cache.release(entry)


def modules_of(seq: Sequence) -> list[PromptModule]:
    """The modules of its request, in order."""
    ends = seq.request.modules
    return [PromptModule(start, end) for start, end in zip([0, *ends], ends, strict=False)]
