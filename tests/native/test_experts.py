"""PST_ROUTE and PST_EXPERTS: the reference's choices, the bits of a loop over single products, and the same bits in any
company, whatever the format, the sizes of groups and the number of threads."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from penstock.backends.native.emit import SCORES
from penstock.base.bf16 import F32, narrow
from penstock.base.errors import EngineError
from penstock.core.model_spec import Router
from penstock.core.panels import Panels
from penstock.ops.native.abi import ACTIVATIONS, Act, Format, Kind
from penstock.ops.native.library import libraries, open_library
from penstock.ops.native.matrix import Packed, Segments, pack
from penstock.ops.native.program import Layout, NativeOp, NativeProgram, StepMemory
from penstock.ops.native.stack import pack_stack
from penstock.ops.ref.experts import ExpertWeights, Routes, experts, route
from penstock.ops.ref.pointwise import activate_gated
from penstock.ops.ref.product import linear
from tests.native.running import ISAS, each_isa, each_threads, execute, plan_of, pool, pytestmark_native

pytestmark = pytestmark_native

# -- routes ----------------------------------------------------------------------------------------------------------

ROUTERS: dict[str, tuple[int, int, Router]] = {
    "one of one": (1, 1, Router()),
    "softmax": (7, 3, Router()),
    "softmax, renormalized": (128, 8, Router(renormalize=True)),
    "chosen only": (32, 4, Router(chosen_only=True)),
    "chosen only, scaled": (5, 5, Router(chosen_only=True, scale=2.5)),
    "sigmoid": (16, 1, Router(score="sigmoid")),
    "sigmoid, corrected": (9, 4, Router(score="sigmoid", correction=True, renormalize=True, scale=1.5)),
    "softmax, corrected": (11, 2, Router(correction=True)),
    "best groups": (12, 3, Router(groups=4, top_groups=2)),
    "best groups of one": (6, 2, Router(groups=6, top_groups=3, group_score="top2")),
    "groups by two": (256, 8, Router(score="sigmoid", correction=True, groups=8, top_groups=4, group_score="top2",
                                     renormalize=True, scale=2.5)),
    "experts that weigh": (10, 3, Router(renormalize=True, scale=0.7, expert_scale=True)),
    "SparseMixer": (16, 2, Router(score="sparse_mixer", jitter=0.1)),
    "SparseMixer, near and far": (33, 5, Router(score="sparse_mixer", jitter=0.4, scale=1.5, expert_scale=True)),
    "SparseMixer, of one": (1, 1, Router(score="sparse_mixer")),
}  # fmt: skip


def route_op(
    top_k: int, r: Router, source: int, out: int, correction: F32 | None, scales: F32 | None = None
) -> NativeOp:
    n = (
        top_k, SCORES.index(r.score), r.groups, r.top_groups, int(r.group_score == "top2"), int(r.renormalize),
        int(r.chosen_only),
    )  # fmt: skip
    return NativeOp(Kind.ROUTE, (source,), out, n=n, f=(r.scale, 2 * r.jitter), pointers=(correction, scales))


def routed(
    isa: str, threads: int, logits: F32, top_k: int, r: Router, correction: F32 | None, scales: F32 | None = None
) -> Routes:
    out = execute(isa, threads, [logits], 2 * top_k, lambda i, o: route_op(top_k, r, i[0], o, correction, scales))
    return Routes(out[:, :top_k].astype(np.int32), out[:, top_k:])


@each_isa
@each_threads
@pytest.mark.parametrize("name", ROUTERS)
def test_routes_are_the_references(name: str, isa: str, threads: int) -> None:
    num, top_k, router = ROUTERS[name]
    for tokens in (1, 2, 40):
        rng = np.random.default_rng([tokens, num])
        logits = (rng.standard_normal((tokens, num)) * 2).astype(np.float32)
        correction = rng.standard_normal(num).astype(np.float32) if router.correction else None
        scales = rng.standard_normal(num).astype(np.float32) if router.expert_scale else None
        want = route(logits, top_k, router, correction, scales)
        if router.score == "sparse_mixer" and scales is not None:  # no model has both
            want = Routes(want.ids, want.weights * scales[want.ids])
        got = routed(isa, threads, logits, top_k, router, correction, scales)
        np.testing.assert_array_equal(got.ids, want.ids)
        np.testing.assert_allclose(got.weights, want.weights, rtol=5e-6)
        for t in range(0, tokens, 7):
            alone = routed(isa, 1, logits[t : t + 1], top_k, router, correction, scales)
            np.testing.assert_array_equal(alone.weights[0], got.weights[t])


@each_isa
def test_ties_go_to_the_lower_id_and_extremes_stay_finite(isa: str) -> None:
    zeros = np.array([[0.0, -0.0] * 4 + [0.0]] * 2, np.float32)
    ids, weights = routed(isa, 1, zeros, 3, Router(renormalize=True), None)
    assert ids.tolist() == [[0, 1, 2]] * 2
    np.testing.assert_allclose(weights, 1 / 3, rtol=1e-6)
    assert routed(isa, 1, zeros[:1, :8], 2, Router(groups=4, top_groups=1), None).ids.tolist() == [[0, 1]]
    far = np.array([[50.0, -50.0, 0.0]], np.float32)
    for router in (Router(), Router(score="sigmoid", renormalize=True), Router(chosen_only=True)):
        got = routed(isa, 1, far, 2, router, None)
        assert got.ids.tolist() == [[0, 2]]
        assert np.isfinite(routed(isa, 1, far * 200, 2, router, None).weights).all()
    nothing = routed(isa, 1, np.full((1, 3), -1e4, np.float32), 2, Router(score="sigmoid", renormalize=True), None)
    assert np.all(nothing.weights < 1e-18)  # next to nothing by 1e-20, not 0 by 0


@each_isa
def test_sparse_mixers_experts_share_with_those_that_are_near(isa: str) -> None:
    """How far one may be goes by the larger of the two. Source: Liu et al., GRIN, arXiv 2409.12136, section 2.2."""
    router = Router(score="sparse_mixer", jitter=0.25)
    logits = np.array(
        [[2.0, 1.0, 1.1, 3.0], [-1.0, -1.5, -1.9, -3.0], [0.0, 0.0, 0.0, 0.0], [4.0, 2.0, 2.0, 2.0]], np.float32
    )
    got = routed(isa, 1, logits, 2, router, None)
    e = np.exp
    assert got.ids.tolist() == [[0, 3], [0, 1], [0, 1], [0, 1]]
    # 2 is a third away from 3, and 1.1 more than half; then, of those left, 1.1 and 1 are half away from 2 at most.
    assert abs(got.weights[0, 1] - 1 / (1 + e(2.0 - 3))) < 1e-6
    assert abs(got.weights[0, 0] - 1 / (1 + e(1.1 - 2) + e(1.0 - 2))) < 1e-6
    # Below zero the size of the smaller one counts: 0.5 of 1.5, 0.9 of 1.9, and 2 of 3, which is far.
    assert abs(got.weights[1, 0] - 1 / (1 + e(-0.5) + e(-0.9))) < 1e-6
    np.testing.assert_allclose(got.weights[2], [1 / 4, 1 / 3], rtol=1e-6)
    np.testing.assert_allclose(got.weights[3], [1 / (1 + 3 * e(-2)), 1 / 3], rtol=1e-6)


@each_isa
@pytest.mark.parametrize("name", ["softmax, renormalized", "sigmoid, corrected", "groups by two", "chosen only"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rows_that_are_no_numbers_break_no_others(name: str, bad: float, isa: str) -> None:
    """Their experts are the reference's: NaN come last, lower ids first. So every id is one that there is."""
    num, top_k, router = ROUTERS[name]
    rng = np.random.default_rng(4)
    logits = rng.standard_normal((5, num)).astype(np.float32)
    correction = rng.standard_normal(num).astype(np.float32) if router.correction else None
    sound = routed(isa, 1, logits, top_k, router, correction)
    logits[1] = bad
    logits[3, [2, 5]] = bad
    got = routed(isa, 2, logits, top_k, router, correction)
    with np.errstate(all="ignore"):
        want = route(logits, top_k, router, correction)
    np.testing.assert_array_equal(got.ids, want.ids)
    np.testing.assert_array_equal(np.isfinite(got.weights), np.isfinite(want.weights))
    for t in (0, 2, 4):
        np.testing.assert_array_equal(got.ids[t], sound.ids[t])
        np.testing.assert_array_equal(got.weights[t], sound.weights[t])


