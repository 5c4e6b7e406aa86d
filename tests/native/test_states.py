"""Native operations with states against those of the reference, and against themselves in other steps and company."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from penstock.base.bf16 import F32
from penstock.base.errors import EngineError
from penstock.ops.native.abi import Kind
from penstock.ops.native.program import Layout, NativeOp, NativeProgram, StepMemory
from penstock.ops.plan import GroupPlan, StepPlan
from penstock.ops.ref import delta, diagonal, mamba, pointwise, recurrence, rwkv
from penstock.ops.ref.mlstm import mlstm, mlstm_gates
from penstock.ops.step import Step
from tests.native.running import ISAS, THREADS, each_isa, execute, plan_of, pool, pytestmark_native

PAGES = 6


def normal(seed: int, *shape: int) -> F32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@dataclass
class Case:
    """`widths`: of the inputs, of which number `value` is as wide as the result. `ref(inputs [T, width], step)`."""

    kind: Kind
    widths: list[int]
    value: int
    planes: dict[str, tuple[int, int]]
    n: tuple[int, ...]
    ref: Callable[[list[F32], Step], F32]
    f: tuple[float, ...] = ()
    pointers: tuple[Any, ...] = ()
    in_place: bool = True
    scales: tuple[float, ...] = ()
    out_width: int | None = None

    @property
    def width(self) -> int:
        return self.widths[self.value] if self.out_width is None else self.out_width

    def op(self, ins: list[int], out: int) -> NativeOp:
        return NativeOp(self.kind, tuple(ins), out, (0, 0, *self.n), self.f, self.pointers)

    def fresh_planes(self) -> dict[str, F32]:
        return {name: np.full((PAGES, *shape), np.nan, np.float32) for name, shape in self.planes.items()}

    def inputs(self, count: int, seed: int) -> list[F32]:
        scales = self.scales or (1.0,) * len(self.widths)
        return [
            normal(seed + i, count, width) * np.float32(by)
            for i, (width, by) in enumerate(zip(self.widths, scales, strict=True))
        ]


def conv(width: int, taps: int, bias: bool, silu: bool) -> Case:
    w, b = normal(1, taps, width), normal(2, width) if bias else None

    def ref(x: list[F32], step: Step) -> F32:
        y = mamba.causal_conv(x[0], step, 0, 0, w, b)
        return y / (1 + np.exp(-y)) if silu else y

    planes = {"conv": (taps - 1, width)}
    return Case(Kind.CONV, [width], 0, planes, (0, taps, int(silu)), ref, pointers=(w, b), in_place=False)


def shift(width: int) -> Case:
    planes = {"other": (1, 3), "shift": (1, width)}
    return Case(
        Kind.SHIFT, [width], 0, planes, (1,), lambda x, s: rwkv.token_shift(x[0], s, 0, 0, "shift"), in_place=False
    )


def scan(width: int, states: int) -> Case:
    a, d = -np.exp(normal(3, width, states)), normal(4, width)
    return Case(
        Kind.SCAN, [width, width, states, states], 0, {"state": (states, width)}, (0,),
        lambda x, s: mamba.mamba_scan(*x, s, 0, 0, a, d), pointers=(a, d),
    )  # fmt: skip


def wkv4(width: int) -> Case:
    decay, first = -np.exp(normal(5, width)), normal(6, width)
    decay[0] = -np.inf  # the past is gone at once
    return Case(
        Kind.WKV4, [width, width], 1, dict.fromkeys(("num", "den", "exponent"), (1, width)), (0, 1, 2),
        lambda x, s: rwkv.wkv4(*x, s, decay, first, 0, 0), pointers=(decay, first),
    )  # fmt: skip


def split(x: F32, heads: int) -> F32:
    return x.reshape(len(x), heads, -1)


def scan2(heads: int, keys: int, width: int, groups: int) -> Case:
    a, d, bias = -np.exp(normal(7, heads)), normal(8, heads), normal(9, heads)

    def ref(x: list[F32], step: Step) -> F32:
        parts = split(x[0], heads), x[1], split(x[2], groups), split(x[3], groups)
        return mamba.mamba2_scan(*parts, step, 0, 0, a, d, bias, 0.1, 1.2).reshape(len(x[0]), -1)

    return Case(
        Kind.SCAN2, [heads * width, heads, groups * keys, groups * keys], 0, {"state": (heads, keys * width)},
        (0, heads, keys, width, groups), ref, (0.1, 1.2), (a, d, bias),
    )  # fmt: skip


def recurrent(heads: int, keys: int, width: int) -> Case:
    def ref(x: list[F32], step: Step) -> F32:
        return recurrence.recurrent(*(split(part, heads) for part in x[:3]), x[3], step, 0, 0).reshape(len(x[0]), -1)

    return Case(
        Kind.RECURRENT, [heads * keys, heads * keys, heads * width, heads], 2, {"state": (heads, keys * width)},
        (0, heads, keys, width), ref,
    )  # fmt: skip


def retention(heads: int, keys: int, width: int) -> Case:
    decay = np.linspace(0.3, 1.0, heads, dtype=np.float32)

    def ref(x: list[F32], step: Step) -> F32:
        q, k, v = (split(part, heads) for part in x)
        return recurrence.retention(q, k, v, step, 0, 0, decay).reshape(len(v), -1)

    return Case(
        Kind.RECURRENT, [heads * keys, heads * keys, heads * width], 2, {"state": (heads, keys * width)},
        (0, heads, keys, width), ref, pointers=(decay,),
    )  # fmt: skip


def wkv6(heads: int, dim: int, fixed: bool) -> Case:
    first, decay = normal(18, heads * dim), np.exp(-np.exp(normal(19, heads * dim)))
    decay[0] = 0.0  # the past is gone at once

    def ref(x: list[F32], step: Step) -> F32:
        own = [split(part, heads) for part in x]
        u, w = first.reshape(heads, dim), decay.reshape(heads, dim)
        out = rwkv.wkv5(*own, step, 0, 0, u, w) if fixed else rwkv.wkv6(*own, step, 0, 0, u)
        return out.reshape(len(x[0]), -1)

    return Case(
        Kind.WKV6, [heads * dim] * (3 if fixed else 4), 2, {"state": (heads, dim * dim)}, (0, heads, dim, dim), ref,
        pointers=(first, decay) if fixed else (first,), scales=(1, 1, 1) if fixed else (1, 1, 1, 2.5),
    )  # fmt: skip


def shared_wkv6(heads: int, groups: int, keys: int, width: int) -> Case:
    def ref(x: list[F32], step: Step) -> F32:
        r, k, v, w = (split(part, n) for part, n in zip(x, (heads, groups, groups, heads), strict=True))
        return rwkv.shared_wkv6(r, k, v, w, step, 0, 0).reshape(len(r), -1)

    return Case(
        Kind.WKV6, [heads * keys, groups * keys, groups * width, heads * keys], 0, {"state": (heads, keys * width)},
        (0, heads, keys, width, groups), ref, (keys**-0.5,), in_place=False, scales=(1, 1, 1, 2.5),
        out_width=heads * width,
    )  # fmt: skip


def wkv7(heads: int, dim: int) -> Case:
    def ref(x: list[F32], step: Step) -> F32:
        return rwkv.wkv7(*(split(part, heads) for part in x), step, 0, 0).reshape(len(x[0]), -1)

    # A removal key longer than a unit vector would make the state grow without end.
    return Case(
        Kind.WKV7, [heads * dim] * 6, 3, {"state": (heads, dim * dim)}, (0, heads, dim, dim), ref,
        scales=(1, 1, 1, 1, dim**-0.5, 0.5),
    )  # fmt: skip


def gated_delta(
    heads: int, groups: int, keys: int, width: int, by_key: bool, factor: float = 1.0, in_turn: bool = False,
    floor: float = 0.0,
) -> Case:  # fmt: skip
    a = np.exp(normal(10, heads)) * np.float32(1 if floor else -1)

    def ref(x: list[F32], step: Step) -> F32:
        q, k, v = split(x[0], groups), split(x[1], groups), split(x[2], heads)
        return delta.gated_delta(q, k, v, x[3], x[4], step, 0, 0, a, 1e-6, factor, in_turn, floor).reshape(len(v), -1)

    return Case(
        Kind.DELTA, [groups * keys, groups * keys, heads * width, heads * (keys if by_key else 1), heads], 2,
        {"state": (heads, keys * width)}, (0, heads, keys, width, groups, int(in_turn)), ref,
        (1e-6, factor, floor), (a,),
    )  # fmt: skip


def rg_lru(width: int) -> Case:
    a = -np.abs(normal(11, width))
    biases = normal(12, width), normal(13, width)
    a[:3] = -1e-4, -30.0, 0.0  # hardly fades, is gone at once, stays for ever
    return Case(
        Kind.RG_LRU, [width] * 3, 0, {"state": (1, width)}, (0,),
        lambda x, s: diagonal.rg_lru(*x, s, 0, 0, a, *biases), pointers=(a, *biases),
    )  # fmt: skip


def diagonal_scan(width: int, states: int, pairs: bool) -> Case:
    angle, size = normal(14, width, states), np.exp(-np.abs(normal(15, width, states)))
    a = np.stack([size * np.cos(angle), size * np.sin(angle)]).astype(np.float32)
    c, d = normal(16, 2, width, states), None if pairs else normal(17, width)
    return Case(
        Kind.DIAGONAL, [2 * width if pairs else width], 0, {"im": (states, width), "re": (states, width)},
        (1, 0, states, int(pairs)), lambda x, s: diagonal.diagonal_scan(x[0], s, 0, 0, a, c, d), pointers=(a, c, d),
    )  # fmt: skip


def gates_of_mlstm(heads: int, keys: int) -> Case:
    """The result is as wide as no input, so it never takes one's place."""

    def ref(x: list[F32], step: Step) -> F32:
        return mlstm_gates(x[0], x[1], split(x[2], heads), split(x[3], heads), step, 0, 0, 1e-6)

    return Case(
        Kind.MLSTM_GATES, [heads, heads, heads * keys, heads * keys], 0,
        {"norm": (heads, keys), "other": (1, 3), "max": (heads, 1)}, (0, 2, heads, keys), ref, (1e-6,),
        in_place=False, scales=(4, 4, 1, 1), out_width=3 * heads,
    )  # fmt: skip


