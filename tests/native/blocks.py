"""Matrices of PST_M_BLOCK for tests: random codes, scales and zeros, packed by the library, and modelled in numpy."""

from __future__ import annotations

import ctypes as c
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.base.bf16 import F32, narrow, widen
from penstock.base.small_floats import E4M3, e8m0
from penstock.ops.native.abi import PANEL, Act, Code, Format, Matrix, Scale, Zero
from penstock.ops.native.matrix import aligned

Array = npt.NDArray[Any]
BITS = {
    Code.U8: 8, Code.U6: 6, Code.U5: 5, Code.U4: 4, Code.U3: 3, Code.U2: 2, Code.T4: 4, Code.F4: 4, Code.E4M3: 8,
}  # fmt: skip
INTEGERS = np.array([-128, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 127], np.float32)
FLOATS = np.linspace(-1, 1, 16, dtype=np.float32) ** 3
SUPERS = (Scale.U8_F16, Scale.I8_F16)
Key = tuple[Code, int, Scale, Zero, int]
"""Code, group, scale, zero, offset."""


@dataclass
class Blocks:
    """One matrix [N, K] of a format, and the struct that the library reads."""

    key: Key
    codes: Array
    scales: Array
    supers: Array | None
    zeros: Array | None
    super_zeros: Array | None
    factor: float = 1.0
    act: Act = Act.I8
    bias: F32 | None = None
    pair: bool = False
    order: npt.NDArray[np.int32] | None = None
    struct: Matrix = field(init=False)
    data: Array = field(init=False)

    @property
    def num_rows(self) -> int:
        return len(self.codes)

    @property
    def num_cols(self) -> int:
        return self.codes.shape[1]

    @property
    def address(self) -> int:
        return c.addressof(self.struct)

    @property
    def structs(self) -> list[Matrix]:
        return [self.struct]

    def outputs(self) -> list[int]:
        """Rows in the order of the panels, -1 for padding."""
        n = self.num_rows
        if not self.pair:
            return [*range(n), *[-1] * (-n % PANEL)]
        half = n // 2
        places = [p // PANEL * 32 + p % 32 for p in range(-(-half // 32) * PANEL)]
        return [-1 if i >= half else i + half * (p % PANEL >= 32) for p, i in enumerate(places)]

    def pack(self, library: Any) -> Blocks:
        code, group, scale, zero, offset = self.key
        table = {Code.T4: INTEGERS, Code.F4: FLOATS}.get(code)
        self.table = None if table is None else table.copy()  # tests spoil it
        outputs = self.outputs()
        self._bias = None
        if self.bias is not None:
            self._bias = np.array([0 if i < 0 else self.bias[i] for i in outputs], np.float32)
        self.struct = Matrix(
            format=Format.BLOCK, act=self.act, rows=self.num_rows, cols=self.num_cols, group=group, code=code,
            scale=scale, zero=zero, offset=offset, factor=self.factor, pair=self.pair,
            table=None if self.table is None else self.table.ctypes.data,
            bias=None if self._bias is None else self._bias.ctypes.data,
            order=None if self.order is None else self.order.ctypes.data,
        )  # fmt: skip
        panel_bytes = library.pst_panel_bytes(self.struct)
        assert panel_bytes > 0
        num_panels = len(outputs) // PANEL
        self.data = aligned(num_panels * panel_bytes)
        self.data[:] = 0xA5

        def pointers(array: Array | None) -> Any:
            if array is None:
                return None
            rows = [None if i < 0 else array.ctypes.data + i * array.strides[0] for i in outputs]
            return (c.c_void_p * len(rows))(*rows)

        arrays = [pointers(a) for a in (self.codes, self.scales, self.supers, self.zeros, self.super_zeros)]
        assert library.pst_pack_codes(self.struct, *arrays, 0, num_panels, self.data.ctypes.data) == 0
        self.struct.data = self.data.ctypes.data
        return self

    def values(self, library: Any) -> F32:
        """What the library says that it stands for, rows in their own order."""
        outputs = self.outputs()
        out = np.empty((len(outputs) // PANEL, PANEL, self.num_cols), np.float32)
        for p in range(len(out)):
            assert library.pst_unpack(self.struct, p, out[p].ctypes.data) == 0
        flat = out.reshape(-1, self.num_cols)
        places = {i: p for p, i in enumerate(outputs) if i >= 0}
        return flat[[places[i] for i in range(self.num_rows)]]

    # -- the model

    def integers(self) -> F32:
        """Codes as the numbers that scales multiply."""
        code, *_, offset = self.key
        if code == Code.T4:
            return INTEGERS[self.codes]
        if code == Code.F4:
            return FLOATS[self.codes]
        if code == Code.E4M3:
            return E4M3[self.codes]
        return self.codes.astype(np.float32) - np.float32(offset)

    def units(self) -> F32:
        """Scales as numbers, [N, G]."""
        scale = self.key[2]
        out = numbers(self.scales, scale)
        if self.supers is not None:
            out = out * self._spread(self.supers, out.shape[1])
        return out * np.float32(self.factor)

    def taken(self) -> tuple[F32 | None, F32 | None]:
        """Zeros in units of codes, and as values: [N, G]."""
        zero = self.key[3]
        if self.zeros is None:
            return None, None
        out = widen(self.zeros) if zero == Zero.BF16_CODES else self.zeros.astype(np.float32)
        if self.super_zeros is not None:
            out = out * self._spread(self.super_zeros, out.shape[1])
        return (out, None) if zero in (Zero.U8, Zero.F16_CODES, Zero.BF16_CODES) else (None, out)

    def _spread(self, supers: Array, groups: int) -> F32:
        return np.repeat(supers.astype(np.float32), 256 // self.key[1], axis=1)[:, :groups]

    def exact(self) -> F32:
        """The values as a reader of files computes them in float32."""
        values, k = self.integers(), self.num_cols

        def each(x: F32) -> F32:
            return np.repeat(x, self.key[1] or k, axis=1)[:, :k]

        codes, taken = self.taken()
        if codes is not None:
            values = values - each(codes)
        values = values * each(self.units())
        return values - each(taken) if taken is not None else values


def numbers(array: Array, scale: Scale) -> F32:
    if scale == Scale.BF16:
        return widen(array)
    if scale == Scale.E4M3:
        return E4M3[array]
    if scale == Scale.E8M0:
        return e8m0(array)
    return array.astype(np.float32)


def random_numbers(rng: np.random.Generator, shape: tuple[int, int], scale: Scale) -> Array:
    """Scales of a type around 0.01; integers over all they may be."""
    around = (rng.uniform(0.5, 1.5, shape) * rng.choice([-0.01, 0.01], shape)).astype(np.float32)
    if scale == Scale.F32:
        return around
    if scale == Scale.F16:
        return around.astype(np.float16)
    if scale == Scale.BF16:
        return narrow(around)
    if scale == Scale.E4M3:
        return rng.choice(np.array([i for i in range(256) if i % 128 != 127], np.uint8), shape)
    if scale == Scale.E8M0:
        return rng.integers(118, 124, shape).astype(np.uint8)
    if scale == Scale.I8_F16:
        return rng.integers(-128, 128, shape).astype(np.int8)
    return rng.integers(0, 256, shape).astype(np.uint8)


def random_blocks(seed: int, n: int, k: int, key: Key, **more: Any) -> Blocks:
    code, group, scale, zero, _ = key
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 1 << BITS[code], (n, k)).astype(np.uint8)
    codes[:, :2] = 0, (1 << BITS[code]) - 1
    if code == Code.E4M3:
        codes[codes % 128 == 127] = 0
    groups, chunks = (-(-k // group) if group else 1), -(-k // 256)
    scales = random_numbers(rng, (n, groups), scale)
    supers = (0.001 * rng.standard_normal((n, chunks))).astype(np.float16) if scale in SUPERS else None
    zeros = super_zeros = None
    if zero == Zero.U8:
        zeros = rng.integers(0, 1 << BITS[code], (n, groups)).astype(np.uint8)
    elif zero == Zero.F16_CODES:
        zeros = (rng.uniform(0, 1 << BITS[code], (n, groups))).astype(np.float16)
    elif zero == Zero.BF16_CODES:
        zeros = narrow(rng.uniform(0, 1 << BITS[code], (n, groups)).astype(np.float32))
    elif zero == Zero.F16:
        zeros = (0.1 * rng.standard_normal((n, groups))).astype(np.float16)
    elif zero == Zero.U8_F16:
        zeros = rng.integers(0, 256, (n, groups)).astype(np.uint8)
        super_zeros = (0.001 * rng.standard_normal((n, chunks))).astype(np.float16)
    if (code, scale, zero) == (Code.U2, Scale.U8_F16, Zero.U8_F16):
        scales, zeros = scales % 16, zeros % 16  # Q2_K of ggml has 4 bits for each
    return Blocks(key, codes, scales, supers, zeros, super_zeros, **more)
