"""Matrices of FP8, int8 or FP4 with scales in a tensor of their own, whoever wrote them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from penstock.base.errors import ModelError
from penstock.core.matrix_format import MatrixFormat, Shared
from penstock.families.checkpoint import Codes
from penstock.families.quantization.method import Module
from penstock.formats.files import quoted
from penstock.formats.tensor_ref import TensorRef

Block = tuple[int, int]
"""Rows and columns that share a scale; 0: all of them."""
CODES = {"F8_E4M3": "e4m3", "I8": "int"}


def byte_matrix(
    module: Module, part: str, scales: str, blocks: Sequence[Block], zeros: str = ""
) -> tuple[TensorRef, Codes]:
    """Codes of one byte, [N, K]. `blocks`: those that scales may have besides one for the matrix and one per output.

    Raises ModelError unless the shape of the scales is that of one of these.
    """
    ref, module = module.need(part), module.about(part)
    if ref.dtype not in CODES or len(ref.shape) != 2 or 0 in ref.shape:
        raise ModelError(
            f"{module.where} is {ref.dtype} of shape {quoted(ref.shape)}, though it has {scales[1:]} beside it; a "
            "matrix of FP8 (E4M3) or int8 is needed: is the checkpoint compressed?"
        )
    found = module.need(scales)
    dtype = module.scale_dtype(scales, *(("U8", "F8_E8M0") if ref.dtype == "F8_E4M3" else ()))
    block = _block(ref.shape, found.shape, [(0, 0), (1, 0), *blocks])
    if block is None:
        listed = ", ".join(_spelt(b) for b in [(0, 0), (1, 0), *blocks])
        raise module.wrong(scales, f"one for each of {listed} of a matrix of {ref.shape[0]} x {ref.shape[1]}")
    shared: tuple[Shared, ...] = ()
    parts = {"scales": found}
    zero = module.get(zeros) if zeros else None
    if zero is not None:
        if zero.dtype != "I8" or prod(zero.shape) != prod(found.shape):
            raise module.wrong(zeros, f"int8 of shape {quoted(found.shape)}")
        shared, parts = (Shared("int8", *block),), parts | {"zeros": zero}
    format = MatrixFormat(CODES[ref.dtype], 8, (Shared(dtype, *block),), shared)  # type: ignore[arg-type]
    return ref, Codes("bytes", format, parts)


def _block(shape: tuple[int, ...], scales: tuple[int, ...], blocks: Sequence[Block]) -> Block | None:
    n, k = shape
    for rows, columns in blocks:
        counts = (-(-n // rows) if rows else 1, -(-k // columns) if columns else 1)
        # A column may be written as a vector; ModelOpt writes blocks [R, 1, C, 1].
        written = [counts, (counts[0], 1, counts[1], 1)] if columns else [counts, counts[:1]]
        if scales in written or (scales == () and not rows):
            return rows, columns
    return None


def _spelt(block: Block) -> str:
    if block == (0, 0):
        return "the whole"
    return "the outputs" if block == (1, 0) else f"{block[0]} x {block[1]}"


def fp4_matrix(
    module: Module, part: str, scales: str, whole: str = "", divides: bool = False
) -> tuple[TensorRef, Codes]:
    """Codes of E2M1, two to a byte, [.., K / 2]: NVFP4 if there is a scale of the whole matrix, else MXFP4.

    Raises ModelError for tensors that do not go together.
    """
    ref, module = module.need(part), module.about(part)
    if ref.dtype not in ("U8", "I8") or len(ref.shape) < 2 or 0 in ref.shape:
        raise ModelError(f"{module.where} is {ref.dtype} of shape {quoted(ref.shape)}; bytes of a matrix are needed")
    *rows, half = ref.shape
    if len(ref.shape) == 4:  # gpt-oss has the 16 bytes of a group in an axis of their own
        *rows, groups, half = ref.shape
        half *= groups
    found = module.need(scales)
    is_nv = bool(whole) and (found.dtype == "F8_E4M3" or module.get(whole) is not None)
    group = 16 if is_nv else 32
    dtype = module.scale_dtype(scales, *(("F8_E4M3",) if is_nv else ("U8", "F8_E8M0")))
    wanted = (*rows, half * 2 // group)
    if half * 2 % group or found.shape != wanted or dtype not in ("e4m3", "e8m0"):
        needed = "E4M3" if is_nv else "E8M0 in bytes"
        raise module.wrong(scales, f"{needed} of shape {quoted(wanted)} for codes of shape {quoted(ref.shape)}")
    levels, parts = [Shared(dtype, 1, group)], {"scales": found}
    if is_nv:
        one = module.need(whole)
        if one.dtype != "F32" or prod(one.shape) != 1:
            raise module.wrong(whole, "one float32")
        levels, parts = [*levels, Shared("float32", 0, 0)], parts | {"whole": one}
    format = MatrixFormat("e2m1", 4, tuple(levels))
    return replace(ref, shape=(*rows, half * 2)), Codes("fp4", format, parts, {"divides": float(divides)})


MXFP4 = MatrixFormat("e2m1", 4, (Shared("e8m0", 1, 32),))
NVFP4 = MatrixFormat("e2m1", 4, (Shared("e4m3", 1, 16), Shared("float32", 0, 0)))