# -- experts ---------------------------------------------------------------------------------------------------------

INT4 = Panels("U4", 32, "F16", offset=8)
INT8 = Panels("U8", 0, "F32", offset=128)
PACKINGS: dict[str, tuple[Format, Act, Panels | None]] = {
    "float32": (Format.F32, Act.F32, None),
    "float16": (Format.F16, Act.F32, None),
    "bfloat16": (Format.BF16, Act.BF16, None),
    "bfloat16, rows of float32": (Format.BF16, Act.F32, None),
    "int8": (Format.BLOCK, Act.I8, INT8),
    "int4": (Format.BLOCK, Act.I8, INT4),
    "int4, rows of float32": (Format.BLOCK, Act.F32, INT4),
}
INNER = {
    "gated": ("silu", 0.0), "clamped": ("swiglu_clamped", 0.9), "ungated": ("relu2", 0.0), "cut": ("silu", 0.4)
}  # fmt: skip


@dataclass
class Layer:
    """Experts as matrices, and packed in every way that their tests need."""

    library: Any
    weights: list[ExpertWeights]
    packing: tuple[Format, Act, Panels | None]
    activation: str
    limit: float
    split: bool = False
    scale_input: bool = False

    def stack(self, names: tuple[str, ...]) -> Packed:
        fmt, act, panels = self.packing
        return pack_stack(
            self.library, [[getattr(w, n) for n in names] for w in self.weights], fmt, act, pair=len(names) == 2,
            panels=panels, biases=[[getattr(w, n + "_bias") for n in names] for w in self.weights], num_threads=2,
        )  # fmt: skip

    def op(self, top_k: int, inputs: tuple[int, ...], out: int) -> NativeOp:
        gated = self.weights[0].gate is not None
        if not gated:
            first, beside = self.stack(("up",)), None
        elif self.split:
            first, beside = self.stack(("gate",)), self.stack(("up",))
        else:
            first, beside = self.stack(("gate", "up")), None
        pointers = (
            Segments([first]),
            None if beside is None else Segments([beside]),
            Segments([self.stack(("down",))]),
        )
        n = (len(self.weights), top_k, int(self.scale_input), ACTIVATIONS[self.activation])
        return NativeOp(Kind.EXPERTS, inputs, out, n=n, f=(self.limit,), pointers=pointers)

    def run(self, isa: str, threads: int, x: F32, routes: Routes, residual: F32 | None = None) -> F32:
        both = np.concatenate([routes.ids.astype(np.float32), routes.weights], axis=1)
        more = [] if residual is None else [residual]
        top_k, width = routes.ids.shape[1], self.weights[0].down.shape[0]
        return execute(isa, threads, [x, both, *more], width, lambda i, o: self.op(top_k, tuple(i), o))

    def product(self, isa: str, x: F32, w: ExpertWeights, names: tuple[str, ...], then: int) -> F32:
        fmt, act, panels = self.packing
        parts = [getattr(w, n) for n in names]
        biases = [getattr(w, n + "_bias") for n in names]
        packed = pack(self.library, parts, fmt, act, pair=len(parts) == 2, panels=panels, biases=biases)
        n = (0, then, ACTIVATIONS[self.activation])
        width = parts[0].shape[0]
        return execute(
            isa, 1, [x], width,
            lambda i, o: NativeOp(Kind.LINEAR, (i[0],), o, n=n, f=(0.0, 1.0, self.limit), pointers=(packed,)),
        )  # fmt: skip

    def loop(self, isa: str, x: F32, routes: Routes, residual: F32 | None = None) -> F32:
        """One token after the other, one PST_LINEAR per product: what a mixture is without grouping."""
        out = np.zeros((len(x), self.weights[0].down.shape[0]), np.float32) if residual is None else residual.copy()
        for t in range(len(x)):
            for e, share in zip(routes.ids[t], routes.weights[t], strict=True):
                w, h = self.weights[e], x[t : t + 1]
                if self.scale_input:
                    h = h * share
                if w.gate is None:
                    inner = self.product(isa, h, w, ("up",), 1)
                elif self.split:
                    gate, up = self.product(isa, h, w, ("gate",), 0), self.product(isa, h, w, ("up",), 0)
                    inner = activate_gated(gate, up, self.activation, self.limit or None)
                else:
                    inner = self.product(isa, h, w, ("gate", "up"), 2)
                y = self.product(isa, inner, w, ("down",), 0)[0]
                # One rounding, as fma has.
                by = 1.0 if self.scale_input else float(share)
                out[t] = (y.astype(np.float64) * by + out[t]).astype(np.float32)
        return out


