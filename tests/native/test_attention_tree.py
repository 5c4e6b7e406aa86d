"""Trees of drafts in PST_WRITE and PST_ATTEND: each node against its path alone, bit for bit, and in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from penstock.base.bf16 import F32
from penstock.ops.native.abi import Kind
from penstock.ops.native.program import Layout, NativeOp, NativeProgram, StepMemory
from penstock.ops.plan import GroupPlan, StepPlan
from penstock.ops.ref.storage import write_kv
from penstock.ops.step import Step
from penstock.ops.tree import tree_mask
from tests.native.running import each_isa, execute, plan_of, pool
from tests.native.test_attention import (
    DTYPES,
    LAYER,
    LAYERS,
    RULES,
    SPAN,
    Rule,
    Text,
    assert_right,
    attend,
    attend_op,
    empty_planes,
    paged,
    same,
    sinks_of,
    slopes_of,
    text,
)  # fmt: skip


@dataclass(frozen=True)
class Drafting:
    """A sequence of a step: tokens start ... of `text` hang on each other as `parents` says; none: an ordinary text.

    `plain` nodes say 0 for a mask: those that see all before them may.
    """

    text: Text
    parents: tuple[int, ...] = ()
    plain: bool = False

    def masks(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int32]]:
        """Masks and positions of the step's tokens."""
        count = self.text.stop - self.text.start
        if not self.parents:
            return np.zeros(count, np.uint64), np.arange(self.text.start, self.text.stop, dtype=np.int32)
        masks, depths = tree_mask(self.parents)
        if self.plain:
            masks[masks == np.array([(2 << i) - 1 for i in range(count)], np.uint64)] = 0
        return masks, depths + np.int32(self.text.start)

    def path(self, node: int) -> list[int]:
        """Nodes from the root to this one."""
        if not self.parents:
            return list(range(node + 1))
        out = [node]
        while self.parents[out[0]] >= 0:
            out.insert(0, self.parents[out[0]])
        return out

    def alone(self, node: int) -> Text:
        """The path as an ordinary text."""
        t, nodes = self.text, self.path(node)
        slots = [*range(t.start), *(t.start + n for n in nodes)]
        return Text(t.q[slots], t.k[slots], t.v[slots], t.start, len(slots))

    def leaves(self) -> list[int]:
        count = self.text.stop - self.text.start
        return sorted(set(range(count)) - set(self.parents)) if self.parents else [count - 1]


def random_tree(rng: np.random.Generator, count: int, kind: str) -> tuple[int, ...]:
    """bushy: any earlier node; deep: a recent one, so that paths are long; wide: all hang on the root."""
    parents: dict[str, Callable[[int], int]] = {
        "bushy": lambda i: int(rng.integers(i)), "deep": lambda i: int(rng.integers(max(0, i - 3), i)),
        "wide": lambda i: 0, "chain": lambda i: i - 1,
    }  # fmt: skip
    return (-1, *(parents[kind](i) for i in range(1, count)))


def drafts(rng: np.random.Generator, rule: Rule, start: int, count: int, kind: str = "bushy") -> Drafting:
    return Drafting(text(rng, rule, start + count, start), random_tree(rng, count, kind), bool(rng.integers(2)))


def tree_plan(step: Sequence[Drafting], group: GroupPlan) -> StepPlan:
    texts = [g.text for g in step]
    bounds = np.cumsum([0, *(t.stop - t.start for t in texts)]).tolist()
    plan = plan_of(bounds, [t.start for t in texts], [group])
    masks, positions = (np.concatenate(x) for x in zip(*(g.masks() for g in step), strict=True))
    return replace(plan, mask=masks, positions=positions)


def attend_step(
    isa: str, threads: int, step: Sequence[Drafting], rule: Rule, dtype: str, block: int = 16, *, seed: int = 0,
    ragged: bool = False,
) -> list[F32]:  # fmt: skip
    """Of each sequence [tokens, H, W]."""
    texts = [g.text for g in step]
    planes, group = paged(texts, rule, dtype, block, np.random.default_rng(seed), ragged)
    plan = tree_plan(step, group)
    bounds = plan.query_start_loc.tolist()
    q = np.concatenate([t.q[t.start : t.stop] for t in texts]).reshape(bounds[-1], -1)
    out = execute(
        isa, threads, [q], rule.heads * rule.width, lambda registers, to: attend_op(rule, registers, to), plan=plan,
        planes=[planes],
    ).reshape(-1, rule.heads, rule.width)  # fmt: skip
    return [out[a:b] for a, b in pairwise(bounds)]


