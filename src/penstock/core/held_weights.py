"""How all weights of a model are held: what a plan decides, as data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import prod
from typing import NamedTuple

import msgspec

from penstock.core.cache_spec import DTYPE_BYTES
from penstock.core.matrix_format import MatrixFormat, plain, row_matrices
from penstock.core.model_spec import ModelSpec, weight_shapes
from penstock.core.panels import panels_of


class WeightMemory(NamedTuple):
    """Packed weights are read while they are used. `limit`: bytes of them that are in memory at a time, at most; None:
    all may be. `prefetch`: layers that come while one computes."""

    limit: int | None = None
    prefetch: int = 1


class HeldWeights(msgspec.Struct, frozen=True):
    """How all weights of a model are held: `matrices` by logical name, everything else as `dtype`.

    `beside`: tables among `matrices` that are kept in `dtype` as well, to be looked up in: a scheme has rounded what
    rows are multiplied with. `packed`: codes lie in native panels, which pad them.
    """

    dtype: str = "float32"
    matrices: Mapping[str, MatrixFormat] = {}
    beside: tuple[str, ...] = ()
    packed: bool = False

    def of(self, name: str) -> MatrixFormat:
        return self.matrices.get(name) or plain(self.dtype)

    def __str__(self) -> str:
        """For people: `14 matrices of 4-bit codes, a float16 scale per 32 inputs; the rest float16`."""
        counts = Counter(map(str, self.matrices.values()))
        return "; ".join([*(f"{n} matrices of {name}" for name, n in sorted(counts.items())), f"the rest {self.dtype}"])

    def bytes_each(self, spec: ModelSpec) -> float | None:
        """Bytes of a number in the matrices that rows are multiplied with, on the mean; None if all are plain."""
        if not self.matrices:
            return None
        shapes = row_matrices(spec)
        total = sum(self.of(name).bytes_each * prod(shape) for name, shape in shapes.items())
        return total / sum(map(prod, shapes.values()))

    def matrix_bytes(self, name: str, shape: tuple[int, int]) -> int:
        """Bytes of one matrix in memory, without those of a table `beside` it."""
        format = self.of(name)
        panels = panels_of(format, shape[1]) if self.packed else None
        return format.num_bytes(shape) if panels is None else panels.num_bytes(shape)

    def num_bytes(self, spec: ModelSpec) -> int:
        """Bytes of all weights in memory."""
        return sum(self.bytes_by_format(spec).values())

    def bytes_by_format(self, spec: ModelSpec) -> dict[str, int]:
        """The same by format, as people read it; plain ones by dtype."""
        size = DTYPE_BYTES[self.dtype]
        if not self.matrices:
            return {self.dtype: spec.num_params * size}
        total: Counter[str] = Counter()
        for name, shape in weight_shapes(spec).items():
            if name in self.matrices:
                total[str(self.matrices[name])] += self.matrix_bytes(name, (shape[0], shape[1]))
            if name not in self.matrices or name in self.beside:
                total[self.dtype] += prod(shape) * size
        return dict(total)
