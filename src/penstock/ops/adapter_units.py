"""The numbers of adapters in units of 1,024 bytes, which may lie anywhere: also in blocks of the KV pool.

All units are of one size, so nothing is lost between them, and an adapter of n units fits wherever n units are free.
Source: Sheng et al., S-LoRA, arXiv 2311.03285, section 5.1, whose unit is a vector of one rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.base.bf16 import F32
from penstock.base.errors import EngineError
from penstock.core.adapter import UNIT_BYTES
from penstock.core.panels import PANEL_ROWS as PANEL
from penstock.ops.adapters import LowRank, Numbers

Units = npt.NDArray[np.uint8]
CHAINS = 4
"""Ranks that a unit of A has."""
FLOATS = UNIT_BYTES // 4
_NO_UNITS: Units = np.zeros((0, UNIT_BYTES), np.uint8)
_NOTHING = np.zeros((0, 0), np.float32)


class UnitShape(NamedTuple):
    """Of one product of `rows` outputs and `cols` inputs: `rank` is filled up to a multiple of CHAINS, numbers have
    `size` bytes."""

    rows: int
    cols: int
    rank: int
    size: int
    gain: bool
    shift: bool

    @classmethod
    def of(cls, rows: int, cols: int, rank: int, size: int, *, gain: bool, shift: bool) -> UnitShape:
        return cls(rows, cols, _ceil(rank, CHAINS) * CHAINS, size, gain, shift)

    @property
    def inputs(self) -> int:
        """Of a unit of A."""
        return UNIT_BYTES // self.size // CHAINS

    @property
    def ranks(self) -> int:
        """Of a unit of B."""
        return UNIT_BYTES // self.size // PANEL

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """Units of A, B, gain and shift."""
        vector = _ceil(self.rows, FLOATS)
        a = self.rank // CHAINS * _ceil(self.cols, self.inputs)
        b = _ceil(self.rows, PANEL) * _ceil(self.rank, self.ranks)
        return a, b, vector * self.gain, vector * self.shift

    @property
    def num_units(self) -> int:
        return sum(self.counts)


def shape_of(part: LowRank) -> UnitShape:
    (rank, cols), rows = part.a.shape, len(part.b)
    return UnitShape.of(
        rows, cols, rank, part.a.dtype.itemsize, gain=part.gain is not None, shift=part.shift is not None
    )  # fmt: skip


def units_of(part: LowRank) -> Units:
    """What `part` holds [units, 1024], without codes: A [rank / 4][inputs][4 ranks][E / 4 inputs], B [panels of 64
    outputs][ranks][E / 64 ranks][64 outputs], E being the numbers in a unit; then the gain and the shift."""
    shape = shape_of(part)
    across, down = _ceil(shape.cols, shape.inputs), _ceil(shape.rank, shape.ranks)
    a = _padded(part.a, shape.rank, across * shape.inputs).reshape(-1, CHAINS, across, shape.inputs).swapaxes(1, 2)
    panels = _ceil(shape.rows, PANEL)
    b = _padded(part.b, panels * PANEL, down * shape.ranks).reshape(panels, PANEL, down * shape.ranks).swapaxes(1, 2)
    vectors = [_padded(v[None], 1, _ceil(len(v), FLOATS) * FLOATS) for v in (part.gain, part.shift) if v is not None]
    found = [np.ascontiguousarray(m).reshape(-1).view(np.uint8).reshape(-1, UNIT_BYTES) for m in (a, b, *vectors)]
    return np.concatenate(found)


def part_of(units: Units, shape: UnitShape, dtype: npt.DTypeLike, factor: float) -> LowRank:
    """The other way, from units in their order; ranks that fill up stay."""
    ends = np.cumsum(shape.counts)
    a, b, gain, shift = (own.reshape(-1) for own in np.split(units, ends[:-1]))
    across, down = _ceil(shape.cols, shape.inputs), _ceil(shape.rank, shape.ranks)
    panels, ranks, inputs = _ceil(shape.rows, PANEL), down * shape.ranks, across * shape.inputs
    low = a.view(dtype).reshape(-1, across, CHAINS, shape.inputs).swapaxes(1, 2).reshape(shape.rank, inputs)
    up = b.view(dtype).reshape(panels, ranks, PANEL).swapaxes(1, 2).reshape(panels * PANEL, ranks)
    return LowRank(
        low[:, : shape.cols], up[: shape.rows, : shape.rank], factor,
        _vector(gain, shape.rows) if shape.gain else None, _vector(shift, shape.rows) if shape.shift else None,
    )  # fmt: skip


class UnitMemory:
    """Units of some pieces of memory, handed out from front to back. `pieces`: uint8 [n, 1024] each, views of it."""

    def __init__(self, pieces: Sequence[Units]) -> None:
        self._pieces = list(pieces)
        self._left = sum(map(len, self._pieces))

    def put(self, units: Units) -> list[Units]:
        """Copies them here: the pieces in which they lie, in order. Raises: EngineError if there is too little room."""
        if len(units) > self._left:
            raise EngineError(f"{len(units)} units of an adapter have room for {self._left}")
        self._left -= len(units)
        found = []
        while len(units):
            piece = self._pieces[0]
            n = min(len(piece), len(units))
            piece[:n] = units[:n]
            found.append(piece[:n])
            self._pieces[:1] = [piece[n:]] if n < len(piece) else []
            units = units[n:]
        return found


def addresses_of(pieces: Iterable[Units]) -> npt.NDArray[np.uint64]:
    """Where each unit lies, in order."""
    found = [np.arange(len(p), dtype=np.uint64) * np.uint64(UNIT_BYTES) + np.uint64(p.ctypes.data) for p in pieces]
    return np.concatenate([np.zeros(0, np.uint64), *found])


class PlacedPart:
    """What an adapter does to one product, for the reference operations: its numbers are read from units each time."""

    def __init__(self, part: LowRank, memory: UnitMemory) -> None:
        self._shape, self._dtype = shape_of(part), part.a.dtype
        self._pieces = memory.put(units_of(part))
        self._rest = part._replace(a=_NOTHING, b=_NOTHING, gain=None, shift=None)

    def read(self) -> LowRank:
        found = part_of(np.concatenate([_NO_UNITS, *self._pieces]), self._shape, self._dtype, self._rest.factor)
        return found._replace(codes=self._rest.codes)


def _padded(m: Numbers, rows: int, cols: int) -> Numbers:
    out = np.zeros((rows, cols), m.dtype)
    out[: m.shape[0], : m.shape[1]] = m
    return out


def _vector(units: Units, count: int) -> F32:
    return units.view(np.float32)[:count]


def _ceil(n: int, of: int) -> int:
    return -(-n // of)
