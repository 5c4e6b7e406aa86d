"""PST_CHOOSE against the reference's choice, and PST_ATTEND over what was chosen: as `test_attention`.

Numbers are small and whole where choices are compared, so that scores are exact on both sides and many are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from penstock.base.bf16 import F32
from penstock.base.errors import EngineError
from penstock.ops.native.abi import SELECTED, TOKENS, Kind
from penstock.ops.native.program import NativeOp
from penstock.ops.plan import GroupPlan, Planes, StepPlan
from penstock.ops.ref.indexer import attend_chosen, choose_tokens
from penstock.ops.step import Step
from tests.native.running import each_isa, each_threads, execute, plan_of
from tests.native.test_attention import (
    LAYER,
    Rule,
    Text,
    assert_right,
    attend_op,
    each_dtype,
    kept,
    paged,
    same,
    sinks_of,
    text,
)  # fmt: skip
from tests.native.test_attention_tree import Drafting, drafts, tree_plan

MAX_TOKENS = 900
"""Of a sequence; more than one chunk of 256 keys."""


def indexed(heads: int, dim: int) -> Rule:
    """Index keys lie in the one plane; a query's values are never looked at."""
    return Rule(heads, 1, dim, 1)


def whole(rng: np.random.Generator, rule: Rule, length: int, start: int = 0, most: int = 3) -> Text:
    """With whole numbers -most ... most, one of each key 127: as 8 bits they are kept as they are."""
    t = text(rng, rule, length, start)
    q, k = (rng.integers(-most, most + 1, x.shape).astype(np.float32) for x in (t.q, t.k))
    k[..., 0] = 127
    return replace(t, q=q, k=k)


def shares(rng: np.random.Generator, tokens: int, heads: int) -> F32:
    return rng.integers(-2, 6, (tokens, heads)).astype(np.float32)


def choose_op(rule: Rule, top: int, registers: Sequence[int], out: int, max_tokens: int = MAX_TOKENS) -> NativeOp:
    n = (0, LAYER, rule.heads, rule.dim, 0, max_tokens)
    return NativeOp(Kind.CHOOSE, tuple(registers), out, n, (0.5,))


def chosen(
    isa: str, threads: int, step: Sequence[Drafting], rule: Rule, weights: Sequence[F32], top: int,
    dtype: str = "float32", block: int = 16, *, seed: int = 0, ragged: bool = False,
) -> tuple[list[F32], StepPlan, Planes]:  # fmt: skip
    """Of each sequence what its tokens chose [tokens, top]; -77.25 where they chose nothing."""
    planes, group = paged([g.text for g in step], rule, dtype, block, np.random.default_rng(seed), ragged)
    plan = tree_plan(step, group)
    q = np.concatenate([g.text.q[g.text.start : g.text.stop] for g in step])
    out = execute(
        isa, threads, [q.reshape(len(q), -1), np.concatenate(weights)], top,
        lambda registers, to: choose_op(rule, top, registers, to), plan=plan, planes=[planes],
    )  # fmt: skip
    return [out[a:b] for a, b in pairwise(plan.query_start_loc.tolist())], plan, planes


def assert_references(
    got: Sequence[F32], step: Sequence[Drafting], rule: Rule, weights: Sequence[F32], top: int, plan: StepPlan,
    planes: Planes,
) -> int:  # fmt: skip
    """Returns how many tokens chose."""
    q = np.concatenate([g.text.q[g.text.start : g.text.stop] for g in step])
    want = choose_tokens(q, np.concatenate(weights), Step(plan, [planes]), 0, LAYER, "k", top, 0.5)
    count = 0
    for found, places, (b, t) in zip(np.concatenate(got), want, _tokens(plan), strict=True):
        if plan.positions[t] < top:
            assert np.all(found == -77.25), "who sees few tokens chooses nothing"
            continue
        start = plan.positions[plan.query_start_loc[b]]
        path = step[b].path(t - int(plan.query_start_loc[b]))
        slots = [p if p < start else start + path[p - start] for p in places.tolist()]
        assert found.tolist() == slots, (b, t)
        count += 1
    return count


