"""Native norms against float64, and against themselves in other company."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from penstock.base.bf16 import F32
from penstock.base.errors import EngineError
from penstock.ops.native.abi import NORMS, Kind
from penstock.ops.native.program import Layout, NativeOp, NativeProgram
from penstock.ops.ref.norm import layer_norm, rms_norm
from tests.native.running import ISAS, each_isa, each_threads, execute, pool, within

EPS = 1e-6
BOUND = 40 * 2.0**-24
"""Relative to what |x| / sqrt(...) * |w| + |b| is: a few tens of roundings in the sums, fewer after them."""
WIDTHS = (1, 15, 16, 17, 64, 896, 4097)
each_kind = pytest.mark.parametrize("kind", ["rms", "layer"])


def normal(seed: int, *shape: int) -> F32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def op(
    kind: str, stretch: int, weight: F32 | None = None, bias: F32 | None = None, own_weights: bool = False
) -> Callable[[list[int], int], NativeOp]:
    return lambda ins, out: NativeOp(
        Kind.NORM, inputs=tuple(ins), out=out, n=(stretch, NORMS[kind], int(own_weights)), f=(EPS,),
        pointers=(weight, bias),
    )  # fmt: skip


def expected(kind: str, x: F32, weight: F32 | None, bias: F32 | None) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """The norm over the last axis in float64, and the size that its error is measured by."""
    wide = x.astype(np.float64)
    centred = wide - wide.mean(-1, keepdims=True) if kind == "layer" else wide
    scale = 1.0 / np.sqrt((centred**2).mean(-1, keepdims=True) + np.float32(EPS))
    if weight is not None:
        scale = scale * weight
    out, size = centred * scale, np.abs(wide * scale) + np.abs(wide).mean(-1, keepdims=True) * np.abs(scale)
    return (out, size) if bias is None else (out + bias, size + np.abs(bias))


@each_isa
@each_kind
@pytest.mark.parametrize("weighted", [False, True])
def test_norms(isa: str, kind: str, weighted: bool) -> None:
    for width in WIDTHS:
        # Rows of many sizes, one far from zero, one of zeros.
        x = normal(1, 6, width) * np.float32(10) ** normal(2, 6, 1)
        x[4] += 30
        x[5] = 0
        weight = normal(3, width) if weighted else None
        bias = normal(4, width) if weighted and kind == "layer" else None
        actual = execute(isa, 1, [x], width, op(kind, width, weight, bias))
        out, size = expected(kind, x, weight, bias)
        within(actual, out, BOUND * size + 1e-30)
        numpy = rms_norm(x, weight, EPS) if kind == "rms" else layer_norm(x, weight, bias, EPS)
        within(actual, numpy, 2 * BOUND * size + 1e-30)


@each_isa
@each_threads
@each_kind
@pytest.mark.parametrize("own_weights", [False, True])
def test_stretches_are_normed_by_themselves(isa: str, threads: int, kind: str, own_weights: bool) -> None:
    for stretch, count in ((1, 3), (17, 5), (64, 14), (128, 8)):
        x = normal(5, 9, count * stretch)
        weight = normal(6, count * stretch if own_weights else stretch)
        bias = normal(7, len(weight)) if kind == "layer" else None
        shape = (count if own_weights else 1, stretch)
        cut = x.reshape(9, count, stretch)
        out, size = expected(kind, cut, weight.reshape(shape), None if bias is None else bias.reshape(shape))
        make = op(kind, stretch, weight, bias, own_weights)
        actual = execute(isa, threads, [x], count * stretch, make)
        within(actual, out.reshape(x.shape), (BOUND * size).reshape(x.shape) + 1e-30)
        assert np.array_equal(execute(isa, threads, [x], None, make), actual), "in place"
        if not own_weights:
            alone = execute(isa, 1, [cut[2, 1:2].copy()], stretch, make)
            assert np.array_equal(alone[0], actual.reshape(cut.shape)[2, 1]), "a head is normed as a row is"


@each_isa
@each_threads
@each_kind
def test_rows_do_not_depend_on_their_company(isa: str, threads: int, kind: str) -> None:
    for width in (1, 17, 896, 4099):
        x, weight = normal(8, 10, width), normal(9, width)
        make = op(kind, width, weight)
        whole = execute(isa, 1, [x], width, make)
        assert np.array_equal(execute(isa, threads, [x], width, make), whole)
        assert np.array_equal(execute(isa, threads, [x], None, make), whole)
        assert np.array_equal(execute(isa, threads, [x[7:8]], width, make), whole[7:8])
        assert np.array_equal(execute(isa, threads, [x[::-1].copy()], width, make), whole[::-1])


@each_isa
@each_threads
@each_kind
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_shows_and_stays_in_its_row(isa: str, threads: int, kind: str, bad: float) -> None:
    x, weight = normal(10, 5, 53), normal(11, 53)
    make = op(kind, 53, weight)
    clean = execute(isa, 1, [x], 53, make)
    for place in (0, 31, 48, 52):
        broken = x.copy()
        broken[2, place] = bad
        actual = execute(isa, threads, [broken], 53, make)
        assert np.isnan(actual[2, place]), "it shows where it is"
        assert np.array_equal(np.delete(actual, 2, 0), np.delete(clean, 2, 0))
        if np.isnan(bad):
            assert np.isnan(actual[2]).all(), "a mean of what is not a number is none"


@each_isa
@each_kind
def test_sums_do_not_drift(isa: str, kind: str) -> None:
    """A row of 100,000 numbers far from zero: the error does not grow with the width."""
    x = np.full((1, 100_003), 1.1, np.float32) + np.float32(0.01) * normal(12, 1, 100_003)
    out, size = expected(kind, x, None, None)
    within(execute(isa, 1, [x], 100_003, op(kind, 100_003)), out, BOUND * size)


@pytest.mark.skipif(not ISAS, reason="no native library was built: no C++17 compiler")
@pytest.mark.parametrize(
    ("n", "pointers", "sentence"),
    [
        ((5, 1, 0), (), "whole number of normed stretches"),
        ((0, 1, 0), (), "whole number of normed stretches"),
        ((4, 0, 0), (), "rms .1. or layer .2."),
        ((4, 3, 0), (), "rms .1. or layer .2."),
        ((4, 1, 2), (), "weights are for"),
        ((4, 1, 0), (None, np.zeros(4, np.float32)), "bias belongs"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_sentence(
    n: tuple[int, ...], pointers: tuple[Any, ...], sentence: str
) -> None:
    layout = Layout()
    r = layout.register(8)
    with pytest.raises(EngineError, match=sentence):
        NativeProgram(
            pool(ISAS[-1], 1), [NativeOp(Kind.NORM, (r,), r, n, (EPS,), pointers)], layout, [], max_tokens=4, max_rows=2
        )