def mlstm_matrix(heads: int, keys: int, width: int) -> Case:
    def ref(x: list[F32], step: Step) -> F32:
        q, k, v = (split(part, heads) for part in x[:3])
        return mlstm(q, k, v, x[3], step, 0, 0).reshape(len(v), -1)

    return Case(
        Kind.MLSTM, [heads * keys, heads * keys, heads * width, 3 * heads], 2, {"state": (heads, keys * width)},
        (0, heads, keys, width), ref, scales=(1, 1, 1, 0.3),
    )  # fmt: skip


CASES = {
    "conv": conv(70, 4, True, True), "conv of 2": conv(16, 2, False, False), "conv, wide": conv(600, 3, True, False),
    "shift": shift(37), "shift, wide": shift(515), "scan": scan(44, 5), "scan of 16": scan(160, 16),
    "wkv4": wkv4(40), "wkv4, wide": wkv4(130),
    "scan2": scan2(6, 5, 7, 2), "scan2, whole": scan2(4, 32, 64, 1), "scan2, strips": scan2(2, 9, 144, 2),
    "recurrent": recurrent(3, 5, 7), "recurrent, strips": recurrent(2, 16, 80), "retention": retention(3, 5, 7),
    "wkv5": wkv6(3, 8, True), "wkv5, whole": wkv6(2, 64, True), "wkv6": wkv6(5, 7, False),
    "wkv6, strips": wkv6(2, 80, False), "wkv6, whole": wkv6(3, 64, False),
    "shared_wkv6": shared_wkv6(6, 2, 5, 7), "shared_wkv6, strips": shared_wkv6(2, 1, 18, 80),
    "shared_wkv6, whole": shared_wkv6(4, 4, 64, 64),
    "wkv7": wkv7(3, 8), "wkv7, whole": wkv7(2, 64),
    "delta": gated_delta(6, 2, 5, 7, False), "delta, strips": gated_delta(2, 1, 32, 128, False, 2.0),
    "delta, in turn": gated_delta(6, 2, 5, 7, False, in_turn=True),
    "rg_lru": rg_lru(37), "rg_lru, wide": rg_lru(200),
    "diagonal": diagonal_scan(21, 5, False), "diagonal, strips": diagonal_scan(150, 3, False),
    "diagonal of pairs": diagonal_scan(70, 1, True), "diagonal of pairs, more": diagonal_scan(16, 4, True),
    "mlstm_gates": gates_of_mlstm(3, 5), "mlstm_gates, wide": gates_of_mlstm(2, 64),
    "mlstm": mlstm_matrix(3, 5, 7), "mlstm, strips": mlstm_matrix(2, 16, 144),
    "delta, bounded": gated_delta(2, 2, 9, 33, False, floor=-3.0),
    "delta by key, bounded": gated_delta(3, 3, 18, 40, True, floor=-5.0),
    "delta by key": gated_delta(3, 3, 6, 48, True), "delta by key, whole": gated_delta(2, 2, 40, 33, True),
}  # fmt: skip
each_case = pytest.mark.parametrize("name", CASES)
NONE = np.zeros(0, np.int32)