def _tokens(plan: StepPlan) -> list[tuple[int, int]]:
    bounds = plan.query_start_loc.tolist()
    return [(b, t) for b, (lo, hi) in enumerate(pairwise(bounds)) for t in range(lo, hi)]


SHAPES = [(1, 1, 1), (1, 8, 5), (3, 17, 7), (8, 32, 16), (9, 33, 64), (64, 128, 20), (300, 4, 3)]


@each_isa
@each_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_choices_are_the_references(isa: str, dtype: str, shape: tuple[int, int, int]) -> None:
    heads, dim, top = shape
    rule, rng = indexed(heads, dim), np.random.default_rng(shape)
    lengths = [(300, 270), (1, 0), (40, 39), (top + 1, 0), (top, 0), (600, 590)]
    step = [Drafting(whole(rng, rule, *n)) for n in lengths]
    weights = [shares(rng, stop - start, heads) for stop, start in lengths]
    got, plan, planes = chosen(isa, 2, step, rule, weights, top, dtype)
    assert assert_references(got, step, rule, weights, top, plan, planes) > 20


@each_isa
@pytest.mark.parametrize("kind", ["bushy", "deep", "wide", "chain"])
def test_nodes_of_a_tree_choose_among_their_paths(isa: str, kind: str) -> None:
    rule, rng = indexed(5, 6), np.random.default_rng(len(kind))
    for start, count, top in ((0, 12, 2), (5, 14, 6), (250, 20, 9), (700, 9, 40)):
        tree = replace(drafts(rng, rule, start, count, kind), text=whole(rng, rule, start + count, start))
        step = [Drafting(whole(rng, rule, 300, 297)), tree, Drafting(whole(rng, rule, 20))]
        weights = [shares(rng, n, 5) for n in (3, count, 20)]
        for threads in (1, 3):
            got, plan, planes = chosen(isa, threads, step, rule, weights, top)
            assert assert_references(got, step, rule, weights, top, plan, planes) > 0


@each_isa
@each_threads
@each_dtype
@pytest.mark.sampled
def test_choices_do_not_depend_on_company_cuts_pages_or_threads(isa: str, threads: int, dtype: str) -> None:
    """With numbers of any size: what is equal now is so only if scores have equal bits."""
    rule, rng = indexed(9, 20), np.random.default_rng(8)
    t = Drafting(text(rng, rule, 531))
    weights = rng.standard_normal((531, 9)).astype(np.float32)
    (all_of_it,), *_ = chosen(isa, 1, [t], rule, [weights], 12, dtype)
    assert len({tuple(row) for row in all_of_it.tolist()}) > 100
    others = [Drafting(text(rng, rule, n, at)) for n, at in ((290, 289), (5, 0), (270, 200))]
    beside = [shares(rng, g.text.stop - g.text.start, 9) for g in others]
    for n, (a, b) in enumerate(pairwise([0, 1, 17, 255, 256, 257, 300, 511, 531])):
        cut = n % 4
        batch = [*others[:cut], Drafting(t.text.part(a, b)), *others[cut:]]
        own = [*beside[:cut], weights[a:b], *beside[cut:]]
        block = (1, 3, 16, 32, 100)[n % 5]
        got, *_ = chosen(isa, threads, batch, rule, own, 12, dtype, block, seed=n, ragged=n % 2 == 1)
        same(got[cut], all_of_it[a:b])


@each_isa
def test_a_batch_that_is_larger_than_the_memory_for_scores_is_done_in_parts(isa: str) -> None:
    """16 MB hold scores of 21 tokens here."""
    rule, rng = indexed(2, 4), np.random.default_rng(3)
    t, weights = whole(rng, rule, 90), shares(rng, 90, 2)
    planes, group = paged([t], rule, "float32", 16, np.random.default_rng(0))

    def run(max_tokens: int) -> F32:
        return execute(
            isa, 2, [t.q.reshape(90, -1), weights], 6, lambda i, o: choose_op(rule, 6, i, o, max_tokens),
            plan=plan_of([0, 90], [0], [group]), planes=[planes],
        )  # fmt: skip

    same(run(200_000), run(MAX_TOKENS))


