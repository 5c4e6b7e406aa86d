"""The next layer's router, asked with this layer's rows: what a layer adds is little beside what there is.

Source: Eliseev and Mazur, "Fast Inference of Mixture-of-Experts Language Models with Offloading", arXiv 2312.17238,
section 3.2 (the next layer's gate on the hidden states of this one).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from penstock.backends.native.experts.predictor import Expected, LayerRun, no_option, sure
from penstock.backends.native.experts.routers import LayerRouter
from penstock.base.bf16 import F32

_TOKENS = 64
"""More choose nearly all experts anyhow."""


class NextRouter:
    """See `ExpertPredictor`. Where both layers' rows come from norms, the next one's weights take the place of this
    one's."""

    def __init__(self, routers: Sequence[LayerRouter | None], sizes: Sequence[int], option: str = "") -> None:
        no_option("router", option)
        self._next: list[LayerRouter | None] = []
        for here, there in zip(routers, [*routers[1:], None], strict=True):
            if here is None or there is None or there.weight is None or not here.reads:
                self._next.append(None)
                continue
            self._next.append(there._replace(weight=_moved(there.weight, here.norm, there.norm)))

    def begin(self, rows: Sequence[int], gone: Collection[int]) -> None:
        """Who they are does not matter."""

    def after(self, run: LayerRun) -> Sequence[Expected]:
        router = self._next[run.layer]
        if router is None:
            return ()
        return [(run.layer + 1, self.choose(run.layer, run.rows[:: -(-len(run.rows) // _TOKENS)], sure(router.top_k)))]

    def choose(self, layer: int, rows: F32, most: int) -> list[int]:
        """What rows [T, E] of `layer` would choose in the next one, up to `most` each: see `LayerRouter.choose`."""
        router = self._next[layer]
        return [] if router is None else router.choose(rows, most)


def _moved(weight: F32, here: F32 | None, there: F32 | None) -> F32:
    if here is None or there is None or not here.all():
        return weight
    moved: F32 = (weight * (there / here)).astype(np.float32)
    return moved