def plan(parts: list[tuple[int, int, int]]) -> StepPlan:
    """Sequences as (position of the first token, tokens, page)."""
    bounds = np.cumsum([0] + [n for _, n, _ in parts]).tolist()
    tables = tuple(np.array([[page]], np.int32) for _, _, page in parts)
    return plan_of(bounds, [at for at, _, _ in parts], [GroupPlan(1, 4, tables)])


def native(
    case: Case, isa: str, threads: int, x: list[F32], parts: list[tuple[int, int, int]], planes: dict[str, F32],
    in_place: bool = False,
) -> F32:  # fmt: skip
    if not in_place:
        return execute(isa, threads, x, case.width, case.op, plan=plan(parts), planes=[planes])
    # `execute` takes the first input's place: the registers are handed over in another order.
    order = [case.value, *(i for i in range(len(x)) if i != case.value)]

    def op(ins: list[int], out: int) -> NativeOp:
        back = [ins[order.index(i)] for i in range(len(ins))]
        return case.op(back, out)

    return execute(isa, threads, [x[i] for i in order], None, op, plan=plan(parts), planes=[planes])


@each_isa
@each_case
def test_it_is_what_the_reference_computes(name: str, isa: str) -> None:
    """One sequence goes on, one begins on a page that holds another's state, one has no tokens."""
    case = CASES[name]
    ours, theirs = case.fresh_planes(), case.fresh_planes()
    for parts, seed in (([(0, 9, 4)], 20), ([(9, 23, 4), (7, 0, 1), (0, 21, 2)], 40), ([(32, 1, 4), (0, 2, 2)], 60)):
        x = case.inputs(sum(n for _, n, _ in parts), seed)
        want = case.ref(x, Step(plan(parts), [theirs]))
        got = native(case, isa, 2, x, parts, ours)
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5 * max(1.0, float(np.abs(want).max())))
        for plane, values in ours.items():
            np.testing.assert_allclose(values, theirs[plane], rtol=2e-4, atol=2e-5)
            assert np.isnan(values[[0, 1, 3, 5]]).all(), "only pages of sequences with tokens are written"