@each_isa
def test_equal_scores_go_to_lower_slots_and_a_nan_comes_last(isa: str) -> None:
    rule = indexed(1, 2)
    k = np.zeros((12, 1, 2), np.float32)
    k[:, 0, 0] = [0, 2, -0.0, -1, 2, np.nan, 1, np.inf, 0, 0, 0, 1]
    q = np.ones((12, 1, 2), np.float32)
    t = Text(q, k, np.zeros((12, 1, 1), np.float32), 11, 12)
    for top, want in ((1, [7]), (3, [1, 4, 7]), (6, [0, 1, 4, 6, 7, 11]), (11, [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11])):
        (got,), *_ = chosen(isa, 1, [Drafting(t)], rule, [np.ones((1, 1), np.float32)], top)
        assert got[0].tolist() == want
    (got,), *_ = chosen(isa, 1, [Drafting(t)], rule, [np.full((1, 1), np.nan, np.float32)], 3)
    assert got[0].tolist() == [0, 1, 2], "a NaN of its own makes all scores equal"


# -- attention over what was chosen ----------------------------------------------------------------------------------


def at_random(rng: np.random.Generator, plan: StepPlan, top: int) -> F32:
    """Slots [T, top] of those that each token sees, ascending; NaN for a token that sees no more than `top`."""
    out = np.full((len(plan.positions), top), np.nan, np.float32)
    for b, t in _tokens(plan):
        lo = int(plan.query_start_loc[b])
        start, own = int(plan.positions[lo]), int(plan.positions[t])
        if own + 1 > top:
            mask = 0 if plan.mask is None else int(plan.mask[t])
            nodes = [i for i in range(64) if mask >> i & 1] if mask else range(t - lo + 1)
            seen = [*range(start), *(start + i for i in nodes)]
            out[t] = np.sort(rng.choice(seen, top, replace=False))
    return out


def attended(
    isa: str, threads: int, step: Sequence[Drafting], rule: Rule, slots: F32, dtype: str, block: int = 16, *,
    seed: int = 0, ragged: bool = False, rows: Any = None,
) -> F32:  # fmt: skip
    planes, group = paged([g.text for g in step], rule, dtype, block, np.random.default_rng(seed), ragged)
    q = np.concatenate([g.text.q[g.text.start : g.text.stop] for g in step])

    def op(registers: list[int], out: int) -> NativeOp:
        return replace(attend_op(rule, registers, out), inputs=tuple(registers))

    return execute(
        isa, threads, [q.reshape(len(q), -1), slots], rule.heads * rule.width, op, plan=tree_plan(step, group),
        planes=[planes], rows=rows, out_rows=TOKENS if rows is None else SELECTED,
    ).reshape(-1, rule.heads, rule.width)  # fmt: skip


def latent(heads: int, **more: Any) -> Rule:
    return Rule(heads, 1, 28, 20, behind=8, **more)


def as_text(t: Text, slots: Sequence[int], token: int) -> Text:
    """The chosen tokens as a text of their own, whose last one asks what `token` asks."""
    k, v = t.k[slots], t.v[slots]
    return Text(np.repeat(t.q[token][None], len(slots), 0), k, v, len(slots) - 1, len(slots))


@each_isa
@each_dtype
@pytest.mark.parametrize("rule", [latent(4), latent(128), latent(16, soft_cap=5.0, sinks=sinks_of(16)),
                                  Rule(6, 1, 16, 12), Rule(4, 2, 8, 8)], ids=str)  # fmt: skip
