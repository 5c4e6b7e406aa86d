"""PST_ATTEND_PART: what ranks find over their own tokens, merged, is attention over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from penstock.base.bf16 import F32
from penstock.ops.native.abi import Kind
from penstock.ops.native.program import NativeOp
from penstock.ops.plan import StepPlan
from tests.native.running import each_isa, execute, plan_of
from tests.native.test_attention import (
    LAYER,
    RULES,
    SPAN,
    Rule,
    Text,
    attend,
    oracle,
    paged,
    rounds_to_pairs,
    same,
    slopes_of,
    text,
)  # fmt: skip


def part_op(rule: Rule, registers: list[int], out: int, share: tuple[int, int]) -> NativeOp:
    value = 0 if rule.behind else 1
    n = (0, LAYER, rule.heads, rule.kv_heads, rule.dim, rule.width, 0, value, rule.window, rule.chunk, 1, rule.behind)
    f = (rule.factor, rule.soft_cap)
    return NativeOp(Kind.ATTEND_PART, (registers[0],), out, n, f, (rule.slopes, np.array(share, np.int32)))


def parts(
    isa: str, threads: int, texts: Sequence[Text], rule: Rule, dtype: str, block: int, share: tuple[int, int],
    *, seed: int = 0, changed: Any = None,
) -> list[F32]:  # fmt: skip
    """Of each text what rank `share[1]` of `share[0]` finds: [tokens, H, W + 2]."""
    planes, group = paged(texts, rule, dtype, block, np.random.default_rng(seed))
    ranks, rank = share
    assert block % ranks == 0, "blocks have parts"
    own = {name: np.ascontiguousarray(plane[:, rank::ranks]) for name, plane in planes.items()}
    group = replace(group, block_size=block // ranks)
    bounds = np.cumsum([0, *(t.stop - t.start for t in texts)]).tolist()
    q = np.concatenate([t.q[t.start : t.stop] for t in texts]).reshape(bounds[-1], -1)
    plan: StepPlan = plan_of(bounds, [t.start for t in texts], [group])
    out = execute(
        isa, threads, [q], rule.heads * (rule.width + 2), lambda registers, to: part_op(rule, registers, to, share),
        plan=plan if changed is None else changed(plan), planes=[own],
    )  # fmt: skip
    out = out.reshape(-1, rule.heads, rule.width + 2)
    return [out[a:b] for a, b in pairwise(bounds)]


def merged(found: Sequence[F32], rule: Rule) -> Any:
    """In float64: sums against the largest score of all ranks; a sink is a score without a value."""
    o, m, total = (np.stack([x[..., s] for x in found]).astype(np.float64) for s in (slice(0, -2), -2, -1))
    most = m.max(axis=0)
    if rule.sinks is not None:
        most = np.maximum(most, rule.sinks)
    by = np.exp(m - most)
    whole = (by * total).sum(axis=0)
    if rule.sinks is not None:
        whole = whole + np.exp(rule.sinks - most)
    return (by[..., None] * o).sum(axis=0) / whole[..., None]


@each_isa
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("plain", d) for d in ("float32", "float16", "bfloat16", "int8")] + [(name, "float32") for name in RULES],
)  # fmt: skip
def test_H11_parts_of_ranks_are_attention_to_all_tokens(isa: str, name: str, dtype: str, ranks: int) -> None:
    """Windows and chunks shorter than there are ranks leave some of them with nothing to see."""
    rule = Rule(6, 2, 16, 24, **RULES.get(name, {}))
    rng = np.random.default_rng([5, ranks])
    texts = [text(rng, rule, 600, 470), text(rng, rule, 1), text(rng, rule, 2, 1), text(rng, rule, 70)]
    found = [parts(isa, 1 + r % 2, texts, rule, dtype, 4 * ranks, (ranks, r)) for r in range(ranks)]
    for i, t in enumerate(texts):
        want, slack = oracle(t, rule, dtype)
        bound = (slack if rounds_to_pairs(dtype, isa) else 1e-5) * float(np.abs(t.v).max())
        assert np.all(np.abs(merged([f[i] for f in found], rule) - want) <= bound), i
    first = [f[1][0] for f in found]
    for rank, nothing in enumerate(first):  # the only token is the first rank's
        assert np.all(np.isneginf(nothing[:, -2])) == (rank > 0)
        assert not rank or (not nothing[:, -1].any() and not nothing[:, :-2].any())


@each_isa
def test_H11_keys_of_two_planes_are_shared_out_too(isa: str) -> None:
    """Latent attention: all heads read one row of a latent and a rotated key."""
    rule = Rule(16, 1, 40, 32, behind=8)
    rng = np.random.default_rng(3)
    texts = [text(rng, rule, 700, 690), text(rng, rule, 30)]
    found = [parts(isa, 2, texts, rule, "float32", 8, (2, r)) for r in range(2)]
    for i, t in enumerate(texts):
        want, _ = oracle(t, rule, "float32")
        assert np.abs(merged([f[i] for f in found], rule) - want).max() <= 1e-5 * float(np.abs(t.v).max())


@each_isa
@pytest.mark.parametrize("name", ["plain", "window", "chunk", "all"])
def test_H11_a_part_has_its_bits_in_every_company_cut_and_number_of_threads(isa: str, name: str) -> None:
    rule = replace(Rule(6, 2, 20, 12, **RULES.get(name, {})), sinks=None)
    rng = np.random.default_rng(8)
    t = text(rng, rule, 1100)
    others = [text(rng, rule, 290, 289), text(rng, rule, 5), text(rng, rule, 270, 200)]
    for rank in range(2):
        (whole,) = parts(isa, 1, [t], rule, "float32", 16, (2, rank))
        cuts = [0, 1, 2, 17, 511, 512, 513, 700, 1099, 1100]
        for n, (a, b) in enumerate(pairwise(cuts)):
            batch = [*others[: n % 4], t.part(a, b), *others[n % 4 :]]
            got = parts(isa, 1 + n % 3, batch, rule, "float32", (2, 6, 16, 32)[n % 4], (2, rank), seed=n)
            same(got[n % 4], whole[a:b])


@each_isa
def test_H11_long_contexts_are_split_among_threads_on_a_rank_as_well(isa: str) -> None:
    """A rank has more than two spans of its own."""
    rule = Rule(2, 1, 8, 8, slopes=slopes_of(2))
    rng = np.random.default_rng(9)
    t = text(rng, rule, 5 * SPAN + 77)
    last = t.part(t.stop - 3, t.stop)
    (want,) = attend(isa, 1, [last], rule, "float32", 256)
    found = [parts(isa, 1, [last], rule, "float32", 256, (2, r))[0] for r in range(2)]
    assert np.abs(merged(found, rule) - want).max() < 1e-5
    for r, alone in enumerate(found):
        same(parts(isa, 3, [text(rng, rule, 40, 39), last], rule, "float32", 256, (2, r), seed=r)[1], alone)


@each_isa
def test_a_tree_is_refused_where_a_slot_is_no_position(isa: str) -> None:
    rule = Rule(2, 1, 8, 8)
    t = text(np.random.default_rng(1), rule, 12, 9)
    mask = np.array([1, 3, 5], np.uint64)
    with pytest.raises(AssertionError, match="the step fits the program"):
        parts(
            isa, 1, [t], rule, "float32", 4, (2, 0),
            changed=lambda plan: replace(plan, mask=mask, positions=np.array([9, 10, 10], np.int32)),
        )  # fmt: skip
