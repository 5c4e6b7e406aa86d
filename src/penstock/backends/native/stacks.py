"""Which stacks of matrices the experts of a layer are packed into."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.model.fuse import Part, Same
from penstock.model.graph import Graph, Node
from penstock.ops.native.stack import stackable
from penstock.ops.ref.experts import ExpertWeights


class StackRun(NamedTuple):
    """Experts that follow each other: of each the parts of one matrix, two if `pair`. `heads`: see `matrix.pack`.
    `stacked`: False for the one matrix of a product."""

    matrices: list[tuple[Part, ...]]
    pair: bool
    heads: int = 0
    stacked: bool = True

    @property
    def name(self) -> str:
        """What the stack is called: the names of its weights."""
        return " ".join(part.name for parts in self.matrices for part in parts)

    @property
    def parts(self) -> list[Part]:
        return [part for parts in self.matrices for part in parts]


class ExpertStacks(NamedTuple):
    """The matrices of a layer's experts as PST_EXPERTS takes them: gate and up as a pair, or up alone; or gate, and up
    beside it. Each falls into more than one stack if formats differ."""

    first: list[StackRun]
    beside: list[StackRun]
    down: list[StackRun]

    @property
    def all(self) -> list[StackRun]:
        return [*self.first, *self.beside, *self.down]


class ExpertCall(NamedTuple):
    """One PST_EXPERTS of a program: its place, the registers of what it reads and of routes, and its matrices. `rows`:
    TOKENS or SELECTED."""

    op: int
    x: int
    routes: int
    rows: int
    top_k: int
    stacks: ExpertStacks

    @property
    def name(self) -> str:
        """Of the layer's experts, whatever program runs them."""
        return self.stacks.first[0].name


def expert_stacks(node: Node, same: Same) -> ExpertStacks:
    """Of a node `experts`, found once. Gate and up are pairs if those of every expert are the `same` (see `fuse`)."""
    if "stacks" not in node.more:
        node.more["stacks"] = _expert_stacks(node, same)
    found: ExpertStacks = node.more["stacks"]
    return found


def _expert_stacks(node: Node, same: Same) -> ExpertStacks:
    experts: Sequence[ExpertWeights] = node.bound[0]
    up = [Part(w.name + "up", w.up, w.up_bias) for w in experts]
    gate = [Part(w.name + "gate", w.gate, w.gate_bias) for w in experts if w.gate is not None]
    down = _runs([(Part(w.name + "down", w.down, w.down_bias),) for w in experts], pair=False)
    if not gate:
        return ExpertStacks(_runs([(u,) for u in up], pair=False), [], down)
    if all(same(g.weight, u.weight) for g, u in zip(gate, up, strict=True)):
        return ExpertStacks(_runs(list(zip(gate, up, strict=True)), pair=True), [], down)
    return ExpertStacks(_runs([(g,) for g in gate], pair=False), _runs([(u,) for u in up], pair=False), down)


def _runs(matrices: list[tuple[Part, ...]], *, pair: bool) -> list[StackRun]:
    runs: list[StackRun] = []
    for parts in matrices:
        if runs and stackable(runs[-1].matrices[0][0].weight, parts[0].weight):
            runs[-1].matrices.append(parts)
        else:
            runs.append(StackRun([parts], pair))
    return runs


def stack_runs(graph: Graph, same: Same) -> dict[str, StackRun]:
    """Every stack of a program, by its name."""
    stacks = [expert_stacks(node, same) for node in graph.nodes if node.op == "experts"]
    return {run.name: run for found in stacks for run in found.all}
