"""Adapters as PST_ADAPT and PST_ADAPT_CODES read them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.base.errors import UnsupportedError
from penstock.core.adapter import UNIT_BYTES
from penstock.core.panels import panels_of
from penstock.ops.adapter_units import CHAINS, UnitMemory, Units, addresses_of, shape_of, units_of
from penstock.ops.adapters import LowRank, Numbers, Rescaled, tokens_of
from penstock.ops.native.abi import PANEL, Act, Adapter, AdapterCodes, Format, TokenAdapters
from penstock.ops.native.matrix import Packed, pack
from penstock.ops.native.packers import DTYPES
from penstock.ops.plan import StepPlan
from penstock.ops.stored import StoredMatrix

_NO_UNITS: Units = np.zeros((0, UNIT_BYTES), np.uint8)
_SCALE_TYPES = {0: np.dtype(np.float32), 1: np.dtype(np.float16), 2: np.dtype(np.uint16)}
"""Of `pst_scale`."""


class AdaptedBase(NamedTuple):
    """A weight of the model in panels. `half`: it is the first (1) or second (2) of a pair."""

    matrix: Packed
    half: int


class PreparedPart(NamedTuple):
    """What an adapter does to one product, its numbers in `units`, and what the structs point into."""

    low: Adapter
    codes: AdapterCodes | None
    held: tuple[Any, ...]
    units: Units


Prepared = Mapping[str, PreparedPart]


class _Slots:
    """`pst_adapter` [count] of one product, `pst_adapter_codes` [count], and what they point into."""

    def __init__(self, count: int) -> None:
        self.structs = (Adapter * count)()
        self.codes = _Codes((AdapterCodes * count)())
        self.held: list[tuple[Any, ...]] = [()] * count

    @property
    def address(self) -> int:
        return ctypes.addressof(self.structs)


class _Codes:
    def __init__(self, structs: Any) -> None:
        self.structs = structs

    @property
    def address(self) -> int:
        return ctypes.addressof(self.structs)


class _StepAdapters:
    def __init__(self) -> None:
        self.struct = TokenAdapters(None, None, 0)
        self.held: tuple[npt.NDArray[np.int32], ...] = ()

    @property
    def address(self) -> int:
        return ctypes.addressof(self.struct)


class NativeTable:
    """See `ops.adapters.AdapterTable`. Changed between two runs only, by the thread that runs.

    `step`: which adapter each token of the step has. `largest`: the largest rank there has been, filled up. `bases`:
    of products that some adapter gives codes, the weight if some adapter gives it scales.
    """

    def __init__(self, count: int, max_rank: int, library: Any, base: Callable[[str], AdaptedBase]) -> None:
        """`base(name)`: a weight of the model, held as codes. Raises KeyError if it is held otherwise."""
        self._count, self._library, self._base = count, library, base
        self.bases: dict[str, AdaptedBase | None] = {}
        self.largest = _filled(max_rank, CHAINS)
        self.step = _StepAdapters()
        self._slots: dict[str, _Slots] = {}

    def of(self, name: str) -> _Slots:
        """Of the product of a weight."""
        return self._slots.setdefault(name, _Slots(self._count))

    def prepare(self, parts: Mapping[str, LowRank]) -> Prepared:
        return {name: self._entry(name, part) for name, part in parts.items()}

    def _entry(self, name: str, part: LowRank) -> PreparedPart:
        units = units_of(part)
        struct, held = packed(part, [units])
        if part.codes is None:
            return PreparedPart(struct, None, held, units)
        if isinstance(part.codes, StoredMatrix):
            panels = panels_of(part.codes.format, part.codes.shape[1])
            delta = pack(self._library, [part.codes], Format.BLOCK, Act.F32, panels=panels, as_stored=True)
            return PreparedPart(struct, AdapterCodes(None, delta.address), (held, delta), units)
        base = self._base(name)
        scales = scale_panels(part.codes, base)
        return PreparedPart(struct, AdapterCodes(scales.ctypes.data, None), (held, scales, base), units)

    def lay(self, prepared: Prepared, memory: UnitMemory) -> Prepared:
        """See `model.forward.PlacingForward`."""
        found = {}
        for name, entry in prepared.items():
            placed = addresses_of(memory.put(entry.units))
            low = Adapter.from_buffer_copy(entry.low)
            low.units = placed.ctypes.data
            held = (placed,) if entry.codes is None else (placed, *entry.held[1:])
            found[name] = PreparedPart(low, entry.codes, held, _NO_UNITS)
        return found

    def needs(self, prepared: Prepared) -> bool:
        """Whether programs made before have no place for codes of these. Mutates: `bases`."""
        found = False
        for name, entry in prepared.items():
            if entry.codes is None:
                continue
            if entry.codes.scales and self.bases.get(name) is None:
                self.bases[name], found = entry.held[-1], True
            elif name not in self.bases:
                self.bases[name], found = None, True
        return found

    def put(self, number: int, prepared: Prepared) -> None:
        self.drop(number)
        for name, (struct, codes, held, _) in prepared.items():
            slots = self.of(name)
            slots.structs[number], slots.held[number] = struct, held
            slots.codes.structs[number] = AdapterCodes() if codes is None else codes

    def drop(self, number: int) -> None:
        for slots in self._slots.values():
            slots.structs[number], slots.held[number] = Adapter(), ()
            slots.codes.structs[number] = AdapterCodes()

    def begin(self, plan: StepPlan) -> None:
        """The run that follows is of this plan, which has adapters."""
        assert plan.adapters is not None, "a step without adapters needs no table"
        of_token = np.ascontiguousarray(tokens_of(plan.adapters, plan.query_start_loc), np.int32)
        order = np.argsort(of_token, kind="stable").astype(np.int32)
        order = order[np.count_nonzero(of_token < 0) :]
        self.step.held = (of_token, order)
        self.step.struct.of_token, self.step.struct.order = of_token.ctypes.data, order.ctypes.data
        self.step.struct.count = len(order)


def packed(part: LowRank, pieces: Sequence[Units]) -> tuple[Adapter, tuple[Any, ...]]:
    """`pst_adapter` of a part whose units lie in `pieces`, and what it points into."""
    shape, addresses = shape_of(part), addresses_of(pieces)
    struct = Adapter(
        addresses.ctypes.data, int(DTYPES[part.a.dtype]), shape.rank, shape.gain, shape.shift, part.factor
    )  # fmt: skip
    return struct, (addresses, *pieces)


def scale_panels(codes: Rescaled, base: AdaptedBase) -> Numbers:
    """[panels, groups, 64] as the panels of `base` have their scales; of a half of a pair [panels, groups, 32].

    Raises: UnsupportedError if it has others."""
    m, lanes = base.matrix.struct, PANEL // 2 if base.half else PANEL
    scales, outputs = codes.scales, base.matrix.num_rows // (2 if base.half else 1)
    if base.matrix.panels is None or _SCALE_TYPES.get(m.scale) != scales.dtype or len(scales) != outputs:
        raise UnsupportedError("this base is not held as the codes of its file here, which a scale set needs")
    groups = -(-base.matrix.num_cols // m.group) if m.group else 1
    if scales.shape[1] != groups:  # panels may have more groups than the file
        scales = np.repeat(scales, -(-groups // scales.shape[1]), axis=1)[:, :groups]
    whole = np.zeros((_filled(outputs, lanes), groups), scales.dtype)
    whole[:outputs] = scales
    return np.ascontiguousarray(whole.reshape(-1, lanes, groups).swapaxes(1, 2))


def _filled(n: int, to: int) -> int:
    return -(-n // to) * to
