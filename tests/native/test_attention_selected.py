"""PST_ATTEND into selected rows: the bits that all tokens' rows have, whatever is selected, in any order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from penstock.base.bf16 import F32
from penstock.ops.native.abi import SELECTED, TOKENS
from tests.native.running import each_isa, each_threads, execute
from tests.native.test_attention import RULES, SPAN, Rule, attend_op, paged, same, text
from tests.native.test_attention_tree import Drafting, drafts, tree_plan

I32 = npt.NDArray[np.int32]


def attend(isa: str, threads: int, step: Sequence[Drafting], rule: Rule, dtype: str, rows: I32 | None) -> F32:
    """Every row, or those of tokens `rows`."""
    planes, group = paged([g.text for g in step], rule, dtype, 16, np.random.default_rng(0))
    q = np.concatenate([g.text.q[g.text.start : g.text.stop] for g in step])
    return execute(
        isa, threads, [q.reshape(len(q), -1)], rule.heads * rule.width, lambda ins, out: attend_op(rule, ins, out),
        plan=tree_plan(step, group), planes=[planes], rows=rows, out_rows=TOKENS if rows is None else SELECTED,
    )  # fmt: skip


def selections(rng: np.random.Generator, step: Sequence[Drafting]) -> list[I32]:
    """None, the last token of each sequence, all, every second, and some twice in any order."""
    ends = np.cumsum([g.text.stop - g.text.start for g in step])
    count = int(ends[-1])
    chosen = [
        [],
        ends - 1,
        np.arange(count),
        np.arange(0, count, 2),
        rng.integers(0, count, count + 5),
        [count - 1] * 3,
    ]
    return [np.array(rows, np.int32) for rows in chosen]


@each_isa
@each_threads
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("name", ["plain", "window", "chunk", "all"])
@pytest.mark.sampled(12)
def test_rows_have_the_bits_of_all_rows(isa: str, threads: int, dtype: str, name: str) -> None:
    rule = Rule(6, 2, 16, 24, **RULES.get(name, {}))
    rng = np.random.default_rng(threads)
    step = [
        Drafting(text(rng, rule, 300, 180)), drafts(rng, rule, 250, 40), Drafting(text(rng, rule, 1)),
        Drafting(text(rng, rule, 90, 89)), drafts(rng, rule, 0, 17, "deep"),
    ]  # fmt: skip
    whole = attend(isa, threads, step, rule, dtype, None)
    for rows in selections(rng, step):
        same(attend(isa, threads, step, rule, dtype, rows), whole[rows])


@each_isa
def test_a_long_context_behind_one_row_is_split(isa: str) -> None:
    rule = Rule(4, 2, 16, 16)
    rng = np.random.default_rng(1)
    step = [Drafting(text(rng, rule, 30)), Drafting(text(rng, rule, 3 * SPAN + 100, 3 * SPAN))]
    whole = attend(isa, 1, step, rule, "bfloat16", None)
    for rows in ([129], [0, 129], [29, 30, 128, 129]):
        same(attend(isa, 3, step, rule, "bfloat16", np.array(rows, np.int32)), whole[rows])
