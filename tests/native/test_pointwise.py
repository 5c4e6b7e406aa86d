"""Native operations on the numbers of rows, against `ops/ref` in float64, and against themselves in other company."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from penstock.base.bf16 import F32, narrow, widen
from penstock.base.errors import EngineError
from penstock.ops.native.abi import ACTIVATIONS, SELECTED, TOKENS, DType, Kind
from penstock.ops.native.program import Layout, NativeOp, NativeProgram, StepMemory
from penstock.ops.ref import pointwise as ref
from tests.native.running import ISAS, each_isa, each_threads, execute, plan_of, pool, within

F64 = npt.NDArray[np.float64]
WIDTHS = (1, 15, 16, 17, 896, 4097)
LIMIT = 1.25
"""Gates are cut there: within what the tests draw."""
HALF_ULP = 2.0**-24


def normal(seed: int, *shape: int) -> F32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def sigmoid(x: Any) -> Any:
    return 1.0 / (1.0 + np.exp(-np.asarray(x, np.float64)))


def activated(x: F32, name: str) -> F64:
    """act(x) in float64."""
    wide = x.astype(np.float64)
    plain: dict[str, Callable[[F64], F64]] = {
        "silu": lambda v: v * sigmoid(v),
        "gelu": lambda v: 0.5 * v * (1.0 + ref.erf(v * np.sqrt(0.5))),
        "gelu_tanh": lambda v: 0.5 * v * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (v + 0.044715 * v**3))),
        "relu": lambda v: np.maximum(v, 0.0),
        "relu2": lambda v: np.maximum(v, 0.0) ** 2,
        "sigmoid": sigmoid,
        "tanh": np.tanh,
        "quick_gelu": lambda v: v * sigmoid(1.702 * v),
    }
    return plain[name](wide)


@dataclass(frozen=True)
class Case:
    """An operation on one or two registers of one width."""

    name: str
    kind: Kind
    num_inputs: int
    expected: Callable[..., Any]
    """Of the inputs as float32, in float64."""
    bound: float
    """Error relative to 1 + |expected| times `grows`; 0: exact."""
    n: tuple[int, ...] = ()
    f: tuple[float, ...] = ()

    def op(self, inputs: tuple[int, ...], out: int) -> NativeOp:
        return NativeOp(self.kind, inputs=inputs, out=out, n=self.n, f=self.f)


def gated(name: str) -> Callable[[F32, F32], F64]:
    def expected(gate: F32, up: F32) -> F64:
        if name not in ("swiglu_clamped", "silu_clamped"):
            return np.minimum(activated(gate, name), LIMIT) * np.clip(up.astype(np.float64), -LIMIT, LIMIT)
        g, u = np.minimum(gate.astype(np.float64), LIMIT), np.clip(up.astype(np.float64), -LIMIT, LIMIT)
        if name == "silu_clamped":
            return np.asarray(g * sigmoid(g) * u, np.float64)
        return np.asarray(g * sigmoid(1.702 * g) * (u + 1.0), np.float64)

    return expected


def xielu(x: F32) -> F64:
    wide = x.astype(np.float64)
    below = 1.3 * (np.expm1(np.minimum(wide, -1e-6)) - wide)
    return np.asarray(np.where(wide > 0, 0.75 * wide * wide, below) + wide / 2, np.float64)


SMOOTH = 3e-6
CASES = [
    Case("add", Kind.ADD, 2, lambda x, y: x + y, 0.0),
    Case("mul", Kind.MUL, 2, lambda x, y: x * y, 0.0),
    Case("scale", Kind.SCALE, 1, lambda x: x * np.float32(0.3), 0.0, f=(0.3,)),
    Case("clip", Kind.CLIP, 1, lambda x: np.clip(x, np.float32(-0.7), np.float32(0.7)), 0.0, f=(0.7,)),
    Case("soft_cap", Kind.SOFT_CAP, 1, lambda x: 2.5 * np.tanh(x.astype(np.float64) / 2.5), SMOOTH, f=(2.5,)),
    Case("gate_rows", Kind.GATE_ROWS, 2, lambda x, g: x.astype(np.float64) * sigmoid(g), SMOOTH),
    Case(
        "gate_rows softplus",
        Kind.GATE_ROWS,
        2,
        lambda x, g: x * np.logaddexp(0.0, g.astype(np.float64)),
        SMOOTH,
        n=(1,),
    ),
    *[
        Case(name, Kind.ACT, 1, lambda x, name=name: activated(x, name), SMOOTH, n=(number,))
        for name, number in ACTIVATIONS.items()
        if name not in ("swiglu_clamped", "silu_clamped", "xielu")
    ],
    Case("xielu", Kind.ACT, 1, xielu, SMOOTH, n=(ACTIVATIONS["xielu"],), f=(0.75, 1.3)),
    Case("gated_without_limit", Kind.GATED, 2, lambda g, u: activated(g, "silu") * u.astype(np.float64), SMOOTH),
    *[
        Case("gated_" + name, Kind.GATED, 2, gated(name), SMOOTH, n=(number,), f=(LIMIT,))
        for name, number in ACTIVATIONS.items()
        if name != "xielu"
    ],
]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def inputs_of(case: Case, rows: int, width: int) -> list[F32]:
    """Numbers of many sizes: most about 1, some far out."""
    return [normal(i + 1, rows, width) * np.float32(3) ** normal(i + 11, rows, 1) for i in range(case.num_inputs)]


def run(isa: str, threads: int, case: Case, inputs: list[F32]) -> F32:
    return execute(isa, threads, inputs, inputs[0].shape[1], lambda ins, out: case.op(tuple(ins), out))


@each_isa
def test_xielu_near_zero_and_far_out(isa: str) -> None:
    case = next(case for case in CASES if case.name == "xielu")
    near = [s * m * 10.0**-e for s in (1, -1) for e in range(1, 30) for m in (1.0, 3.7)]
    x = np.array(
        [[*near, 0.0, -0.0, 5e-7, -5e-7, 1e-6, -1e-6, 90.0, -90.0, -200.0, 1e4, -1e4, 1e18, -1e30]], np.float32
    )
    want = xielu(x)
    within(run(isa, 1, case, [x]), want, 3e-7 * np.abs(want) + 1e-12)
    ends = run(isa, 1, case, [np.array([[np.inf, np.nan]], np.float32)])[0]
    assert ends[0] == np.inf
    assert np.isnan(ends[1])


@each_isa
@each_case
def test_numbers(isa: str, case: Case) -> None:
    for width in WIDTHS:
        inputs = inputs_of(case, 3, width)
        expected = case.expected(*inputs)
        actual = run(isa, 1, case, inputs)
        if case.bound == 0.0:
            assert np.array_equal(actual, expected)
        else:
            within(actual, expected, case.bound * (1.0 + np.abs(expected)) + 2.0**-126)


@each_isa
@each_threads
@each_case
def test_rows_do_not_depend_on_their_company(isa: str, threads: int, case: Case) -> None:
    """Bit for bit, in place or not, alone or among others, at any place of the step, whoever runs them."""
    for width in (1, 17, 900, 9001):
        inputs = inputs_of(case, 11, width)
        whole = run(isa, 1, case, inputs)
        assert np.array_equal(run(isa, threads, case, inputs), whole)
        assert np.array_equal(run(isa, threads, case, [x[4:5] for x in inputs]), whole[4:5])
        assert np.array_equal(run(isa, threads, case, [x[::-1].copy() for x in inputs]), whole[::-1])
        in_place = execute(isa, threads, inputs, None, lambda ins, out: case.op(tuple(ins), out))
        assert np.array_equal(in_place, whole)


@each_isa
@pytest.mark.parametrize(
    "case", [c for c in CASES if c.num_inputs == 2 and c.kind != Kind.GATE_ROWS], ids=lambda c: c.name
)
def test_in_place_on_the_second(isa: str, case: Case) -> None:
    first, second = inputs_of(case, 5, 77)
    actual = execute(isa, 2, [second, first], None, lambda ins, out: case.op((ins[1], ins[0]), out))
    assert np.array_equal(actual, run(isa, 1, case, [first, second]))


@each_isa
@each_case
def test_what_is_not_finite_shows_and_stays_in_its_row(isa: str, case: Case) -> None:
    inputs = inputs_of(case, 6, 35)
    clean = run(isa, 1, case, inputs)
    for broken in range(case.num_inputs):
        x = [a.copy() for a in inputs]
        x[broken][1, 33] = np.nan
        x[broken][2, 2] = np.inf
        x[broken][4, 20] = -np.inf
        with np.errstate(all="ignore"):
            expected = case.expected(*x)
        actual = run(isa, 2, case, x)
        assert np.isnan(actual[1, 33]), "a NaN is not hidden"
        for at in ((2, 2), (4, 20)):
            same = np.isfinite(expected[at]) == np.isfinite(actual[at])
            # -inf * sigmoid(-inf) is NaN by the formula; its limit, 0, is as good
            assert same or (np.isnan(expected[at]) and abs(actual[at]) < 1e-30), f"{actual[at]}, not {expected[at]}"
        mask = np.ones(clean.shape, bool)
        mask[1, 33] = mask[2, 2] = mask[4, 20] = False
        assert np.array_equal(actual[mask], clean[mask])


@each_isa
@each_threads
def test_a_row_gated_by_one_number(isa: str, threads: int) -> None:
    for width in WIDTHS:
        x, gate = normal(1, 7, width), normal(2, 7, 1)
        make = lambda ins, out: NativeOp(Kind.GATE_ROWS, inputs=tuple(ins), out=out)  # noqa: E731
        actual = execute(isa, threads, [x, gate], width, make)
        within(actual, x.astype(np.float64) * sigmoid(gate), SMOOTH * (1 + np.abs(x)))
        assert np.array_equal(execute(isa, threads, [x, gate], None, make), actual)
        assert np.array_equal(execute(isa, 1, [x[3:4], gate[3:4]], width, make), actual[3:4])


@each_isa
@each_threads
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint16])
@pytest.mark.parametrize("factor", [1.0, 29.93])
def test_embed(isa: str, threads: int, dtype: Any, factor: float) -> None:
    rng = np.random.default_rng(5)
    for width in (1, 17, 896, 4097):
        values = normal(6, 50, width)
        table = narrow(values) if dtype == np.uint16 else values.astype(dtype)
        number = {np.float32: DType.F32, np.float16: DType.F16, np.uint16: DType.BF16}[dtype]
        wide = widen(table) if dtype == np.uint16 else table.astype(np.float32)
        ids = rng.integers(0, 50, 9).astype(np.int32)
        plan = plan_of([0, 4, 9], [3, 20], token_ids=ids)
        unused = np.zeros((9, 1), np.float32)
        for source, rows in ((0, ids), (1, plan.positions)):
            op = lambda _, out, n=(int(number), source), t=table: NativeOp(  # noqa: E731
                Kind.EMBED, out=out, n=n, f=(factor,), pointers=(t,)
            )
            actual = execute(isa, threads, [unused], width, op, plan=plan)
            assert np.array_equal(actual, wide[rows] * np.float32(factor))
        short = lambda _, out, n=(int(number), 0, 30), t=table: NativeOp(  # noqa: E731
            Kind.EMBED, out=out, n=n, f=(factor,), pointers=(t,)
        )
        ids = np.array([*ids[:6], 29, 30, 49], np.int32)
        actual = execute(isa, threads, [unused], width, short, plan=plan_of([0, 4, 9], [3, 20], token_ids=ids))
        assert np.array_equal(actual, wide[np.where(ids < 30, ids, 0)] * np.float32(factor)), "ids beyond: row 0"


@each_isa
@each_threads
def test_select(isa: str, threads: int) -> None:
    for width in WIDTHS:
        x, rows = normal(7, 12, width), np.array([0, 3, 4, 11], np.int32)
        actual = execute(
            isa, threads, [x], width, lambda ins, out: NativeOp(Kind.SELECT, inputs=tuple(ins), out=out), rows=rows,
            out_rows=SELECTED,
        )  # fmt: skip
        assert np.array_equal(actual, x[rows])


@each_isa
@each_threads
def test_scaled_queries(isa: str, threads: int) -> None:
    """Positions below, at and beyond the floor; the factor is that of `ops/ref` to the last bit of float32."""
    plan = plan_of([0, 5, 9, 12], [0, 8190, 1_000_000])
    for width, beta, floor, shift in ((17, 0.1, 8192, 1), (896, 0.25, 8192, 0), (4097, 0.1, 16, 0)):
        x = normal(8, 12, width)
        make = lambda ins, out, f=(beta, floor, shift): NativeOp(  # noqa: E731
            Kind.SCALE_QUERIES, inputs=tuple(ins), out=out, f=f
        )
        actual = execute(isa, threads, [x], width, make, plan=plan)
        expected = ref.scale_queries(x[:, None, :], plan.positions, beta, floor, shift)[:, 0]
        within(actual, expected, 4 * HALF_ULP * np.abs(expected.astype(np.float64)))
        assert np.array_equal(execute(isa, threads, [x], None, make, plan=plan), actual)


def argmax(isa: str, threads: int, x: F32) -> tuple[npt.NDArray[np.int32], F32, npt.NDArray[np.uint8]]:
    room = len(x) + 3
    index, value, finite = np.full(room, -7, np.int32), np.zeros(room, np.float32), np.full(room, 9, np.uint8)
    execute(
        isa, threads, [x], None,
        lambda ins, out: NativeOp(Kind.ARGMAX, inputs=tuple(ins), pointers=(index, value, finite)),
    )  # fmt: skip
    assert np.all(index[len(x) :] == -7)
    assert np.all(finite[len(x) :] == 9)
    return index[: len(x)], value[: len(x)], finite[: len(x)]


@each_isa
@each_threads
def test_argmax(isa: str, threads: int) -> None:
    for width in (*WIDTHS, 4095, 4096, 8192, 151_936):
        x = normal(9, 5, width)
        index, value, finite = argmax(isa, threads, x)
        assert np.array_equal(index, x.argmax(axis=1))
        assert np.array_equal(value, x.max(axis=1))
        assert np.array_equal(finite, np.ones(5))


@each_isa
@each_threads
def test_argmax_takes_the_first_of_equals(isa: str, threads: int) -> None:
    """Whether equals share a vector, a piece or nothing; few different numbers, so that there are many of them."""
    rng = np.random.default_rng(10)
    for width in (3, 40, 900, 12_289):
        for choices in (1, 2, 3, width):
            x = rng.integers(-choices, 0, (6, width)).astype(np.float32)
            assert np.array_equal(argmax(isa, threads, x)[0], x.argmax(axis=1))
    x = np.full((3, 9000), -3.0, np.float32)
    x[0, [4095, 4096]], x[1, [8191, 8999]], x[2, 8999] = 1.0, 1.0, 1.0
    assert argmax(isa, threads, x)[0].tolist() == [4095, 8191, 8999]
    signs = np.array([[-0.0, 0.0, -1.0], [0.0, -0.0, -1.0]], np.float32)
    index, value, _ = argmax(isa, threads, signs)
    assert index.tolist() == [0, 0]
    assert np.signbit(value).tolist() == [True, False]


@each_isa
@each_threads
@pytest.mark.parametrize("width", [5, 64, 9003])
def test_argmax_of_rows_that_are_not_finite(isa: str, threads: int, width: int) -> None:
    """As numpy: a NaN is the largest. Every place of a short row, some of a long one."""
    places = range(width) if width < 100 else (0, 15, 16, 4095, 4096, 8191, 8192, 8999, 9000, 9002)
    x = normal(11, 3 * len(places) + 2, width)
    for row, place in enumerate(places):
        x[3 * row, place], x[3 * row + 1, place], x[3 * row + 2, place] = np.nan, np.inf, -np.inf
    x[-2] = -np.inf
    index, value, finite = argmax(isa, threads, x)
    assert np.array_equal(index, x.argmax(axis=1))
    assert np.array_equal(value, x.max(axis=1), equal_nan=True)
    assert not finite[:-1].any()
    assert finite[-1]
    large = np.full((1, width), np.float32(3e38))
    assert argmax(isa, threads, large)[2].tolist() == [1], "large numbers are finite, and so are as many of them"


@each_isa
def test_rows_of_one_buffer(isa: str) -> None:
    """gate and up are halves of one buffer, the output takes the first: strides are not widths."""
    layout = Layout()
    buffer = layout.buffer(70)
    gate, up = layout.view(buffer, 2, 31), layout.view(buffer, 35, 31)
    op = NativeOp(Kind.GATED, inputs=(gate, up), out=gate, n=(ACTIVATIONS["silu"],))
    program = NativeProgram(pool(isa, 2), [op], layout, [], max_tokens=4, max_rows=1)
    before = normal(12, 4, 70)
    program.arena[0][:] = before
    program.run(StepMemory(0).args(plan_of([0, 3], [0]), np.zeros(0, np.int32)))
    after = program.arena[0]
    x, y = before[:3, 2:33], before[:3, 35:66]
    within(after[:3, 2:33], activated(x, "silu") * y, SMOOTH * (1 + np.abs(x * y)))
    assert np.array_equal(after[:, 33:], before[:, 33:])
    assert np.array_equal(after[:, :2], before[:, :2])
    assert np.array_equal(after[3], before[3]), "a row beyond the step"


MISFITS: list[tuple[str, Kind, dict[str, Any], str]] = [
    ("widths", Kind.ADD, {"inputs": (0, 1), "out": 0}, "equally wide"),
    ("rows", Kind.ADD, {"inputs": (0, 2), "out": 0}, "equally wide"),
    ("register", Kind.ADD, {"inputs": (0, 9), "out": 0}, "no such register"),
    ("missing", Kind.MUL, {"inputs": (0,), "out": 0}, "no such register"),
    ("activation", Kind.ACT, {"inputs": (0,), "out": 0, "n": (99,)}, "activation"),
    ("gates only", Kind.ACT, {"inputs": (0,), "out": 0, "n": (7,)}, "gates only"),
    ("cap", Kind.SOFT_CAP, {"inputs": (0,), "out": 0, "f": (0.0,)}, "larger than 0"),
    ("floor", Kind.SCALE_QUERIES, {"inputs": (0,), "out": 0, "f": (0.1, 0.0, 0.0)}, "f1 > 0"),
    ("gate", Kind.GATE_ROWS, {"inputs": (0, 1), "out": 0}, "a gate has one number"),
    ("table", Kind.EMBED, {"out": 0, "n": (0, 0)}, "needs a table"),
    ("dtype", Kind.EMBED, {"out": 0, "n": (3, 0), "pointers": (np.zeros(4),)}, "float32, float16 or bfloat16"),
    ("source", Kind.EMBED, {"out": 0, "n": (0, 2), "pointers": (np.zeros(4),)}, "token ids"),
    ("embed rows", Kind.EMBED, {"out": 2, "n": (0, 0), "pointers": (np.zeros(4),)}, "rows of tokens"),
    ("select", Kind.SELECT, {"inputs": (0,), "out": 0}, "selected from those of tokens"),
    ("select width", Kind.SELECT, {"inputs": (1,), "out": 2}, "as wide as"),
    ("argmax", Kind.ARGMAX, {"inputs": (0,)}, "room for indices"),
]


@pytest.mark.skipif(not ISAS, reason="no native library was built: no C++17 compiler")
@pytest.mark.parametrize(("kind", "parts", "sentence"), [m[1:] for m in MISFITS], ids=[m[0] for m in MISFITS])
def test_what_does_not_fit_is_refused_with_a_sentence(kind: Kind, parts: dict[str, Any], sentence: str) -> None:
    layout = Layout()
    layout.register(8, TOKENS)
    layout.register(9, TOKENS)
    layout.register(8, SELECTED)
    with pytest.raises(EngineError, match=sentence):
        NativeProgram(pool(ISAS[-1], 1), [NativeOp(kind, **parts)], layout, [], max_tokens=4, max_rows=2)
