"""Stored bytes of any coded type -> float32 values, part by part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.base.bf16 import F32, widen
from penstock.formats.tensor_ref import BLOCKS, TensorRef
from penstock.weights.stored.ggml.matrix import decoded_blocks
from penstock.weights.stored.scaled import int8
from penstock.weights.stored.ternary import ternary

U8 = npt.NDArray[np.uint8]


def decoded(tensor: TensorRef, raw: U8, scales: tuple[TensorRef, U8] | None, chunk: int) -> Iterator[F32]:
    """The values of `tensor`, whose bytes are `raw`, row-major, in flat parts of about `chunk` elements each.

    `scales`: the tensor that holds its scales, and its bytes, for types that keep them apart; their shapes have been
    checked by `families.checkpoint`. Hostile scales give NaN and infinity, so read this with numpy's floating-point
    warnings off. Raises ValueError for a type that is not coded.
    """
    if scales is None:
        yield from _blocks(tensor.dtype, raw, chunk)
    elif tensor.dtype == "I8":
        yield from int8(raw, _floats(*scales), chunk)
    elif tensor.dtype == "T2":
        yield from ternary(raw, _floats(*scales), chunk)
    else:
        raise ValueError(f"{tensor.dtype} is not a coded type")


def _blocks(dtype: str, raw: U8, chunk: int) -> Iterator[F32]:
    elements, nbytes = BLOCKS[dtype]
    blocks = raw.reshape(-1, nbytes)
    step = max(1, chunk // elements)
    for start in range(0, len(blocks), step):
        yield decoded_blocks(dtype, blocks[start : start + step]).reshape(-1)


def _floats(tensor: TensorRef, raw: U8) -> F32:
    """Scales, which may be stored in any of the three floating types."""
    kinds: dict[str, Any] = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
    values = raw.view(kinds[tensor.dtype]).reshape(tensor.shape)
    return widen(values) if tensor.dtype == "BF16" else values.astype(np.float32)
