"""Keeps what each layer's router has read and chosen, to fit predictors offline and to judge them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from penstock.backends.native.experts.predictor import Expected, LayerRun
from penstock.base.bf16 import F32


class RoutingRecorder:
    """An `ExpertPredictor` that predicts nothing. Of runs of a step that take all tokens."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        self.rows: list[list[F32]] = [[] for _ in sizes]
        self.chosen: list[list[npt.NDArray[np.int64]]] = [[] for _ in sizes]

    def begin(self, rows: Sequence[int], gone: Collection[int]) -> None:
        """Who they are does not matter."""

    def after(self, run: LayerRun) -> Sequence[Expected]:
        if run.owners is not None:
            self.rows[run.layer].append(run.rows.copy())
            self.chosen[run.layer].append(run.chosen)
        return ()

    def used(self) -> F32:
        """[tokens, experts] of all layers: 1 where a token used an expert."""
        num = sum(map(len, self.chosen[0]))
        found = np.zeros((num, sum(self.sizes)), np.float32)
        first = 0
        for chosen, size in zip(self.chosen, self.sizes, strict=True):
            if chosen:  # else the last layer, which runs only where logits are wanted
                np.put_along_axis(found[:, first : first + size], np.concatenate(chosen), 1, axis=1)
            first += size
        return found