def make(
    isa: str, rng: np.random.Generator, num: int, e: int, f: int, packing: str = "float32", inner: str = "gated", *,
    bias: bool = False, **more: Any,
) -> Layer:  # fmt: skip
    activation, limit = INNER[inner]

    def matrix(*shape: int) -> npt.NDArray[Any]:
        w = (rng.standard_normal(shape) / np.sqrt(shape[1])).astype(np.float32)
        return {"float16": w.astype(np.float16), "bfloat16": narrow(w)}.get(packing.split(",")[0], w)

    def vector(n: int) -> F32 | None:
        return rng.standard_normal(n).astype(np.float32) if bias else None

    gated = inner != "ungated"
    weights = [
        ExpertWeights(
            matrix(f, e) if gated else None, matrix(f, e), matrix(e, f), vector(f) if gated else None, vector(f),
            vector(e),
        )
        for _ in range(num)
    ]  # fmt: skip
    return Layer(open_library(libraries()[isa]), weights, PACKINGS[packing], activation, limit, **more)


def choose(rng: np.random.Generator, tokens: int, num: int, top_k: int, only: list[int] | None = None) -> Routes:
    among = np.arange(num) if only is None else np.array(only)
    ids = np.sort([rng.choice(among, top_k, replace=False) for _ in range(tokens)], axis=1).astype(np.int32)
    return Routes(ids, rng.uniform(0.1, 1.0, ids.shape).astype(np.float32))


