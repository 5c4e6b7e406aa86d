"""The rank's side of a KV selection: what lines hold, what attention says of it, and moving what stays.

The scheduler says when and how much (`ScheduledRow.keeps`), the selector says what, the KV manager says where to
(`kv.selection`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from penstock.base.bf16 import F32
from penstock.core.batch import ScheduledRow, SchedulerOutput, Selected
from penstock.core.mixers.attention import Attention
from penstock.core.model_spec import ModelSpec
from penstock.core.page_ops import HOST, PackOp
from penstock.core.selection import KVLine, KVSelector, Selecting
from penstock.ops.plan import I32, Planes
from penstock.ops.ref.storage import read_kv
from penstock.runner.levels import Levels
from penstock.runner.rows import Row, RowStore
from penstock.runner.set_aside import Whole
from penstock.runner.storage import Storage
from penstock.runner.weighing import Score, attention_weights

GROUP = 0
"""Selections are for models whose layers share one cache group."""


class _Sequence:
    """What is known of one sequence.

    Attributes:
        old: [n] of each line: which of the tokens before `cut` it holds.
        cut: where the last selection took place; all tokens from there on are held.
        stats: a selector's numbers about each token that a line holds.
        queries: the last tokens' queries, [t, H, D] of each layer, which ended at position `end`.
        choice: slots that each line keeps, by the newest selection, until it has been carried out.
        aside: where all tokens before `cut` are, if none was lost (`BlockTable.aside`); `whole`: none is ever lost.
        before: what was so before the choice was carried out.
        levels: of each line, if some tokens are at half the bits: what it held at `cut`; `chosen`: what it shall hold;
            `had`: what it held when that was chosen.
    """

    def __init__(self, num_lines: int, num_layers: int, *, whole: bool) -> None:
        self.old: list[I32] = [np.zeros(0, np.int32)] * num_lines
        self.cut = 0
        self.stats: list[dict[str, F32]] = [{} for _ in range(num_lines)]
        self.queries: list[F32 | None] = [None] * num_layers
        self.end = 0
        self.choice: list[I32] | None = None
        self.whole = whole
        self.aside: tuple[int, ...] = ()
        self.before = self.where
        self.levels: list[Levels] | None = None
        self.chosen: list[Levels] = []
        self.had: list[Levels] = []

    def held(self) -> list[Levels]:
        """Of each line, with the tokens behind `cut`."""
        assert self.levels is not None
        fresh = np.arange(self.cut, self.end, dtype=np.int32)
        return [Levels(line.low, np.concatenate([line.whole, fresh])) for line in self.levels]

    @property
    def where(self) -> Whole:
        return Whole(self.aside, self.cut, [len(old) for old in self.old])

    def positions(self) -> list[I32]:
        """[n] of each line: which tokens it holds."""
        if self.whole:
            return [np.arange(self.end, dtype=np.int32)] * len(self.old)
        if self.levels is not None:
            return [line.positions for line in self.held()]
        fresh = np.arange(self.cut, self.end, dtype=np.int32)
        return [np.concatenate([old, fresh]) for old in self.old]

    def carry_out(self) -> None:
        """The tables begin anew, as was chosen."""
        assert self.choice is not None
        if self.levels is not None:
            self.levels, self.cut = self.chosen, self.end
            return
        self.before = self.where
        self.old = [p[kept] for p, kept in zip(self.positions(), self.choice, strict=True)]
        self.cut = self.end
        if self.whole:
            return
        self.stats = [
            {name: x[kept] for name, x in stats.items()} for stats, kept in zip(self.stats, self.choice, strict=True)
        ]

    def copy(self) -> _Sequence:
        other = _Sequence(len(self.stats), len(self.queries), whole=self.whole)
        other.levels, other.chosen, other.had = self.levels, self.chosen, self.had
        other.old, other.cut, other.aside, other.before = list(self.old), self.cut, self.aside, self.before
        other.stats = [dict(stats) for stats in self.stats]
        other.queries, other.end, other.choice = list(self.queries), self.end, self.choice
        return other


class RowSelections:
    """`observe`: last tokens whose queries are remembered.

    Raises nothing: what a model cannot do was refused by `launch.selection`.
    """

    def __init__(
        self, selector: KVSelector, spec: ModelSpec, rows: RowStore, storage: Storage, *, observe: int
    ) -> None:
        self.selector = selector
        self._rows, self._storage = rows, storage
        self._observe = observe
        group = rows.groups[GROUP]
        self._lanes = group.spec.lanes
        self._scores: list[Score] = []
        for n in group.layers:
            mixer = spec.layers[n].mixer
            assert isinstance(mixer, Attention), "launch.selection has looked"
            scale = mixer.head_dim**-0.5 if mixer.scale is None else mixer.scale
            self._scores.append(Score(mixer.num_kv_heads, scale, mixer.soft_cap))
        self._layers = group.layers
        self.num_fetched = self.num_scored = 0
        """Tokens of lines that were read in host memory, since start: chosen ones; those whose keys were weighed."""
        self._known: dict[int, _Sequence] = {}
        self._left: dict[int, _Sequence] = {}
        """Those that this step removes: what they chose may still have to move, for their forks."""

    @property
    def _far(self) -> Planes:
        return dict(self._storage.tiers[HOST].look(GROUP))

    @property
    def watching(self) -> bool:
        """Whether the forward pass has to give its queries."""
        return self.selector.watches != "nothing"

    # -- rows and memory -----------------------------------------------------------------------------------------

    def track(self, output: SchedulerOutput) -> None:
        """The row lists of a step, once the rows have changed; before `pack`."""
        for fork in output.forked:
            self._known[fork.child_id] = self._known[fork.parent_id].copy()
        self._left = {seq_id: self._known.pop(seq_id) for seq_id in output.removed}
        num_lines = len(self._layers) * self._lanes
        for added in output.added:
            known = self._known[added.seq_id] = _Sequence(num_lines, len(self._layers), whole=self.selector.aside)
            if self.selector.halves:
                known.levels = [Levels(np.zeros(0, np.int32), np.zeros(0, np.int32))] * num_lines
        # A sequence whose tables begin anew has been cut as it chose; so has the copy of one.
        for seq_id in {u.seq_id for u in output.tables if u.dropped >= 0}:
            known = self._known[seq_id]
            if known.choice is not None:
                known.carry_out()
            if known.levels is not None:
                low = [line.num_low(self._rows.block_size) for line in known.levels]
                self._rows[seq_id].tables[GROUP].low = np.array(low, np.int32)

    def pack(self, op: PackOp) -> None:
        """Move what sequence `op.seq_id` keeps into the pages of its new table. Mutates: the storage's planes.

        New pages may be among the old ones, of any line: all is read before anything is written.
        """
        known = self._left.get(op.seq_id) or self._known.get(op.seq_id)
        if not op.lines:  # what is aside has moved, of one that may have gone meanwhile
            if known is not None:
                known.aside = op.aside
            return
        assert known is not None
        assert known.choice is not None, f"{op}: nothing was chosen"
        if known.whole:
            self._pack_chosen(op, known)
            return
        old = [np.array(ids, np.int32) for ids in op.sources]
        if len(old) < len(op.lines):  # slabs, which have a page of every line
            width = np.int32(len(op.lines))
            old = [old[0] * width + np.int32(line) for line in range(width)]
        if known.levels is not None:
            planes, there = self._storage.planes[op.group], [np.array(ids, np.int32) for ids in op.lines]
            held = [had.take(planes, ids, to) for had, ids, to in zip(known.had, old, known.chosen, strict=True)]
            for to, ids, (raw, numbers) in zip(known.chosen, there, held, strict=True):
                to.put(planes, ids, raw, numbers)
            return
        for plane in self._storage.planes[op.group].values():
            size = plane.shape[1]
            tokens = [plane[pages[k // size], k % size] for pages, k in zip(old, known.choice, strict=True)]
            for moved, pages in zip(tokens, op.lines, strict=True):
                new, slots = np.array(pages, np.int32), np.arange(len(moved))
                plane[new] = 0
                plane[new[slots // size], slots % size] = moved

    def _pack_chosen(self, op: PackOp, known: _Sequence) -> None:
        """What was chosen is copied into the new table; what was not aside yet is, too."""
        assert known.choice is not None
        planes, far = self._storage.planes[op.group], self._far
        width, names = len(op.lines), list(planes)
        # One that has gone is not carried out any more; a fork may need what it chose.
        where, end = known.before if known.cut == known.end else known.where, known.end
        first, sources = end, op.sources
        if any(sources):
            first = min(end, where.first_new(op.aside, self._rows.block_size) * self._rows.block_size)
        else:
            where, sources = where._replace(aside=op.aside, cut=end), op.lines
        fresh = np.arange(first, end, dtype=np.int32)
        chosen = [where.read(planes, far, names, i, width, sources[i], known.choice[i]) for i in range(width)]
        others = [where.read(planes, far, names, i, width, sources[i], fresh) for i in range(width)]
        self.num_fetched += sum(where.num_far(known.choice[i], self._rows.block_size) for i in range(width))
        for name, plane in planes.items():
            size = plane.shape[1]
            for i in range(width):
                pages = np.array(op.lines[i], np.int32)
                kept = chosen[i][name]
                slots = np.arange(len(kept))
                plane[pages] = 0
                plane[pages[slots // size], slots % size] = kept
                if len(fresh):
                    aside = np.array(op.aside, np.int32)
                    plane[aside[first // size :] * width + i] = 0
                    plane[aside[fresh // size] * width + i, fresh % size] = others[i][name]
        known.aside = op.aside

    # -- a step --------------------------------------------------------------------------------------------------

    def after(self, scheduled: Sequence[ScheduledRow], starts: I32, queries: Sequence[F32]) -> list[Selected]:
        """Once a step has run: remember its queries, let the selector watch, and choose for the rows that ask for it.

        Shapes: starts [B+1], where the rows' tokens are; queries[i] [T, H, D] of the group's i-th layer, rotated; none
        for a selector that watches nothing.
        """
        out: list[Selected] = []
        for b, job in enumerate(scheduled):
            known = self._known[job.seq_id]
            known.choice = None
            row = self._rows[job.seq_id]
            end = job.start + job.num_tokens
            own = [q[starts[b] : starts[b + 1]] for q in queries]
            self._remember(known, own, end)
            if self.selector.watches == "all":
                for i, line in enumerate(self._lines(known, row)):
                    weights = self._weigh(known, row, i, line.positions, own[i // self._lanes], end)
                    self.selector.watch(line, weights, job.start)
            if job.keeps:
                out.append(self._choose(job, known, row, end))
        return out

    def _remember(self, known: _Sequence, own: Sequence[F32], end: int) -> None:
        known.end = end
        for i, q in enumerate(own):
            before = known.queries[i]
            held = q if before is None else np.concatenate([before, q])
            known.queries[i] = held[-self._observe :].copy()

    def _lines(self, known: _Sequence, row: Row) -> list[KVLine]:
        lines = []
        for i, (stats, positions) in enumerate(zip(known.stats, known.positions(), strict=True)):
            layer, lane = divmod(i, self._lanes)
            for name, x in stats.items():
                if len(x) < len(positions):
                    stats[name] = np.concatenate([x, np.zeros(len(positions) - len(x), np.float32)])
            lines.append(
                KVLine(
                    self._layers[layer], lane, positions, stats,
                    keys=partial(self._read, "k", known, row, i, len(positions)),
                    values=partial(self._read, "v", known, row, i, len(positions)),
                    recent=partial(self._recent, known, row, i, positions),
                )
            )  # fmt: skip
        return lines

    def _choose(self, job: ScheduledRow, known: _Sequence, row: Row, end: int) -> Selected:
        lines = self._lines(known, row)
        at = Selecting(end, row.prompt_len, job.keeps, row.tokens[:end])
        if known.levels is not None:
            known.had = known.held()
            for view, had in zip(lines, known.had, strict=True):
                view.coarse = had.coarse
            found = zip(known.had, *self.selector.levels(at, lines), strict=True)
            known.chosen = [had.cut(whole, middle, self._rows.block_size) for had, whole, middle in found]
            known.choice = [to.whole for to in known.chosen]
            return Selected(job.seq_id, GROUP, [to.num_slots() for to in known.chosen])
        kept = self.selector.select(at, lines)
        known.choice = kept
        for line, stats in zip(lines, known.stats, strict=True):
            assert line.stats is stats, "a selector's numbers stay where they are"
        return Selected(job.seq_id, GROUP, [len(k) for k in kept])

    # -- attention -----------------------------------------------------------------------------------------------

    def _read(self, name: str, known: _Sequence, row: Row, line: int, num_slots: int) -> F32:
        """What a line holds [n, D]; of a group without lanes, all its heads side by side [n, G * D]."""
        if known.levels is not None:
            held = known.held()[line]
            own = row.tables[GROUP].pages_of(line, 0, -(-held.num_slots() // self._rows.block_size))
            return held.read(self._storage.planes[GROUP], name, own).reshape(num_slots, -1)
        if known.aside:
            planes, where = self._storage.planes[GROUP], known.where
            size, num_lines = self._rows.block_size, len(known.old)
            own = row.tables[GROUP].pages_of(line, 0, -(-(num_slots - known.cut + len(known.old[line])) // size))
            names = [plane for plane in planes if plane.startswith(name)]
            every = np.arange(num_slots, dtype=np.int32)
            self.num_scored += where.num_far(every, size)
            tokens = where.read(planes, self._far, names, line, num_lines, own, every)
            one_page = {plane: x[None] for plane, x in tokens.items()}
            return read_kv(one_page, name, np.zeros(1, np.int32), 0, num_slots).reshape(num_slots, -1)
        pages = row.tables[GROUP].pages_of(line, 0, -(-num_slots // self._rows.block_size))
        x = read_kv(self._storage.planes[GROUP], name, pages, 0, num_slots)
        return x.reshape(num_slots, -1)

    def _recent(self, known: _Sequence, row: Row, line: int, positions: I32) -> F32:
        queries = known.queries[line // self._lanes]
        assert queries is not None, "the selector watches nothing"
        return self._weigh(known, row, line, positions, queries, known.end)

    def _weigh(self, known: _Sequence, row: Row, line: int, positions: I32, q: F32, end: int) -> F32:
        """Weights [t, H/G, n] of queries [t, H, D], the last t tokens before position `end`, over a line's slots."""
        layer, lane = divmod(line, self._lanes)
        score = self._scores[layer]
        keys = self._read("k", known, row, line, len(positions))
        if self._lanes == score.num_kv_heads:
            per = q.shape[1] // score.num_kv_heads
            return attention_weights(q[:, lane * per : (lane + 1) * per], keys, positions, end, score)
        per_head = keys.reshape(len(keys), score.num_kv_heads, -1)
        per = q.shape[1] // score.num_kv_heads
        parts = [
            attention_weights(q[:, g * per : (g + 1) * per], per_head[:, g], positions, end, score)
            for g in range(score.num_kv_heads)
        ]
        return np.concatenate(parts, axis=1)
