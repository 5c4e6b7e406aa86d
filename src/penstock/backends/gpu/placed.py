"""Weights and tables where the model runs: what a graph has bound, as tensors.

Shape letters: M outputs, N inputs of a matrix, K inputs of a stored one, G groups along a row.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import numpy as np
import torch

from penstock.backends.gpu.fused import Joined
from penstock.backends.gpu.rounded import under
from penstock.base.small_floats import E2M1, E4M3
from penstock.core.matrix_format import NONE, MatrixFormat, Scheme, is_kept
from penstock.model.graph import Node
from penstock.ops.ref.experts import ExpertWeights
from penstock.ops.stored import StoredMatrix, Weight, product_of, same_order

_TABLES: dict[str, Any] = {"table": (), "e2m1": E2M1, "e4m3": E4M3}
"""Codes that are indices into a table: the format's own, or one of small floats."""
_CHUNK_ELEMENTS = 1 << 20
"""Codes are decoded at most this many at a time."""


def tensor_of(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """An array as a tensor on `device`; uint16 are bits of bfloat16. On the CPU it is the array's own memory."""
    if array.dtype == np.uint16:
        return tensor_of(array.view(np.int16), device).view(torch.bfloat16)
    if not array.flags.c_contiguous or any(stride < 0 for stride in array.strides):
        array = np.ascontiguousarray(array)
    with warnings.catch_warnings():
        # Mapped files cannot be written to, and nobody does.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array).to(device)


def _shortest(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    wide = x.astype(np.float32)
    with np.errstate(over="ignore"):
        short = wide.astype(np.float16)
    return short if np.array_equal(short.astype(np.float32), wide) else wide


class StoredTensor:
    """A matrix that stays codes and scales on the device. `why_not` says which must be decoded ahead.

    Codes are unsigned bytes [M, K], two of at most 4 bits to a byte [M, K/2] (the first in the low half); scales and
    zeros are [M, G], float16 where that says the same as float32. What it decodes to is bit for bit what
    `StoredMatrix.values` says.
    """

    def __init__(self, matrix: StoredMatrix, device: torch.device) -> None:
        assert self.why_not(matrix) is None
        form, (rows, columns) = matrix.format, matrix.shape
        self.shape, self.format = matrix.shape, form
        codes = matrix.codes(0, rows)
        self.signed = codes.dtype == np.int8
        self.paired = form.bits <= 4 and not self.signed and columns % 2 == 0
        if self.paired:
            codes = codes[:, 0::2] | codes[:, 1::2] << 4
        self.codes = tensor_of(codes, device)
        self.scales = tensor_of(_shortest(product_of(form.scales, matrix.scales(0, rows))), device)
        zeros = product_of(form.zeros, matrix.zeros(0, rows)) if form.zeros else None
        self.zeros = None if zeros is None else tensor_of(_shortest(zeros), device)
        table = form.table or _TABLES.get(form.code, ())
        self.table = torch.tensor(np.asarray(table, np.float32), device=device) if len(table) else None
        groups = form.group or columns
        at = matrix.order if matrix.order is not None else np.arange(columns, dtype=np.int64) // groups
        self.at = tensor_of(np.ascontiguousarray(at, np.int64), device)
        """[K] the group of every input."""

    @staticmethod
    def why_not(matrix: StoredMatrix) -> str | None:
        """What keeps codes from being held as they are, as an end of a sentence."""
        form: MatrixFormat = matrix.format
        if form.code not in ("int", "uint", *_TABLES) or form.bits > 8:
            return f"{form} is decoded when it is loaded"
        if type(matrix)._values is not StoredMatrix._values:
            return f"{form} has an arithmetic of its own"
        return None

    @property
    def num_bytes(self) -> int:
        parts = [self.codes, self.scales, *([] if self.zeros is None else [self.zeros])]
        return sum(part.numel() * part.element_size() for part in parts)

    def with_rows(self, change: Callable[..., torch.Tensor], *others: StoredTensor) -> StoredTensor:
        """What `change` makes of each of its parts that have a line for every row, and of those of `others`."""
        own = copy.copy(self)
        for name in ("codes", "scales", "zeros"):
            parts = [getattr(each, name) for each in (self, *others)]
            setattr(own, name, None if parts[0] is None else change(*parts))
        own.shape = len(own.codes), self.shape[1]
        return own

    def values(self, rows: torch.Tensor | slice) -> torch.Tensor:
        """Some rows as float32 [n, K]."""
        codes = self.codes[rows]
        if self.paired:
            codes = torch.stack([codes & 15, codes >> 4], dim=-1).reshape(len(codes), -1)
        x = codes.float() if self.table is None else self.table[codes.long()]
        scales = self.scales[rows][:, self.at]
        zeros = None if self.zeros is None else self.zeros[rows][:, self.at]
        if self.format.zeros_are == "values":
            return x * scales if zeros is None else x * scales - zeros
        return (x - (float(self.format.offset) if zeros is None else zeros)) * scales


Matrix = torch.Tensor | StoredTensor


def rows_of(weight: Matrix, rows: torch.Tensor | slice) -> torch.Tensor:
    """Some rows of a matrix as float32."""
    return weight.values(rows) if isinstance(weight, StoredTensor) else weight[rows].float()


def part_of(weight: Matrix, first: int, last: int) -> Matrix:
    """Rows first ... last - 1, over the same memory."""
    if isinstance(weight, StoredTensor):
        return weight.with_rows(lambda x: x[first:last])
    return weight[first:last]


def _together(parts: Sequence[Matrix]) -> Matrix:
    """Rows of matrices that are alike, one below the other."""
    first = parts[0]
    if isinstance(first, StoredTensor):
        return first.with_rows(lambda *x: torch.cat(x), *parts[1:])  # type: ignore[arg-type]
    return torch.cat(parts)  # type: ignore[arg-type]


class ExpertStack(NamedTuple):
    """The experts of a layer as one matrix for each of their parts, so that a device finds an expert by its number.

    Shapes: `gate` (None if they have none) and `up` [num * F, E], `down` [num * E, F]; biases [num, F] and [num, E].
    """

    num: int
    gate: Matrix | None
    up: Matrix
    down: Matrix
    gate_bias: torch.Tensor | None
    up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None


def _can_stack(parts: Sequence[Any]) -> bool:
    """Whether each expert has this part, in one shape and format, or none has."""
    first = parts[0]
    if any((part is None) != (first is None) or isinstance(part, StoredMatrix) != isinstance(first, StoredMatrix)
           for part in parts):  # fmt: skip
        return False
    if first is None:
        return True
    if isinstance(first, StoredMatrix):
        return all(p.format == first.format and p.shape == first.shape and same_order(p, first) for p in parts)
    return all(p.dtype == first.dtype and p.shape == first.shape for p in parts)


class Placement:
    """Puts what a graph has bound onto one device; what two nodes or models share is there once while one lives.

    Models own what was placed for them; here it is only known. The arrays may go once they are placed.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._placed: dict[Any, tuple[list[ReferenceType[Any]], ReferenceType[Any]]] = {}
        """By ids: what had them, for others may have them by now, and what was placed."""

    @property
    def num_bytes(self) -> int:
        """Of all that was placed, each storage once."""
        total, seen = 0, set()
        for placed in self.alive():
            if isinstance(placed, StoredTensor):
                total += placed.num_bytes
            elif placed.untyped_storage().data_ptr() not in seen:
                seen.add(placed.untyped_storage().data_ptr())
                total += placed.numel() * placed.element_size()
        return total

    def alive(self) -> list[Any]:
        """What was placed and is still there."""
        return [tensor for _, known in self._placed.values() if (tensor := known()) is not None]

    def place_bound(self, node: Node, scheme: Scheme) -> Any:
        """What a node has bound, its matrices rounded where the scheme says so."""
        if node.op == "linear" and not is_kept(node.weights[0]):
            return self.place(node.bound[:1], scheme) + self.place(node.bound[1:])
        return self.place(node.bound, scheme if node.op == "experts" else NONE)

    def place(self, bound: Any, scheme: Scheme = NONE) -> Any:
        """The same with arrays as tensors: of tuples and lists each part, anything else as it is. Experts that are
        alike become an `ExpertStack`. Matrices are rounded as `scheme` says."""
        if isinstance(bound, Joined):
            return self._once(bound, scheme, lambda: _together([self._matrix(under(scheme, part)) for part in bound]))
        if isinstance(bound, np.ndarray | StoredMatrix):
            return self._once([bound], scheme, lambda: self._matrix(under(scheme, bound)))
        if isinstance(bound, tuple) and hasattr(bound, "_fields"):
            return type(bound)(*(self.place(part, scheme) for part in bound))
        if isinstance(bound, list) and bound and isinstance(bound[0], ExpertWeights):
            kinds = [[getattr(one, name) for one in bound] for name in ExpertStack._fields[1:]]
            if all(map(_can_stack, kinds)):
                return ExpertStack(len(bound), *(self._stack(kind, scheme) for kind in kinds))
        if isinstance(bound, tuple | list):
            return type(bound)(self.place(part, scheme) for part in bound)
        return bound

    def _stack(self, parts: Sequence[Any], scheme: Scheme) -> Any:
        """One part of every expert, as `ExpertStack` has it."""
        if parts[0] is None:
            return None
        if parts[0].ndim == 1:
            return self._once(parts, NONE, lambda: torch.stack([tensor_of(part, self.device) for part in parts]))
        return self._once(parts, scheme, lambda: _together([self._matrix(under(scheme, part)) for part in parts]))

    def _once(self, sources: Sequence[Weight], scheme: Scheme, make: Callable[[], Any]) -> Any:
        """What `make` places for these arrays, or has placed and is still there."""
        key = (scheme.name, *map(id, sources))
        known, before = self._placed.get(key, ([], None))
        placed = before() if before is not None and all(k() is s for k, s in zip(known, sources, strict=True)) else None
        if placed is None:
            placed = make()
            self._placed[key] = [ref(source) for source in sources], ref(placed)
        return placed

    def _matrix(self, weight: np.ndarray[Any, Any] | StoredMatrix) -> Matrix:
        if isinstance(weight, np.ndarray):
            return tensor_of(weight, self.device)
        if StoredTensor.why_not(weight) is None:
            return StoredTensor(weight, self.device)
        whole = torch.empty(weight.shape, dtype=torch.float32)
        step = max(1, _CHUNK_ELEMENTS // max(1, weight.shape[1]))
        for first in range(0, weight.shape[0], step):
            whole[first : first + step] = torch.from_numpy(weight.values(first, first + step))
        return whole.to(self.device)