@each_isa
@each_case
def test_nothing_but_the_text_decides_the_bits(name: str, isa: str) -> None:
    """Chunks, company, place in the step, page, threads, place of the result."""
    case, count = CASES[name], 41
    text, other = case.inputs(count, 80), case.inputs(50, 90)
    planes = case.fresh_planes()
    whole = native(case, isa, 1, text, [(0, count, 3)], planes)
    assert np.isfinite(whole).all()
    rng = random.Random(name)
    for _ in range(6):
        own, page, parts, at = case.fresh_planes(), rng.randrange(PAGES), [], 0
        while at < count:
            n = min(rng.choice([1, 1, 2, 3, 5, 17, 24]), count - at)
            mine, company = [x[at : at + n] for x in text], rng.randrange(5)
            first = rng.random() < 0.5
            order = [(at, n, page), (0, company, (page + 1) % PAGES)]
            both = [(a, b[:company]) if first else (b[:company], a) for a, b in zip(mine, other, strict=True)]
            x = [np.concatenate(pair) for pair in both]
            got = native(
                case, isa, rng.choice(THREADS), x, order if first else order[::-1], own,
                case.in_place and rng.random() < 0.5,
            )  # fmt: skip
            parts.append(got[:n] if first else got[company:])
            at += n
        assert np.array_equal(np.concatenate(parts), whole)
        for plane, values in own.items():
            assert np.array_equal(values[page], planes[plane][3], equal_nan=plane == "other"), "and what is kept"