@pytest.mark.sampled
def test_attention_over_chosen_tokens_is_attention_without_the_others(isa: str, dtype: str, rule: Rule) -> None:
    rng = np.random.default_rng(rule.heads)
    for top in (1, 30, 270):
        step = [Drafting(text(rng, rule, n, at)) for n, at in ((600, 590), (30, 0), (1, 0), (300, 280), (580, 579))]
        plan = tree_plan(step, GroupPlan(1, 16, ()))
        slots = at_random(rng, plan, top)
        got = attended(isa, 2, step, rule, slots, dtype)
        for b, t in _tokens(plan):
            of, position = step[b].text, int(plan.positions[t])
            own = range(position + 1) if np.isnan(slots[t, 0]) else slots[t].astype(int).tolist()
            assert_right(got[t : t + 1], as_text(of, list(own), position), rule, dtype, isa)


@each_isa
@each_dtype
@pytest.mark.parametrize("heads", [3, 64])
@pytest.mark.sampled
def test_bits_over_chosen_tokens_do_not_depend_on_anything_else(isa: str, dtype: str, heads: int) -> None:
    rule, rng = latent(heads), np.random.default_rng(5)
    t = Drafting(text(rng, rule, 640))
    slots = at_random(rng, tree_plan([t], GroupPlan(1, 16, ())), 90)
    whole_text = attended(isa, 1, [t], rule, slots, dtype)
    other = [Drafting(text(rng, rule, 290, 289)), Drafting(text(rng, rule, 5))]
    beside = at_random(rng, tree_plan(other, GroupPlan(1, 16, ())), 90)
    for n, (a, b) in enumerate(pairwise([0, 1, 17, 89, 90, 91, 255, 300, 511, 513, 640])):
        batch, own = [other[0], Drafting(t.text.part(a, b)), other[1]], [beside[:1], slots[a:b], beside[1:]]
        more: dict[str, Any] = {"seed": n, "ragged": n % 2 == 1}
        got = attended(isa, 1 + n % 3, batch, rule, np.concatenate(own), dtype, (1, 3, 16, 32, 100)[n % 5], **more)
        same(got[1 : 1 + b - a], whole_text[a:b])
    rows = np.array([639, 0, 100, 101, 102, 89], np.int32)
    same(attended(isa, 3, [t], rule, slots, dtype, rows=rows), whole_text[rows])


@each_isa
@pytest.mark.parametrize("kind", ["bushy", "deep", "chain"])
def test_nodes_attend_as_their_paths_do(isa: str, kind: str) -> None:
    rule, rng = latent(8), np.random.default_rng([4, len(kind)])
    for start, count, top in ((0, 12, 3), (60, 14, 60), (300, 20, 40)):
        tree = drafts(rng, rule, start, count, kind)
        slots = at_random(rng, tree_plan([tree], GroupPlan(1, 16, ())), top)
        got = attended(isa, 2, [tree], rule, slots, "bfloat16")
        for node in range(count):
            path = tree.path(node)
            alone = tree.alone(node)
            place = {start + n: start + i for i, n in enumerate(path)}
            own = np.array([[place.get(int(s), int(s)) for s in row] if not np.isnan(row[0]) else row
                            for row in slots[path]], np.float32)  # fmt: skip
            same(got[node : node + 1], attended(isa, 1, [Drafting(alone)], rule, own, "bfloat16")[-1:])


@each_isa
def test_a_line_that_has_forgotten_tokens_is_the_same_with_slots_for_positions(isa: str) -> None:
    gone, top = 37, 9
    rng = np.random.default_rng(12)
    forgotten = {"dropped": (np.array([0, gone, 0], np.int32),)}
    for rule, op in ((indexed(5, 6), choose_op), (latent(8), None)):
        t = text(rng, rule, 60, 5)
        planes, group = paged([t], rule, "float32", 16, rng)
        plan, later = (plan_of([0, 55], [at], [group]) for at in (5, 5 + gone))
        later = replace(later, groups=(replace(group, **forgotten),))
        second = shares(rng, 55, 5) if op is not None else at_random(rng, plan, top)

        def make(i: list[int], o: int, rule: Rule = rule, op: Any = op) -> NativeOp:
            return replace(attend_op(rule, i, o), inputs=tuple(i)) if op is None else op(rule, top, i, o)

        width = rule.heads * rule.width if op is None else top
        want, got = (
            execute(isa, 2, [t.q[5:].reshape(55, -1), second], width, make, plan=p, planes=[planes])
            for p in (plan, later)
        )
        same(got, want)


