"""Products with 8-bit and 4-bit weights: packing, rows as bytes, exactness, and rows that do not know each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from penstock.base.bf16 import F32, narrow, widen
from penstock.base.errors import EngineError
from penstock.ops.native.abi import PANEL, Act, Format, Kind
from penstock.ops.native.library import libraries, open_library
from penstock.ops.native.matrix import Packed, pack
from penstock.ops.native.program import NativeOp
from tests.native.running import ISAS, THREADS, each_isa, each_threads, execute, within

KINDS = [(Format.I8, 0), (Format.I4, 32), (Format.I4, 64), (Format.I4, 128)]
each_kind = pytest.mark.parametrize(("format", "group"), KINDS, ids=["i8", "i4-32", "i4-64", "i4-128"])
each_act = pytest.mark.parametrize("act", list(Act), ids=["f32", "bf16", "i8"])
SHAPES = [(1, 1), (64, 4), (70, 33), (130, 203), (65, 261)]
"""Outputs, inputs."""
MAX_HALF = 65504.0


def library(isa: str) -> Any:
    return open_library(libraries()[isa])


def normal(seed: int, *shape: int) -> F32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def linear(isa: str, x: F32, matrix: Packed, threads: int = 1) -> F32:
    def make(numbers: list[int], out: int) -> NativeOp:
        return NativeOp(Kind.LINEAR, (numbers[0],), out, (0, 0, 0), (0.0, 1.0, 0.0), (matrix,))

    return execute(isa, threads, [x], matrix.num_rows, make)


def integers(m: Packed) -> npt.NDArray[np.int64]:
    """The values of the panels as `penstock.h` lays them out: [padded N, padded K]."""
    panels = -(-m.num_rows // PANEL)
    if m.struct.format == Format.I8:
        flat = m.data.reshape(panels, -1, PANEL, 4).transpose(0, 2, 1, 3).astype(np.int64) - 128
        return flat.reshape(panels * PANEL, -1)
    both = m.data.reshape(panels, -1, PANEL, 4).transpose(0, 2, 1, 3).astype(np.int64)
    halves = np.stack([both & 15, both >> 4], axis=3) - 8
    return halves.reshape(panels * PANEL, -1)


def scales(m: Packed) -> F32:
    """[padded N, groups]."""
    assert m.scales is not None
    panels = -(-m.num_rows // PANEL)
    numbers = m.scales.view(np.float32 if m.struct.format == Format.I8 else np.float16)
    return numbers.reshape(panels, -1, PANEL).transpose(0, 2, 1).reshape(panels * PANEL, -1).astype(np.float32)


def rows_as_bytes(x: F32) -> tuple[npt.NDArray[np.int64], F32]:
    """Rows [T, K] as values of 8 bits and their scales [T], in the arithmetic that the header and 0007 promise."""
    most = np.abs(x).max(axis=1)
    lift = np.where(most < 2.0**-64, np.float32(2.0**64), np.float32(1))
    with np.errstate(divide="ignore", invalid="ignore"):
        values = np.rint(x * lift[:, None] * (np.float32(127) / (most * lift))[:, None])
    return np.where(most[:, None] > 0, values, 0).astype(np.int64), most / np.float32(127)


# ---- packing


@each_isa
@each_kind
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint16], ids=["f32", "f16", "bf16"])
def test_panels_hold_what_the_header_says(isa: str, format: Format, group: int, dtype: Any) -> None:
    wide = normal(1, 70, 203)
    w = narrow(wide) if dtype is np.uint16 else wide.astype(dtype)
    m = pack(library(isa), [w], format, Act.I8, group=group)
    values, units = integers(m), scales(m)
    assert np.all(values[70:] == 0)
    assert np.all(units[70:] == 0)
    assert np.all(values[:, 203:] == 0)
    spread = np.repeat(units, group or values.shape[1], axis=1)
    np.testing.assert_array_equal(m.values(library(isa)), (values.astype(np.float32) * spread)[:, :203])


@each_isa
@pytest.mark.parametrize(("num_rows", "num_cols"), SHAPES)
def test_8_bit_weights_are_the_nearest(isa: str, num_rows: int, num_cols: int) -> None:
    w = normal(2, num_rows, num_cols) * np.float32(0.02)
    m = pack(library(isa), [w], Format.I8, Act.I8)
    unit = np.abs(w).max(axis=1, keepdims=True) / np.float32(127)
    np.testing.assert_array_equal(scales(m)[:num_rows], unit)
    np.testing.assert_array_equal(integers(m)[:num_rows, :num_cols], np.rint(w / unit))
    within(m.values(library(isa))[:num_rows], w, unit * 0.5001)


def plain_error(w: F32, place: float) -> npt.NDArray[np.float64]:
    """Squared error of groups [G, group] with the weight of the largest size at `place`, and the scale as a half."""
    most = np.take_along_axis(w, np.abs(w).argmax(axis=1, keepdims=True), axis=1)
    unit = (most / np.float32(place)).astype(np.float16).astype(np.float64)
    error: npt.NDArray[np.float64] = np.square(w - unit * np.clip(np.rint(w / unit), -8, 7)).sum(axis=1)
    return error


@each_isa
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("tails", [False, True])
def test_4_bit_scales_beat_plain_ones(isa: str, group: int, tails: bool) -> None:
    w = normal(3, 64, 4 * group) * np.float32(0.03)
    if tails:
        w = 1000 * w**3
    got = pack(library(isa), [w], Format.I4, Act.I8, group=group).values(library(isa))
    error = np.square(got.astype(np.float64) - w).reshape(-1, group).sum(axis=1)
    groups = w.reshape(-1, group)
    for place in (-8, 7, -7):
        assert np.all(error <= plain_error(groups, place) * (1 + 1e-5))
    assert error.sum() < (0.97 if tails else 0.93) * min(plain_error(groups, place).sum() for place in (-8, 7))


@each_isa
def test_4_bit_values_are_the_nearest_for_the_scale_as_stored(isa: str) -> None:
    w = normal(22, 64, 256) * np.float32(1e-4)  # scales among the subnormal halves: rounding them changes them much
    m = pack(library(isa), [w], Format.I4, Act.I8, group=64)
    unit = np.repeat(scales(m), 64, axis=1).astype(np.float64)
    within(integers(m), np.clip(w / unit, -8, 7), 0.5 + 1e-6)


@each_isa
def test_weights_at_the_edges(isa: str) -> None:
    w = np.zeros((5, 37), np.float32)
    w[1, 3] = 1e-42
    w[2, 4], w[2, 36] = 3e38, -3e38
    w[3, 5] = 1e-6
    w[4, 6] = np.inf
    for format, group in KINDS:
        m = pack(library(isa), [w], format, Act.F32, group=group)
        got = m.values(library(isa))
        assert np.all(got[0] == 0)
        assert np.all(np.isfinite(got[:4]))
        within(got[1], w[1], 1.01e-42)
        within(got[3], w[3], 2e-8 if format == Format.I8 else 5e-7)
        assert np.all(np.isnan(got[4][:32])), "an infinite weight is not hidden"
        if format == Format.I8:
            within(got[2], w[2], 1e32)
        else:
            assert sorted(np.abs(got[2][got[2] != 0])) in ([7 * MAX_HALF, 8 * MAX_HALF], [7 * MAX_HALF] * 2,
                                                           [8 * MAX_HALF] * 2)  # fmt: skip


@each_kind
def test_all_instruction_sets_pack_the_same(format: Format, group: int) -> None:
    w = normal(4, 70, 203) ** 3
    packs = [pack(library(isa), [w], format, Act.I8, group=group) for isa in ISAS]
    for m in packs[1:]:
        np.testing.assert_array_equal(m.data, packs[0].data)
        assert m.scales is not None
        np.testing.assert_array_equal(m.scales, packs[0].scales)


# ---- integer products


@each_isa
@pytest.mark.parametrize(("num_rows", "num_cols"), [*SHAPES, (70, 2052)])
def test_8_bit_products_are_exact(isa: str, num_rows: int, num_cols: int) -> None:
    x = normal(5, 9, num_cols) * np.exp2(np.arange(9, dtype=np.float32) * 20 - 130)[:, None]
    x[3] = 0
    m = pack(library(isa), [normal(6, num_rows, num_cols)], Format.I8, Act.I8)
    values, unit = rows_as_bytes(x)
    dots = values @ integers(m)[:num_rows, :num_cols].T
    expected = dots.astype(np.float32) * scales(m)[:num_rows, 0] * unit[:, None]
    np.testing.assert_array_equal(linear(isa, x, m), expected)


@each_isa
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize(("num_rows", "num_cols"), [*SHAPES, (70, 1100)])
def test_4_bit_products_are_exact_within_groups(isa: str, group: int, num_rows: int, num_cols: int) -> None:
    x = normal(7, 9, num_cols)
    m = pack(library(isa), [normal(8, num_rows, num_cols)], Format.I4, Act.I8, group=group)
    values, unit = rows_as_bytes(x)
    weights = integers(m)[:num_rows]
    padded = np.zeros((9, weights.shape[1]), np.int64)
    padded[:, :num_cols] = values
    dots = np.einsum("tgk,ngk->tng", padded.reshape(9, -1, group), weights.reshape(num_rows, -1, group))
    terms = dots * scales(m)[:num_rows].astype(np.float64)
    # One rounding per group, two for an instruction set without fused multiply-add, one for the row's scale.
    bound = (2 * terms.shape[2] + 1) * 2.0**-24 * np.abs(terms).sum(axis=2) * unit[:, None]
    within(linear(isa, x, m), terms.sum(axis=2) * unit[:, None].astype(np.float64), bound)


@each_isa
@each_kind
def test_whole_numbers_come_out_whole(isa: str, format: Format, group: int) -> None:
    """With scales of 1 the result is an integer, and every instruction set must find exactly that one."""
    rng = np.random.default_rng(9)
    low, high = (-127, 127) if format == Format.I8 else (-8, 7)
    w = rng.integers(low, high + 1, (70, 517)).astype(np.float32)
    w[:, ::16] = low
    w[:, 1::16] = high
    x = rng.integers(-127, 128, (7, 517)).astype(np.float32)
    x[:, 0] = 127
    m = pack(library(isa), [w], format, Act.I8, group=group)
    np.testing.assert_array_equal(scales(m)[:70], np.float32(1))
    np.testing.assert_array_equal(linear(isa, x, m), x.astype(np.float64) @ w.T.astype(np.float64))


@each_isa
@each_kind
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("weight_sign", [1.0, -1.0])
def test_nothing_saturates(isa: str, format: Format, group: int, sign: float, weight_sign: float) -> None:
    """The largest values everywhere; sums of 65,000 of them stay within 32 bits."""
    num_cols = 65000 if format == Format.I8 else 1024
    x = np.full((2, num_cols), 127 * sign, np.float32)
    w = np.full((3, num_cols), weight_sign, np.float32)
    got = linear(isa, x, pack(library(isa), [w], format, Act.I8, group=group))
    within(got, np.full((2, 3), 127.0 * num_cols * sign * weight_sign), 127 * num_cols * (1e-6 if group == 0 else 1e-3))


@each_kind
@each_act
def test_instruction_sets_agree(format: Format, group: int, act: Act) -> None:
    """8-bit products have no sums that round: the same bits everywhere. Others: wherever additions are fused."""
    x, w = normal(10, 7, 261), normal(11, 70, 261)
    own = {"base"} if (format, act) != (Format.I8, Act.I8) else set()
    own |= {"avx512bf16"} if act == Act.BF16 else set()
    isas = [isa for isa in ISAS if isa not in own]
    got = [linear(isa, x, pack(library(isa), [w], format, act, group=group)) for isa in isas]
    for y in got[1:]:
        np.testing.assert_array_equal(y, got[0])


# ---- weights alone in integers


@each_isa
@each_kind
@pytest.mark.parametrize("act", [Act.F32, Act.BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize(("num_rows", "num_cols"), SHAPES)
def test_C89_E01_weight_only(isa: str, format: Format, group: int, act: Act, num_rows: int, num_cols: int) -> None:
    x = normal(12, 9, num_cols)
    m = pack(library(isa), [normal(13, num_rows, num_cols)], format, act, group=group)
    seen = widen(narrow(x)) if act == Act.BF16 else x
    values = m.values(library(isa))[:num_rows].astype(np.float64)
    bound = (2 * num_cols + 4) * 2.0**-24 * (np.abs(seen).astype(np.float64) @ np.abs(values.T))
    within(linear(isa, x, m), seen.astype(np.float64) @ values.T, bound)


@each_isa
@each_kind
@pytest.mark.parametrize("act", [Act.F32, Act.BF16], ids=["f32", "bf16"])
def test_every_integer_is_turned_exactly(isa: str, format: Format, group: int, act: Act) -> None:
    """A unit vector per input brings out each weight by itself."""
    low, high = (-127, 127) if format == Format.I8 else (-8, 7)
    w = np.resize(np.arange(low, high + 1), (64, 256)).astype(np.float32)
    m = pack(library(isa), [w], format, act, group=group)
    np.testing.assert_array_equal(linear(isa, np.eye(256, dtype=np.float32), m).T, w)


# ---- rows do not know each other


@each_isa
@each_act
@each_kind
def test_a_row_is_the_same_in_any_company(isa: str, act: Act, format: Format, group: int) -> None:
    x = normal(14, 130, 203)
    m = pack(library(isa), [normal(15, 130, 203)], format, act, group=group)
    whole = linear(isa, x, m)
    for count in [*range(1, 18), 64]:
        first = 3 * count % (131 - count)
        np.testing.assert_array_equal(linear(isa, x[first : first + count], m), whole[first : first + count])


@each_isa
@pytest.mark.parametrize("seed", range(12))
def test_later_rows_have_the_bits_of_first_ones(isa: str, seed: int) -> None:
    """Kernels take rows behind the first six, and rows in numbers, in other tiles: shapes are drawn."""
    rng = np.random.default_rng(seed)
    num_rows, num_outputs, num_cols = (int(rng.integers(low, high)) for low, high in ((7, 60), (1, 140), (1, 700)))
    x, w = normal(100 + seed, num_rows, num_cols), normal(200 + seed, num_outputs, num_cols)
    for format, group in KINDS:
        m = pack(library(isa), [w], format, Act.I8, group=group)
        alone = np.concatenate([linear(isa, x[t : t + 1], m) for t in range(num_rows)])
        np.testing.assert_array_equal(linear(isa, x, m).view(np.uint32), alone.view(np.uint32))


@each_isa
@each_act
@each_threads
def test_threads_change_nothing(isa: str, act: Act, threads: int) -> None:
    x, w = normal(16, 23, 165), normal(17, 330, 165)
    for format, group in KINDS[::2]:
        m = pack(library(isa), [w], format, act, group=group)
        np.testing.assert_array_equal(linear(isa, x, m, threads), linear(isa, x, m, THREADS[0]))


@each_isa
@each_act
@each_kind
def test_what_is_not_finite_stays_in_its_row(isa: str, act: Act, format: Format, group: int) -> None:
    x = normal(18, 13, 203)
    m = pack(library(isa), [normal(19, 70, 203)], format, act, group=group)
    clean = linear(isa, x, m)
    spoilt = x.copy()
    spoilt[2, 202], spoilt[5, 0], spoilt[11, 77] = np.nan, np.inf, -np.inf
    got = linear(isa, spoilt, m)
    assert np.all(np.isnan(got[2]))
    assert not np.any(np.isfinite(got[[5, 11]]))
    good = [t for t in range(13) if t not in (2, 5, 11)]
    np.testing.assert_array_equal(got[good], clean[good])
    if act == Act.I8:
        assert np.all(np.isnan(got[[5, 11]]))


@each_isa
@each_kind
def test_rows_at_the_edges(isa: str, format: Format, group: int) -> None:
    """Zeros give zeros; the smallest and the largest rows are rounded like any other."""
    x = np.stack([np.zeros(67), *(normal(20, 67) * f for f in (1.0, 2.0**-140, 2.0**-80, 2.0**120))]).astype(np.float32)
    m = pack(library(isa), [normal(21, 64, 67)], format, Act.I8, group=group)
    got = linear(isa, x, m)
    assert np.all(got[0] == 0)
    for t, factor in ((3, 2.0**-80), (4, 2.0**120)):
        np.testing.assert_array_equal(got[t], got[1] * np.float32(factor))
    within(got[2], got[1].astype(np.float64) * 2.0**-140, 67 * 8 * 2.0**-142)


@each_isa
def test_what_would_give_wrong_sums_is_refused(isa: str) -> None:
    """Groups of 8-bit weights, which have one scale; more products of bytes than a 32-bit sum has room for."""
    grouped = pack(library(isa), [normal(1, 64, 128)], Format.I8, Act.I8, group=0)
    grouped.struct.group = 64
    with pytest.raises(EngineError, match="only 4-bit weights have groups"):
        linear(isa, normal(2, 1, 128), grouped)
    long = pack(library(isa), [np.ones((64, 131076), np.float32)], Format.I8, Act.I8)
    with pytest.raises(EngineError, match="leave 32 bits"):
        linear(isa, np.ones((1, 131076), np.float32), long)
    largest = pack(library(isa), [np.ones((64, 131072), np.float32)], Format.I8, Act.I8)
    np.testing.assert_allclose(linear(isa, np.ones((1, 131072), np.float32), largest), 131072, rtol=1e-5)
