"""Quest: bounds of pages and what is read by them, native against the reference (catalogue row F13)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from penstock.base.bf16 import F32, widen
from penstock.base.errors import EngineError
from penstock.core.kv_codec import scales_name
from penstock.core.selection import BOUNDS, PageReads
from penstock.ops.native.abi import Kind
from penstock.ops.native.program import ChosenPages, NativeOp
from penstock.ops.plan import GroupPlan, Planes
from penstock.ops.ref.attention.pages import choose_pages, upper_bounds
from penstock.ops.ref.storage import page_bounds, read_kv
from tests.native.running import each_isa, execute, plan_of
from tests.native.test_attention import LAYER, Rule, Text, attend_op, each_dtype, kept, same, sinks_of, text
from tests.native.test_attention import attend as attend_plain
from tests.native.test_attention_lines import Kept, in_lines

each_lanes = pytest.mark.parametrize("lanes", [False, True], ids=["layers", "heads"])
FULL = PageReads(share=1.0)


def whole(t: Text, lanes: int) -> Kept:
    return Kept(t, (np.arange(t.start, dtype=np.int32),) * lanes)


def with_bounds(planes: Planes, group: GroupPlan, texts: Sequence[Text]) -> Planes:
    """The planes, and those of the bounds of every page that a text uses; NaN elsewhere."""
    out = dict(planes)
    keys = planes["k"]
    dtype = np.dtype(np.float32) if keys.dtype == np.int8 else keys.dtype
    nan = 0x7FC0 if dtype == np.uint16 else np.nan
    for name in BOUNDS:
        out[name] = np.full((len(keys), 1, *keys.shape[2:]), nan, dtype)
    for b, t in enumerate(texts):
        for lane in range(group.lanes):
            pages, size = group.pages(b, LAYER, lane), group.block_size
            for block in range(-(-t.stop // size)):
                held = read_kv(planes, "k", pages, block * size, min((block + 1) * size, t.stop))
                for name, x in zip(BOUNDS, page_bounds(held), strict=True):
                    x[np.isnan(x)] = -np.float32(np.nan)  # as processors make it of infinity times zero
                    bits = (x.view(np.uint32) >> 16).astype(np.uint16) if dtype == np.uint16 else x.astype(dtype)
                    out[name][pages[block], 0] = bits
    return out


def attend(
    isa: str, threads: int, texts: Sequence[Text], rule: Rule, reads: PageReads, dtype: str = "float32",
    block: int = 16, *, lanes: bool = False, ragged: bool = False, seed: int = 0, max_tokens: int = 40000,
    choose_from: Sequence[int] | None = None,
) -> list[F32]:  # fmt: skip
    per_layer = rule.kv_heads if lanes else 1
    rng = np.random.default_rng(seed)
    planes, group = in_lines([whole(t, per_layer) for t in texts], rule, dtype, block, rng, lanes, ragged)
    planes = with_bounds(planes, group, texts)
    names = list(planes)
    chosen = ChosenPages(reads, names.index(BOUNDS[0]), names.index(BOUNDS[1]), max_tokens)
    bounds = np.cumsum([0, *(t.stop - t.start for t in texts)]).tolist()
    q = np.concatenate([t.q[t.start : t.stop] for t in texts]).reshape(bounds[-1], -1)

    def make(registers: list[int], to: int) -> NativeOp:
        op = attend_op(rule, registers, to)
        return replace(op, pointers=(*op.pointers, None, chosen))

    plan = plan_of(bounds, [t.start for t in texts], [group])
    if choose_from is not None:
        plan = replace(plan, choose_from=np.array(choose_from, np.int32))
    out = execute(isa, threads, [q], rule.heads * rule.width, make, plan=plan, planes=[planes])
    out = out.reshape(-1, rule.heads, rule.width)
    return [out[a:b] for a, b in pairwise(bounds)]


def kept_keys(t: Text, dtype: str) -> F32:

    return kept(t.k[: t.stop], dtype)


def read_by(t: Text, rule: Rule, reads: PageReads, dtype: str, block: int, g: int) -> Text:
    """What kv head `g` of a text with one token in the step reads, as a text that never had more."""
    keys, per = kept_keys(t, dtype), rule.heads // rule.kv_heads
    pages = [page_bounds(keys[i : i + block]) for i in range(0, t.stop, block)]
    low, high = (np.stack([p[i][g] for p in pages]) for i in (0, 1))
    own = slice(g * per, (g + 1) * per)
    chosen = choose_pages(upper_bounds(t.q[t.start, own], low, high), t.stop, block, reads)
    at = (chosen[:, None] * block + np.arange(block)).reshape(-1)
    at = at[at < t.stop]
    n = len(at) - 1
    q = np.concatenate([t.q[:n], t.q[t.start : t.stop]])[:, own]
    return Text(q.copy(), t.k[at, g : g + 1], t.v[at, g : g + 1], n, n + 1)


@each_isa
@each_dtype
@each_lanes
@pytest.mark.sampled
def test_F13_native_choice_is_the_references(isa: str, dtype: str, lanes: bool) -> None:
    """F13: bit for bit attention over the pages that the reference chooses, head by head."""
    reads = PageReads(share=0.25, recent=20)
    rules = [
        Rule(6, 3, 32, 32),
        Rule(4, 4, 33, 7),
        Rule(14, 2, 64, 64),
        Rule(8, 4, 16, 16, soft_cap=3.0, sinks=sinks_of(8)),
    ]
    for n, rule in enumerate(rules):
        rng = np.random.default_rng([n, lanes])
        texts = [text(rng, rule, length, length - 1) for length in (300, 1, 33, 97)]
        for reads_now in (reads, PageReads(tokens=100, recent=1), PageReads(tokens=8, recent=64)):
            for threads, block in ((1, 16), (2, 7)):
                got = attend(isa, threads, texts, rule, reads_now, dtype, block, lanes=lanes, ragged=n % 2 == 1)
                for t, rows in zip(texts, got, strict=True):
                    for g in range(rule.kv_heads):
                        per = rule.heads // rule.kv_heads
                        own = slice(g * per, (g + 1) * per)
                        sinks = None if rule.sinks is None else rule.sinks[own].copy()
                        alone = replace(rule, heads=per, kv_heads=1, sinks=sinks, scale=rule.factor)
                        part = read_by(t, rule, reads_now, dtype, block, g)
                        same(np.ascontiguousarray(rows[:, own]), attend_plain(isa, 1, [part], alone, dtype)[0])


@each_isa
@each_dtype
def test_F13_a_full_budget_changes_no_bit(isa: str, dtype: str) -> None:
    rule = Rule(6, 3, 32, 24)
    rng = np.random.default_rng(3)
    texts = [text(rng, rule, 5000, 4999), text(rng, rule, 300, 270), text(rng, rule, 40, 39)]
    want = attend_plain(isa, 1, texts, rule, dtype)
    for reads in (FULL, PageReads(tokens=5000)):
        for got, expected in zip(attend(isa, 2, texts, rule, reads, dtype), want, strict=True):
            same(got, expected)


@each_isa
def test_F13_several_tokens_of_a_sequence_read_everything(isa: str) -> None:
    rule = Rule(4, 2, 16, 16)
    rng = np.random.default_rng(4)
    texts = [text(rng, rule, 400, 398), text(rng, rule, 400), text(rng, rule, 400, 399)]
    reads = PageReads(tokens=64, recent=16)
    got, want = attend(isa, 2, texts, rule, reads), attend_plain(isa, 1, texts, rule)
    for n in range(2):
        same(got[n], want[n])
    assert np.abs(got[2] - want[2]).max() > 1e-3, "the lone token must read less"


@each_isa
@each_lanes
def test_F13_tokens_behind_their_prompt_choose_however_they_come(isa: str, lanes: bool) -> None:
    """F13: one by one or several in a step, as a resumed sequence's do; a lone token of a prompt reads everything."""
    rule, reads = Rule(6, 3, 24, 20), PageReads(share=0.2, recent=10)
    rng = np.random.default_rng([9, lanes])
    t, other = text(rng, rule, 500), text(rng, rule, 300, 299)
    full = attend_plain(isa, 1, [t, other], rule, "bfloat16")
    more: dict[str, Any] = {"dtype": "bfloat16", "lanes": lanes}
    want = {p: attend(isa, 1, [t.part(p, p + 1)], rule, reads, **more)[0] for p in range(417, 500, 7)}
    assert all(np.abs(row - full[0][p]).max() > 1e-4 for p, row in want.items())
    for n, (a, b) in enumerate([(0, 500), (400, 430), (410, 418), (417, 500), (450, 500), (499, 500)]):
        got = attend(
            isa, 1 + n % 3, [other, t.part(a, b)], rule, reads, block=16, ragged=n % 2 == 1, seed=n,
            choose_from=[2**31 - 1, 417], **more,
        )  # fmt: skip
        same(got[0], full[1])
        same(got[1][: max(0, 417 - a)], full[0][a : max(a, 417)])
        for p, row in want.items():
            if a <= p < b:
                same(got[1][p - a : p - a + 1], row)


