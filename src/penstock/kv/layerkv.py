"""Layers of a sequence away from the device, where memory is short.

A prompt whose blocks do not all fit is admitted with two sets of pages that all its layers take in turns: they are
*away*. What an away layer has is read from host memory before the layer runs and written there behind it, by the rank,
between layers (`core.page_ops.StreamOp`). While a prompt is computed that costs next to nothing; a step that only
decodes has to wait for it, so whoever has layers away waits with decoding, if others can bear no more, until memory is
free and its layers come back.
Source: LayerKV, arXiv 2410.00428, sections 3.1 (layer-wise blocks) and 3.2 (the bound on TPOT).
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.base.errors import EngineError
from penstock.core.batch import TableUpdate
from penstock.core.cache_spec import CacheGroup
from penstock.core.page_ops import AnyPageOp, LoadOp, StoreOp, StreamOp
from penstock.core.sequence import Sequence
from penstock.kv.cursor import PrefixMatch
from penstock.kv.manager import KVManager
from penstock.kv.room import Want
from penstock.kv.stats import KVStats
from penstock.kv.swap import Swapped

if TYPE_CHECKING:
    from penstock.core.batch import SchedulerOutput, StepOutput

NUM_SETS = 2
"""Sets of pages that away layers take in turns: one is computed with while the other is filled."""
MOST = 1.2
"""How many times as long a step may take for layers that are away, if nothing else is said."""
HALF_STEPS = 64
"""What a step took counts half after so many others."""


class StreamRate:
    """What pages that move cost steps which only decode: seconds = base + pages * each, by least squares.

    Seconds are those that steps report, which the run's log has: a replay decides the same.
    """

    def __init__(self) -> None:
        self._sums = [0.0] * 5

    def stepped(self, pages: int, seconds: float) -> None:
        kept = 0.5 ** (1 / HALF_STEPS)
        seen = (1.0, pages, pages * pages, seconds, pages * seconds)
        self._sums = [old * kept + new for old, new in zip(self._sums, seen, strict=True)]

    def step_s(self, pages: int) -> float | None:
        """Seconds of a decode step that moves so many pages; None: no two kinds of steps have been seen."""
        n, x, xx, y, xy = self._sums
        area = n * xx - x * x
        if area <= 1e-9 * n * xx:
            return None
        each = max(0.0, (n * xy - x * y) / area)
        return (y - each * x) / n + each * pages


class Away(NamedTuple):
    """A sequence with layers away, and the blocks that are to stay free when they come back."""

    seq: Sequence
    aside: int


class LayerKVManager(KVManager):
    """A KVManager without a prefix cache, for models with one full group (`plan.layerkv`).

    Args:
        groups, num_slabs, block_size, host_slabs, tier: as for KVManager.
        most_s: who has layers away decodes only in steps that take no longer, unless nobody else does. None: MOST times
            as long as without.
        column: how many sequences should run at once, and blocks of each: so much stays free that all find room for
            both sets. Zeros: whoever comes first takes whole blocks.

    Attributes:
        num_layerwise: sequences that were admitted with layers away, since start.
        num_brought_back: layers that came back, since start.
        num_waits: decodes that waited a step for layers, since start.
        rate: of moving pages.
    """

    def __init__(
        self,
        groups: Seq[CacheGroup],
        num_slabs: Seq[int],
        block_size: int,
        *,
        most_s: float | None = None,
        column: tuple[int, int] = (0, 0),
        **options: Any,
    ) -> None:
        assert len(groups) == 1, "layers leave where there is one full group"
        assert groups[0].spec.kind == "paged", "layers leave where there is one full group"
        super().__init__(groups, num_slabs, block_size, prefix_cache="none", **options)
        self.num_layerwise = self.num_brought_back = self.num_waits = 0
        self.rate = StreamRate()
        self.measures.append(self._measure)
        self.hints.others = self._give_way
        self._most_s = most_s
        self._column = column
        self._inside: dict[int, Sequence] = {}
        """By seq_id: those that have blocks."""
        self._pool, self._width = self.pools[0], self.groups[0].pages_per_slab
        self._away: dict[int, Away] = {}
        self._homes = self.swaps.homes
        self._written: dict[int, tuple[int, int]] = {}  # by seq_id: tokens that the step to come computes
        self._decided: tuple[int, int] = (-1, 0)
        self._must_run = False
        self._entered: set[int] = set()
        """In the step to come: whoever is admitted runs in it."""
        self._num_rows = 0

    # -- admission -----------------------------------------------------------------------------------------------

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _fits_away(self, seq: Sequence, aside: int) -> bool:
        """Whether there is room for both sets, and in host memory, for what is known of `seq` and a token more."""
        blocks = self._blocks(seq.num_known + 1)
        free = self._pool.num_free_pages - aside * self._width // 2
        there = 0 if seq.swapped is None else len(seq.swapped.ids[0])
        return NUM_SETS * blocks <= free and blocks - there <= self.swaps.tier.num_free(0)

    def can_admit(self, seq: Sequence, match: PrefixMatch, num_tokens: int) -> bool:
        """Whether `admit` and `grow` would succeed, if need be with its layers away. `num_tokens` includes what is set
        aside for others: layers come back while that stays free.

        Nobody who could have its layers away takes whole blocks while others wait for the memory for theirs.
        """
        request = seq.request
        aside = self._blocks(max(num_tokens, seq.num_known)) - self._blocks(seq.num_known)
        whole = request.n > 1 or request.beam is not None or request.prefetches  # forks share whole blocks
        whole = whole or self._width <= NUM_SETS
        if super().can_admit(seq, match, num_tokens) and (whole or (not self._away and self._spares_column(seq))):
            self._decided = (-1, 0)
            return True
        self._decided = (seq.seq_id, aside)
        return not whole and self._fits_away(seq, aside)

    def _spares_column(self, seq: Sequence) -> bool:
        """Whether all of the column find room if `seq` takes whole blocks."""
        rows, blocks = self._column
        if not rows:
            return True
        own = self._width * max(blocks, self._blocks(seq.num_known + 1))
        return own + self._promised(1) <= self._pool.num_free_pages

    def _promised(self, more: int = 0) -> int:
        """Pages that stay free for the column, if `more` sequences come with pages of their own: for those that run,
        as many as they still grow by; for the others, both sets."""
        rows, blocks = self._column
        total = NUM_SETS * blocks * max(0, rows - len(self._inside) - more)
        for seq in self._inside.values():
            table = seq.tables[0]
            lines = self._width - len(table.away) + NUM_SETS if table.away else self._width
            total += lines * max(0, blocks - table.num_blocks)
        return total

    def admit(self, seq: Sequence, match: PrefixMatch) -> None:
        super().admit(seq, match)
        self._inside[seq.seq_id] = seq
        decided, aside = self._decided
        if decided != seq.seq_id:
            return
        table = seq.tables[0]
        table.layers = [[] for _ in range(self._width)]
        table.away = list(range(self._width))
        self._away[seq.seq_id] = Away(seq, aside)
        self._homes[seq.seq_id] = []
        self._entered.add(seq.seq_id)
        self._stop_following(seq.node)
        self._leaving.leave(seq.node)
        self.num_layerwise += 1

    def restore(self, seq: Sequence) -> bool:
        """As `KVManager.restore`. Whose layers are away goes on with them where they are."""
        copy: Swapped | None = seq.swapped
        if seq.seq_id not in self._away or copy is None:
            return super().restore(seq)
        seq.swapped, self._homes[seq.seq_id] = None, copy.ids[0]
        if not self._grow_away(seq, len(copy.ids[0])):
            raise EngineError(f"{seq} was admitted without room for its layers")
        seq.num_computed = copy.num_tokens
        return True

    # -- who waits -----------------------------------------------------------------------------------------------

    def cut(self, seq: Sequence, start: int, n: int) -> int:
        """As `KVManager.cut`; 0 for who would decode with layers away and make the step longer than others can bear.

        Who has had layers away for longest gets memory for them first. Mutates: seq.tables.
        """
        n = super().cut(seq, start, n)
        if n <= 0 or seq.seq_id not in self._away or seq.seq_id in self._entered:
            return n
        if seq.seq_id == next(iter(self._away)):
            self._fetch(seq, start)
        decodes = start >= max(seq.prompt_len, seq.num_known - 1)
        if seq.seq_id not in self._away or not decodes or self._must_run or self._column[0]:
            return n  # a column goes through each layer together
        moving = sum(self._stream(seq_id).num_pages for seq_id in self._written)
        pages = len(seq.tables[0].away) * (seq.tables[0].num_blocks + 1)
        if self._bearable(moving, pages):
            return n
        self.num_waits += 1
        return 0

    def _bearable(self, moving: int, pages: int) -> bool:
        """Whether a step that decodes, and moves so many pages, should move so many more for one more token: it keeps
        the bound, and tokens per second do not fall. Nobody knows before steps of two kinds have been seen."""
        least_s, before_s, after_s = map(self.rate.step_s, (0, moving, moving + pages))
        if least_s is None or before_s is None or after_s is None:
            return True
        most_s = MOST * least_s if self._most_s is None else self._most_s
        return after_s <= most_s and after_s * self._num_rows <= before_s * (self._num_rows + 1)

    def _give_way(self) -> bool:
        """Whoever waits because others decode goes on: there are none."""
        gives = bool(self._away) and not self._must_run
        self._must_run = True
        return gives

    def _fetch(self, seq: Sequence, start: int) -> None:
        """As many layers come back as there is memory for, beside what others may need."""
        theirs = sum(len(pages) for away, _ in self._away.values() for pages in away.tables[0].held_pages)
        nobody = self._pool.num_free_pages + theirs == self._pool.num_slabs * self._width  # has whole blocks
        spare = 0 if nobody else self._away[seq.seq_id].aside * self._width
        if self._column[0]:
            spare = self._promised() + self._column[1]
        while seq.seq_id in self._away and self._bring_back(seq, start, spare=spare):
            pass

    # -- growth --------------------------------------------------------------------------------------------------

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """As `KVManager.grow`; of layers that are away, blocks in host memory and in both sets grow."""
        start = seq.num_computed + seq.num_inflight
        num_new = self._blocks(num_tokens) - seq.tables[0].num_blocks
        while seq.seq_id in self._away:
            if self._grow_away(seq, num_new):
                self._written[seq.seq_id] = (start, num_tokens)
                seq.writable = 0  # every step has to be planned
                return True
            if not self._bring_back(seq, start, spare=0):
                return False
        return super().grow(seq, num_tokens)

    def _grow_away(self, seq: Sequence, num_new: int) -> bool:
        if num_new <= 0:
            return True
        table = seq.tables[0]
        lines: list[list[int]] = table.layers
        away: list[int] = table.away
        num_lines = self._width - len(away) + NUM_SETS
        first = len(lines[0])
        lacking = first + num_new - len(self._homes[seq.seq_id])
        room = self._room.reserve([Want(0, 0, num_new * num_lines)])
        homes = self.swaps.tier.prepare_store([lacking]) if room else None
        if homes is None:
            return False
        self._homes[seq.seq_id] += homes[0]
        pages = self._pool.alloc_pages(num_new * num_lines)
        assert pages is not None, "there was room"
        for layer, line in enumerate(lines):
            turn = away.index(layer) if layer in away else -1
            if turn < NUM_SETS:
                fresh, pages = pages[:num_new], pages[num_new:]
                self.outbox.zero_pages(0, fresh)
            else:
                fresh = lines[away[turn % NUM_SETS]][first:]
            line += fresh
            self.outbox.table(seq.seq_id, 0, first, fresh, layer)
        return True

    def _bring_back(self, seq: Sequence, start: int, *, spare: int) -> bool:
        """One more layer of `seq` stays on the device, if there are pages for it beyond `spare`. With NUM_SETS layers
        away none is: each has a set of its own. False: nothing changed."""
        table = seq.tables[0]
        num_blocks = table.num_blocks
        if not num_blocks or self._pool.num_free_pages < num_blocks + spare:
            return False
        layer = table.away.pop(0)
        pages = self._pool.alloc_pages(num_blocks)
        assert pages is not None, "there was room"
        table.layers[layer][:] = pages
        self.outbox.table(seq.seq_id, 0, 0, pages, layer)
        self._load(seq, layer, start)
        self.num_brought_back += 1
        if len(table.away) == NUM_SETS:
            # The sets hold what these had when they last took turns: they were the last to.
            self.num_brought_back += NUM_SETS
            self._forget(seq)
        return True

    def _load(self, seq: Sequence, layer: int, num_tokens: int) -> None:
        """Plan to copy what a layer has of the first so many tokens from where it is."""
        move, pages = self.swaps.next_move(), seq.tables[0].layers[layer]
        known = self._blocks(num_tokens)
        self.outbox.zero_pages(0, pages[known:])
        for block, home in enumerate(self._homes[seq.seq_id][:known]):
            self.outbox.add(LoadOp(0, home * self._width + layer, pages[block], 1, move))

    def _forget(self, seq: Sequence) -> None:
        """Nothing of `seq` is away any more."""
        seq.tables[0].away = []
        self.swaps.tier.evict([self._homes.pop(seq.seq_id)])
        del self._away[seq.seq_id]
        self._written.pop(seq.seq_id, None)

    def swap_out(self, seq: Sequence) -> bool:
        """As `KVManager.swap_out`: what is away stays where it is, only layers that had come back are copied."""
        if seq.seq_id not in self._away or not seq.num_computed:
            return super().swap_out(seq)
        assert seq.num_inflight == 0, f"{seq} is swapped out while a step works on it"
        table, homes = seq.tables[0], self._homes[seq.seq_id]
        num_tokens = seq.num_computed
        used = self._blocks(num_tokens)
        for layer in set(range(self._width)).difference(table.away):
            for page, home in zip(table.layers[layer], homes[:used], strict=False):
                self.outbox.add(StoreOp(0, page, home * self._width + layer, 1))
        self.swaps.tier.prepare_load([homes[:used]])  # a holder of their own
        self.release(seq)
        seq.swapped = Swapped(num_tokens, [homes[:used]], None)
        return True

    def release(self, seq: Sequence) -> None:
        self._inside.pop(seq.seq_id, None)
        pages = seq.tables[0].held_pages if seq.seq_id in self._away else None
        if pages is not None:
            self._forget(seq)
            seq.tables[0].layers = pages  # each once
        super().release(seq)

    # -- steps ---------------------------------------------------------------------------------------------------

    def drain(self) -> tuple[list[TableUpdate], list[AnyPageOp]]:
        for seq_id in self._written:
            self.outbox.add(self._stream(seq_id))
        self._written.clear()
        self._entered.clear()
        self._must_run = False
        return super().drain()

    def _stream(self, seq_id: int) -> StreamOp:
        table, (start, end) = self._away[seq_id].seq.tables[0], self._written[seq_id]
        sets = tuple(tuple(table.layers[layer]) for layer in table.away[:NUM_SETS])
        homes = tuple(home * self._width for home in self._homes[seq_id])
        old, first, last = self._blocks(start), start // self.block_size, self._blocks(end)
        return StreamOp(0, tuple(table.away), sets, homes, old, first, last)

    def _measure(self, output: SchedulerOutput, result: StepOutput) -> int:
        if output.scheduled and all(row.num_tokens == 1 for row in output.scheduled):
            moved = sum(op.num_pages for op in output.page_ops if isinstance(op, StreamOp))
            self.rate.stepped(moved, result.duration_s)
            self._num_rows = len(output.scheduled)
        return 0

    def stats(self) -> KVStats:
        return replace(
            super().stats(), num_layerwise=self.num_layerwise, num_layers_back=self.num_brought_back,
            num_layer_waits=self.num_waits,
        )  # fmt: skip

    def check_invariants(self, live: Iterable[Sequence]) -> None:
        """As for KVManager; also that what is away is whole, and takes its sets in turns."""
        live = list(live)
        super().check_invariants(live)
        owners = {seq.seq_id for seq in live if seq.tables and seq.tables[0].away}
        assert owners == self._away.keys() == self._homes.keys(), "layers are away of sequences that have none"
        for seq, _ in self._away.values():
            table = seq.tables[0]
            assert len(table.away) > NUM_SETS, f"{seq}: every layer that is away has a set of its own"
            assert table.num_blocks == len(self._homes[seq.seq_id]), f"{seq}: blocks are not all in host memory"
            for turn, layer in enumerate(table.away):
                own = table.layers[table.away[turn % NUM_SETS]]
                assert table.layers[layer] == own, f"{seq}: layer {layer} has pages of its own and is away"