def assert_paths(got: F32, g: Drafting, rule: Rule, dtype: str, isa: str, *, leaves: int = 5) -> None:
    """Some paths in full, and their last tokens decoded alone."""
    for leaf in g.leaves()[-leaves:]:
        t = g.alone(leaf)
        along = got[g.path(leaf)]
        assert_right(along, t, rule, dtype, isa)
        same(along, attend(isa, 1, [t], rule, dtype, 16)[0])
        same(along[-1:], attend(isa, 1, [t.part(t.stop - 1, t.stop)], rule, dtype, 7, seed=3)[0])


KINDS = ("bushy", "deep", "wide", "chain")


@each_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_C51_nodes_are_their_paths(isa: str, dtype: str, kind: str) -> None:
    """At a page's beginning, across the end of a chunk of keys, and from nothing, beside ordinary tokens."""
    rule = Rule(6, 2, 16, 24)
    rng = np.random.default_rng([KINDS.index(kind), 4])
    step = [
        drafts(rng, rule, 250, 40, kind), Drafting(text(rng, rule, 270, 200)), drafts(rng, rule, 0, 17, kind),
        Drafting(text(rng, rule, 90, 89)), drafts(rng, rule, 16, 64, kind), drafts(rng, rule, 511, 1, kind),
    ]  # fmt: skip
    for g, got in zip(step, attend_step(isa, 2, step, rule, dtype), strict=True):
        assert_paths(got, g, rule, dtype, isa)


@each_isa
@pytest.mark.parametrize("name", RULES)
@pytest.mark.sampled
def test_rules_go_by_positions(isa: str, name: str) -> None:
    rule = Rule(6, 2, 16, 24, **RULES[name])
    rng = np.random.default_rng(22)
    for n, dtype in enumerate(DTYPES):
        step = [drafts(rng, rule, s, c, k) for s, c, k in ((430, 64, "deep"), (0, 9, "bushy"), (500, 40, "chain"))]
        step.insert(n % 3, Drafting(text(rng, rule, 70)))
        for g, got in zip(step, attend_step(isa, 1, step, rule, dtype, 8, ragged=n % 2 == 1), strict=True):
            assert_paths(got, g, rule, dtype, isa, leaves=3)


@each_isa
def test_the_mask_changes_something(isa: str) -> None:
    rule = Rule(2, 1, 16, 16)
    g = drafts(np.random.default_rng(3), rule, 20, 12, "wide")
    step = [replace(g, plain=False)]
    chain = [replace(g, parents=random_tree(np.random.default_rng(0), 12, "chain"))]
    tree, ordinary = (attend_step(isa, 1, s, rule, "float32")[0] for s in (step, chain))
    same(tree[:2], ordinary[:2])
    assert np.abs(tree[2:] - ordinary[2:]).max(axis=(1, 2)).min() > 1e-3
    same(attend(isa, 1, [g.text], rule, "float32")[0], ordinary)


@each_isa
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_random_steps(isa: str, threads: int) -> None:
    rng = np.random.default_rng([41, threads])
    for trial in range(6):
        per, kv_heads = int(rng.choice([1, 2, 7, 17])), int(rng.integers(1, 4))
        heads = per * kv_heads
        dim, width = (int(rng.choice([8, 16, 32, 33, 64])) for _ in range(2))
        rule = Rule(
            heads, kv_heads, dim, width, int(rng.choice([0, 0, 1, 30, 257])), int(rng.choice([0, 0, 50, 256])),
            float(rng.choice([0.0, 3.0])), slopes_of(heads) if rng.random() < 0.5 else None,
            sinks_of(heads) if rng.random() < 0.5 else None,
        )  # fmt: skip
        dtype = str(rng.choice(sorted(DTYPES)))
        step = []
        for _ in range(int(rng.integers(1, 5))):
            start = int(rng.choice([0, 1, 255, int(rng.integers(600))]))
            if rng.random() < 0.4:
                step.append(Drafting(text(rng, rule, start + int(rng.choice([1, 30])), start)))
            else:
                step.append(drafts(rng, rule, start, int(rng.integers(1, 65)), str(rng.choice(KINDS))))
        block, ragged = int(rng.integers(1, 33)), bool(rng.integers(2))
        together = attend_step(isa, threads, step, rule, dtype, block, seed=trial, ragged=ragged)
        for g, got in zip(step, together, strict=True):
            assert_paths(got, g, rule, dtype, isa, leaves=2)
            same(got, attend_step(isa, 1, [g], rule, dtype, 16)[0])