@each_isa
@each_lanes
def test_F13_bits_do_not_depend_on_company_pages_or_threads(isa: str, lanes: bool) -> None:
    """F13: a token's choice follows from its own context alone."""
    rng = np.random.default_rng([5, lanes])
    for dtype in ("bfloat16", "int8", "float32"):
        rule = Rule(6, 3, 24, 20)
        t = text(rng, rule, 3001, 3000)
        others = [text(rng, rule, n, start) for n, start in ((900, 899), (120, 60), (2500, 2499), (17, 0))]
        reads = PageReads(share=0.2, recent=33)
        alone = attend(isa, 1, [t], rule, reads, dtype, lanes=lanes)[0]
        for n in range(5):
            batch = [*others[:n], t, *others[n:]]
            got = attend(
                isa, 1 + n % 3, batch, rule, reads, dtype, lanes=lanes, ragged=n % 2 == 1, seed=n,
                max_tokens=(200, 40000)[n % 2],
            )  # fmt: skip
            same(got[n], alone)


@each_isa
def test_F13_equal_bounds_go_to_the_lower_page_and_nan_first(isa: str) -> None:
    rule, block = Rule(2, 1, 16, 16), 4
    t = text(np.random.default_rng(6), rule, 64, 63)
    t.k[:60] = np.tile(t.k[:4], (15, 1, 1))
    reads = PageReads(tokens=16, recent=4)
    clean = t.k.copy()
    for spoilt in (None, np.nan, np.inf):
        t.k[:] = clean
        if spoilt is not None:
            t.k[40, 0, 3] = spoilt
        got = attend(isa, 1, [t], rule, reads, block=block)[0]
        pages = [0, 1, 2, 15] if spoilt is None else [0, 1, 10, 15]
        at = np.concatenate([np.arange(p * block, (p + 1) * block) for p in pages])
        part = Text(np.concatenate([t.q[:15], t.q[63:]]), t.k[at], t.v[at], 15, 16)
        want = attend_plain(isa, 1, [part], rule)[0]
        assert np.isnan(want).any() == (spoilt is not None)
        np.testing.assert_array_equal(got, want)


