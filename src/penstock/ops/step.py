"""The handle that ops which read the plan get: a step's plan, its storage, and what is worked out once per step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from penstock.base.errors import EngineError
from penstock.ops.plan import I32, Planes, StepPlan
from penstock.ops.tree import path, slots


class State(NamedTuple):
    """Tokens start ... stop-1 of the step are one sequence's, whose state is in `page`.

    `fresh`: it begins with them, so its state is zeros, whatever the page holds.
    """

    page: int
    start: int
    stop: int
    fresh: bool


class Step:
    """One step while it runs.

    Attributes:
        plan: what runs.
        planes: storage of each cache group, in the order of the plan's groups. Ops that write a cache mutate it.
        memo: room for what an op works out once per step and reads once per layer; keys start with the op's name.
        observed: queries [T, H, D] of the layers that op `observe` has seen so far.
    """

    __slots__ = ("bounds", "memo", "observed", "plan", "planes")

    def __init__(self, plan: StepPlan, planes: Sequence[Planes]) -> None:
        self.plan = plan
        self.planes = planes
        self.bounds: list[int] = plan.query_start_loc.tolist()
        self.memo: dict[Any, Any] = {}
        self.observed: list[Any] = []

    @property
    def num_sequences(self) -> int:
        return len(self.bounds) - 1

    def states(self, group: int, layer: int) -> Iterator[State]:
        """Where every sequence that runs tokens keeps the state of a slot group's layer.

        Raises: EngineError if one has a tree: a state follows one path only.
        """
        if self.plan.mask is not None and self.plan.mask.any():
            raise EngineError("a layer with a recurrent state cannot run a tree of drafts")
        where = self.plan.groups[group]
        for b in range(self.num_sequences):
            start, stop = self.bounds[b], self.bounds[b + 1]
            if start < stop:
                yield State(int(where.pages(b, layer)[0]), start, stop, bool(self.plan.positions[start] == 0))

    def token_pages(self, group: int) -> tuple[I32, I32]:
        """Where this step's tokens live in a paged group: pages [lines, T] and offsets in them, [T] or [lines, T].

        They live at their positions, or, in a tree, at the slots of `ops.tree`; where lines have dropped tokens, so
        much further to the front.
        """
        key = ("token_pages", group)
        if key not in self.memo:
            self.memo[key] = self._find_token_pages(group)
        pages: tuple[I32, I32] = self.memo[key]
        return pages

    def chooses(self, b: int, t: int) -> bool:
        """Whether token `t`, sequence `b`'s, reads chosen pages only, where attention does so. See `StepPlan`."""
        plan = self.plan
        if plan.mask is not None and plan.mask[t]:
            return False
        if plan.choose_from is None:
            return self.bounds[b + 1] - self.bounds[b] == 1
        return bool(plan.positions[t] >= plan.choose_from[b])

    def trees(self, b: int) -> list[list[int]] | None:
        """The tokens of the step that each of sequence `b`'s tokens sees; None: each sees all before it and itself."""
        mask, lo, hi = self.plan.mask, self.bounds[b], self.bounds[b + 1]
        if mask is None or not mask[lo:hi].any():
            return None
        return [[lo + i for i in path(bits, own)] for own, bits in enumerate(mask[lo:hi].tolist())]

    def _find_token_pages(self, group: int) -> tuple[I32, I32]:
        where, plan = self.plan.groups[group], self.plan
        if where.dropped is not None:
            return self._find_kept_pages(group)
        at = plan.positions if plan.mask is None else slots(plan.positions, plan.query_start_loc)
        blocks, offsets = np.divmod(at, np.int32(where.block_size))
        pages = np.empty((where.num_layers, len(blocks)), np.int32)
        lanes = np.arange(where.num_layers, dtype=np.int32)[:, None]
        for b, table in enumerate(where.tables):
            own = slice(self.bounds[b], self.bounds[b + 1])
            ids = table[:, blocks[own]]
            pages[:, own] = ids * np.int32(where.num_layers) + lanes if table.shape[0] == 1 else ids
        return pages, offsets

    def _find_kept_pages(self, group: int) -> tuple[I32, I32]:
        where, plan = self.plan.groups[group], self.plan
        assert plan.mask is None, "a sequence that has dropped tokens runs no tree"
        pages = np.empty((where.num_layers, len(plan.positions)), np.int32)
        offsets = np.empty_like(pages)
        for b in range(self.num_sequences):
            own = slice(self.bounds[b], self.bounds[b + 1])
            for line in range(where.num_layers):
                at = plan.positions[own] - np.int32(where.num_dropped(b, 0, line))
                blocks, offsets[line, own] = np.divmod(at, np.int32(where.block_size))
                pages[line, own] = where.pages(b, 0, line)[blocks]
        return pages, offsets
