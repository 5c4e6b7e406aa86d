"""PST_LINEAR on floating-point matrices: against float64, and bit for bit against itself in other company."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from penstock.base.bf16 import F32, narrow, widen
from penstock.base.errors import EngineError
from penstock.ops.native.abi import ACTIVATIONS, NORMS, SELECTED, Act, Format, Kind
from penstock.ops.native.library import libraries, open_library
from penstock.ops.native.matrix import Packed, pack
from penstock.ops.native.program import Layout, NativeOp, NativeProgram, StepMemory
from penstock.ops.ref.pointwise import erf
from tests.native.running import ISAS, each_isa, each_threads, execute, plan_of, pool, within

F64 = npt.NDArray[np.float64]
Array = npt.NDArray[Any]

U32 = 2.0**-24
"""Half a unit of the last place of float32, relative."""
PRODUCTS = [
    (Format.F32, Act.F32), (Format.F16, Act.F32), (Format.BF16, Act.F32), (Format.BF16, Act.BF16),
]  # fmt: skip
each_product = pytest.mark.parametrize(("fmt", "act"), PRODUCTS, ids=lambda x: x.name.lower())
SINGLE = ["silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "tanh", "quick_gelu"]
FUSED = [isa for isa in ISAS if isa != "base"]
"""Instruction sets with fused multiply-add."""


def random(seed: int, *shape: int) -> F32:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def stored(fmt: Format, w: F32) -> Array:
    """The weights as a checkpoint of this format would hold them."""
    if fmt is Format.F16:
        return w.astype(np.float16)
    return narrow(w) if fmt is Format.BF16 else w


def meant(weights: Array) -> F64:
    return (widen(weights) if weights.dtype == np.uint16 else weights).astype(np.float64)


def seen(x: F32, act: Act) -> F64:
    """What the rows are when they meet the weights."""
    return (widen(narrow(x)) if act is Act.BF16 else x).astype(np.float64)


@dataclass(frozen=True)
class Linear:
    """A PST_LINEAR and its parts. `kind`: 0 plain, 1 activated, 2 gated."""

    packed: Packed
    norm: str = "none"
    norm_weight: F32 | None = None
    norm_bias: F32 | None = None
    eps: float = 1e-5
    kind: int = 0
    activation: str = "silu"
    factor: float = 1.0
    limit: float = 0.0

    def op(self, source: int, out: int, residual: int = -1) -> NativeOp:
        return NativeOp(
            Kind.LINEAR, (source, residual), out, n=(NORMS[self.norm], self.kind, ACTIVATIONS[self.activation]),
            f=(self.eps, self.factor, self.limit), pointers=(self.packed, self.norm_weight, self.norm_bias),
        )  # fmt: skip

    @property
    def width(self) -> int:
        return self.packed.num_rows // (2 if self.kind == 2 else 1)


def run(isa: str, threads: int, linear: Linear, x: F32, residual: F32 | None = None) -> F32:
    inputs = [x] if residual is None else [x, residual]
    return execute(
        isa, threads, inputs, linear.width, lambda ins, out: linear.op(ins[0], out, ins[1] if len(ins) > 1 else -1)
    )


def in_place(isa: str, threads: int, linear: Linear, x: F32, residual: F32) -> F32:
    """The output is the register of the residual."""
    return execute(isa, threads, [residual, x], None, lambda ins, out: linear.op(ins[1], out, out))


def packed(isa: str, fmt: Format, act: Act, w: Array | list[Array], **more: Any) -> Packed:
    return pack(open_library(libraries()[isa]), w if isinstance(w, list) else [w], fmt, act, **more)


def product_bound(x: F64, w: F64) -> F64:
    """Worst rounding of a chain of K additions, of products that round too on some sets: 2 K u sum |x w|.

    The chain's own error is at most ((1 + u)^K - 1) sum |x w| (Higham, Accuracy and Stability, section 3.1); products
    round once more where there is no fused multiply-add; 2^-120 is for what vdpbf16ps flushes to zero.
    """
    k = x.shape[1]
    out: F64 = 2.02 * (k + 1) * U32 * (np.abs(x) @ np.abs(w).T) + k * 2.0**-120
    return out


def same(a: F32, b: F32) -> None:
    """Equal bit for bit, NaN too."""
    np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


# ---- the product --------------------------------------------------------------------------------------------------

SHAPES = [(1, 1), (7, 63), (64, 64), (65, 65), (130, 200), (896, 200), (897, 65)]


@each_isa
@each_product
@pytest.mark.parametrize(("cols", "outputs"), SHAPES)
def test_product(isa: str, fmt: Format, act: Act, cols: int, outputs: int) -> None:
    weights = stored(fmt, random(cols, outputs, cols))
    linear = Linear(packed(isa, fmt, act, weights))
    for count in (1, 2, 3, 5, 6, 7, 11, 12, 13, 17, 64):
        x = random(count, count, cols)
        rows, wide = seen(x, act), meant(weights)
        within(run(isa, 1, linear, x), rows @ wide.T, product_bound(rows, wide))


@each_isa
@each_product
def test_wide_and_many(isa: str, fmt: Format, act: Act) -> None:
    """Inputs beyond one stretch, rows beyond those that every thread prepares and those of one block."""
    cols, outputs, count = 4864, 130, 130
    weights, x = stored(fmt, random(1, outputs, cols)), random(2, count, cols)
    rows, wide = seen(x, act), meant(weights)
    actual = run(isa, 2, Linear(packed(isa, fmt, act, weights)), x)
    within(actual, rows @ wide.T, product_bound(rows, wide))


@each_isa
@each_product
def test_a_row_is_the_same_in_any_company(isa: str, fmt: Format, act: Act) -> None:
    """Alone, among others, elsewhere, on 1, 2 or 3 threads; few rows, those of one tile, several blocks."""
    for cols, outputs, total in ((65, 200, 130), (896, 65, 210), (1001, 127, 20), (4864, 64, 14)):
        weights, x = stored(fmt, random(3, outputs, cols)), random(4, total, cols)
        x *= np.exp(random(5, total, 1) * 3)
        linear = Linear(packed(isa, fmt, act, weights), norm="rms", norm_weight=random(6, cols))
        whole = run(isa, 1, linear, x)
        shuffled = np.random.default_rng(7).permutation(total)
        for threads in (1, 2, 3):
            same(run(isa, threads, linear, x), whole)
            same(run(isa, threads, linear, x[shuffled]), whole[shuffled])
            for count in (*range(1, 18), 49):
                first = min(count, total - 1)
                same(run(isa, threads, linear, x[first : first + count]), whole[first : first + count])


@each_isa
@each_product
def test_a_large_panel_in_parts_is_the_same(isa: str, fmt: Format, act: Act) -> None:
    """Many rows meet a panel that L2 does not hold part by part: with sums put down in between, the same chain."""
    cols, outputs, total = 4865, 65, 130
    weights, x = stored(fmt, random(3, outputs, cols)), random(4, total, cols)
    linear = Linear(packed(isa, fmt, act, weights))
    whole = run(isa, 1, linear, x)
    for first, count in ((0, 1), (40, 12), (83, 47), (1, 48), (30, 95), (17, 96), (5, 97)):
        for threads in (1, 2):
            same(run(isa, threads, linear, x[first : first + count]), whole[first : first + count])


@pytest.mark.skipif(len(FUSED) < 2, reason="one instruction set with fused multiply-add")
@pytest.mark.parametrize(("fmt", "act"), [p for p in PRODUCTS if p[1] is Act.F32])
def test_sets_with_fused_additions_agree(fmt: Format, act: Act) -> None:
    weights, x = stored(fmt, random(1, 129, 901)), random(2, 29, 901)
    results = []
    for isa in FUSED:
        linear = Linear(
            packed(isa, fmt, act, weights), norm="layer", norm_weight=random(3, 901), norm_bias=random(4, 901), kind=1
        )
        results.append(run(isa, 2, linear, x, random(5, 29, 129)))
    for other in results[1:]:
        same(other, results[0])


def flushed(x: F32) -> F32:
    return np.where(np.abs(x) < np.float32(2.0**-126), np.float32(0), x)


@pytest.mark.skipif("avx512bf16" not in ISAS, reason="no bfloat16 products here")
def test_bfloat16_pairs_round_as_documented() -> None:
    """vdpbf16ps, step by step: odd inputs' product, then the even ones', one rounding each, no subnormal numbers."""
    for cols, scale in ((1, 1.0), (333, 1.0), (64, 1e-20)):
        weights, x = narrow(random(1, 70, cols) * np.float32(scale)), random(2, 9, cols) * np.float32(scale)
        w = np.zeros((70, cols + cols % 2))
        w[:, :cols] = flushed(widen(weights))
        rows = np.zeros((9, w.shape[1]))
        rows[:, :cols] = flushed(widen(narrow(x)))
        acc = np.zeros((9, 70), np.float32)
        for k in range(0, w.shape[1], 2):
            for i in (k + 1, k):
                # Sums of a float32 and a product of 16 bits in float64: their own rounding could only matter for a
                # tie, 29 bits further down.
                acc = flushed((acc + rows[:, i, None] * w[None, :, i]).astype(np.float32))
        actual = run("avx512bf16", 1, Linear(packed("avx512bf16", Format.BF16, Act.BF16, weights)), x)
        np.testing.assert_array_equal(actual, acc)


# ---- packing ------------------------------------------------------------------------------------------------------


def hard_numbers() -> F32:
    """Ties, the ends of the ranges, subnormal numbers, infinities, NaN."""
    bits = np.random.default_rng(0).integers(0, 2**32, 3000, np.uint64).astype(np.uint32)
    near_half = np.arange(-2050, 2050).astype(np.float32) * np.float32(2.0**-25)
    ties = (np.arange(0x3F800000, 0x3F800000 + 600) * 1 + 0x7000).astype(np.uint32).view(np.float32)
    ends = np.array([0, -0.0, 65504, 65519.9, 65520, -7e4, 3.4e38, -3.4e38, np.inf, -np.inf, np.nan, 1e-45], np.float32)
    return np.concatenate([bits.view(np.float32), near_half, ties, ends])


@each_isa
@pytest.mark.parametrize("source", [np.float32, np.float16, np.uint16])
@pytest.mark.parametrize("fmt", [Format.F32, Format.F16, Format.BF16])
def test_packing_keeps_or_rounds_to_the_nearest(isa: str, fmt: Format, source: type) -> None:
    numbers = hard_numbers()
    library = open_library(libraries()[isa])
    with np.errstate(over="ignore", invalid="ignore"):
        for cols in (1, 7, 64, 65, 131):
            w = numbers[: len(numbers) // cols * cols].reshape(-1, cols)[:130]
            w = np.ascontiguousarray(np.concatenate([w, numbers[-cols:][None]]))
            weights = narrow(w) if source is np.uint16 else w.astype(source)
            exact = widen(weights) if source is np.uint16 else weights.astype(np.float32)
            expected = exact
            if fmt is Format.F16:
                expected = exact.astype(np.float16).astype(np.float32)
            elif fmt is Format.BF16:
                expected = widen(narrow(exact))
            matrix = pack(library, [weights], fmt, Act.F32)
            values = matrix.values(library)
            np.testing.assert_array_equal(values[: len(w)], expected)
            np.testing.assert_array_equal(np.signbit(values[: len(w)]), np.signbit(expected))
            assert not values[len(w) :].any(), "padding is zero"


@each_isa
def test_halves_below_the_normal_numbers_count(isa: str) -> None:
    weights = (np.arange(1, 65 * 3 + 1).reshape(65, 3) * 2.0**-24).astype(np.float16)
    x = np.array([[2.0**24, 2.0**25, 2.0**26]] * 50, np.float32)
    expected = (x[:1].astype(np.float64) @ weights.astype(np.float64).T).astype(np.float32)
    for count in (1, 5, 50):
        actual = run(isa, 1, Linear(packed(isa, Format.F16, Act.F32, weights)), x[:count])
        np.testing.assert_array_equal(actual, np.repeat(expected, count, 0))


# ---- what is not a number -----------------------------------------------------------------------------------------


@each_isa
@each_threads
@each_product
def test_what_is_not_finite_stays_in_its_row(isa: str, threads: int, fmt: Format, act: Act) -> None:
    cols = 67
    weights, x = stored(fmt, np.abs(random(1, 70, cols)) + 1), random(2, 15, cols)
    linear = Linear(packed(isa, fmt, act, weights))
    clean = run(isa, threads, linear, x)
    x[3, 5], x[8, cols - 1], x[14, 0] = np.nan, np.inf, -np.inf
    actual = run(isa, threads, linear, x)
    assert np.isnan(actual[3]).all()
    assert (actual[8] == np.inf).all()
    assert (actual[14] == -np.inf).all()
    others = [r for r in range(15) if r not in (3, 8, 14)]
    same(actual[others], clean[others])
    normed = run(isa, threads, replace(linear, norm="rms", kind=1, activation="sigmoid"), x, random(9, 15, 70))
    assert np.isnan(normed[[3, 8, 14]]).all(), "norms and activations hide nothing"
    assert np.isfinite(normed[others]).all()


@each_isa
@each_product
def test_what_lies_beside_a_row_is_not_looked_at(isa: str, fmt: Format, act: Act) -> None:
    """Registers are parts of wider rows; NaN there would get through the zeros of padding."""
    for cols, norm in ((1, "none"), (15, "rms"), (16, "none"), (65, "none"), (65, "layer"), (127, "none")):
        weights, x = stored(fmt, random(1, 70, cols)), random(2, 9, cols)
        linear = Linear(packed(isa, fmt, act, weights), norm=norm)
        layout = Layout()
        source, out = layout.view(layout.buffer(cols + 70), 3, cols), layout.register(70)
        program = NativeProgram(pool(isa, 1), [linear.op(source, out)], layout, [], max_tokens=9, max_rows=1)
        for array in program.arena:
            array[:] = np.nan
        program.values(source, 9)[:] = x
        program.run(StepMemory(0).args(plan_of([0, 9], [0]), np.zeros(0, np.int32)))
        same(program.values(out, 9), run(isa, 1, linear, x))


# ---- before and behind the product ----------------------------------------------------------------------------------


def normed(x: F32, linear: Linear) -> F64:
    y = x.astype(np.float64)
    if linear.norm == "none":
        return y
    if linear.norm == "layer":
        y -= y.mean(1, keepdims=True)
    y /= np.sqrt((y * y).mean(1, keepdims=True) + np.float64(np.float32(linear.eps)))
    if linear.norm_weight is not None:
        y *= linear.norm_weight
    if linear.norm_bias is not None:
        y += linear.norm_bias
    return y


def eye(isa: str, width: int) -> Packed:
    """Outputs are the inputs, exactly: what is before and behind the product is seen by itself."""
    return packed(isa, Format.F32, Act.F32, np.eye(width, dtype=np.float32))


@each_isa
@pytest.mark.parametrize("width", [1, 7, 64, 65, 511, 513, 896])
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_norm_before(isa: str, norm: str, width: int) -> None:
    x = random(width, 11, width) * np.float32(3)
    for weight, bias in ((None, None), (random(1, width), None), (random(1, width), random(2, width))):
        linear = Linear(eye(isa, width), norm=norm, norm_weight=weight, norm_bias=bias)
        expected = normed(x, linear)
        # The mean's error is relative to the numbers that make it, before they cancel.
        factor = np.ones(width) if weight is None else np.abs(weight)
        scale = np.abs(expected) + (np.abs(x).max() * factor if norm == "layer" else 0)
        spread = x.astype(np.float64).std(1, keepdims=True) if norm == "layer" else np.ones((11, 1))
        bound = 1e-6 * (scale / np.minimum(1, np.sqrt(spread**2 + linear.eps)) + (0 if bias is None else np.abs(bias)))
        for count in (1, 11):
            within(run(isa, 1, linear, x[:count]), expected[:count], bound[:count])


@each_isa
@pytest.mark.parametrize("width", [4864, 16384])
def test_norms_of_wide_rows(isa: str, width: int) -> None:
    """One number comes through, so that only the norm rounds. Numbers of one sign are the worst for its sums."""
    w = np.zeros((1, width), np.float32)
    w[0, 17] = 1
    x = np.abs(random(1, 3, width)) + np.float32(0.1)
    x[1] = 1.1
    for norm in ("rms", "layer"):
        linear = Linear(packed(isa, Format.F32, Act.F32, w), norm=norm)
        expected = normed(x, linear)[:, 17:18]
        spread = np.ones((3, 1)) if norm == "rms" else np.sqrt(x.astype(np.float64).var(1, keepdims=True) + 1e-5)
        within(run(isa, 1, linear, x), expected, 1e-6 * (np.abs(expected) + np.abs(x[:, 17:18]) / spread))


@each_isa
def test_small_numbers_after_large_ones_count(isa: str) -> None:
    """Each part of the sum is just below half a unit of the last place of what is there: lost, were it only added."""
    width = 16384
    w = np.zeros((1, width), np.float32)
    w[0, 0] = 1
    x = np.full((1, width), math.sqrt(0.49 * 2.0**-18 / 32), np.float32)
    x[0, :512] = 1
    linear = Linear(packed(isa, Format.F32, Act.F32, w), norm="rms", eps=0.0)
    expected = normed(x, linear)[:, :1]
    within(run(isa, 1, linear, x), expected, 4e-7 * expected)


def activated(x: F64, name: str) -> F64:
    y: Any
    if name == "gelu":
        y = 0.5 * x * (1 + erf(x * math.sqrt(0.5)))
    elif name == "gelu_tanh":
        y = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    elif name in ("relu", "relu2"):
        y = np.maximum(x, 0) ** (2 if name == "relu2" else 1)
    elif name == "tanh":
        y = np.tanh(x)
    elif name == "sigmoid":
        y = 1 / (1 + np.exp(-x))
    else:
        y = x / (1 + np.exp(-x * (1.702 if name == "quick_gelu" else 1)))
    return np.asarray(y, np.float64)


@each_isa
@pytest.mark.parametrize("name", SINGLE)
def test_activation(isa: str, name: str) -> None:
    single = [0.0, -0.0, 1e-30, 88.0, -88.0]
    around = np.concatenate([np.linspace(-20, 20, 6001), np.linspace(-0.01, 0.01, 501), single])
    x = np.zeros((len(around) // 64 + 1, 64), np.float32)
    x.reshape(-1)[: len(around)] = around
    expected = activated(x.astype(np.float64), name)
    actual = run(isa, 1, Linear(eye(isa, 64), kind=1, activation=name), x)
    # Relative to the result where it is large, to x where it is about x / 2; far below zero nothing is left.
    within(actual, expected, 1e-6 * np.maximum(np.abs(expected), np.minimum(np.abs(x), 1)))


@each_isa
@pytest.mark.parametrize("name", SINGLE)
def test_ends_of_activations(isa: str, name: str) -> None:
    ends = np.array([[-np.inf, -3e38, -1e20, -1e3, 1e3, 1e18, np.inf, np.nan]], np.float32)
    w = np.zeros((1, 1), np.float32)
    w[0, 0] = 1
    linear = Linear(packed(isa, Format.F32, Act.F32, w), kind=1, activation=name)
    actual = run(isa, 1, linear, np.ascontiguousarray(ends.T))[:, 0]
    low = -1.0 if name == "tanh" else 0.0
    np.testing.assert_allclose(actual[:4], low, atol=1e-6)
    high = {"sigmoid": [1.0] * 3, "tanh": [1.0] * 3, "relu2": [1e6, 1e36, np.inf]}.get(name, [1e3, 1e18, np.inf])
    np.testing.assert_allclose(actual[4:7], high, rtol=1e-6)
    assert np.isnan(actual[7])


def gated(gate: F64, up: F64, name: str, limit: float) -> F64:
    if name != "swiglu_clamped":
        act = activated(gate, name)
        return np.minimum(act, limit) * np.clip(up, -limit, limit) if limit else act * up
    if limit:
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return activated(gate, "quick_gelu") * (up + 1)


@each_isa
@each_threads
@pytest.mark.parametrize("name", [*SINGLE, "swiglu_clamped"])
def test_pair(isa: str, threads: int, name: str) -> None:
    """Gate and up of odd widths in one matrix, bias, a factor, a residual: in place and not."""
    for width, count, limit in ((1, 1, 0.0), (31, 2, 1.5), (32, 6, 0.0), (33, 13, 1.5), (100, 30, 1.5)):
        gate_w, up_w = np.eye(width, 40, dtype=np.float32) * 3, random(1, width, 40)
        biases = [random(2, width), random(3, width)]
        x, residual = random(4, count, 40), random(5, count, width)
        matrix = packed(isa, Format.F32, Act.F32, [gate_w, up_w], pair=True, biases=biases)
        linear = Linear(matrix, kind=2, activation=name, limit=limit, factor=0.5)
        rows = x.astype(np.float64)
        gate, up = rows @ gate_w.T.astype(np.float64) + biases[0], rows @ up_w.T.astype(np.float64) + biases[1]
        expected = 0.5 * gated(gate, up, name, limit)
        bound = 1e-5 * (1 + np.abs(expected) + np.abs(up) + np.abs(gate) * (1 + np.abs(gate)))
        within(run(isa, threads, linear, x), expected, bound)
        added = run(isa, threads, linear, x, residual)
        within(added, expected + residual, bound + U32 * np.abs(residual))
        same(in_place(isa, threads, linear, x, residual), added)


@each_isa
@each_threads
@each_product
@pytest.mark.parametrize("outputs", [1, 15, 63, 64, 65, 200])
def test_bias_factor_and_residual(isa: str, threads: int, fmt: Format, act: Act, outputs: int) -> None:
    weights, bias = stored(fmt, random(1, outputs, 33)), random(2, outputs)
    linear = Linear(packed(isa, fmt, act, weights, biases=[bias]), factor=-1.75)
    for count in (1, 8, 50):
        x, residual = random(3, count, 33), random(4, count, outputs)
        rows, wide = seen(x, act), meant(weights)
        y = rows @ wide.T + bias
        bound = 1.75 * product_bound(rows, wide) + 4 * U32 * (2 * np.abs(y) + np.abs(residual))
        within(run(isa, threads, linear, x), -1.75 * y, bound)
        added = run(isa, threads, linear, x, residual)
        within(added, residual - 1.75 * y, bound)
        same(in_place(isa, threads, linear, x, residual), added)


@each_isa
def test_selected_rows_have_their_own_count(isa: str) -> None:
    """The rows of a step whose logits are wanted are fewer than its tokens."""
    layout = Layout()
    source, out = layout.register(20, SELECTED), layout.register(9, SELECTED)
    w, x = random(1, 9, 20), random(2, 3, 20)
    linear = Linear(packed(isa, Format.F32, Act.F32, w))
    program = NativeProgram(pool(isa, 2), [linear.op(source, out)], layout, [], max_tokens=50, max_rows=5)
    program.values(source, 3)[:] = x
    program.arena[1][:] = 7
    program.run(StepMemory(0).args(plan_of([0, 40], [0]), np.array([1, 5, 39], np.int32)))
    within(program.values(out, 3), x.astype(np.float64) @ w.T.astype(np.float64), 1e-4)
    assert (program.arena[1][3:] == 7).all()


# ---- what does not fit ----------------------------------------------------------------------------------------------


@each_isa
def test_misfits_are_told(isa: str) -> None:
    library = open_library(libraries()[isa])
    matrix = pack(library, [random(1, 70, 33)], Format.F32, Act.F32)
    pair = pack(library, [random(1, 35, 33)] * 2, Format.F32, Act.F32, pair=True)

    def told(linear: Linear, *, source: int = 33, out: int = 70, residual: int = 0, shift: int | None = None) -> str:
        layout = Layout()
        numbers = [layout.register(source), layout.register(out)]
        extra = layout.register(residual) if residual else -1
        if shift is not None:
            whole = layout.buffer(200)
            numbers = [layout.view(whole, 0, source), layout.view(whole, shift, out)]
        op = linear.op(numbers[0], numbers[1], extra)
        try:
            NativeProgram(pool(isa, 1), [op], layout, [], max_tokens=4, max_rows=1)
        except EngineError as error:
            return str(error)
        return ""

    plain = Linear(matrix)
    assert told(plain) == ""
    assert "as wide as the matrix has columns" in told(plain, source=34)
    assert "as wide as the matrix has rows" in told(plain, out=69)
    assert "as large as the output" in told(plain, residual=69)
    assert told(plain, shift=33) == ""
    assert "must not lie on the input" in told(plain, shift=32)
    assert "must not lie on the input" in told(plain, shift=0)
    assert "pair" in told(replace(plain, kind=2))
    assert "pair" in told(Linear(pair), out=35)
    assert told(Linear(pair, kind=2), out=35) == ""
    assert "as wide as the matrix has rows" in told(Linear(pair, kind=2))
    assert "no such activation" in told(replace(plain, kind=1, activation="swiglu_clamped"))
    assert "eps" in told(replace(plain, norm="rms", eps=math.nan))
    wrong = pack(library, [random(1, 70, 33)], Format.F32, Act.BF16)
    assert "do not meet" in told(Linear(wrong))
