"""Weights that are read and never changed: widened, or decoded, where a product needs them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from penstock.backends.gpu.placed import tensor_of
from penstock.ops.ref.product import take_rows
from penstock.ops.stored import StoredMatrix, Weight

_CPU = torch.device("cpu")
_CHUNK_ELEMENTS = 1 << 20


class FrozenMatrix:
    """A matrix [N, K] as it lies in memory or in a file."""

    def __init__(self, weight: Weight) -> None:
        self.weight = weight
        self.shape = int(weight.shape[0]), int(weight.shape[1])
        self._tensor = None if isinstance(weight, StoredMatrix) else tensor_of(weight, _CPU)

    @property
    def is_wide(self) -> bool:
        return self._tensor is not None and self._tensor.dtype == torch.float32

    def rows(self, first: int, last: int) -> Tensor:
        """Rows first ... last - 1 as float32."""
        if self._tensor is None:
            assert isinstance(self.weight, StoredMatrix)
            return tensor_of(self.weight.values(first, last), _CPU)
        return self._tensor[first:last].float()

    def take(self, rows: Tensor) -> Tensor:
        return torch.from_numpy(take_rows(self.weight, rows.numpy()))


class Wide:
    """Matrices of the layer at work as float32: many products follow each other with the same ones. Their memory is
    used again for the next layer's."""

    def __init__(self) -> None:
        self._own: dict[int, Tensor] = {}
        self._free: dict[tuple[int, int], list[Tensor]] = {}

    def fill(self, matrix: FrozenMatrix) -> Iterator[None]:
        """Widens, or decodes, a run of rows for each step."""
        if id(matrix) in self._own or matrix.is_wide:
            return
        free = self._free.get(matrix.shape)
        whole = free.pop() if free else torch.empty(matrix.shape)
        step = max(1, _CHUNK_ELEMENTS // max(1, matrix.shape[1]))
        for lo in range(0, matrix.shape[0], step):
            hi = min(lo + step, matrix.shape[0])
            whole[lo:hi] = matrix.rows(lo, hi)
            yield
        self._own[id(matrix)] = whole

    def of(self, matrix: FrozenMatrix) -> Tensor:
        if matrix.is_wide:
            return matrix.rows(0, matrix.shape[0])
        for _ in self.fill(matrix):
            pass
        return self._own[id(matrix)]

    def clear(self) -> None:
        for whole in self._own.values():
            self._free.setdefault((whole.shape[0], whole.shape[1]), []).append(whole)
        self._own.clear()


def vector_of(bound: Any) -> Any:
    """What an operation has bound besides matrices, as it takes it: vectors and tables as tensors."""
    return tensor_of(bound, _CPU) if hasattr(bound, "dtype") else bound
