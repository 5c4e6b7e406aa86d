"""From a pooled hidden state to an embedding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.base.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


def embedding(pooled: bytes, *, normalize: bool = True, dimensions: int | None = None) -> npt.NDArray[np.float32]:
    """The first `dimensions` numbers of a pooled hidden state, as a vector of length 1 if `normalize`.

    Shapes: [dimensions]. Cutting a vector and normalising what is left is OpenAI's meaning of `dimensions`; it is
    useful only with models that were trained for it (Kusupati et al., Matryoshka Representation Learning, 2022).
    """
    import numpy as np  # a server's front end has no other use for it: 86 modules at its start

    vector = np.frombuffer(pooled, "<f4").astype(np.float64)[:dimensions]
    if normalize:
        # Divided by its largest number first: squares of large ones would overflow, of small ones vanish.
        peak = float(np.abs(vector).max())
        if peak > 0:
            vector = vector / peak
            vector = vector / float(np.sqrt(np.dot(vector, vector)))
    return vector.astype(np.float32)


def check_dimensions(dimensions: int | None, size: int) -> None:
    """`size`: numbers that the model gives. Raises: InputError."""
    if dimensions is None:
        return
    if isinstance(dimensions, bool) or not isinstance(dimensions, int) or not 1 <= dimensions <= size:
        raise InputError(f"dimensions must be an integer from 1 to {size}, the size of this model", param="dimensions")


def label_scores(pooled: bytes, kind: str) -> list[float]:
    """Scores of labels from what a classifier's head gave. `kind`: softmax, sigmoid or none.

    Shapes: [number of labels].
    """
    import numpy as np

    x = np.frombuffer(pooled, "<f4").astype(np.float64)
    if kind == "softmax":
        x = np.exp(x - x.max())
        x = x / x.sum()
    elif kind == "sigmoid":
        x = np.where(x >= 0, 1.0, np.exp(-np.abs(x))) / (1.0 + np.exp(-np.abs(x)))
    found: list[float] = x.tolist()
    return found


def cosine(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> float:
    """Of two vectors of length 1, in float64."""
    import numpy as np

    return float(np.dot(a.astype(np.float64), b.astype(np.float64)))
