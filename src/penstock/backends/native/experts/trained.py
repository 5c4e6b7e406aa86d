"""What was recorded offline says what tokens like these will use, for all layers at once: SiDA (catalogue row C73).

`--expert-prediction trained:FILE`, a file of `tools/expert_predictor.py`: a linear map from the rows that the first
layer's router reads to how likely each expert of each layer is, fitted to recorded routing. It is asked once a step, as
soon as the first layer has chosen; what it names is fetched two layers ahead of its turn. The paper trains a recurrent
network for it, and drops experts that it misses; here a miss is fetched, so no token changes.

Source: Du et al., SiDA, arXiv 2310.18859, section 3.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from penstock.backends.native.experts.predictor import Expected, LayerRun, sure
from penstock.backends.native.experts.routers import LayerRouter
from penstock.base.bf16 import F32
from penstock.base.errors import ConfigError
from penstock.formats.files import quoted

LAYERS_AHEAD = 2
"""Of the layer that runs: what comes much sooner than it is needed puts out what is needed before it."""
_RIDGES = (0.1, 1.0, 10.0, 100.0, 1000.0)
_TOKENS = 64
"""More choose nearly all experts anyhow."""


class TrainedPredictor:
    """See `ExpertPredictor`."""

    def __init__(self, routers: Sequence[LayerRouter | None], sizes: Sequence[int], option: str = "") -> None:
        """`option`: the file. Raises ConfigError if it is none of this model's."""
        self._bounds = np.cumsum([0, *sizes]).tolist()
        self._map, self._mean = read_map(option, self._bounds[-1])
        self._likely: F32 = np.zeros((0, self._bounds[-1]), np.float32)

    def begin(self, rows: Sequence[int], gone: Collection[int]) -> None:
        """Who they are does not matter."""

    def after(self, run: LayerRun) -> Sequence[Expected]:
        layer, top_k = run.layer, run.chosen.shape[1]
        first, last = layer + LAYERS_AHEAD, layer + LAYERS_AHEAD + 1
        if layer == 0:
            rows = run.rows[:: -(-len(run.rows) // _TOKENS)]
            if rows.shape[1] != len(self._map):
                return ()
            self._likely, first = rows @ self._map + self._mean, 1
        found: list[Expected] = []
        for later in range(first, min(last, len(self._bounds) - 1)):
            own = self._likely[:, self._bounds[later] : self._bounds[later + 1]]
            picks = np.argsort(-own, axis=1, kind="stable")[:, : sure(top_k)]
            votes = np.bincount(picks.reshape(-1), minlength=own.shape[1])
            order = np.lexsort((-own.mean(axis=0), -votes))
            found.append((later, order[: np.count_nonzero(votes)].tolist()))
        return found


def fit(rows: F32, used: F32) -> tuple[F32, F32]:
    """The map [E, experts] and what it adds to, by least squares of what tokens [T, E] used [T, experts], with the
    penalty on its size that does best on a fifth that is left out."""
    cut = len(rows) * 4 // 5

    def error(ridge: float) -> float:
        found, mean = _fitted(rows[:cut], used[:cut], ridge)
        return float(np.square(rows[cut:] @ found + mean - used[cut:]).sum())

    return _fitted(rows, used, min(_RIDGES, key=error))


def _fitted(rows: F32, used: F32, ridge: float) -> tuple[F32, F32]:
    """`ridge`: the penalty, in the rows' mean square."""
    mean = used.mean(axis=0)
    square = rows.T @ rows
    square[np.diag_indices(len(square))] += ridge * np.trace(square) / len(square)
    found: F32 = np.linalg.solve(square, rows.T @ (used - mean)).astype(np.float32)
    return found, mean.astype(np.float32)


def read_map(name: str, num_experts: int) -> tuple[F32, F32]:
    """What `fit` gave, from the file it was written to. Raises ConfigError."""
    path = Path(name)
    if not name:
        raise ConfigError(
            "expert_prediction: trained needs a file, as trained:FILE; tools/expert_predictor.py makes one",
            field="expert_prediction",
        )
    try:
        with np.load(path, allow_pickle=False) as file:
            found, mean = file["map"].astype(np.float32), file["mean"].astype(np.float32)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"expert_prediction: {quoted(path)} cannot be read as a predictor ({error}); make it with "
            "tools/expert_predictor.py",
            field="expert_prediction",
        ) from error
    if found.ndim != 2 or mean.shape != (num_experts,) or found.shape[1] != num_experts:
        raise ConfigError(
            f"expert_prediction: {quoted(path)} predicts {mean.size} experts and this model has {num_experts}; make "
            "one for this model",
            field="expert_prediction",
        )
    return found, mean