@each_isa
@each_case
def test_a_sick_sequence_harms_nobody(name: str, isa: str) -> None:
    case = CASES[name]
    x = case.inputs(30, 70)
    clean = native(case, isa, 1, [part[10:] for part in x], [(0, 20, 2)], case.fresh_planes())
    for part in x:
        part[:10] = np.nan
    got = native(case, isa, 2, x, [(0, 10, 1), (0, 20, 2)], case.fresh_planes())
    assert np.isnan(got[1:10]).all(), "it shows"
    assert np.array_equal(got[10:], clean)


@pytestmark_native
@each_case
def test_nodes_of_a_tree_are_refused(name: str) -> None:
    """A state follows one path."""
    case, layout = CASES[name], Layout()
    ins, out = [layout.register(width) for width in case.widths], layout.register(case.width)
    planes = case.fresh_planes()
    program = NativeProgram(pool(ISAS[-1], 1), [case.op(ins, out)], layout, [planes], max_tokens=4, max_rows=1)
    plain = plan([(0, 2, 1)])
    memory = StepMemory(1)
    program.run(memory.args(plain, NONE))
    tree = replace(plain, mask=np.array([1, 3], np.uint64))
    with pytest.raises(AssertionError):
        program.run(memory.args(tree, NONE))


MISFITS: list[tuple[str, dict[str, Any], str]] = [
    ("conv", {"n": (0, 0, 0, 5, 1)}, "plane does not hold"),
    ("conv", {"n": (0, 0, 0, 1, 1)}, "plane does not hold"),
    ("conv", {"pointers": ()}, "has taps"), ("conv", {"n": (0, 0, 3, 4, 1)}, "no such plane"),
    ("conv", {"n": (2, 0, 0, 4, 1)}, "no such cache group"), ("scan", {"pointers": ()}, "has a and d"),
    ("wkv4", {"pointers": ()}, "decay and a bonus"), ("scan2", {"pointers": ()}, "has weights"),
    ("scan2", {"n": (0, 0, 0, 6, 5, 7, 4)}, "equal groups"), ("scan2", {"n": (0, 0, 0, 6, 5, 8, 2)}, "does not fit"),
    ("wkv6", {"pointers": ()}, "equal groups"), ("wkv5", {"n": (0, 0, 0, 4, 8, 8)}, "does not fit"),
    ("recurrent", {"n": (0, 0, 0, 3, 6, 7)}, "does not fit"), ("wkv7", {"n": (0, 0, 0, 0, 8, 8)}, "heads, keys and"),
    ("rg_lru", {"pointers": ()}, "has a, and biases"), ("diagonal", {"pointers": ()}, "has a, c and, of real rows, d"),
    ("diagonal", {"n": (0, 0, 1, 0, 4, 0)}, "plane does not hold"),
    ("mlstm", {"n": (0, 0, 0, 3, 6, 7)}, "does not fit"),
    ("delta", {"n": (0, -1, 0, 6, 5, 7, 2)}, "no such layer"),
]  # fmt: skip


@pytestmark_native
@pytest.mark.parametrize(("name", "parts", "sentence"), MISFITS)
def test_what_does_not_fit_is_refused_with_a_sentence(name: str, parts: dict[str, Any], sentence: str) -> None:
    case, layout = CASES[name], Layout()
    ins, out = [layout.register(width) for width in case.widths], layout.register(case.width)
    good = case.op(ins, out)
    made = NativeOp(
        good.kind, good.inputs, good.out, parts.get("n", good.n), good.f, parts.get("pointers", good.pointers)
    )
    with pytest.raises(EngineError, match=sentence):
        NativeProgram(pool(ISAS[-1], 1), [made], layout, [case.fresh_planes()], max_tokens=4, max_rows=1)


