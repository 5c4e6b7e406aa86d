"""PST_WRITE and PST_ATTEND against a softmax in float64, and the laws about their bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from penstock.base.bf16 import F32, narrow, widen
from penstock.base.errors import EngineError
from penstock.core.cache_spec import vector_planes
from penstock.core.kv_codec import scales_name
from penstock.ops.native.abi import Kind
from penstock.ops.native.program import NativeOp
from penstock.ops.plan import GroupPlan, Planes, StepPlan
from penstock.ops.ref.codecs.int8 import quantise
from penstock.ops.ref.storage import write_kv
from penstock.ops.step import Step
from tests.native.running import each_isa, each_threads, execute, plan_of, within

F64 = npt.NDArray[np.float64]
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16, "int8": np.int8}
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
LAYERS, LAYER, GONE = 3, 1, -(10**6)
SPAN = 4096
"""Keys whose partial softmax is one task at least; csrc/src/attention.h."""


@dataclass(frozen=True)
class Rule:
    heads: int
    kv_heads: int
    dim: int
    width: int
    window: int = 0
    chunk: int = 0
    soft_cap: float = 0.0
    slopes: F32 | None = None
    sinks: F32 | None = None
    scale: float = field(default=0.0)
    behind: int = 0
    """Numbers of a key that lie in a second plane; the others are the value then."""

    @property
    def dims(self) -> dict[str, int]:
        """Planes, and numbers of a head in each."""
        if self.behind:
            return {"k": self.dim - self.behind, "more": self.behind}
        return {"k": self.dim, "v": self.width}

    @property
    def factor(self) -> float:
        return float(np.float32(self.scale or self.dim**-0.5))

    def first_key(self, position: int) -> int:
        first = max(0, position + 1 - self.window) if self.window else 0
        return max(first, position // self.chunk * self.chunk) if self.chunk else first


@dataclass(frozen=True)
class Text:
    """One sequence's whole history: q [T, H, D], k [T, G, D], v [T, G, W]. A step runs tokens start ... stop-1."""

    q: F32
    k: F32
    v: F32
    start: int
    stop: int

    def planes(self, rule: Rule) -> dict[str, F32]:
        """What each plane holds of it, before it is rounded."""
        if rule.behind:
            return {"k": self.k[..., : -rule.behind], "more": self.k[..., -rule.behind :]}
        return {"k": self.k, "v": self.v}

    def part(self, start: int, stop: int) -> Text:
        return replace(self, start=start, stop=stop)


def text(rng: np.random.Generator, rule: Rule, length: int, start: int = 0) -> Text:
    shapes = (rule.heads, rule.dim), (rule.kv_heads, rule.dim), (rule.kv_heads, rule.width)
    q, k, v = (rng.standard_normal((length, *s), dtype=np.float32) for s in shapes)
    if rule.behind:
        assert rule.width == rule.dim - rule.behind, "values are keys without what is behind"
        v = k[..., : rule.width]
    return Text(q, k, v, start, length)


def stored(x: F32, dtype: str, name: str = "") -> Planes:
    """What planes hold of x [..., heads, dim]: the one called `name`, and that of its scales."""
    if dtype == "int8":
        whole, scales = quantise(x)
        return {name: whole, scales_name(name, "int8"): scales}
    return {name: narrow(x) if dtype == "bfloat16" else x.astype(DTYPES[dtype])}


def kept(x: F32, dtype: str) -> F32:
    """x after a stay in storage."""
    if dtype == "int8":
        whole, scales = quantise(x)
        return whole * scales
    (out,) = stored(x, dtype).values()
    return widen(out) if dtype == "bfloat16" else out.astype(np.float32)


def empty_planes(shape: tuple[int, ...], dims: dict[str, int], dtype: str) -> Planes:
    """Planes [*shape, dim], full of NaN; int8 has NaN for scales, of which the planes stand behind the others."""
    kinds = vector_planes({name: (shape[-1], dim) for name, dim in dims.items()}, dtype)
    nan = {"bfloat16": 0x7FC0, "int8": -128}
    return {p.name: np.full((*shape, p.dim), nan.get(p.dtype, np.nan), DTYPES[p.dtype]) for p in kinds}


def rounds_to_pairs(dtype: str, isa: str) -> bool:
    """Whether queries and weights are rounded to bfloat16."""
    return dtype in ("bfloat16", "int8") and isa == "avx512bf16"


