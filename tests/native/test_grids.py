"""Rows of ggml's blocks in native panels: every value, and products that have one order of additions."""

from __future__ import annotations

import ctypes as c
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from penstock.base.bf16 import F32, narrow, widen
from penstock.formats.tensor_ref import BLOCKS
from penstock.ops.native.abi import PANEL, Act, Code, Format, Kind, Matrix
from penstock.ops.native.library import libraries, open_library
from penstock.ops.native.matrix import aligned
from penstock.ops.native.program import NativeOp
from penstock.weights.stored.ggml.matrix import decoded_blocks
from tests.native.running import each_isa, execute, within

GRIDS = ["IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_S", "IQ1_M", "TQ1_0"]
each_grid = pytest.mark.parametrize("name", GRIDS)
N, K = 70, 512
SCALE_AT = {"TQ1_0": 52}
"""Where a block has its half, if that is not its beginning. IQ1_M has its bits in four places."""


def random_rows(name: str) -> npt.NDArray[np.uint8]:
    """[N, bytes of a row]: all bits drawn, but those of scales, which are around 0.01."""
    rng = np.random.default_rng(GRIDS.index(name))
    blocks = rng.integers(0, 256, (N * K // 256, BLOCKS[name][1]), dtype=np.uint8)
    halves = (0.01 * rng.standard_normal(len(blocks))).astype(np.float16)
    if name == "IQ1_M":
        for i in range(4):
            bits = halves.view(np.uint16) >> 4 * i & 15
            blocks[:, 49 + 2 * i] = blocks[:, 49 + 2 * i] & 15 | bits.astype(np.uint8) << 4
    else:
        at = SCALE_AT.get(name, 0)
        blocks[:, at : at + 2] = halves[:, None].view(np.uint8)
    return blocks.reshape(N, -1)


class Grid:
    """One matrix of blocks in panels; `exact` is what the reader of files makes of it."""

    def __init__(self, library: Any, name: str, act: Act) -> None:
        rows = random_rows(name)
        self.num_rows = N
        self.exact = decoded_blocks(name, rows.reshape(-1, BLOCKS[name][1])).reshape(N, K)
        self.struct = Matrix(format=Format.BLOCK, act=act, rows=N, cols=K, code=Code[name], factor=1.0)
        panels = -(-N // PANEL)
        self._data = aligned(panels * library.pst_panel_bytes(self.struct))
        assert self._data.nbytes == panels * PANEL * rows.shape[1], "as many bytes as in the file"
        places = [rows.ctypes.data + i * rows.strides[0] if i < N else None for i in range(panels * PANEL)]
        pointers = (c.c_void_p * len(places))(*places)
        nothing = [None] * 4
        assert library.pst_pack_codes(self.struct, pointers, *nothing, 0, panels, self._data.ctypes.data) == 0
        self.struct.data = self._data.ctypes.data

    @property
    def address(self) -> int:
        return c.addressof(self.struct)


def linear(isa: str, x: F32, m: Grid, threads: int = 1) -> F32:
    def make(numbers: list[int], out: int) -> NativeOp:
        return NativeOp(Kind.LINEAR, (numbers[0],), out, (0, 0, 0), (0.0, 1.0, 0.0), (m,))

    return execute(isa, threads, [x], N, make)


@each_isa
@each_grid
def test_values_are_those_of_a_reader(isa: str, name: str) -> None:
    library = open_library(libraries()[isa])
    m = Grid(library, name, Act.I8)
    out = np.empty((2, PANEL, K), np.float32)
    for p in range(2):
        assert library.pst_unpack(m.struct, p, out[p].ctypes.data) == 0
    np.testing.assert_array_equal(out.reshape(-1, K)[:N], m.exact)


@each_isa
@each_grid
@pytest.mark.parametrize("act", list(Act), ids=["f32", "bf16", "i8"])
def test_products(isa: str, name: str, act: Act) -> None:
    """Rows whose blocks reach 127 are held exactly in any kind, so all of them have one result but for rounding."""
    rng = np.random.default_rng(9)
    x = rng.integers(-127, 128, (45, K)).astype(np.float32)
    x[:, ::32] = 127
    assert np.array_equal(widen(narrow(x)), x)
    m = Grid(open_library(libraries()[isa]), name, act)
    whole = linear(isa, x, m)
    bound = (np.abs(x) @ np.abs(m.exact).T).astype(np.float64) * K * 2.0**-24
    within(whole, x.astype(np.float64) @ m.exact.T.astype(np.float64), bound)
    for count in (1, 2, 3, 7, 20):
        np.testing.assert_array_equal(linear(isa, x[count : 2 * count], m, 2), whole[count : 2 * count])