@pytestmark_native
def test_planes_of_other_types_are_refused() -> None:
    case, layout = CASES["recurrent"], Layout()
    ins, out = [layout.register(width) for width in case.widths], layout.register(case.width)
    planes = {name: plane.astype(np.float16) for name, plane in case.fresh_planes().items()}
    with pytest.raises(EngineError, match="does not hold this state"):
        NativeProgram(pool(ISAS[-1], 1), [case.op(ins, out)], layout, [planes], max_tokens=4, max_rows=1)


@each_isa
@pytest.mark.parametrize("width", [3, 16, 70, 5000])
def test_rows_of_rwkv(width: int, isa: str) -> None:
    heads = {3: 3, 16: 1, 70: 7, 5000: 100}[width]
    x, y, z, w = (normal(i, 7, width) for i in range(4))
    w1 = normal(9, width)

    def by(kind: Kind, *, n: tuple[int, ...] = (), pointers: tuple[Any, ...] = (w1,)) -> Callable[..., NativeOp]:
        return lambda ins, out: NativeOp(kind, tuple(ins), out, n, (), pointers)

    r, k, v = (split(part, heads) for part in (x, y, z))
    wants: list[tuple[list[F32], Callable[..., NativeOp], F32]] = [
        ([x, y], by(Kind.LERP), rwkv.interpolate(x, y, w1)),
        ([x, y, w], by(Kind.LERP, pointers=()), rwkv.interpolate(x, y, w)),
        ([x], by(Kind.REMOVAL_KEY, n=(heads,)), rwkv.removal_key(x, w1, heads).reshape(7, width)),
        ([x, y], by(Kind.REPLACEMENT_KEY), rwkv.replacement_key(x, y, w1)),
        (
            [x, y, z], by(Kind.VALUE_BONUS, n=(heads,)),
            rwkv.value_bonus(r, k, v, split(w1[None], heads)[0]).reshape(7, width),
        ),
    ]  # fmt: skip
    for inputs, make, want in wants:
        got = execute(isa, 1, inputs, width, make)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
        assert np.array_equal(execute(isa, 3, inputs, width, make), got)
        assert np.array_equal(execute(isa, 2, inputs, None, make), got), "in place"
        assert np.array_equal(execute(isa, 1, [part[4:5] for part in inputs], width, make), got[4:5])
    zeros = np.zeros((1, width), np.float32)
    assert not execute(isa, 1, [zeros], width, by(Kind.REMOVAL_KEY, n=(heads,))).any(), "nothing has no direction"


@each_isa
@pytest.mark.parametrize(("heads", "dim"), [(1, 1), (3, 5), (2, 64), (7, 130)])
def test_heads_with_a_bias_behind_them(heads: int, dim: int, isa: str) -> None:
    """A number of its own for each, or the same one; rows do not depend on their company, nor on who runs them."""
    x, dt, a = normal(1, 9, heads * dim), normal(2, 9, heads) * np.float32(4), normal(3, heads) * np.float32(0.4)
    dt[0, 0], dt[1, 0] = 60.0, -60.0
    for inputs, own, factor in (([x, dt], a, 2.5), ([x], None, 1.0)):
        want = pointwise.biased_heads(split(x, heads), dt, own, factor).reshape(9, -1)

        def make(ins: list[int], out: int, own: Any = own, factor: float = factor) -> NativeOp:
            return NativeOp(Kind.BIASED_HEADS, tuple(ins), out, (heads,), (factor,), (own,))

        got = execute(isa, 1, inputs, want.shape[1], make)
        np.testing.assert_allclose(got, want, rtol=2e-5)
        assert np.array_equal(execute(isa, 3, inputs, want.shape[1], make), got)
        for row in (0, 8):
            alone = execute(isa, 1, [part[row : row + 1] for part in inputs], want.shape[1], make)
            assert np.array_equal(alone, got[row : row + 1])
