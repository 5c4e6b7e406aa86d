"""Which tokens of a step have which adapter, as the kernels read it. Torch-free."""

from __future__ import annotations

import numpy as np

from penstock.ops.adapters import tokens_of
from penstock.ops.plan import I32, StepPlan

TILE = 16
"""`kernels.adapters.TILE`, which cannot be imported without Triton."""


def numbers_of_adapters(plan: StepPlan, least: int = 1) -> dict[str, I32]:
    """What the kernels read of a step, by its key in `step.memo`: tokens by adapter, and tiles of them.

    Shapes: order int32 [P], tiles int32 [N, 3], see `kernels.adapters.adapt`; P and N are `least` at least.
    """
    order, tiles = np.zeros(0, np.int32), np.zeros((0, 3), np.int32)
    if plan.adapters is not None:
        of_token = tokens_of(plan.adapters, plan.query_start_loc)
        order = np.argsort(of_token, kind="stable")[np.count_nonzero(of_token < 0) :].astype(np.int32)
        own = of_token[order]
        begins = np.flatnonzero(np.diff(own, prepend=-1))
        ends = np.append(begins, len(own))[1:]
        per = -(-(ends - begins) // TILE)
        which = np.repeat(np.arange(len(begins)), per)
        first = begins[which] + TILE * (np.arange(len(which)) - np.repeat(np.cumsum(per) - per, per))
        tiles = np.stack([own[first], first, np.minimum(TILE, ends[which] - first)], axis=1).astype(np.int32)
    more = max(0, least - len(order)), max(0, least - len(tiles))
    return {
        "adapter_order": np.concatenate([order, np.zeros(more[0], np.int32)]),
        "adapter_tiles": np.concatenate([tiles, np.full((more[1], 3), -1, np.int32)]),
    }
