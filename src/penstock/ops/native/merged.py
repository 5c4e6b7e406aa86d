"""A matrix with an adapter in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.base.bf16 import F32, widen
from penstock.ops.adapters import LowRank, Numbers, Rescaled
from penstock.ops.native.abi import PANEL, Act, Format
from penstock.ops.native.matrix import Packed, pack


def with_adapter(
    library: Any, matrix: Packed, rows: Sequence[tuple[str, int]], parts: Mapping[str, LowRank], num_threads: int = 1
) -> Packed:  # fmt: skip
    """`matrix`, of float32, consists of `rows` of these weights, or of a pair of them: W * gain + factor * b a +
    delta, and bias * gain + shift. Numbers come from the panels: files may not be mapped any more."""
    m = matrix.struct
    parts_of = _halves if m.pair else _runs
    weights = parts_of(matrix.values(library), [n for _, n in rows])
    biases: list[F32 | None] = [None] * len(rows)
    if matrix.bias is not None:
        biases[:] = (own[:, 0] for own in parts_of(matrix.bias[:, None], [n for _, n in rows]))
    for i, (name, _) in enumerate(rows):
        if (part := parts.get(name)) is not None:
            weights[i], biases[i] = _merged(weights[i], biases[i], part)
    return pack(
        library, weights, Format(m.format), Act(m.act), pair=bool(m.pair), biases=biases, num_threads=num_threads
    )  # fmt: skip


def _runs(values: F32, counts: Sequence[int]) -> list[F32]:
    return np.split(values[: sum(counts)], np.cumsum(counts)[:-1])


def _halves(values: F32, counts: Sequence[int]) -> list[F32]:
    """Of a pair: 32 rows of the one in every panel, then 32 of the other (`matrix.order`)."""
    panels = values.reshape(-1, 2, PANEL // 2, values.shape[1])
    return [panels[:, half].reshape(-1, values.shape[1])[:n] for half, n in enumerate(counts)]


def _merged(weight: F32, bias: F32 | None, part: LowRank) -> tuple[F32, F32 | None]:
    assert not isinstance(part.codes, Rescaled), "weights of float32 have no scales"
    if part.codes is not None:
        weight = weight + part.codes.values()
    if part.gain is not None:
        weight = weight * part.gain[:, None]
        bias = None if bias is None else bias * part.gain
    if part.a.shape[0]:
        low: F32 = np.matmul(np.float32(part.factor) * _wide(part.b), _wide(part.a))
        low += weight
        weight = low
    if part.shift is not None:
        bias = part.shift if bias is None else bias + part.shift
    return weight, bias


def _wide(x: Numbers) -> F32:
    return widen(x) if x.dtype == np.uint16 else x.astype(np.float32)
