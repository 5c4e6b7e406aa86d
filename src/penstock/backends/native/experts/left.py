"""Experts that stay in a file, as the settings want it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.backends.native.emit import Emitted
from penstock.backends.native.experts import ORDERS, PREDICTORS
from penstock.backends.native.experts.cache import ExpertCache
from penstock.backends.native.experts.routers import LayerRouter, routers_of, with_weights
from penstock.backends.native.experts.stops import ExpertStops, layer_of
from penstock.base.cache import cache_folder
from penstock.model.graph import Graph
from penstock.ops.native.filed import SpillFile
from penstock.ops.native.matrix import Packed


class LeftExperts:
    """`num_bytes`: memory for experts, of all programs over one model. `eviction`: of `ORDERS`. `prediction`: of
    `PREDICTORS`, with an option behind a colon; or none."""

    def __init__(self, num_bytes: int, eviction: str, prediction: str) -> None:
        self._num_bytes, self._order = num_bytes, ORDERS.get(eviction)
        name, _, self._option = prediction.partition(":")
        self._predictor = None if name == "none" else PREDICTORS.get(name)

    def spill(self) -> SpillFile:
        """Where what is packed by this process stays. Raises ModelError if the disk does not take it."""
        return SpillFile(cache_folder("weights"))

    def routers(self, graph: Graph) -> list[LayerRouter | None]:
        """What `stops` needs of a graph before it is fused."""
        return [] if self._predictor is None else routers_of(graph)

    def stops(
        self, code: Emitted, matrices: Mapping[str, Packed], routers: Sequence[LayerRouter | None],
        rows: Mapping[str, list[tuple[str, int]]], library: Any,
    ) -> ExpertStops | None:  # fmt: skip
        """`rows`: names and numbers of rows that each matrix is packed of. None for a model without experts in a
        file. Raises ConfigError if a layer's do not fit into `num_bytes`."""
        layers = {call.name: layer_of(call, matrices) for call in code.experts}
        if not any(any(layer.pieces) for layer in layers.values()):
            return None
        cache = ExpertCache([*layers.values()], self._num_bytes, self._order)
        predictor = None
        if self._predictor is not None:
            known = with_weights(routers, matrices, rows, library)
            predictor = self._predictor(known, [len(layer.pieces) for layer in layers.values()], self._option)
        return ExpertStops(cache, code.experts, code.bounds, predictor)
