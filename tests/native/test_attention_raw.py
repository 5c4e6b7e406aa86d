"""PST_ATTEND over raw keys, which turn when they are read: the bits of keys that were rotated before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from penstock.base.bf16 import F32
from penstock.base.errors import EngineError
from penstock.ops.native.program import NativeOp, RawKeys
from penstock.ops.plan import GroupPlan, Planes
from penstock.ops.ref.rotary import rope
from tests.native.running import each_isa, execute, plan_of
from tests.native.test_attention import DTYPES, Rule, Text, attend_op, kept, paged, same, sinks_of, slopes_of, text
from tests.native.test_attention_tree import Drafting, drafts, tree_plan

POSITIONS = 700


def table_of(rng: np.random.Generator, half: int) -> F32:
    angles = np.arange(POSITIONS)[:, None] * rng.random(half)
    return np.stack([np.cos(angles), np.sin(angles)]).astype(np.float32)


def raw_op(rule: Rule, raw: RawKeys | None, registers: list[int], out: int) -> NativeOp:
    op = attend_op(rule, registers, out)
    return replace(op, pointers=(*op.pointers, raw))


def run(
    isa: str, threads: int, step: Sequence[Drafting], rule: Rule, planes: Planes, group: GroupPlan, raw: RawKeys | None
) -> list[F32]:
    plan = tree_plan(step, group)
    bounds = plan.query_start_loc.tolist()
    q = np.concatenate([g.text.q[g.text.start : g.text.stop] for g in step]).reshape(bounds[-1], -1)
    out = execute(
        isa, threads, [q], rule.heads * rule.width, lambda registers, to: raw_op(rule, raw, registers, to), plan=plan,
        planes=[planes],
    ).reshape(-1, rule.heads, rule.width)  # fmt: skip
    return [out[a:b] for a, b in pairwise(bounds)]


def turned(g: Drafting, table: F32, dtype: str, *, interleaved: bool, first: int) -> Text:
    """The text with keys as they are after a stay in storage and a rotation at their positions."""
    t = g.text
    positions = np.concatenate([np.arange(t.start, dtype=np.int32), g.masks()[1]])
    return replace(t, k=rope(kept(t.k[: t.stop], dtype), table[:, positions], interleaved, first))


@each_isa
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_raw_keys_are_rotated_keys(isa: str, dtype: str, interleaved: bool) -> None:
    """Keys of float32 that were rotated before, with the same values beside them."""
    rng = np.random.default_rng([7, interleaved])
    rules = [
        (Rule(6, 2, 24, 16), 0, 12), (Rule(4, 4, 40, 8, window=30, slopes=slopes_of(4)), 3, 17),
        (Rule(7, 1, 5, 33, chunk=50, soft_cap=3.0, sinks=sinks_of(7)), 1, 2),
    ]  # fmt: skip
    for n, (rule, first, half) in enumerate(rules):
        table = table_of(rng, half)
        step = [Drafting(text(rng, rule, 300, 260)), drafts(rng, rule, 500, 40), Drafting(text(rng, rule, 600, 599))]
        same_pages = [np.random.default_rng(n) for _ in range(2)]
        block = (1, 7, 16)[n]
        planes, group = paged([g.text for g in step], rule, dtype, block, same_pages[0], n == 1)
        rotated = [turned(g, table, dtype, interleaved=interleaved, first=first) for g in step]
        whole, _ = paged(rotated, rule, "float32", block, same_pages[1], n == 1)
        mixed = {"k": whole["k"], **{name: plane for name, plane in planes.items() if name.startswith("v")}}
        mixed = {name: mixed[name] for name in planes if name in mixed}
        raw = RawKeys(table, first=first, interleaved=interleaved)
        want = run(isa, 1, step, rule, mixed, group, None)
        for got, expected in zip(run(isa, 1 + n, step, rule, planes, group, raw), want, strict=True):
            assert np.isfinite(got).all()
            same(got, expected)
        plain = run(isa, 1, step, rule, planes, group, None)
        assert np.abs(plain[0] - want[0]).max() > 0.01, "the rotation must change something"


@each_isa
def test_one_page_stands_at_several_positions(isa: str) -> None:
    rule, block = Rule(4, 2, 16, 16), 8
    rng = np.random.default_rng(5)
    a, b = text(rng, rule, 12, 11), text(rng, rule, 29, 20)
    for x, y in ((a.k, b.k), (a.v, b.v)):
        y[block : 2 * block] = x[:block]
    raw = RawKeys(table_of(rng, 8))
    step = [Drafting(a), Drafting(b)]
    planes, group = paged([a, b], rule, "bfloat16", block, np.random.default_rng(1))
    want = run(isa, 1, step, rule, planes, group, raw)
    tables = [table.copy() for table in group.tables]
    tables[1][0, 1] = tables[0][0, 0]
    for got, expected in zip(
        run(isa, 2, step, rule, planes, replace(group, tables=tuple(tables)), raw), want, strict=True
    ):
        same(got, expected)


@each_isa
def test_a_rotation_that_does_not_fit_is_told(isa: str) -> None:
    rule = Rule(4, 2, 16, 16)
    t = text(np.random.default_rng(0), rule, 3)
    planes, group = paged([t], rule, "float32", 4, np.random.default_rng(0))
    for first, half in ((0, 9), (-1, 4), (9, 4)):
        raw = RawKeys(np.zeros((2, 8, half), np.float32), first=first)
        with pytest.raises(EngineError, match=r"kind 7.*a key is smaller than what turns"):
            execute(
                isa, 1, [t.q.reshape(3, -1)], 64, lambda r, out, raw=raw: raw_op(rule, raw, r, out),  # type: ignore[misc]
                plan=plan_of([0, 3], [0], [group]), planes=[planes],
            )  # fmt: skip
