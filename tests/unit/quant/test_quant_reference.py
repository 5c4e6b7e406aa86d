"""Rounding to few bits: errors within half a step, exact where it can be, rows by themselves. Catalogue row E01."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.base.bf16 import F32, narrow, widen
from penstock.base.errors import ConfigError
from penstock.core.matrix_format import GROUPS, NONE, Scheme, parse_scheme, plain
from penstock.ops.blas import linear
from penstock.quant.reference import (
    QuantisedLinear,
    int4_groups,
    int8_groups,
    int8_outputs,
    panels_bytes,
    quantised,
    rounded_rows,
)


def noise(*shape: int, seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_names() -> None:
    assert parse_scheme("none") == NONE
    assert parse_scheme("int8-w8a8") == Scheme("int8-w8a8", 8, 0, 8)
    assert parse_scheme("int8-wo") == Scheme("int8-wo", 8, 0, 0)
    assert parse_scheme("int8-w8a8:32") == Scheme("int8-w8a8:32", 8, 32, 8)
    assert parse_scheme("int4-w4a8") == parse_scheme("int4-w4a8:64") == Scheme("int4-w4a8", 4, 64, 8)
    assert parse_scheme("int4-wo:128") == Scheme("int4-wo:128", 4, 128, 0)


@pytest.mark.parametrize(
    "name", ["", "int8", "int4-w4a8:16", "int4-wo:", "int8-wo:16", "none:32", "INT8-WO", "int4-wo:064", "int4-wo:64 "]
)
def test_names_that_are_none(name: str) -> None:
    if name == "int4-wo:064":
        assert parse_scheme(name).group == 64
        return
    with pytest.raises(ConfigError, match="quantization"):
        parse_scheme(name)


def test_int8_is_within_half_a_step_and_keeps_what_fits() -> None:
    w = noise(40, 51)
    codes, scales = int8_outputs(w)
    values = codes.astype(np.float32) * scales[:, None]
    assert np.all(np.abs(values - w) <= scales[:, None] * 0.500001)
    assert np.all(np.abs(codes).max(axis=1) == 127), "the largest of each output uses the whole range"
    exact = np.random.default_rng(1).integers(-127, 128, (6, 30)).astype(np.float32)
    exact[:, 0] = 127
    assert np.array_equal(int8_outputs(exact)[0], exact)
    ties = np.array([[127, 0.5, 1.5, 2.5, -0.5, -1.5]], np.float32)
    assert int8_outputs(ties)[0].tolist() == [[127, 0, 2, 2, 0, -2]]
    assert not int8_outputs(np.zeros((2, 3), np.float32))[0].any()


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("cols", [1, 31, 128, 200])
def test_int8_of_groups_is_within_half_a_step_of_its_group(group: int, cols: int) -> None:
    w = noise(9, cols, seed=cols) * np.linspace(0.01, 5, cols, dtype=np.float32)
    codes, scales = int8_groups(w, group)
    assert (codes.shape, scales.shape, scales.dtype) == (w.shape, (9, -(-cols // group)), np.float16)
    wide = np.repeat(scales.astype(np.float32), group, axis=1)[:, :cols]
    # A scale that is rounded down cuts the extreme off by a 2,048th of it, 127 / 2,048 of a step.
    assert np.all(np.abs(codes * wide - w) <= wide * 0.5001)
    for g in range(scales.shape[1]):
        assert np.all(np.abs(codes[:, g * group : (g + 1) * group]).max(axis=1) == 127)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("cols", [1, 31, 128, 200])
def test_int4_is_within_half_a_step_of_its_group(group: int, cols: int) -> None:
    w = noise(9, cols, seed=cols)
    codes, scales = int4_groups(w, group)
    assert codes.shape == w.shape
    assert scales.shape == (9, -(-cols // group))
    assert codes.min() >= -8
    assert codes.max() <= 7
    wide = np.repeat(scales.astype(np.float32), group, axis=1)[:, :cols]
    steps = np.abs(wide)
    # A number next to the extreme, on the other side, would be 8, which is not there: it may be a whole step off.
    assert np.all(np.abs(codes * wide - w) <= steps * 1.001)
    inside = np.abs(w) <= 7.4 * steps
    assert np.all(np.abs(codes * wide - w)[inside] <= steps[inside] * 0.5001)
    for g in range(scales.shape[1]):
        part = w[:, g * group : (g + 1) * group]
        largest = np.take_along_axis(codes[:, g * group : (g + 1) * group], np.abs(part).argmax(1)[:, None], 1)
        assert np.all(largest == -8), "the extreme of a group is -8, whatever its sign"


def test_int4_keeps_what_fits_and_survives_extremes() -> None:
    exact = np.random.default_rng(2).integers(-8, 8, (5, 64)).astype(np.float32)
    exact[:, 3] = -8
    assert np.array_equal(quantised(exact, parse_scheme("int4-wo")).values(), exact)
    huge = np.array([[3e38, -1.0, 5.0]], np.float32)
    values = quantised(huge, parse_scheme("int4-wo:32")).values()
    assert np.isfinite(values).all()
    tiny = np.full((1, 3), 1e-30, np.float32)
    assert not quantised(tiny, parse_scheme("int4-wo:32")).values().any()


def test_sixteen_bit_weights_are_rounded_from_their_values() -> None:
    w = noise(70, 33)
    for scheme in (parse_scheme("int8-wo"), parse_scheme("int4-wo:32")):
        for stored, values in ((narrow(w), widen(narrow(w))), (w.astype(np.float16), w.astype(np.float16))):
            a, b = quantised(stored, scheme), quantised(values.astype(np.float32), scheme)
            assert np.array_equal(a.values(), b.values())


def test_rows_are_rounded_by_themselves() -> None:
    x = noise(5, 40)
    x[1] *= 1000
    x[3] = 0
    whole = rounded_rows(x, 32)
    assert np.array_equal(whole, np.concatenate([rounded_rows(row[None], 32) for row in x]))
    assert np.array_equal(whole, np.concatenate([rounded_rows(x[:, :32], 32), rounded_rows(x[:, 32:], 32)], 1))
    for part in (slice(0, 32), slice(32, 40)):
        largest = np.abs(x[:, part]).max(axis=1, keepdims=True)
        assert np.all(np.abs(whole - x)[:, part] <= largest / 127 * 0.5001)
    assert np.abs(rounded_rows(x, 64) - whole)[1].max() > 0, "larger blocks have larger steps"
    assert not whole[3].any()
    for bad in (np.nan, np.inf, -np.inf):
        spoilt = x.copy()
        spoilt[2, 7] = bad
        with np.errstate(all="ignore"):
            out = rounded_rows(spoilt, 32)
        assert np.isnan(out[2, :32]).all()
        assert np.array_equal(np.delete(out, 2, 0), np.delete(whole, 2, 0))


@pytest.mark.parametrize("name", ["int8-w8a8", "int8-wo", "int8-w8a8:32", "int4-w4a8:32", "int4-wo:128"])
def test_the_linear_entry_is_the_product_of_what_is_stood_for(name: str) -> None:
    scheme = parse_scheme(name)
    x, w, bias, kept = noise(6, 100, seed=1), noise(70, 100, seed=2), noise(70, seed=3), noise(5, 100, seed=4)
    entry = QuantisedLinear(scheme, [kept])
    rows = rounded_rows(x, 32) if scheme.row_bits else x
    expected = rows.astype(np.float64) @ quantised(w, scheme).values().astype(np.float64).T + bias
    for _ in range(2):
        assert np.allclose(entry(x, w, bias), expected, rtol=1e-5, atol=1e-5)
    assert entry.met(w)
    assert np.array_equal(entry(x, kept), linear(x, kept))
    assert not entry.met(kept)
    assert not np.allclose(entry(x, w), linear(x, w), atol=1e-4), "something is lost"


def test_bytes_in_panels() -> None:
    assert panels_bytes((64, 128), plain("bfloat16")) == 64 * 128 * 2
    assert panels_bytes((65, 128), plain("float32")) == 128 * 128 * 4
    assert panels_bytes((64, 128), parse_scheme("int8-wo").format) == 64 * 128 + 64 * 4
    assert panels_bytes((64, 100), parse_scheme("int4-wo").format) == 64 * 128 // 2 + 64 * 2 * 2
