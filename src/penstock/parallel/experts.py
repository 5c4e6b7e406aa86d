"""Experts of a mixture over ranks: some outputs of every expert on each of them, or whole experts.

By outputs, each rank makes some of the numbers between an expert's products, all ranks put these side by side, and each
makes some of the last product's outputs of them. With whole experts a rank computes what chose its own, and results go
to the rank that combines the token: the all-to-all of expert parallelism (GShard, Lepikhin et al., arXiv 2006.16668,
section 3), whose first half is empty here, because every rank has every token's row. Both are inside PST_EXPERTS.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.base.bf16 import F32
from penstock.core.model_spec import Experts, ModelSpec, weight_shapes
from penstock.ops.ref.experts import ExpertWeights
from penstock.ops.stored import StoredMatrix, Weight
from penstock.parallel.comm import Comm
from penstock.plan.ranks import Ranges, expert_ranges


class ExpertSplit(NamedTuple):
    """How the ranks of `comm` exchange within the experts of a layer, one of both: `widths`, of each one's numbers
    between the products; `starts` [ranks + 1], where each one's experts begin."""

    comm: Comm
    widths: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()


def rows_of(weight: Weight, first: int, last: int) -> Weight:
    """Rows first ... last - 1 of a matrix [N, K], as it is: nothing is read, decoded or rounded."""
    return weight.rows(first, last) if isinstance(weight, StoredMatrix) else weight[first:last]


def by_outputs(weights: Sequence[ExpertWeights], inner: Ranges, outputs: Ranges, rank: int) -> list[ExpertWeights]:
    """Of every expert what `rank` has: rows `inner` of gate and up, `outputs` of down; where there are none, all."""

    def rows(weight: Weight, ranges: Ranges) -> Weight:
        return rows_of(weight, *ranges[rank]) if ranges else weight

    def numbers(bias: F32 | None, ranges: Ranges) -> F32 | None:
        return bias if bias is None or not ranges else bias[slice(*ranges[rank])]

    return [
        ExpertWeights(
            None if w.gate is None else rows(w.gate, inner), rows(w.up, inner), rows(w.down, outputs),
            numbers(w.gate_bias, inner), numbers(w.up_bias, inner), numbers(w.down_bias, outputs), w.name,
        )
        for w in weights
    ]  # fmt: skip


def elsewhere(spec: ModelSpec, rank: int, size: int) -> frozenset[str]:
    """The weights of experts that are whole on other ranks."""
    own: dict[str, range] = {}
    for n, layer in enumerate(spec.layers):
        if isinstance(layer.ffn, Experts):
            own[f"layers.{n}"] = range(*expert_ranges(layer.ffn.num_experts, size)[rank])
    names = set()
    for name in weight_shapes(spec):
        prefix, found, rest = name.partition(".experts.")
        if found and int(rest.split(".")[0]) not in own[prefix]:
            names.add(name)
    return frozenset(names)
