"""Where weights are in tensors of ggml's blocks: which of them can stay the blocks that they are stored as.

A matrix `x.weight` of NVFP4 may have a number `x.scale` beside it that multiplies all of it, a stack of matrices one
for each; `x.input_scale` is for who rounds activations to 4 bits, too, and is passed over. Source: `_repack_nvfp4` of
conversion/base.py, github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from penstock.base.errors import ModelError, UnsupportedError
from penstock.core.model_spec import ModelSpec, weight_shapes
from penstock.core.weight_map import Cut, WeightMap
from penstock.families.checkpoint import Codes, WeightRef
from penstock.families.quantization.gather import is_rows
from penstock.formats.files import quoted
from penstock.formats.ggml import GGML_FORMATS, with_factor
from penstock.formats.tensor_ref import TensorRef

_FACTOR, _FOR_ROWS = "scale", "input_scale"


def beside_blocks(tensors: Mapping[str, TensorRef]) -> set[str]:
    """Names of the tensors that are no weights, but belong to one in blocks."""
    stems = {name.removesuffix("weight") for name, ref in tensors.items() if ref.dtype == "NVFP4"}
    return {stem + end for stem in stems for end in (_FACTOR, _FOR_ROWS)} & tensors.keys()


def block_refs(tensors: Mapping[str, TensorRef], places: WeightMap, spec: ModelSpec) -> dict[str, WeightRef]:
    """Every weight of `spec`, each a tensor of `tensors` or a part of one.

    Raises ModelError for a factor of another type or shape, UnsupportedError for what has one and is no rows of a
    matrix. Weights themselves are not checked here.
    """
    shapes, beside = weight_shapes(spec), beside_blocks(tensors)
    refs: dict[str, WeightRef] = {}
    for name, place in places.items():
        cut = place if isinstance(place, Cut) else None
        tensor = tensors[place if isinstance(place, str) else place.name]
        factor = tensor.name.removesuffix("weight") + _FACTOR
        refs[name] = block_ref(tensor, cut, shapes[name], tensors[factor] if factor in beside else None)
    return refs


def block_ref(
    tensor: TensorRef, cut: Cut | None, shape: tuple[int, ...], factor: TensorRef | None = None
) -> WeightRef:  # fmt: skip
    """A weight of this shape. Blocks lie along rows: a choice of these, or one matrix of a stack, stays blocks; other
    parts are decoded. `factor`: a number that multiplies every matrix. Raises as `block_refs`."""
    whole = WeightRef(tensor, cut)
    if tensor.dtype not in GGML_FORMATS or (cut is not None and tensor.shape != cut.shape):
        return whole
    if factor is not None and (factor.dtype != "F32" or factor.shape != (tensor.shape[:-2] or (1,))):
        raise ModelError(
            f"tensor {quoted(factor.name)} of {quoted(factor.path)} is {factor.dtype} of shape {quoted(factor.shape)}; "
            f"a float32 for each matrix of {quoted(tensor.name)} is needed"
        )
    if cut is not None and not cut.view and len(tensor.shape) == 3 and cut.take and isinstance(cut.take[0], int):
        at = cut.take[0]
        tensor, cut = tensor.row(at), msgspec.structs.replace(cut, shape=cut.shape[1:], take=cut.take[1:])
        cut = cut if cut.take or cut.axes else None
        factor = None if factor is None else factor.rows(at, at + 1)
    if len(shape) != 2 or tensor.shape[1:] != shape[1:] or not (cut is None or is_rows(cut)):
        if factor is not None:
            raise UnsupportedError(f"tensor {quoted(tensor.name)} has a scale beside it; a weight is no rows of it")
        return whole
    format, layout = GGML_FORMATS[tensor.dtype], tensor.dtype.lower()
    if factor is None:
        return WeightRef(tensor, cut, codes=Codes(layout, format))
    return WeightRef(tensor, cut, codes=Codes(layout, with_factor(format), {"factor": factor}))