@each_isa
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("scale_input", [False, True])
def test_experts_are_the_references(inner: str, bias: bool, scale_input: bool, isa: str) -> None:
    for tokens, num, top_k, e, f in ((1, 1, 1, 1, 1), (1, 9, 4, 40, 70), (7, 5, 2, 33, 9), (50, 4, 4, 65, 129)):
        rng = np.random.default_rng([tokens, num, bias])
        layer = make(isa, rng, num, e, f, inner=inner, bias=bias, scale_input=scale_input)
        x = rng.standard_normal((tokens, e)).astype(np.float32)
        routes = choose(rng, tokens, num, top_k)
        want = experts(x, routes, layer.weights, layer.activation, layer.limit or None, scale_input, linear)
        got = layer.run(isa, 2, x, routes)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-5)


@each_isa
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.sampled(14)
def test_C80_a_grouped_product_is_the_loop_over_tokens(packing: str, inner: str, isa: str) -> None:
    """Bit for bit but for how the last additions round on instruction sets without a fused multiply-add."""
    rng = np.random.default_rng(len(packing))
    layer = make(isa, rng, 6, 72, 40, packing, inner, bias=True)
    x = rng.standard_normal((9, 72)).astype(np.float32)
    for routes in (choose(rng, 9, 6, 3), choose(rng, 9, 6, 2, [1, 4]), choose(rng, 9, 6, 6)):
        residual = rng.standard_normal((9, 72)).astype(np.float32)
        for added in (None, residual):
            want = layer.loop(isa, x, routes, added)
            got = layer.run(isa, 3, x, routes, added)
            np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6 if isa == "base" else 3e-7)


