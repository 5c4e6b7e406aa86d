"""The routers of a model, for whoever predicts what they will choose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from penstock.base.bf16 import F32
from penstock.core.router import Router
from penstock.model.graph import Graph
from penstock.ops.native.matrix import Packed
from penstock.ops.ref.experts import route


class LayerRouter(NamedTuple):
    """One layer's: its matrix [X, E] once it is known, by `name`. `norm`: [E], what the norm whose rows it reads
    multiplies by, if it is one; `reads`: whether its experts read the same rows."""

    name: str
    num_experts: int
    top_k: int
    router: Router
    correction: F32 | None
    norm: F32 | None
    reads: bool
    bias: F32 | None = None
    weight: F32 | None = None

    def choose(self, rows: F32, most: int) -> list[int]:
        """The experts that rows [T, E] would choose first, up to `most` each: those of most rows first."""
        assert self.weight is not None, "only where it is known"
        logits = rows @ self.weight.T
        if self.bias is not None:
            logits = logits + self.bias
        ids = route(logits, most, self.router, self.correction).ids
        votes = np.bincount(ids.reshape(-1), minlength=self.num_experts)
        order = np.lexsort((-logits.mean(axis=0), -votes))
        found: list[int] = order[: np.count_nonzero(votes)].tolist()
        return found


def routers_of(graph: Graph) -> list[LayerRouter | None]:
    """Of each node `experts` of a graph that no pass has touched; None where no product chooses."""
    found: list[LayerRouter | None] = []
    for node in graph.nodes:
        if node.op != "experts":
            continue
        routes = node.inputs[1].maker
        product = None if routes is None or routes.op != "route" else routes.inputs[0].maker
        if routes is None or product is None or product.op != "linear":
            found.append(None)
            continue
        top_k, router, correction = routes.bound[:3]
        norm = product.inputs[0].maker
        known = norm is not None and norm.op in ("rms_norm", "layer_norm")
        found.append(
            LayerRouter(
                product.weights[0], product.bound[0].shape[0], top_k, router, correction,
                np.asarray(norm.bound[0], np.float32) if known and norm is not None else None,
                node.inputs[0].same(product.inputs[0]),
                *(np.asarray(b, np.float32) for b in product.bound[1:2] if b is not None),
            )
        )  # fmt: skip
    return found


def with_weights(
    routers: Sequence[LayerRouter | None], matrices: Mapping[str, Packed], rows: Mapping[str, list[tuple[str, int]]],
    library: Any,
) -> list[LayerRouter | None]:  # fmt: skip
    """The routers with their matrices, out of the packed ones: `rows` says which names and how many rows these hold."""
    place = {name: (run, at) for run, parts in rows.items() for at, (name, _) in enumerate(parts)}
    found: list[LayerRouter | None] = []
    for router in routers:
        if router is None or router.name not in place:
            found.append(None)
            continue
        run, at = place[router.name]
        first = sum(n for _, n in rows[run][:at])
        packed = matrices[run]
        values = packed.values(library)[first : first + router.num_experts]
        if packed.order is not None:
            values[:, packed.order] = values.copy()
        found.append(router._replace(weight=values))
    return found
