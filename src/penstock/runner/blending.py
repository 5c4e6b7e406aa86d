"""Modules that stand behind others see them a little: some of their tokens are computed again in the whole context.

The first layers run over all tokens of the modules behind the first. Those whose keys and values in the last of these
layers come out most differently run through all layers (what fills a module up to whole blocks only after all others),
where they see all that stands before them: a step with several runs of tokens over one table, as if each run were a
sequence that ends with it. A layer's writes come before its attention, so later runs read what earlier ones wrote. With
all tokens that is the prompt as if it had no modules.
Source: CacheBlend, Yao et al., arXiv 2405.16444, sections 4.2 (deviations) and 4.3 (which tokens).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from penstock.core.page_ops import BlendOp
from penstock.model.forward import Forward
from penstock.ops.plan import I32, GroupPlan, StepPlan
from penstock.ops.ref.storage import read_kv
from penstock.runner.rows import RowStore
from penstock.runner.storage import Storage

NUM_LAYERS = 2
"""In the first layer keys and values follow from the token alone."""
GROUP = 0
_NONE: I32 = np.zeros(0, np.int32)


class Blender:
    """`forward`: the model, whose layers all keep their context in one group; `part`: layers -> the model without all
    others; `max_tokens`: that a run of either may have; `num_layers`: that all tokens run through again."""

    def __init__(
        self, forward: Forward, part: Callable[[Collection[int]], Forward], rows: RowStore, storage: Storage,
        max_tokens: int, num_layers: int = NUM_LAYERS,
    ) -> None:  # fmt: skip
        self._forward, self._make_part = forward, part
        self._part: Forward | None = None
        self._rows, self._storage, self._most = rows, storage, max_tokens
        self._num_layers = min(num_layers, rows.groups[GROUP].pages_per_slab // rows.groups[GROUP].spec.lanes)

    def blend(self, op: BlendOp) -> None:
        """Mutates: the pages of the sequence's modules behind the first."""
        first, end = op.ends[0], op.ends[-1]
        positions = np.arange(first, end, dtype=np.int32)
        if op.num_tokens < end - first:
            ranked = self._most_changed(op.seq_id, positions)
            filling = self._filling(op)[ranked]
            positions = np.concatenate([ranked[~filling], ranked[filling]])[: op.num_tokens]
        self._run(self._forward, op.seq_id, np.sort(positions))

    def _most_changed(self, seq_id: int, positions: I32) -> I32:
        """The positions, those first whose keys and values a context changes most. Of equals the first."""
        if self._part is None:
            self._part = self._make_part(range(self._num_layers))
        before = self._entries(seq_id, positions)
        self._run(self._part, seq_id, positions)
        changes = [
            ((x - y).astype(np.float64) ** 2).reshape(len(positions), -1).sum(axis=1) / max(float((y**2).mean()), 1e-30)
            for x, y in zip(self._entries(seq_id, positions), before, strict=True)
        ]
        order = np.argsort(-np.sum(changes, axis=0), kind="stable")
        return positions[order]

    def _entries(self, seq_id: int, positions: I32) -> list[npt.NDArray[np.float32]]:
        """Keys, raw, and values of consecutive positions in the last layer that all tokens run through."""
        first, end = int(positions[0]), int(positions[-1]) + 1
        pages = self._plan(seq_id, [(first, end)]).groups[GROUP].pages(0, self._num_layers - 1)
        return [read_kv(self._storage.planes[GROUP], name, pages, first, end).copy() for name in ("k", "v")]

    def _filling(self, op: BlendOp) -> npt.NDArray[np.bool_]:
        """By position: those at the end of a module that say the same as the one before, as what fills it up does."""
        tokens = self._rows[op.seq_id].tokens
        found = np.zeros(op.ends[-1], np.bool_)
        for start, end in pairwise(op.ends):
            at = end - 1
            while at > start and tokens[at - 1] == tokens[end - 1]:
                found[at] = True
                at -= 1
        return found

    def _run(self, forward: Forward, seq_id: int, positions: I32) -> None:
        """Ascending positions, in steps of so many tokens as `forward` takes."""
        for at in range(0, len(positions), self._most):
            own = positions[at : at + self._most]
            cuts = np.flatnonzero(np.diff(own) != 1) + 1
            runs = [(int(run[0]), int(run[-1]) + 1) for run in np.split(own, cuts)]
            forward.run(self._plan(seq_id, runs), self._storage.planes)

    def _plan(self, seq_id: int, runs: Sequence[tuple[int, int]]) -> StepPlan:
        row, size = self._rows[seq_id], self._rows.block_size
        group = self._rows.groups[GROUP]
        table = row.tables[GROUP]
        tables = tuple(table.view(-(-end // size)) for _, end in runs)
        starts = np.cumsum([0] + [end - first for first, end in runs], dtype=np.int32)
        positions = np.concatenate([np.arange(first, end, dtype=np.int32) for first, end in runs])
        return StepPlan(
            token_ids=row.tokens[positions], positions=positions, query_start_loc=starts.astype(np.int32),
            seq_lens=np.array([end for _, end in runs], np.int32), logits_indices=_NONE,
            groups=(GroupPlan(group.pages_per_slab, size, tables, group.spec.lanes),),
        )  # fmt: skip