@each_isa
@pytest.mark.parametrize("scale_input", [False, True])
@pytest.mark.parametrize("packing", ["float32", "int4"])
def test_gate_and_up_may_lie_apart(packing: str, scale_input: bool, isa: str) -> None:
    rng = np.random.default_rng(8)
    layer = make(isa, rng, 5, 48, 70, packing, "clamped", bias=True, split=True, scale_input=scale_input)
    x = rng.standard_normal((11, 48)).astype(np.float32)
    routes = choose(rng, 11, 5, 2)
    np.testing.assert_allclose(layer.run(isa, 2, x, routes), layer.loop(isa, x, routes), rtol=1e-5, atol=1e-5)


@each_isa
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("scale_input", [False, True])
def test_nothing_but_the_token_decides_its_bits(packing: str, scale_input: bool, isa: str) -> None:
    """However a batch is cut, whoever is in it, on however many threads; rows enough for every way through a panel."""
    rng = np.random.default_rng(3)
    layer = make(isa, rng, 7, 80, 96, packing, scale_input=scale_input)
    x = rng.standard_normal((500, 80)).astype(np.float32)
    routes = choose(rng, 500, 7, 2)
    routes.ids[:420] = [2, 5]  # one expert has more rows than a kernel takes
    whole = layer.run(isa, 1, x, routes)
    assert np.isfinite(whole).all()
    for threads in (2, 3, 5):
        np.testing.assert_array_equal(layer.run(isa, threads, x, routes), whole)
    cuts = [0, 1, 3, 10, 60, 61, 64, 199, 424, 430, 500]
    for first, last in pairwise(cuts):
        part = Routes(routes.ids[first:last], routes.weights[first:last])
        np.testing.assert_array_equal(layer.run(isa, 2, x[first:last], part), whole[first:last])
    order = rng.permutation(500)
    mixed = Routes(routes.ids[order], routes.weights[order])
    np.testing.assert_array_equal(layer.run(isa, 3, x[order], mixed), whole[order])


@each_isa
@pytest.mark.parametrize("packing", ["bfloat16", "int4"])
def test_many_tokens_of_few_experts_are_shared_out_in_blocks(packing: str, isa: str) -> None:
    """Threads that have too few panels of `down` take blocks of tokens, too."""
    rng = np.random.default_rng(9)
    layer = make(isa, rng, 5, 40, 64, packing)
    x = rng.standard_normal((601, 40)).astype(np.float32)
    routes = choose(rng, 601, 5, 2, [1, 4])
    whole = layer.run(isa, 1, x, routes)
    for threads in (2, 3):
        np.testing.assert_array_equal(layer.run(isa, threads, x, routes), whole)
    part = Routes(routes.ids[300:], routes.weights[300:])
    np.testing.assert_array_equal(layer.run(isa, 2, x[300:], part), whole[300:])


