"""Matrices rounded to NF4 with double quantisation, as bitsandbytes stores them: a base for low-rank training.

Source: Dettmers et al., QLoRA, arXiv 2305.14314, section 3; the 8-bit table of the scales: Dettmers et al., 8-bit
Optimizers via Block-wise Quantization, arXiv 2110.02861, section 2.1 (dynamic tree quantisation).
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.base.bf16 import F32
from penstock.families.quantization.bitsandbytes import TABLES

_BLOCK, _NESTED_BLOCK = 64, 256
U8 = npt.NDArray[np.uint8]


def dynamic_table() -> F32:
    """The 256 values that scales are rounded to, ascending: seven decades, each twice as fine as the one below."""
    values = [0.0, 1.0]
    for exponent in range(7):
        edges = np.linspace(0.1, 1.0, (1 << exponent) + 1)
        means = 10.0 ** (exponent - 6) * 0.5 * (edges[:-1] + edges[1:])
        values += [*means, *-means]
    return np.sort(np.array(values)).astype(np.float32)


def nearest(x: F32, table: F32) -> U8:
    """The index of the value of an ascending table that is nearest to each number."""
    middles = 0.5 * (table[:-1] + table[1:])
    return np.searchsorted(middles, x).astype(np.uint8)


def _largest(x: F32, block: int) -> F32:
    out: F32 = np.abs(np.pad(x, (0, -len(x) % block)).reshape(-1, block)).max(axis=1)
    return out


def nf4_parts(weight: F32) -> dict[str, npt.NDArray[Any]]:
    """weight [N, K], K even -> tensors by what follows the module's name in a file of bitsandbytes."""
    table = np.array(TABLES["nf4"], np.float32)
    flat = np.ascontiguousarray(weight, np.float32).reshape(-1)
    largest = _largest(flat, _BLOCK)
    scale = np.repeat(np.where(largest == 0, 1, largest), _BLOCK)[: len(flat)]
    codes = nearest(flat / scale, table)
    offset = np.float32(largest.mean())
    rest = largest - offset
    nested = _largest(rest, _NESTED_BLOCK)
    wide = np.repeat(np.where(nested == 0, 1, nested), _NESTED_BLOCK)[: len(rest)]
    state = {
        "quant_type": "nf4", "blocksize": _BLOCK, "dtype": "float32", "shape": list(weight.shape),
        "nested_blocksize": _NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": float(offset),
    }  # fmt: skip
    return {
        ".weight": (codes[0::2] << 4 | codes[1::2])[:, None],
        ".weight.absmax": nearest(rest / wide, dynamic_table()),
        ".weight.quant_map": table,
        ".weight.nested_absmax": nested,
        ".weight.nested_quant_map": dynamic_table(),
        ".weight.quant_state.bitsandbytes__nf4": np.frombuffer(json.dumps(state).encode(), np.uint8),
    }
