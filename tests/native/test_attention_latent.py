"""PST_ATTEND over keys of two planes, the first of which is the value (latent attention): as `test_attention`."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from penstock.base.errors import EngineError
from penstock.ops.native.program import NativeOp
from tests.native.running import each_isa, execute, plan_of
from tests.native.test_attention import (
    Rule,
    assert_right,
    attend,
    attend_op,
    each_dtype,
    paged,
    same,
    sinks_of,
    slopes_of,
    text,
)  # fmt: skip
from tests.native.test_attention_tree import Drafting, attend_step, drafts

SPAN = 512
"""Keys whose partial softmax is one task at least, where they have two planes; csrc/src/attention.h."""


def latent(heads: int, kv_heads: int, rank: int, behind: int, **more: object) -> Rule:
    return replace(Rule(heads, kv_heads, rank + behind, rank, behind=behind), **more)  # type: ignore[arg-type]


SHAPES = [(1, 1, 12, 4), (4, 1, 16, 8), (16, 1, 64, 16), (128, 1, 32, 8), (20, 1, 40, 33), (6, 2, 7, 1), (32, 2, 24, 8)]
BENT = {"window": 300, "soft_cap": 9.0, "scale": 0.4}


@each_isa
@each_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_softmax_in_float64(isa: str, dtype: str, shape: tuple[int, int, int, int]) -> None:
    """C04: scores of both planes, each with scales of its own, and values of the first."""
    rule = latent(*shape)
    rng = np.random.default_rng(shape)
    texts = [text(rng, rule, 300, 270), text(rng, rule, 1), text(rng, rule, 40, 39), text(rng, rule, 20)]
    for got, t in zip(attend(isa, 2, texts, rule, dtype), texts, strict=True):
        assert_right(got, t, rule, dtype, isa)


@each_isa
@each_dtype
def test_both_planes_count(isa: str, dtype: str) -> None:
    rule = latent(16, 1, 32, 16)
    t = text(np.random.default_rng(3), rule, 80, 60)
    right = attend(isa, 1, [t], rule, dtype)[0]
    for first, last in ((0, 32), (32, 48)):
        other = replace(t, q=t.q.copy())
        other.q[..., first:last] = 0
        got = attend(isa, 1, [other], rule, dtype)[0]
        assert_right(got, other, rule, dtype, isa)
        assert np.abs(got - right).max() > 0.01


@each_isa
@pytest.mark.parametrize("bent", [False, True])
@pytest.mark.parametrize("heads", [3, 16, 64])
@each_dtype
@pytest.mark.sampled
def test_bits_do_not_depend_on_company_cuts_pages_or_threads(isa: str, dtype: str, heads: int, bent: bool) -> None:
    """Query heads of one kv head part where there are few tasks, and nobody sees it."""
    rule = latent(heads, 1, 20, 12, **(BENT | {"slopes": slopes_of(heads), "sinks": sinks_of(heads)} if bent else {}))
    rng = np.random.default_rng(8)
    t = text(rng, rule, 531)
    others = [text(rng, rule, 290, 289), text(rng, rule, 5), text(rng, rule, 270, 200)]
    whole = attend(isa, 1, [t], rule, dtype)[0]
    assert_right(whole, t, rule, dtype, isa)
    for n, (a, b) in enumerate(pairwise([0, 1, 17, 255, 256, 257, 300, 511, 512, 513, 531])):
        batch = [*others[: n % 4], t.part(a, b), *others[n % 4 :]]
        got = attend(isa, 1 + n % 3, batch, rule, dtype, (1, 3, 16, 32, 100)[n % 5], seed=n, ragged=n % 2 == 1)
        same(got[n % 4], whole[a:b])


@each_isa
@each_dtype
@pytest.mark.parametrize("heads", [4, 32])
@pytest.mark.sampled
def test_long_contexts_are_split_without_a_trace(isa: str, dtype: str, heads: int) -> None:
    rule = latent(heads, 1, 8, 4)
    rng = np.random.default_rng(9)
    t = text(rng, rule, 18 * SPAN + 70)
    short = text(rng, rule, 60, 57)
    for n, (a, b) in enumerate([(t.stop - 1, t.stop), (t.stop - 9, t.stop), (2 * SPAN - 2, 2 * SPAN + 3)]):
        alone = attend(isa, 1, [t.part(a, b)], rule, dtype, 256)[0]
        assert_right(alone, t.part(a, b), rule, dtype, isa)
        got = attend(isa, 3 - n % 2, [short, t.part(a, b), short.part(0, 1)], rule, dtype, 256, seed=n)
        same(got[1], alone)
        same(attend(isa, 2, [t.part(b - 1, b)], rule, dtype, 256)[0], alone[-1:])


@each_isa
@pytest.mark.parametrize("heads", [4, 32])
@each_dtype
@pytest.mark.sampled
def test_nodes_of_a_tree_have_the_bits_of_their_paths(isa: str, dtype: str, heads: int) -> None:
    """C38: parts of a kv head share what lies before the step, and gather the paths each for itself."""
    rule = latent(heads, 1, 24, 8)
    rng = np.random.default_rng([5, heads])
    for start, count, kind in ((0, 9, "bushy"), (250, 14, "deep"), (505, 20, "wide"), (700, 3, "chain")):
        tree = drafts(rng, rule, start, count, kind)
        plain = Drafting(text(rng, rule, 300, 296))
        for threads in (1, 3):
            got = attend_step(isa, threads, [plain, tree], rule, dtype)[1]
            for node in range(count):
                alone = tree.alone(node)
                want = attend(isa, 1, [alone.part(alone.stop - 1, alone.stop)], rule, dtype)[0]
                same(got[node : node + 1], want)


@each_isa
@pytest.mark.parametrize("what", ["k", "more", "scales"])
def test_a_nan_stays_with_those_who_see_it(isa: str, what: str) -> None:
    rule = latent(8, 1, 16, 8, window=40)
    dtype = "int8" if what == "scales" else "float32"
    rng = np.random.default_rng(11)
    texts = [text(rng, rule, 100), text(rng, rule, 80)]
    clean = attend(isa, 2, texts, rule, dtype)
    spoilt = replace(texts[0], k=texts[0].k.copy())
    spoilt.k[51, 0, 3 if what == "k" else -2] = np.nan
    spoilt = replace(spoilt, v=spoilt.k[..., :16])
    got = attend(isa, 2, [spoilt, texts[1]], rule, dtype)
    same(got[1], clean[1])
    sees = (np.arange(100) >= 51) & (np.arange(100) < 91)
    same(got[0][~sees], clean[0][~sees])
    assert np.isnan(got[0][sees]).all()


@each_isa
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({7: 2}, "the first for values"), ({11: 24}, "a second plane of keys has some"), ({10: 9}, "no such plane"),
        ({11: 7}, "heads do not fit their plane"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(isa: str, change: dict[int, int], words: str) -> None:
    rule = latent(4, 1, 16, 8)
    t = text(np.random.default_rng(1), rule, 20, 17)
    planes, group = paged([t], rule, "float32", 16, np.random.default_rng(2))
    planes["other"] = planes["k"].copy()

    def op(registers: list[int], out: int) -> NativeOp:
        made = attend_op(rule, registers, out)
        return replace(made, n=tuple(change.get(i, value) for i, value in enumerate(made.n)))

    with pytest.raises(EngineError, match=words):
        execute(isa, 1, [t.q[17:].reshape(3, -1)], 64, op, plan=plan_of([0, 3], [17], [group]), planes=[planes])
