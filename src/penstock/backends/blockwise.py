"""A program that takes a step's rows through each layer in blocks: attention, and the feed-forward right behind it.

Source: Liu & Abbeel, Blockwise Parallel Transformer, arXiv 2305.19370, section 3. A layer first caches the keys and
values of all its rows, a block at a time; then each block goes through the rest of the layer. Between layers there is
a residual of all rows, and nothing else. What both halves need of a block (the norm in front) is computed twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from penstock.backends.program import BoundCall, Program
from penstock.core.protocols import AttentionBackend
from penstock.model.graph import STEP_INPUTS, Graph
from penstock.ops.plan import StepPlan
from penstock.ops.step import Step
from penstock.ops.table import OpTable
from penstock.parallel.sequence.attention import check_graph


@dataclass(frozen=True)
class _Segment:
    """A layer: the calls that its cache needs, those that its results need, and the registers that it reads from before
    (`given`) and leaves for later (`left`), each with the axis of its rows. `kept`: all that is needed later."""

    caching: tuple[BoundCall, ...]
    rest: tuple[BoundCall, ...]
    given: dict[int, int]
    left: dict[int, int]
    kept: frozenset[int]


class BlockwiseProgram(Program):
    """See `Program`; for models whose rows meet in attention alone."""

    def __init__(self, graph: Graph, ops: OpTable, attention: AttentionBackend, rows: int) -> None:
        """`rows`: of a block. Raises UnsupportedError for a model with operations that need other rows."""
        assert rows > 0, "a block of rows"
        check_graph(graph)
        super().__init__(graph, ops, attention)
        self._rows = rows
        self._before, self._behind = self.code[: self._bounds[0]], self._body[self._bounds[-1] :]
        last = {self._hidden, self._logits}
        self._segments = [_segment(self.code, lo, hi, last) for lo, hi in pairwise(self._bounds)]

    def _run_body(self, registers: list[Any]) -> None:
        step = registers[0]
        num_rows = len(step.plan.positions)
        if num_rows <= self._rows or step.plan.mask is not None or self._pause is not None:
            super()._run_body(registers)
            return
        blocks = [slice(lo, min(lo + self._rows, num_rows)) for lo in range(0, num_rows, self._rows)]
        steps = [Step(_part(step.plan, block), step.planes) for block in blocks]
        self._execute(self._before, registers)
        for segment in self._segments:
            for own, block in zip(steps, blocks, strict=True):
                self._execute(segment.caching, self._own(segment, registers, own, block))
            made: dict[int, Any] = {}
            for own, block in zip(steps, blocks, strict=True):
                found = self._own(segment, registers, own, block)
                self._execute(segment.rest, found)
                for register, axis in segment.left.items():
                    x = found[register]
                    if register not in made:
                        shape = list(x.shape)
                        shape[axis] = num_rows
                        made[register] = np.empty(shape, x.dtype)
                    made[register][(slice(None),) * axis + (block,)] = x
            for register in range(len(STEP_INPUTS), len(registers)):
                if register not in segment.kept:
                    registers[register] = None
            for register, x in made.items():
                registers[register] = x
        self._execute(self._behind, registers)

    @staticmethod
    def _own(segment: _Segment, registers: Sequence[Any], step: Step, block: slice) -> list[Any]:
        """Registers of a block, with what comes from before the layer."""
        own: list[Any] = [None] * len(registers)
        own[: len(STEP_INPUTS)] = [step, step.plan.token_ids, step.plan.positions, step.plan.logits_indices]
        for register, axis in segment.given.items():
            own[register] = registers[register][(slice(None),) * axis + (block,)]
        return own


def _part(plan: StepPlan, block: slice) -> StepPlan:
    """Some rows of a step."""
    starts = np.clip(plan.query_start_loc - np.int32(block.start), 0, block.stop - block.start).astype(np.int32)
    return replace(
        plan, token_ids=plan.token_ids[block], positions=plan.positions[block], query_start_loc=starts,
        logits_indices=plan.logits_indices[:0], hidden_indices=plan.hidden_indices[:0],
    )  # fmt: skip


def _segment(code: Sequence[BoundCall], lo: int, hi: int, last: set[int]) -> _Segment:
    """Calls lo ... hi-1. `last`: registers that are read behind all code."""
    inputs = range(len(STEP_INPUTS))
    written: dict[int, int] = {}
    needs: dict[int, set[int]] = {}
    axes = {call.output: _axis(call) for call in code[:lo]}
    given: dict[int, int] = {}
    for i in range(lo, hi):
        needs[i] = {written[r] for r in code[i].inputs if r in written}
        given |= {r: axes[r] for r in code[i].inputs if r not in written and r not in inputs}
        if code[i].output >= 0:
            written[code[i].output] = i
    kept: set[int] = set()
    gone: set[int] = set()
    for call in code[hi:]:
        kept |= {r for r in call.inputs if r not in gone}
        gone.add(call.output)
    kept |= last - gone
    left = {r: _axis(code[i]) for r, i in written.items() if r in kept}

    def reach(wanted: set[int]) -> tuple[BoundCall, ...]:
        found: set[int] = set()
        todo = list(wanted)
        while todo:
            i = todo.pop()
            if i not in found:
                found.add(i)
                todo += needs[i]
        return tuple(code[i] for i in sorted(found))

    caching = reach({i for i in range(lo, hi) if code[i].op == "write_kv"})
    return _Segment(caching, reach({written[r] for r in left}), given, left, frozenset(kept - set(left)))


def _axis(call: BoundCall) -> int:
    """Of rows, in what a call gives."""
    return 1 if call.op == "rope_angles" else 0
