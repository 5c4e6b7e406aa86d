"""Whether weights are those of a model."""

from __future__ import annotations

import numpy as np

from penstock.base.errors import ModelError
from penstock.core.model_spec import ModelSpec, weight_shapes
from penstock.model.emitter import Weights

_DTYPES = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(np.uint16))


def check_weights(spec: ModelSpec, weights: Weights) -> None:
    """Raises ModelError for weights that are missing, unknown or of wrong shape or type."""
    shapes = weight_shapes(spec)
    if missing := sorted(shapes.keys() - weights.keys()):
        raise ModelError(f"{len(missing)} weights are missing, the first: {missing[0]}")
    if unknown := sorted(weights.keys() - shapes.keys()):
        raise ModelError(f"{len(unknown)} weights are not part of the model, the first: {unknown[0]}")
    for name, shape in shapes.items():
        if weights[name].shape != shape:
            raise ModelError(f"weight {name} has shape {list(weights[name].shape)}, the model needs {list(shape)}")
        if weights[name].dtype not in _DTYPES:
            raise ModelError(f"weight {name} is {weights[name].dtype}, not float32, float16 or bfloat16 (as uint16)")
