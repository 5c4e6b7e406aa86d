"""Whether a model can run natively, found out from its spec alone."""

from __future__ import annotations

import numpy as np

from penstock.backends.native.emit import NotNativeError, emit, matrix_runs
from penstock.backends.native.stacks import stack_runs
from penstock.core.model_spec import ModelSpec, cache_groups, weight_shapes
from penstock.model.builder import build
from penstock.model.fuse import fuse
from penstock.ops.native.abi import Act, Format
from penstock.ops.native.matrix import Packed
from penstock.ops.stored import alike


class _NoMatrices(dict[str, Packed]):
    """Stands for every packed matrix where nothing will run."""

    def __missing__(self, name: str) -> Packed:
        return Packed(Format.F32, Act.F32, 0, 0, False, np.zeros(0, np.uint8))


def native_obstacle(spec: ModelSpec) -> str | None:
    """The part of the model that has no native form, or None if all of it has one. Takes milliseconds."""
    try:
        native_matrices(spec)
    except NotNativeError as error:
        return str(error)
    return None


def native_matrices(spec: ModelSpec) -> list[str]:
    """What the packed matrices of the model's program are called. Raises: NotNativeError."""
    # Weights of the right shapes that take no memory: every element is the same one.
    element = np.zeros((), np.uint16)
    shapes = weight_shapes(spec)
    made = {shape: np.broadcast_to(element, shape) for shape in set(shapes.values())}
    weights = {name: made[shape] for name, shape in shapes.items()}
    groups = cache_groups(spec, "bfloat16")
    graph = build(spec, weights, groups, max_model_len=1)
    fuse(graph)
    emit(graph, groups, _NoMatrices())
    return [*matrix_runs(graph), *stack_runs(graph, alike)]
