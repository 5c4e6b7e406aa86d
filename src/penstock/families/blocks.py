"""Where weights are in tensors of ggml's blocks: which of them can stay the blocks that they are stored as."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from penstock.core.model_spec import ModelSpec, weight_shapes
from penstock.core.weight_map import Cut, WeightMap
from penstock.families.checkpoint import Codes, WeightRef
from penstock.families.quantization.gather import is_rows
from penstock.formats.ggml import GGML_FORMATS
from penstock.formats.tensor_ref import TensorRef


def block_refs(tensors: Mapping[str, TensorRef], places: WeightMap, spec: ModelSpec) -> dict[str, WeightRef]:
    """Every weight of `spec`, each a tensor of `tensors` or a part of one. Nothing is checked here."""
    shapes = weight_shapes(spec)
    refs: dict[str, WeightRef] = {}
    for name, place in places.items():
        cut = place if isinstance(place, Cut) else None
        refs[name] = block_ref(tensors[place if isinstance(place, str) else place.name], cut, shapes[name])
    return refs


def block_ref(tensor: TensorRef, cut: Cut | None, shape: tuple[int, ...]) -> WeightRef:
    """A weight of this shape. Blocks lie along rows: a choice of these, or one matrix of a stack, stays blocks; other
    parts are decoded."""
    whole = WeightRef(tensor, cut)
    if tensor.dtype not in GGML_FORMATS or (cut is not None and tensor.shape != cut.shape):
        return whole
    if cut is not None and not cut.view and len(tensor.shape) == 3 and cut.take and isinstance(cut.take[0], int):
        tensor, cut = tensor.row(cut.take[0]), msgspec.structs.replace(cut, shape=cut.shape[1:], take=cut.take[1:])
        cut = cut if cut.take or cut.axes else None
    if len(shape) != 2 or tensor.shape[1:] != shape[1:] or not (cut is None or is_rows(cut)):
        return whole
    return WeightRef(tensor, cut, codes=Codes(tensor.dtype.lower(), GGML_FORMATS[tensor.dtype]))
