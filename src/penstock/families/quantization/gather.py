"""Tensors of a quantised folder, gathered matrix by matrix, and the place of a weight in such a matrix."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.base.errors import ModelError, UnsupportedError
from penstock.core.matrix_format import MatrixFormat, rounded_matrices
from penstock.core.model_spec import ModelSpec
from penstock.core.weight_map import Cut, Take, WeightMap
from penstock.families.checkpoint import Codes, WeightRef
from penstock.families.quantization.method import Method, Module
from penstock.formats.files import quoted, read_exactly
from penstock.formats.tensor_ref import TensorRef

_MARKS = {
    ".qweight": "gptq, awq or auto-round", ".weight_packed": "compressed-tensors", ".weight_scale_inv": "fp8",
    ".weight_scale": "fp8, modelopt, bitnet or compressed-tensors", ".weight.absmax": "bitsandbytes",
    ".SCB": "bitsandbytes", ".W_q": "hqq", "_blocks": "mxfp4",
}  # fmt: skip
"""End of a tensor's name -> the methods that write such tensors."""


def gather(tensors: Mapping[str, TensorRef], method: Method) -> tuple[dict[str, TensorRef], dict[str, Codes]]:
    """Tensors with each matrix of codes as one, called `x.weight`, of the shape [N, K]; and what belongs to these, by
    that name.

    Raises ModelError for tensors that do not go together; nothing but small ones is read.
    """
    out, codes = dict(tensors), {}
    for name in tensors:
        if name.endswith(method.read_over):
            out.pop(name, None)
            continue
        mark = next((mark for mark in method.marks if name.endswith(mark)), None)
        if mark is None or name not in out:
            continue
        stem = name.removesuffix(mark)
        parts = {part: out.pop(stem + part) for part in method.parts if stem + part in out}
        whole = stem + method.whole
        if whole in out:
            raise ModelError(
                f"tensor {quoted(name)} of {quoted(tensors[name].path)} says that {quoted(whole)} is stored as codes, "
                "but that is there as it was, too: leave one of the two out"
            )
        found = method.matrix(Module(stem, parts, mark))
        if found is None:
            out |= {stem + part: ref for part, ref in parts.items()}
        else:
            out[whole], codes[whole] = found
    return out, codes


def check_claims(tensors: Mapping[str, TensorRef], wanted: set[str], method: Method | None) -> None:
    """Raises ModelError for tensors of codes that the configuration says nothing of."""
    for name, ref in tensors.items():
        for mark, methods in _MARKS.items():
            stem = name.removesuffix(mark)
            if stem == name or not wanted & {stem, stem + ".weight"}:
                continue
            says = "has no quantization_config" if method is None else f"says {method.method}"
            raise ModelError(
                f"tensor {quoted(name)} of {quoted(ref.path)} is what {methods} write, but config.json {says}: set its "
                "quant_method to what the weights are"
            )


def drop_empty_biases(
    tensors: Mapping[str, TensorRef], codes: Mapping[str, Codes], wanted: set[str]
) -> dict[str, TensorRef]:
    """Without biases of zeros that the model has not: early tools wrote one beside every matrix of codes."""
    out = dict(tensors)
    for name in codes:
        bias = name.removesuffix("weight") + "bias"
        ref = out.get(bias)
        if ref is None or bias in wanted or ref.shape != tensors[name].shape[:1]:
            continue
        if not read_exactly(ref.path, ref.offset, ref.nbytes).strip(b"\0"):
            del out[bias]
    return out


def codes_ref(tensor: TensorRef, cut: Cut | None, codes: Codes) -> WeightRef:
    """The place of a weight in a matrix of codes, or in a stack of such matrices. Always [.., N, K], though the model
    may keep it the other way round.

    Raises UnsupportedError for a part that is not a choice of rows.
    """
    rank = 0 if cut is None else len(cut.shape)
    if cut is not None and not cut.view and cut.axes == (1, 0) and rank in (2, 3):
        whole: tuple[Take, ...] = tuple((0, size) for size in cut.shape)
        *first, row, column = (*cut.take, *whole[len(cut.take) :])
        cut = Cut(cut.name, (*cut.shape[:-2], cut.shape[-1], cut.shape[-2]), (*first, column, row))
    if cut is not None and not is_rows(cut):
        raise UnsupportedError(f"tensor {quoted(tensor.name)} is stored as codes; a weight is no run of its outputs")
    if cut is None and len(tensor.shape) != 2:
        raise UnsupportedError(f"tensor {quoted(tensor.name)} is stored as codes, of a stack that a weight has whole")
    return WeightRef(tensor, cut, codes=codes)


def is_rows(cut: Cut) -> bool:
    """Whether the part has whole rows of a matrix (of one in a stack), in whatever order."""
    view = cut.view or cut.shape
    kept = len(view) - sum(isinstance(take, int) for take in cut.take)
    inputs = cut.take[len(view) - 1] if len(cut.take) == len(view) else (0, view[-1])
    return view[-1] == cut.shape[-1] and inputs == (0, view[-1]) and (not cut.axes or cut.axes[-1] == kept - 1)


def expected_codes(method: Method, spec: ModelSpec, places: WeightMap) -> dict[str, MatrixFormat]:
    """What a checkpoint that is not here stores as codes, as far as its config.json tells: for planning.

    Raises ModelError as `gather` for inputs that fall into no whole groups.
    """
    out: dict[str, MatrixFormat] = {}
    for name, shape in rounded_matrices(spec).items():  # what chooses experts is left alone by others, too
        if not name.startswith(("layers.", "shared.")) and not method.lm_head:
            continue
        place = places[name]
        stored = place.name if isinstance(place, Cut) else place
        format = method.expected(stored.removesuffix(".weight"), shape)
        if format is not None:
            out[name] = format
    return out
