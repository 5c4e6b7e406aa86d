"""Which experts will be asked for next."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from penstock.backends.native.experts.routers import LayerRouter
from penstock.base.bf16 import F32
from penstock.base.errors import ConfigError
from penstock.ops.plan import I32

SURE = 0.5
"""Of the experts that a token is expected to use, so many are fetched: the last ones are the likeliest to be wrong, and
each costs a read."""
Expected = tuple[int, list[int]]
"""A layer, and experts of it, the likeliest first."""


class LayerRun(NamedTuple):
    """What a step has just decided: the layer, the experts [T, K] of each token, the rows [T, E] that they read, and
    the row of the step that each token belongs to, [T]; None where only some tokens' experts are run."""

    layer: int
    chosen: npt.NDArray[np.int64]
    rows: F32
    owners: I32 | None


def sure(top_k: int) -> int:
    """How many of a token's `top_k` experts are fetched ahead."""
    return max(1, round(top_k * SURE))


def no_option(name: str, option: str) -> None:
    """Raises ConfigError if something stood behind the name of a predictor that takes nothing."""
    if option:
        raise ConfigError(f"expert_prediction: {name} takes no option; leave out {option!r}", field="expert_prediction")


class ExpertPredictor(Protocol):
    """Wrong guesses cost reads, and nothing else."""

    def __init__(self, routers: Sequence[LayerRouter | None], sizes: Sequence[int], option: str = "") -> None:
        """`routers` and numbers of experts, of each layer with experts; `option`: what stood behind its name and a
        colon. Raises ConfigError for one that it does not understand."""
        ...

    def begin(self, rows: Sequence[int], gone: Collection[int]) -> None:
        """A step is about to run these sequences; `gone` will not come again."""
        ...

    def after(self, run: LayerRun) -> Sequence[Expected]:
        """Experts of later layers to fetch while this one runs, what is needed first before what is needed later."""
        ...