def paged(
    texts: Sequence[Text], rule: Rule, dtype: str, block: int, rng: np.random.Generator, ragged: bool = False
) -> tuple[Planes, GroupPlan]:
    """Storage with the texts' keys and values up to each one's `stop`, NaN wherever no token of the step looks.

    Pages are dealt at random; blocks that no token of a sequence's step reaches have a number that no page has. Whole
    blocks of equal beginnings that were there before the step are the same pages, as in the prefix cache.
    """
    counts = [-(-t.stop // block) for t in texts]
    num_pages = LAYERS * (sum(counts) + 2)
    planes = empty_planes((num_pages, block, rule.kv_heads), rule.dims, dtype)
    free = rng.permutation(num_pages // LAYERS).tolist()
    tables, cached = [], dict[tuple[int, bytes], int]()
    for t, count in zip(texts, counts, strict=True):
        slabs = np.array([free.pop() for _ in range(count)], np.int32)
        for i in range(0 if ragged else t.start // block):
            here = slice(i * block, (i + 1) * block)
            content = int(slabs[i - 1]) if i else -1, t.k[here].tobytes() + t.v[here].tobytes()
            slabs[i] = cached.setdefault(content, int(slabs[i]))
        pages = slabs * LAYERS + (rng.integers(0, LAYERS, count) if ragged else LAYER)
        first = rule.first_key(t.start)
        for i, page in enumerate(pages):
            lo, hi = max(i * block, first), min((i + 1) * block, t.stop)
            for name, x in t.planes(rule).items():
                for of, numbers in stored(x[lo : max(lo, hi)], dtype, name).items():
                    planes[of][page, lo - i * block : max(lo, hi) - i * block] = numbers
        gone = np.arange(count) < first // block
        table = np.where(gone, GONE, pages if ragged else slabs).astype(np.int32)
        tables.append(
            np.stack([np.full_like(table, GONE), table, np.full_like(table, GONE)]) if ragged else table[None]
        )
    return planes, GroupPlan(LAYERS, block, tuple(tables))


def attend_op(rule: Rule, registers: list[int], out: int) -> NativeOp:
    value = 0 if rule.behind else 1
    n = (0, LAYER, rule.heads, rule.kv_heads, rule.dim, rule.width, 0, value, rule.window, rule.chunk, 1, rule.behind)
    f = (rule.factor, rule.soft_cap)
    return NativeOp(Kind.ATTEND, (registers[0],), out, n, f, (rule.slopes, rule.sinks))


def attend(
    isa: str, threads: int, texts: Sequence[Text], rule: Rule, dtype: str = "float32", block: int = 16, *,
    seed: int = 0, ragged: bool = False,
) -> list[F32]:  # fmt: skip
    """One step with all the texts: of each, [tokens, H, W]."""
    planes, group = paged(texts, rule, dtype, block, np.random.default_rng(seed), ragged)
    bounds = np.cumsum([0, *(t.stop - t.start for t in texts)]).tolist()
    q = np.concatenate([t.q[t.start : t.stop] for t in texts]).reshape(bounds[-1], -1)
    before = {name: plane.copy() for name, plane in planes.items()}
    out = execute(
        isa, threads, [q], rule.heads * rule.width, lambda registers, to: attend_op(rule, registers, to),
        plan=plan_of(bounds, [t.start for t in texts], [group]), planes=[planes],
    )  # fmt: skip
    for name, plane in planes.items():
        np.testing.assert_array_equal(plane.view(np.uint8), before[name].view(np.uint8))
    out = out.reshape(-1, rule.heads, rule.width)
    return [out[a:b] for a, b in pairwise(bounds)]


def oracle(t: Text, rule: Rule, dtype: str) -> tuple[F64, F64]:
    """[tokens, H, W] in float64, and how far [tokens, H, 1] the kernels may be from it, in units of max |v|.

    Products in float32 are within 1e-5. With bfloat16 products, rounding q changes a score by at most 2^-9 scale
    sum |q k|, and that of weights by twice as much, relatively; rounding weights moves the mean by 2^-8 at most.
    """
    per = rule.heads // rule.kv_heads
    held = {n: np.repeat(kept(x[: t.stop], dtype).astype(np.float64), per, axis=1) for n, x in t.planes(rule).items()}
    k, v = (held["k"], held["v"]) if "v" in held else (np.concatenate([held["k"], held["more"]], -1), held["k"])
    q = t.q[t.start : t.stop].astype(np.float64)
    i, j = np.arange(t.start, t.stop)[:, None], np.arange(t.stop)[None]
    first = np.array([rule.first_key(p) for p in range(t.start, t.stop)])[:, None]
    out = np.empty((*q.shape[:2], rule.width))
    slack = np.empty((*q.shape[:2], 1))
    for h in range(rule.heads):
        s = q[:, h] @ k[:, h].T * rule.factor
        size = np.abs(q[:, h]) @ np.abs(k[:, h]).T * abs(rule.factor)
        if rule.soft_cap:
            s = np.tanh(s / rule.soft_cap) * rule.soft_cap
        if rule.slopes is not None:
            s = s - float(rule.slopes[h]) * (i - j)
        seen = (first <= j) & (j <= i)
        s = np.where(seen, s, -np.inf)
        value = v[:, h]
        if rule.sinks is not None:
            s = np.concatenate([s, np.full((len(s), 1), float(rule.sinks[h]))], axis=1)
            value = np.concatenate([value, np.zeros((1, rule.width))])
        w = np.exp(s - s.max(axis=1, keepdims=True))
        out[:, h] = w @ value / w.sum(axis=1, keepdims=True)
        slack[:, h, 0] = 2 * 2.0**-9 * np.where(seen, size, 0).max(axis=1) + 2.0**-8
    return out, slack


def assert_right(got: F32, t: Text, rule: Rule, dtype: str, isa: str) -> None:
    want, slack = oracle(t, rule, dtype)
    bound = slack if rounds_to_pairs(dtype, isa) else 1e-5
    within(got, want, bound * float(np.abs(t.v).max()))


def same(got: F32, want: F32) -> None:
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


def slopes_of(heads: int) -> F32:
    return (2.0 ** -(8.0 * np.arange(1, heads + 1) / heads)).astype(np.float32)


def sinks_of(heads: int) -> F32:
    return np.resize(np.array([0.5, -2.0, 4.0, 0.0, -9.0], np.float32), heads)


SHAPES = [
    (1, 1, 8, 8), (2, 1, 16, 16), (14, 2, 64, 64), (8, 1, 32, 32), (2, 2, 80, 80), (7, 1, 128, 128), (4, 2, 192, 128),
    (3, 3, 7, 5), (4, 4, 33, 49), (17, 1, 1, 1), (2, 1, 24, 200),
]  # fmt: skip


@each_isa
@each_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_softmax_in_float64(isa: str, dtype: str, shape: tuple[int, int, int, int]) -> None:
    """C43, C49: tiles over scattered pages, against the softmax as the textbook writes it."""
    rule = Rule(*shape)
    rng = np.random.default_rng(shape)
    texts = [text(rng, rule, 300, 270), text(rng, rule, 1), text(rng, rule, 40, 39), text(rng, rule, 70)]
    for got, t in zip(attend(isa, 2, texts, rule, dtype), texts, strict=True):
        assert_right(got, t, rule, dtype, isa)


RULES: dict[str, dict[str, Any]] = {
    "window 1": {"window": 1}, "window": {"window": 37}, "wide window": {"window": 300}, "chunk": {"chunk": 37},
    "chunk and window": {"chunk": 64, "window": 20}, "soft cap": {"soft_cap": 2.5, "scale": 0.9},
    "slopes": {"slopes": slopes_of(6)}, "sinks": {"sinks": sinks_of(6)},
    "all": {"window": 290, "chunk": 450, "soft_cap": 20.0, "slopes": slopes_of(6), "sinks": sinks_of(6), "scale": 1.0},
}  # fmt: skip


CASES = [*(("all", d) for d in DTYPES), *zip([r for r in RULES if r != "all"], cycle(DTYPES), strict=False)]
"""Every rule with one dtype, all together with each."""


@each_isa
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_rules_equal_a_masked_matrix_in_float64(isa: str, dtype: str, name: str) -> None:
    rule = Rule(6, 2, 16, 24, **RULES[name])
    rng = np.random.default_rng(21)
    texts = [text(rng, rule, 600, 430), text(rng, rule, 1), text(rng, rule, 70)]
    for got, t in zip(attend(isa, 1, texts, rule, dtype, block=8), texts, strict=True):
        assert_right(got, t, rule, dtype, isa)
    plain = oracle(texts[0], Rule(6, 2, 16, 24), dtype)[0]
    assert np.abs(plain - oracle(texts[0], rule, dtype)[0]).max() > 0.01, "the rule must change something"


@each_isa
@pytest.mark.parametrize(("name", "dtype"), [*(("plain", d) for d in DTYPES), *CASES])
@pytest.mark.sampled(8)
def test_bits_do_not_depend_on_company_cuts_pages_or_threads(isa: str, dtype: str, name: str) -> None:
    rule = Rule(6, 2, 20, 12, **RULES.get(name, {}))
    rng = np.random.default_rng(8)
    t = text(rng, rule, 531)
    others = [text(rng, rule, 290, 289), text(rng, rule, 5), text(rng, rule, 270, 200)]
    whole = attend(isa, 1, [t], rule, dtype)[0]
    cuts = [0, 1, 17, 255, 256, 257, 300, 511, 531]
    for n, (a, b) in enumerate(pairwise(cuts)):
        batch = [*others[: n % 4], t.part(a, b), *others[n % 4 :]]
        got = attend(isa, 1 + n % 3, batch, rule, dtype, (1, 3, 16, 32, 100)[n % 5], seed=n, ragged=n % 2 == 1)
        same(got[n % 4], whole[a:b])


@each_isa
@each_threads
def test_random_steps_keep_their_bits(isa: str, threads: int) -> None:
    rng = np.random.default_rng([31, threads])
    for trial in range(4):
        per, kv_heads = int(rng.choice([1, 2, 7, 8])), int(rng.integers(1, 4))
        heads = per * kv_heads
        dim, width = (int(rng.choice([8, 16, 32, 64, 80])) for _ in range(2))
        rule = Rule(
            heads, kv_heads, dim, width, int(rng.choice([0, 1, 30, 257])), int(rng.choice([0, 0, 50, 256])),
            float(rng.choice([0.0, 3.0])), slopes_of(heads) if rng.random() < 0.5 else None,
            sinks_of(heads) if rng.random() < 0.5 else None,
        )  # fmt: skip
        dtype = str(rng.choice(list(DTYPES)))
        lengths = rng.integers(1, 400, 3).tolist()
        texts = [text(rng, rule, n, int(rng.integers(max(0, n - 40), n))) for n in lengths]
        block = int(rng.choice([1, 3, 16, 32, 100]))
        got = attend(isa, threads, texts, rule, dtype, block, seed=trial, ragged=bool(rng.integers(2)))
        for t, of_text in zip(texts, got, strict=True):
            assert_right(of_text, t, rule, dtype, isa)
            same(of_text, attend(isa, 1, [t], rule, dtype, 16)[0])
            last = t.part(t.stop - 1, t.stop)
            same(of_text[-1:], attend(isa, 1, [last], rule, dtype, 7, seed=9)[0])


@each_isa
@pytest.mark.parametrize(("window", "dtype"), [*((0, d) for d in DTYPES), (5000, "bfloat16")])
@pytest.mark.sampled
def test_long_contexts_are_split_without_a_trace(isa: str, dtype: str, window: int) -> None:
    """C45: several threads share the spans of one long context; 19 spans are more than a wave of them holds."""
    rule = Rule(2, 1, 8, 8, window)
    rng = np.random.default_rng(9)
    t = text(rng, rule, 18 * SPAN + 700)
    short = text(rng, rule, 60, 57)
    parts = [(t.stop - 1, t.stop), (t.stop - 9, t.stop), (2 * SPAN - 2, 2 * SPAN + 3), (SPAN - 1, SPAN + 1)]
    for n, (a, b) in enumerate(parts):
        alone = attend(isa, 1, [t.part(a, b)], rule, dtype, 256)[0]
        assert_right(alone, t.part(a, b), rule, dtype, isa)
        got = attend(isa, 3 - n % 2, [short, t.part(a, b), short.part(0, 1)], rule, dtype, 256, seed=n)
        same(got[1], alone)
        same(attend(isa, 2, [t.part(b - 1, b)], rule, dtype, 256)[0], alone[-1:])


@each_isa
def test_two_long_contexts_at_once(isa: str) -> None:
    rule = Rule(4, 2, 8, 16, sinks=sinks_of(4))
    rng = np.random.default_rng(10)
    texts = [text(rng, rule, n, n - 2) for n in (3 * SPAN + 5, 9, 2 * SPAN + 100, SPAN)]
    want = [attend(isa, 1, [t], rule, "bfloat16", 64)[0] for t in texts]
    for threads in (2, 3):
        for got, expected in zip(attend(isa, threads, texts, rule, "bfloat16", 64), want, strict=True):
            same(got, expected)


@each_isa
@each_dtype
@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("what", ["k", "v"])
def test_what_is_not_finite_stays_with_those_who_see_it(isa: str, dtype: str, poison: float, what: str) -> None:
    rule = Rule(4, 2, 16, 16, window=40)
    rng = np.random.default_rng(11)
    texts = [text(rng, rule, 100), text(rng, rule, 80)]
    clean = attend(isa, 2, texts, rule, dtype)
    spoilt = replace(texts[0], k=texts[0].k.copy(), v=texts[0].v.copy())
    getattr(spoilt, what)[51, 0] = poison
    got = attend(isa, 2, [spoilt, texts[1]], rule, dtype)
    same(got[1], clean[1])
    same(got[0][:, 2:], clean[0][:, 2:])
    sees = (np.arange(100) >= 51) & (np.arange(100) < 91)
    same(got[0][~sees], clean[0][~sees])
    bad = ~np.isfinite(got[0][sees][:, :2])
    if np.isnan(poison) or what == "v" or dtype == "int8":  # of int8 an infinity becomes a NaN
        assert bad.all()
    else:  # a score of +infinity, or of -infinity, which weighs nothing
        with np.errstate(invalid="ignore"):
            sign = texts[0].q[sees][:, :2].sum(axis=-1) > 0
        assert bad[sign].all()


@each_isa
@each_dtype
def test_scores_far_apart(isa: str, dtype: str) -> None:
    """Scores of magnitude 1e4, rising, falling and with peaks, do not overflow."""
    rule = Rule(1, 1, 1, 4, scale=1.0)
    rng = np.random.default_rng(12)
    n = 700
    ramps = [np.linspace(-1e4, 1e4, n), np.linspace(1e4, -1e4, n), np.where(np.arange(n) == 300, 1e4, -1e4)]
    for ramp in ramps:
        t = Text(np.ones((n, 1, 1), np.float32), ramp.astype(np.float32)[:, None, None], rng.standard_normal(
            (n, 1, 4), dtype=np.float32), n - 3, n)  # fmt: skip
        got = attend(isa, 1, [t], rule, dtype)[0]
        bound = 2.0**-7 if rounds_to_pairs(dtype, isa) else 1e-5
        within(got, oracle(t, rule, dtype)[0], bound * float(np.abs(t.v).max()))


@each_isa
def test_queries_of_bfloat16_are_not_rounded(isa: str) -> None:
    """What is left is the rounding of weights, of which the sum is taken after it."""
    rule = Rule(4, 1, 64, 64)
    t = text(np.random.default_rng(13), rule, 400, 380)
    t = replace(t, q=widen(narrow(t.q)))
    bound = 2.0**-8 if isa == "avx512bf16" else 1e-5
    within(attend(isa, 1, [t], rule, "bfloat16")[0], oracle(t, rule, "bfloat16")[0], bound * float(np.abs(t.v).max()))
    ones = replace(t, v=np.ones_like(t.v))
    within(attend(isa, 1, [ones], rule, "bfloat16")[0], np.ones((20, 4, 64)), 1e-6)


# ---- writing ----


def write_case(isa: str, threads: int, dtype: str, block: int, ragged: bool, second: bool) -> tuple[Planes, Planes]:
    """Planes after a native and after a reference write of one step of three sequences."""
    rng = np.random.default_rng(5)
    bounds, starts = [0, 1, 30, 47], [70, 0, 13]
    a, b = (rng.standard_normal((47, 2, n), dtype=np.float32) * 100 for n in (24, 19))
    a[3, 0, :4] = [1e6, -1e6, 65519.9, 65520.0]
    a[4, 1, :5] = [1e-7, 2.0**-25, -(2.0**-24), 0.0, -0.0]
    a[8, 0] = b[8, 1] = 0.0
    a[9, 0] = a[9, 0] * 1e-38
    a[10, 0], a[11, 0] = 2.0**-149, np.arange(24, dtype=np.float32) * np.float32(2.0**-149) * 13
    a[12, 0] = a[12, 0] * np.float32(1e36)
    b[13, 1] = np.resize(np.array([127.0, 0.5, 1.5, -2.5, 126.5], np.float32), 19)
    a[5, 0, :4] = [1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11]
    a[6, 0, 23] = b[7, 1, 18] = np.nan
    a[6, 1, :2] = b[7, 0, 16:18] = [np.inf, -np.inf]
    ends = [s + n for s, n in zip(starts, np.diff(bounds).tolist(), strict=True)]
    counts = [-(-e // block) for e in ends]
    slabs = rng.permutation(sum(counts) + 2).astype(np.int32)
    tables, at = [], 0
    for n in counts:
        own = slabs[at : at + n]
        at += n
        gone = np.full_like(own, GONE)
        tables.append(np.stack([gone, own * LAYERS + 2, gone]) if ragged else own[None])
    group = GroupPlan(LAYERS, block, tuple(tables))
    planes = empty_planes((LAYERS * len(slabs), block, 2), {"k": 24, "v": 19}, dtype)
    for plane in planes.values():
        plane[:] = 7
    expected = {name: plane.copy() for name, plane in planes.items()}
    plan = plan_of(bounds, starts, [group])
    write_reference(plan, expected, a, b, second, ragged)
    numbers = (0, LAYER, 2, 24, 2, 19, 0, 1)
    inputs = [a.reshape(47, -1), b.reshape(47, -1)][: 1 + second]
    execute(
        isa, threads, inputs, None, lambda registers, out: NativeOp(Kind.WRITE, tuple(registers), -1, numbers),
        plan=plan, planes=[planes],
    )  # fmt: skip
    return planes, expected


def write_reference(plan: StepPlan, planes: Planes, a: F32, b: F32, second: bool, ragged: bool) -> None:
    if ragged:  # the reference looks up the other layers' lines, too
        tables = tuple(np.repeat(t[LAYER : LAYER + 1], LAYERS, axis=0) for t in plan.groups[0].tables)
        plan = replace(plan, groups=(replace(plan.groups[0], tables=tables),))
    untouched = {name: planes[name].copy() for name in planes if name.startswith("v")}
    write_kv(Step(plan, [planes]), a, b, 0, LAYER, ("k", "v"))
    if not second:
        planes.update(untouched)


@each_isa
@each_dtype
@pytest.mark.parametrize(
    ("threads", "block", "ragged", "second"), [(1, 1, False, True), (2, 3, True, True), (3, 16, False, False)]
)
def test_writes_what_the_reference_writes(
    isa: str, threads: int, dtype: str, block: int, ragged: bool, second: bool
) -> None:
    planes, expected = write_case(isa, threads, dtype, block, ragged, second)
    for name, plane in planes.items():
        got, want = (widen(x) if dtype == "bfloat16" else x for x in (plane, expected[name]))
        np.testing.assert_array_equal(got, want, name)
        np.testing.assert_array_equal(np.signbit(got)[~np.isnan(got)], np.signbit(want)[~np.isnan(want)])


# ---- what does not fit ----


@each_isa
@pytest.mark.parametrize(
    "other", [Rule(4, 2, 8, 16), Rule(4, 3, 16, 16), Rule(4, 2, 16, 8), Rule(4, 2, 16, 16, -1)], ids=str
)
def test_misfits_are_told(isa: str, other: Rule) -> None:
    rule = Rule(4, 2, 16, 16)
    t = text(np.random.default_rng(0), rule, 3)
    planes, group = paged([t], rule, "float32", 4, np.random.default_rng(0))
    with pytest.raises(EngineError, match=r"operation 0 \(kind 7\)"):
        execute(
            isa, 1, [t.q.reshape(3, -1)], 64, lambda registers, out: attend_op(other, registers, out),
            plan=plan_of([0, 3], [0], [group]), planes=[planes],
        )  # fmt: skip


@each_isa
def test_8_bits_without_scales_are_told(isa: str) -> None:
    """Scales of another type, of another number of heads, or none at all."""
    rule = Rule(4, 2, 16, 16)
    t = text(np.random.default_rng(0), rule, 3)
    good, group = paged([t], rule, "int8", 4, np.random.default_rng(0))
    scales = good["k_scale"]
    for bad in (scales.astype(np.float16), scales[:, :, :1], np.repeat(scales, 2, axis=-1)):
        with pytest.raises(EngineError, match=r"kind 7.*a plane of 8 bits has no scales"):
            execute(
                isa, 1, [t.q.reshape(3, -1)], 64, lambda registers, out: attend_op(rule, registers, out),
                plan=plan_of([0, 3], [0], [group]), planes=[good | {"k_scale": np.ascontiguousarray(bad)}],
            )  # fmt: skip
