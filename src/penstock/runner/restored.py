"""Blocks that come back as hidden states: keys and values are made of them before anybody hears that they are there.

Source: HCache, Gao et al., arXiv 2410.05004. What was read is restored while more is read, so neither the link nor the
processor waits for the other; beside steps that compute, a bounded part before each.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence

import numpy as np

from penstock.core.cache_spec import CacheGroup
from penstock.core.page_ops import GetOp, OutsideOp
from penstock.model.forward import Forward
from penstock.ops.plan import GroupPlan, Planes, StepPlan
from penstock.runner.block_files import BlockFiles
from penstock.runner.outside import Outside

RESTORED_TOKENS = 512
"""At most so many are restored before a step, and behind it, as a chunk of a prompt is bounded: others wait for it."""
_NONE = np.zeros(0, np.int32)


class Restorer:
    """Writes keys and values of blocks whose hidden states are in their pages. `forward`: of a graph that
    `model.restoring` made over `planes`; `groups`: the model's, of which there is one."""

    def __init__(
        self, forward: Forward, planes: Sequence[Planes], groups: Sequence[CacheGroup], block_size: int
    ) -> None:
        (group,) = groups
        self._forward, self._planes = forward, planes
        self._width, self._size = group.pages_per_slab, block_size

    def restore(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Blocks as (which of its text it is, first page of its slab). Mutates: planes, at these pages."""
        size, count = self._size, len(blocks)
        within = np.arange(size, dtype=np.int32)
        first = np.array([page for _, page in blocks], np.int32)[:, None]
        start = np.array([number * size for number, _ in blocks], np.int32)[:, None]
        tables = []
        for number, page in blocks:
            table = np.zeros((1, number + 1), np.int32)  # what comes before is not looked at
            table[0, number] = page // self._width
            tables.append(table)
        plan = StepPlan(
            token_ids=(first * size + within).reshape(-1), positions=(start + within).reshape(-1),
            query_start_loc=np.arange(count + 1, dtype=np.int32) * size, seq_lens=start[:, 0] + size,
            logits_indices=_NONE, groups=(GroupPlan(self._width, size, tuple(tables)),),
        )  # fmt: skip
        self._forward.run(plan, self._planes)


class RestoredOutside(Outside):
    """Tiers of hidden states. A block is told as read when it has been restored, a load when all its blocks have."""

    def __init__(self, tiers: Mapping[int, BlockFiles], restorer: Restorer, block_size: int) -> None:
        super().__init__(tiers)
        self._restorer, self._most = restorer, max(1, RESTORED_TOKENS // block_size)
        self._asked: dict[int, GetOp] = {}
        self._read: deque[GetOp] = deque()
        self._left: Counter[int] = Counter()  # of each load, blocks that were read and are to be restored
        self._untold: dict[int, bool] = {}
        self._restore_s = 0.0

    def order(self, op: OutsideOp) -> None:
        if isinstance(op, GetOp):
            self._asked[op.block] = op
        super().order(op)

    def ended(self, wait_s: float = 0.0) -> dict[int, bool]:
        """As `Outside.ended`; restores some of what was read. Mutates: pages of loads that have not ended."""
        told: dict[int, bool] = {}
        for number, good in super().ended(0.0 if self._read else wait_s).items():
            op = self._asked.pop(number, None)
            if op is not None and good:
                self._read.append(op)
                self._left[op.move] += 1
            else:
                self._untold[number] = good
        blocks = [self._read.popleft() for _ in range(min(self._most, len(self._read)))]
        if blocks:
            began = time.perf_counter()
            self._restorer.restore([(int(op.path.rpartition("-")[2], 16), op.pages[0]) for op in blocks])
            self._restore_s += time.perf_counter() - began
        for op in blocks:
            told[op.block] = True
            self._left[op.move] -= 1
        for number in [n for n in self._untold if self._left[n] <= 0]:
            told[number] = self._untold.pop(number)
            self._left.pop(number, None)
        return told

    def took(self) -> dict[int, tuple[int, float, float]]:
        """As `Outside.took`. Restoring goes on beside reading, so the longer of both is what a load takes."""
        found = super().took()
        if not any(num_bytes for num_bytes, _, _ in found.values()):
            return found
        restore_s, self._restore_s = self._restore_s, 0.0
        return {tier: (num, max(seconds, restore_s), first_s) for tier, (num, seconds, first_s) in found.items()}