@each_isa
def test_a_step_that_is_too_long_for_its_memory_is_done_in_parts(isa: str) -> None:
    """64 MiB lie between the products at most: here some 300 tokens' worth."""
    rng = np.random.default_rng(5)
    layer = make(isa, rng, 2, 8, 24_000, "bfloat16")
    x = rng.standard_normal((420, 8)).astype(np.float32)
    routes = choose(rng, 420, 2, 2)
    whole = layer.run(isa, 2, x, routes)
    for first, last in ((0, 2), (250, 420), (419, 420)):
        part = Routes(routes.ids[first:last], routes.weights[first:last])
        np.testing.assert_array_equal(layer.run(isa, 1, x[first:last], part), whole[first:last])


@each_isa
def test_a_broken_row_breaks_no_other_and_idle_experts_are_not_read(isa: str) -> None:
    rng = np.random.default_rng(6)
    layer = make(isa, rng, 6, 40, 40)
    x = rng.standard_normal((8, 40)).astype(np.float32)
    routes = choose(rng, 8, 6, 2, [0, 1, 3, 5])
    want = layer.run(isa, 1, x, routes)
    for part in (layer.weights[2], layer.weights[4]):
        for w in part[:3]:
            w.fill(np.nan)  # type: ignore[union-attr]
    x[3], routes.weights[6] = np.nan, np.nan
    got = layer.run(isa, 2, x, routes)
    assert np.isnan(got[[3, 6]]).all()
    good = [0, 1, 2, 4, 5, 7]
    np.testing.assert_array_equal(got[good], want[good])


@each_isa
@pytest.mark.parametrize(("changes", "words"), [
    ({"width": 41}, "one shape"), ({"top_k": 7}, "routes are an id"), ({"activation": "swiglu_clamped"}, "activation"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(changes: dict[str, Any], words: str, isa: str) -> None:
    rng = np.random.default_rng(7)
    layer = make(isa, rng, 3, 40, 24, inner="ungated")
    layer.activation = changes.get("activation", "relu2")
    routes = choose(rng, 2, 3, 2)
    x = rng.standard_normal((2, 40)).astype(np.float32)
    both = np.concatenate([routes.ids.astype(np.float32), routes.weights], axis=1)
    top_k, width = changes.get("top_k", 2), changes.get("width", 40)
    with pytest.raises(EngineError, match=words):
        execute(isa, 1, [x, both], width, lambda i, o: layer.op(min(top_k, 3), tuple(i), o))


def test_C80_a_grouped_product_is_faster_than_one_token_after_the_other() -> None:
    """The same tokens through the same program in one step and in steps of one: in turns, the best of each."""
    rng = np.random.default_rng(12)
    tokens, num, top_k, e, f = 64, 8, 2, 256, 512
    layer = make(ISAS[-1], rng, num, e, f)
    layout = Layout()
    x, both, out = (layout.register(width) for width in (e, 2 * top_k, e))
    program = NativeProgram(
        pool(ISAS[-1], 1), [layer.op(top_k, (x, both), out)], layout, [], max_tokens=tokens, max_rows=1
    )
    routes = choose(rng, tokens, num, top_k)
    given = (rng.standard_normal((tokens, e)).astype(np.float32), np.concatenate([routes.ids, routes.weights], axis=1))
    memory, none = StepMemory(0), np.zeros(0, np.int32)
    plans = {n: plan_of([0, n], [0]) for n in (1, tokens)}
    best, results = {1: np.inf, tokens: np.inf}, {}
    for _ in range(5):
        for n in best:
            found, seconds = [], 0.0
            for t in range(0, tokens, n):
                for register, rows in zip((x, both), given, strict=True):
                    program.values(register, n)[:] = rows[t : t + n]
                args = memory.args(plans[n], none)
                start = time.perf_counter()
                program.run(args)
                seconds += time.perf_counter() - start
                found.append(program.values(out, n).copy())
            best[n], results[n] = min(best[n], seconds), np.concatenate(found)
    np.testing.assert_array_equal(results[1], results[tokens])
    assert best[tokens] < 0.7 * best[1]


def test_some_instruction_set_is_tested() -> None:
    assert ISAS