@each_isa
@pytest.mark.parametrize(("window", "dtype"), [(0, "bfloat16"), (5000, "int8"), (40, "float32")])
@pytest.mark.sampled
def test_long_contexts_are_split_without_a_trace(isa: str, dtype: str, window: int) -> None:
    """Threads share the spans of one long context; a path may go from one span into the next."""
    rule = Rule(4, 2, 8, 8, window)
    rng = np.random.default_rng(9)
    short = Drafting(text(rng, rule, 60, 57))
    for start in (2 * SPAN - 20, 3 * SPAN - 300):
        g = drafts(rng, rule, start, 60, "deep")
        alone = attend_step(isa, 1, [g], rule, dtype, 256)[0]
        assert_paths(alone, g, rule, dtype, isa, leaves=2)
        for threads in (2, 3):
            same(attend_step(isa, threads, [short, g], rule, dtype, 32, seed=threads)[1], alone)


@each_isa
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_stays_on_its_paths(isa: str, dtype: str) -> None:
    rule = Rule(4, 2, 16, 16)
    g = drafts(np.random.default_rng(11), rule, 100, 30)
    clean = attend_step(isa, 1, [g], rule, dtype)[0]
    sick = 100 + 4
    for what in ("k", "v"):
        spoilt = replace(g.text, **{what: getattr(g.text, what).copy()})
        getattr(spoilt, what)[sick] = np.nan
        got = attend_step(isa, 1, [replace(g, text=spoilt)], rule, dtype)[0]
        sees = np.array([4 in g.path(n) for n in range(30)])
        assert 1 < sees.sum() < 29
        same(got[~sees], clean[~sees])
        assert np.isnan(got[sees]).all()


@each_isa
@pytest.mark.parametrize(("threads", "block"), [(1, 1), (2, 3), (3, 16)])
def test_writes_at_slots(isa: str, threads: int, block: int) -> None:
    rng = np.random.default_rng(5)
    rule = Rule(2, 2, 24, 19)
    step = [
        drafts(rng, rule, 13, 30), Drafting(text(rng, rule, 20, 9)), drafts(rng, rule, 0, 9, "wide"),
    ]  # fmt: skip
    counts = [-(-g.text.stop // block) for g in step]
    slabs = rng.permutation(sum(counts)).astype(np.int32)
    tables = tuple(slabs[b - n : b][None] for n, b in zip(counts, np.cumsum(counts), strict=True))
    for dtype in DTYPES:
        planes = empty_planes((LAYERS * len(slabs), block, 2), {"k": 24, "v": 19}, dtype)
        expected = {name: plane.copy() for name, plane in planes.items()}
        plan = tree_plan(step, GroupPlan(LAYERS, block, tables))
        a, b = (np.concatenate([getattr(g.text, x)[g.text.start :] for g in step]) for x in "kv")
        write_kv(Step(plan, [expected]), a, b, 0, LAYER, ("k", "v"))
        assert sum(int((x.view(np.uint8) != planes[n].view(np.uint8)).any()) for n, x in expected.items()) >= 2
        execute(
            isa, threads, [a.reshape(len(a), -1), b.reshape(len(b), -1)], None,
            lambda registers, out: NativeOp(Kind.WRITE, tuple(registers), -1, (0, LAYER, 2, 24, 2, 19, 0, 1)),
            plan=plan, planes=[planes],
        )  # fmt: skip
        for name, plane in planes.items():
            np.testing.assert_array_equal(plane.view(np.uint8), expected[name].view(np.uint8), name)


def _later(plan: Any) -> None:
    plan.mask[1] = 0b111


def _not_itself(plan: Any) -> None:
    plan.mask[2] = 0b011


def _position(plan: Any) -> None:
    plan.positions[2] += 1


@each_isa
@pytest.mark.parametrize("spoil", [_later, _not_itself, _position])
def test_a_mask_that_would_read_elsewhere_is_refused(isa: str, spoil: Any) -> None:
    rule = Rule(2, 1, 8, 8)
    g = drafts(np.random.default_rng(1), rule, 5, 4, "wide")
    planes, group = paged([g.text], rule, "float32", 4, np.random.default_rng(0))
    layout = Layout()
    q, out = layout.register(16), layout.register(16)
    program = NativeProgram(pool(isa, 1), [attend_op(rule, [q], out)], layout, [planes], max_tokens=4, max_rows=1)
    plan = tree_plan([replace(g, plain=False)], group)
    memory, none = StepMemory(1), np.zeros(0, np.int32)
    program.run(memory.args(plan, none))
    spoil(plan)
    with pytest.raises(AssertionError):
        program.run(memory.args(plan, none))


def test_a_step_with_the_same_arrays_and_another_mask_is_another_step() -> None:
    """The arguments of a step are kept for one with the same arrays: the mask is one of them."""
    memory, none = StepMemory(0), np.zeros(0, np.int32)
    plain = plan_of([0, 2], [0])
    tree = replace(plain, mask=np.array([1, 3], np.uint64))
    found = [bool(memory.args(plan, none).mask) for plan in (plain, tree, plain, tree)]
    assert found == [False, True, False, True]