@each_isa
def test_it_is_the_references_attention(isa: str) -> None:
    rule, rng = latent(4), np.random.default_rng(2)
    step = [Drafting(text(rng, rule, 200, 150)), Drafting(text(rng, rule, 9))]
    planes, group = paged([g.text for g in step], rule, "float32", 16, np.random.default_rng(0))
    plan = tree_plan(step, group)
    slots = at_random(rng, plan, 20)
    chose = [
        np.arange(p + 1) if np.isnan(s[0]) else s.astype(np.int64) for p, s in zip(plan.positions, slots, strict=True)
    ]
    q = np.concatenate([g.text.q[g.text.start : g.text.stop] for g in step])
    want = attend_chosen(q, chose, Step(plan, [planes]), 0, LAYER, keys=("k", "more"), value="k", scale=rule.factor)
    np.testing.assert_allclose(attended(isa, 2, step, rule, slots, "float32"), want, atol=2e-6)


@each_isa
def test_a_nan_stays_with_those_who_choose_it(isa: str) -> None:
    rule, rng = latent(4), np.random.default_rng(6)
    t = text(rng, rule, 100)
    slots = at_random(rng, tree_plan([Drafting(t)], GroupPlan(1, 16, ())), 20)
    clean = attended(isa, 2, [Drafting(t)], rule, slots, "float32")
    k = t.k.copy()
    k[31] = np.nan
    got = attended(isa, 2, [Drafting(replace(t, k=k, v=k[..., :20]))], rule, slots, "float32")
    sees = np.array([31 in row if not np.isnan(row[0]) else p >= 31 for p, row in enumerate(slots)])
    assert 0 < sees.sum() < 60
    same(got[~sees], clean[~sees])
    assert np.isnan(got[sees]).all()


@each_isa
def test_slots_that_there_are_not_are_not_read(isa: str) -> None:
    """A caller's mistake; memory outside the pages would be read."""
    rule, rng = latent(4), np.random.default_rng(7)
    t = Drafting(text(rng, rule, 40, 39))
    for bad in (np.nan, -3.0, 41.0, 1e30):
        slots = np.array([[1, 5, bad]], np.float32)
        assert np.isfinite(attended(isa, 1, [t], rule, slots, "float32")).all()


@each_isa
@pytest.mark.parametrize(
    ("n", "words"),
    [
        ((0, 1, 4, 8, 0, 0), "a sequence has a token"), ((0, 1, 0, 8, 0, 9), "a head and a number"),
        ((0, 1, 4, 7, 0, 9), "do not fit their plane"), ((0, 1, 4, 8, 9, 9), "no such plane"),
        ((0, 1, 5, 8, 0, 9), "heads do not fill"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(isa: str, n: tuple[int, ...], words: str) -> None:
    rule, rng = indexed(4, 8), np.random.default_rng(1)
    t = text(rng, rule, 20, 17)
    planes, group = paged([t], rule, "float32", 16, rng)
    with pytest.raises(EngineError, match=words):
        execute(
            isa, 1, [t.q[17:].reshape(3, -1), shares(rng, 3, 4)], 2,
            lambda i, o: NativeOp(Kind.CHOOSE, tuple(i), o, n, (1.0,)), plan=plan_of([0, 3], [17], [group]),
            planes=[planes],
        )  # fmt: skip


@each_isa
def test_windows_go_with_no_choice(isa: str) -> None:
    rule, rng = latent(4, window=9), np.random.default_rng(1)
    with pytest.raises(EngineError, match="without window"):
        attended(isa, 1, [Drafting(text(rng, rule, 20, 19))], rule, np.zeros((1, 4), np.float32), "float32")


def test_kept_numbers_are_whole(  # what the comparisons above lean on
) -> None:
    t = whole(np.random.default_rng(0), indexed(2, 5), 30)
    for dtype in ("float16", "bfloat16", "int8"):
        np.testing.assert_array_equal(kept(t.k, dtype), t.k)