# ---- bounds ----


@each_isa
@each_dtype
@each_lanes
def test_F13_bounds_are_written_beside_the_keys(isa: str, dtype: str, lanes: bool) -> None:
    """F13: those of the reference, for pages that begin, go on or are written anew; others are left alone."""
    for rule in (Rule(3, 3, 24, 19), Rule(4, 2, 7, 32), Rule(2, 2, 40, 8)):
        rng = np.random.default_rng(7)
        texts = [text(rng, rule, 71, 70), text(rng, rule, 90), text(rng, rule, 30, 13), text(rng, rule, 12, 8)]
        texts[1].k[3, 0, 1], texts[2].k[20, 1, 2] = np.nan, np.inf
        per_layer = rule.kv_heads if lanes else 1
        planes, group = in_lines([whole(t, per_layer) for t in texts], rule, dtype, 5, rng, lanes, lanes)
        want = with_bounds(planes, group, texts)
        touched = np.zeros(len(planes["k"]), bool)
        for b, t in enumerate(texts):
            for lane in range(group.lanes):
                touched[group.pages(b, LAYER, lane)[t.start // 5 : -(-t.stop // 5)]] = True
        bounds = np.cumsum([0, *(t.stop - t.start for t in texts)]).tolist()
        a, b_ = (
            np.concatenate([getattr(t, name)[t.start : t.stop] for t in texts]).reshape(bounds[-1], -1)
            for name in ("k", "v")
        )
        names = list(want)
        n = (0, LAYER, rule.kv_heads, rule.dim, rule.kv_heads, rule.width, 0, 1, *(names.index(x) for x in BOUNDS))
        for threads in (1, 2):
            got = {name: plane.copy() for name, plane in want.items()}
            for name in BOUNDS:
                got[name][:] = 7
            execute(
                isa, threads, [a, b_], None, lambda r, out, n=n: NativeOp(Kind.WRITE, tuple(r), -1, n),  # type: ignore[misc]
                plan=plan_of(bounds, [t.start for t in texts], [group]), planes=[got],
            )  # fmt: skip
            for name in BOUNDS:
                x, y = (widen(p) if p.dtype == np.uint16 else p for p in (got[name], want[name]))
                np.testing.assert_array_equal(x[touched], y[touched])
                assert np.all(got[name][~touched] == 7)
            for name in ("k", "v"):
                np.testing.assert_array_equal(got[name].view(np.uint8), planes[name].view(np.uint8))


@each_isa
def test_F13_what_does_not_fit_is_told(isa: str) -> None:
    rule = Rule(4, 2, 16, 16)
    t = text(np.random.default_rng(0), rule, 40, 39)
    rng = np.random.default_rng(0)
    planes, group = in_lines([whole(t, 1)], rule, "int8", 4, rng, False, False)
    good = with_bounds(planes, group, [t])
    names = list(good)

    def run(planes: Planes, reads: PageReads, rule: Rule = rule, **more: Any) -> None:
        chosen = ChosenPages(reads, names.index(BOUNDS[0]), names.index(BOUNDS[1]), 100)
        execute(
            isa, 1, [t.q[39:].reshape(1, -1)], 64,
            lambda r, out: replace(attend_op(rule, r, out), pointers=(None, None, None, chosen)),
            plan=plan_of([0, 1], [39], [group]), planes=[planes],
        )  # fmt: skip

    run(good, PageReads(share=0.5))
    for bad in (good | {"k_max": good["k_max"].astype(np.float16)}, good | {"k_max": good["k_max"][..., :8]}):
        with pytest.raises(EngineError, match="bounds are not"):
            run({name: np.ascontiguousarray(x) for name, x in bad.items()}, PageReads(share=0.5))
    for reads in (PageReads(share=0.0), PageReads(tokens=-1), PageReads(share=0.5, recent=0)):
        with pytest.raises(EngineError, match="a budget of pages makes no sense"):
            run(good, reads)
    with pytest.raises(EngineError, match="chosen pages go without window"):
        run(good, PageReads(share=0.5), replace(rule, window=9))
    assert scales_name("k", "int8") in good
