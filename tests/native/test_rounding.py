"""Floats rounded to codes of 8 and 4 bits while they are packed: the same on every instruction set."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from penstock.base.bf16 import F32, narrow, widen
from penstock.core.panels import Panels
from penstock.ops.native.abi import Act, Format
from penstock.ops.native.library import libraries, open_library
from penstock.ops.native.matrix import Packed, pack
from penstock.quant.reference import int8_groups
from tests.native.running import ISAS, each_isa, within

EIGHT = Panels("U8", 0, "F32", "NONE", 128)
EIGHTS = {group: Panels("U8", group, "F16", "NONE", 128) for group in (32, 64, 128)}
FOUR = {group: Panels("U4", group, "F16", "NONE", 8) for group in (32, 64, 128)}
KINDS = [EIGHT, *EIGHTS.values(), *FOUR.values()]
each_kind = pytest.mark.parametrize("panels", KINDS, ids=["i8", "i8-32", "i8-64", "i8-128", "i4-32", "i4-64", "i4-128"])
SHAPES = [(1, 1), (64, 4), (70, 33), (130, 203), (65, 261)]
"""Outputs, inputs."""
MAX_HALF = 65504.0


def library(isa: str) -> Any:
    return open_library(libraries()[isa])


def normal(seed: int, *shape: int) -> F32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def rounded(isa: str, w: npt.NDArray[Any], panels: Panels) -> Packed:
    return pack(library(isa), [w], Format.BLOCK, Act.I8, panels=panels)


def values(isa: str, w: npt.NDArray[Any], panels: Panels) -> F32:
    """Of the packed rows, and zeros for padding."""
    return rounded(isa, w, panels).values(library(isa))


@each_isa
@each_kind
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint16], ids=["f32", "f16", "bf16"])
def test_sources_are_read_in_their_own_type(isa: str, panels: Panels, dtype: Any) -> None:
    wide = normal(1, 70, 203)
    w = narrow(wide) if dtype is np.uint16 else wide.astype(dtype)
    got = values(isa, w, panels)
    assert got.shape == (128, 203)
    assert np.all(got[70:] == 0)
    np.testing.assert_array_equal(
        got[:70], values(isa, widen(w) if dtype is np.uint16 else w.astype(np.float32), panels)[:70]
    )


@each_isa
@pytest.mark.parametrize(("num_rows", "num_cols"), SHAPES)
def test_8_bit_weights_are_the_nearest(isa: str, num_rows: int, num_cols: int) -> None:
    w = normal(2, num_rows, num_cols) * np.float32(0.02)
    unit = np.abs(w).max(axis=1, keepdims=True) / np.float32(127)
    np.testing.assert_array_equal(values(isa, w, EIGHT)[:num_rows], np.rint(w / unit) * unit)


@each_isa
@pytest.mark.parametrize("group", EIGHTS)
@pytest.mark.parametrize(("num_rows", "num_cols"), SHAPES)
def test_8_bit_groups_are_those_of_the_reference(isa: str, group: int, num_rows: int, num_cols: int) -> None:
    w = normal(4, num_rows, num_cols) * np.float32(0.02)
    w[:, ::7] *= 40
    codes, scales = int8_groups(w, group)
    wide = np.repeat(scales.astype(np.float32), group, axis=1)[:, :num_cols]
    np.testing.assert_array_equal(values(isa, w, EIGHTS[group])[:num_rows], codes * wide)


def plain_error(w: F32, place: float) -> npt.NDArray[np.float64]:
    """Squared error of groups [G, group] with the weight of the largest size at `place`, and the scale as a half."""
    most = np.take_along_axis(w, np.abs(w).argmax(axis=1, keepdims=True), axis=1)
    unit = (most / np.float32(place)).astype(np.float16).astype(np.float64)
    error: npt.NDArray[np.float64] = np.square(w - unit * np.clip(np.rint(w / unit), -8, 7)).sum(axis=1)
    return error


@each_isa
@pytest.mark.parametrize("group", FOUR)
@pytest.mark.parametrize("tails", [False, True])
def test_4_bit_scales_beat_plain_ones(isa: str, group: int, tails: bool) -> None:
    w = normal(3, 64, 4 * group) * np.float32(0.03)
    if tails:
        w = 1000 * w**3
    got = values(isa, w, FOUR[group])
    error = np.square(got.astype(np.float64) - w).reshape(-1, group).sum(axis=1)
    groups = w.reshape(-1, group)
    for place in (-8, 7, -7):
        assert np.all(error <= plain_error(groups, place) * (1 + 1e-5))
    assert error.sum() < (0.97 if tails else 0.93) * min(plain_error(groups, place).sum() for place in (-8, 7))


@each_isa
def test_4_bit_values_are_the_nearest_for_the_scale_as_stored(isa: str) -> None:
    """Scales among the subnormal halves: rounding them changes them much. Codes differ by one scale at least."""
    w = normal(22, 64, 256) * np.float32(1e-4)
    got = values(isa, w, FOUR[64]).reshape(-1, 64)
    steps = np.diff(np.sort(np.abs(got), axis=1), axis=1)
    unit = np.where(steps > 0, steps, np.inf).min(axis=1, keepdims=True)
    exact = w.reshape(-1, 64) / unit
    inside = np.abs(exact) < 7  # what is beyond may be cut off
    within((got / unit)[inside], exact[inside], 0.5 + 1e-6)


@each_isa
def test_weights_at_the_edges(isa: str) -> None:
    w = np.zeros((5, 37), np.float32)
    w[1, 3] = 1e-42
    w[2, 4], w[2, 36] = 3e38, -3e38
    w[3, 5] = 1e-6
    w[4, 6] = np.inf
    for panels in KINDS:
        got = values(isa, w, panels)
        assert np.all(got[0] == 0)
        assert np.all(np.isfinite(got[:4]))
        within(got[1], w[1], 1.01e-42)
        # Of 8 bits a half is 0 below 127 times its least, 7.6e-6.
        within(got[3], w[3], 2e-8 if panels is EIGHT else 5e-7 if panels.code == "U4" else 1.01e-6)
        assert np.all(np.isnan(got[4][:32])), "an infinite weight is not hidden"
        if panels is EIGHT:
            within(got[2], w[2], 1e32)
        elif panels.code == "U8":
            assert np.abs(got[2]).max() == 127 * MAX_HALF
        else:
            assert sorted(np.abs(got[2][got[2] != 0])) in ([7 * MAX_HALF, 8 * MAX_HALF], [7 * MAX_HALF] * 2,
                                                           [8 * MAX_HALF] * 2)  # fmt: skip


@each_kind
def test_all_instruction_sets_pack_the_same(panels: Panels) -> None:
    w = normal(4, 70, 203) ** 3
    packs = [rounded(isa, w, panels) for isa in ISAS]
    for m in packs[1:]:
        np.testing.assert_array_equal(m.data, packs[0].data)
