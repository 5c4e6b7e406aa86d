"""PST_WRITE and PST_ATTEND where kv heads have pages of their own and lines have forgotten some of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest

from penstock.base.bf16 import F32
from penstock.base.errors import EngineError
from penstock.ops.native.abi import Kind
from penstock.ops.native.program import Layout, NativeOp, NativeProgram, RawKeys, StepMemory
from penstock.ops.plan import I32, GroupPlan, Planes
from tests.native.running import each_isa, execute, plan_of, pool
from tests.native.test_attention import (
    DTYPES,
    GONE,
    LAYER,
    LAYERS,
    SPAN,
    Rule,
    Text,
    assert_right,
    attend_op,
    each_dtype,
    empty_planes,
    same,
    sinks_of,
    slopes_of,
    stored,
    text,
)
from tests.native.test_attention import attend as attend_plain
from tests.native.test_attention_raw import table_of

each_lanes = pytest.mark.parametrize("lanes", [False, True], ids=["layers", "heads"])


@dataclass(frozen=True)
class Kept:
    """A text of whose tokens before `text.start` line i keeps those at the ascending positions keeps[i]."""

    text: Text
    keeps: tuple[I32, ...]

    def line(self, i: int) -> Text:
        """What line i sees, as a text that never had more: as many tokens in the step, with all heads."""
        t, n = self.text, len(self.keeps[i])
        own = np.concatenate([self.keeps[i], np.arange(t.start, t.stop)])
        return Text(np.concatenate([t.q[:n], t.q[t.start : t.stop]]), t.k[own], t.v[own], n, len(own))

    @property
    def dropped(self) -> list[int]:
        return [self.text.start - len(k) for k in self.keeps]


def num_lines(rule: Rule, lanes: bool) -> int:
    """Of a layer."""
    return rule.kv_heads if lanes else 1


def thinned(rng: np.random.Generator, rule: Rule, length: int, start: int, lanes: bool) -> Kept:
    """Every line keeps another share of its tokens, the first all of them, the second (if there is one) none."""
    t = text(rng, rule, length, start)
    shares = [1.0, 0.0, 0.3, 0.7][: num_lines(rule, lanes)] if lanes else [0.4]
    return Kept(t, tuple(np.flatnonzero(rng.random(start) < s).astype(np.int32) for s in shares))


def in_lines(
    texts: Sequence[Kept], rule: Rule, dtype: str, block: int, rng: np.random.Generator, lanes: bool, ragged: bool
) -> tuple[Planes, GroupPlan]:
    """As `paged`: pages dealt at random, NaN wherever no token of the step looks; of other layers all is GONE."""
    per_layer = num_lines(rule, lanes)
    lines, heads = LAYERS * per_layer, rule.kv_heads // per_layer
    counts = [[-(-k.line(i).stop // block) for i in range(per_layer)] for k in texts]
    num_slabs = sum(sum(c) for c in counts) + 2
    planes = empty_planes((num_slabs * lines, block, heads), {"k": rule.dim, "v": rule.width}, dtype)
    free = rng.permutation(num_slabs * lines if ragged else num_slabs).tolist()
    tables, dropped = [], []
    for kept, count in zip(texts, counts, strict=True):
        table = np.full((lines if ragged else 1, max(count)), GONE, np.int32)
        if not ragged:
            table[0] = [free.pop() for _ in range(max(count))]
        for i in range(per_layer):
            line = LAYER * per_layer + i
            if ragged:
                table[line, : count[i]] = [free.pop() for _ in range(count[i])]
            t = kept.line(i)
            for n in range(count[i]):
                page = table[line, n] if ragged else table[0, n] * lines + line
                lo, hi = n * block, min((n + 1) * block, t.stop)
                for name, x in (("k", t.k), ("v", t.v)):
                    for of, numbers in stored(x[lo:hi, i * heads : (i + 1) * heads], dtype, name).items():
                        planes[of][page, : hi - lo] = numbers
        gone = np.zeros(lines, np.int32)
        gone[LAYER * per_layer : (LAYER + 1) * per_layer] = kept.dropped
        tables.append(table)
        dropped.append(gone if gone.any() else None)
    return planes, GroupPlan(lines, block, tuple(tables), lanes=per_layer, dropped=tuple(dropped))


def attend(
    isa: str, threads: int, texts: Sequence[Kept], rule: Rule, dtype: str, block: int = 16, *, lanes: bool,
    ragged: bool = False, seed: int = 0, raw: RawKeys | None = None,
) -> list[F32]:  # fmt: skip
    """One step with all the texts: of each, [tokens, H, W]."""
    planes, group = in_lines(texts, rule, dtype, block, np.random.default_rng(seed), lanes, ragged)
    bounds = np.cumsum([0, *(k.text.stop - k.text.start for k in texts)]).tolist()
    q = np.concatenate([k.text.q[k.text.start : k.text.stop] for k in texts]).reshape(bounds[-1], -1)

    def make(registers: list[int], to: int) -> NativeOp:
        op = attend_op(rule, registers, to)
        return replace(op, pointers=(*op.pointers, raw))

    out = execute(
        isa, threads, [q], rule.heads * rule.width, make,
        plan=plan_of(bounds, [k.text.start for k in texts], [group]), planes=[planes],
    ).reshape(-1, rule.heads, rule.width)  # fmt: skip
    return [out[a:b] for a, b in pairwise(bounds)]


def of_line(rule: Rule, t: Text, i: int, lanes: bool) -> tuple[Rule, Text, slice]:
    """The rule and the text of one line by themselves, and its query heads."""
    if not lanes:
        return rule, t, slice(None)
    per = rule.heads // rule.kv_heads
    own = slice(i * per, (i + 1) * per)
    slopes, sinks = (None if x is None else x[own].copy() for x in (rule.slopes, rule.sinks))
    alone = replace(rule, heads=per, kv_heads=1, slopes=slopes, sinks=sinks, scale=rule.factor)
    return alone, replace(t, q=t.q[:, own].copy(), k=t.k[:, i : i + 1], v=t.v[:, i : i + 1]), own


RULES = [
    Rule(6, 3, 32, 32), Rule(4, 4, 33, 7), Rule(14, 2, 64, 64), Rule(5, 1, 24, 80),
    Rule(8, 4, 16, 16, soft_cap=3.0, sinks=sinks_of(8)),
]  # fmt: skip


@each_isa
@each_dtype
@each_lanes
@pytest.mark.sampled
def test_what_is_kept_is_attended_as_if_it_were_all(isa: str, dtype: str, lanes: bool) -> None:
    """Against float64, and bit for bit against the kept tokens put together as a text of their own."""
    for n, rule in enumerate(RULES):
        rng = np.random.default_rng([n, lanes])
        sizes = [(300, 270), (40, 39), (1, 0), (530, 529), (90, 0)]
        texts = [thinned(rng, rule, length, start, lanes) for length, start in sizes]
        for threads, ragged, block in ((1, False, 16), (2, True, 7)):
            got = attend(isa, threads, texts, rule, dtype, block, lanes=lanes, ragged=ragged, seed=n)
            for kept, rows in zip(texts, got, strict=True):
                for i in range(num_lines(rule, lanes)):
                    alone, t, own = of_line(rule, kept.line(i), i, lanes)
                    assert_right(rows[:, own], t, alone, dtype, isa)
                    same(np.ascontiguousarray(rows[:, own]), attend_plain(isa, 1, [t], alone, dtype)[0])


@each_isa
@each_lanes
def test_rules_go_by_slots(isa: str, lanes: bool) -> None:
    rules = [
        Rule(6, 3, 16, 24, window=37), Rule(6, 3, 16, 24, chunk=64), Rule(6, 3, 16, 24, slopes=slopes_of(6)),
        Rule(6, 3, 16, 24, window=290, chunk=450, soft_cap=20.0, slopes=slopes_of(6), sinks=sinks_of(6)),
    ]  # fmt: skip
    for n, rule in enumerate(rules):
        rng = np.random.default_rng([4, n])
        texts = [thinned(rng, rule, 600, 560, lanes), thinned(rng, rule, 80, 79, lanes)]
        got = attend(isa, 2, texts, rule, "bfloat16", 8, lanes=lanes, ragged=n % 2 == 1)
        for kept, rows in zip(texts, got, strict=True):
            for i in range(num_lines(rule, lanes)):
                alone, t, own = of_line(rule, kept.line(i), i, lanes)
                same(np.ascontiguousarray(rows[:, own]), attend_plain(isa, 1, [t], alone, "bfloat16")[0])


@each_isa
@each_lanes
def test_raw_keys_turn_at_their_slots(isa: str, lanes: bool) -> None:
    """One page of raw keys serves whatever slot it stands at."""
    rule = Rule(6, 3, 24, 16)
    rng = np.random.default_rng(6)
    texts = [thinned(rng, rule, 300, 290, lanes), thinned(rng, rule, 30, 29, lanes)]
    raw = RawKeys(table_of(rng, 12))
    got = attend(isa, 2, texts, rule, "float32", lanes=lanes, raw=raw)
    for kept, rows in zip(texts, got, strict=True):
        for i in range(num_lines(rule, lanes)):
            alone, t, own = of_line(rule, kept.line(i), i, lanes)
            whole = Kept(t, (np.arange(t.start, dtype=np.int32),))
            same(np.ascontiguousarray(rows[:, own]), attend(isa, 1, [whole], alone, "float32", lanes=False, raw=raw)[0])


@each_isa
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@each_lanes
def test_long_lines_are_split_without_a_trace(isa: str, dtype: str, lanes: bool) -> None:
    rule = Rule(4, 2, 8, 8, window=5000 if dtype == "int8" else 0)
    rng = np.random.default_rng(9)
    long = text(rng, rule, 6 * SPAN + 700, 6 * SPAN + 699)
    shares = (0.6, 0.05) if lanes else (0.7,)
    kept = Kept(long, tuple(np.flatnonzero(rng.random(long.start) < s).astype(np.int32) for s in shares))
    short = thinned(rng, rule, 60, 57, lanes)
    alone = attend(isa, 1, [kept], rule, dtype, 256, lanes=lanes)[0]
    for i in range(num_lines(rule, lanes)):
        rule_of, t, own = of_line(rule, kept.line(i), i, lanes)
        same(np.ascontiguousarray(alone[:, own]), attend_plain(isa, 1, [t], rule_of, dtype, 256)[0])
    for threads in (1, 2, 3):
        same(attend(isa, threads, [short, kept, short], rule, dtype, 64, lanes=lanes, ragged=True)[1], alone)


@each_isa
@each_lanes
def test_a_chunk_of_several_spans_begins_earlier_where_tokens_are_gone(isa: str, lanes: bool) -> None:
    """Its first key moves back over a span's bound, so that a split block has more spans than the whole text's."""
    rule = Rule(4, 2, 8, 8, chunk=4 * SPAN)
    rng = np.random.default_rng(10)
    long = text(rng, rule, 24001, 24000)
    keeps = tuple(np.sort(rng.permutation(24000)[:16000]).astype(np.int32) for _ in range(2 if lanes else 1))
    alone = attend(isa, 1, [Kept(long, keeps)], rule, "bfloat16", 256, lanes=lanes)[0]
    for threads in (2, 3):
        same(attend(isa, threads, [Kept(long, keeps)], rule, "bfloat16", 256, lanes=lanes)[0], alone)


@each_isa
@each_lanes
def test_bits_do_not_depend_on_company_cuts_or_threads(isa: str, lanes: bool) -> None:
    """A line that has forgotten tokens goes on with more of them in one step, or one by one, beside others."""
    for dtype in DTYPES:
        rule = Rule(6, 3, 20, 12)
        rng = np.random.default_rng([8, lanes])
        kept = thinned(rng, rule, 331, 290, lanes)
        others = [thinned(rng, rule, n, n - 3, lanes) for n in (290, 5, 70)]
        whole = attend(isa, 1, [kept], rule, dtype, lanes=lanes)[0]
        for n, (a, b) in enumerate(pairwise([290, 291, 300, 330, 331])):
            # What came in earlier steps is kept whole.
            new = np.arange(290, a, dtype=np.int32)
            part = Kept(kept.text.part(a, b), tuple(np.concatenate([k, new]) for k in kept.keeps))
            batch = [*others[: n % 4], part, *others[n % 4 :]]
            got = attend(isa, 1 + n % 3, batch, rule, dtype, (1, 3, 16, 100)[n], lanes=lanes, ragged=n % 2 == 1, seed=n)
            same(got[n % 4], whole[a - 290 : b - 290])


# ---- writing ----


@each_isa
@each_dtype
@each_lanes
@pytest.mark.parametrize("ragged", [False, True], ids=["shared", "ragged"])
def test_tokens_are_written_to_the_slots_of_each_line(isa: str, dtype: str, lanes: bool, ragged: bool) -> None:
    """What is written on one or two threads is what attention looks for."""
    for rule in (Rule(3, 3, 24, 19), Rule(4, 2, 7, 32)):
        rng = np.random.default_rng(5)
        texts = [thinned(rng, rule, 71, 70, lanes), thinned(rng, rule, 29, 0, lanes), thinned(rng, rule, 30, 13, lanes)]
        want, group = in_lines(texts, rule, dtype, 5, np.random.default_rng(1), lanes, ragged)
        bounds = np.cumsum([0, *(k.text.stop - k.text.start for k in texts)]).tolist()
        a, b = (
            np.concatenate([getattr(k.text, name)[k.text.start : k.text.stop] for k in texts]).reshape(bounds[-1], -1)
            for name in ("k", "v")
        )
        before = [replace(k, text=k.text.part(k.text.start, k.text.start)) for k in texts]
        n = (0, LAYER, rule.kv_heads, rule.dim, rule.kv_heads, rule.width, 0, 1)
        for threads in (1, 2):
            planes = {name: plane.copy() for name, plane in want.items()}
            for kept, table, gone in zip(before, group.tables, group.dropped or (), strict=True):
                spoil_new(planes, kept, table, gone, group)
            assert any(np.any(planes[x].view(np.uint8) != want[x].view(np.uint8)) for x in planes), "it has to write"
            execute(
                isa, threads, [a, b], None, lambda r, out, n=n: NativeOp(Kind.WRITE, tuple(r), -1, n),  # type: ignore[misc]
                plan=plan_of(bounds, [k.text.start for k in texts], [group]), planes=[planes],
            )  # fmt: skip
            for name, plane in planes.items():
                np.testing.assert_array_equal(plane.view(np.uint8), want[name].view(np.uint8), name)


def spoil_new(planes: Planes, kept: Kept, table: I32, gone: I32 | None, group: GroupPlan) -> None:
    """Everything behind what was kept before the step becomes what fresh planes hold."""
    size = group.block_size
    for i in range(group.lanes):
        line = LAYER * group.lanes + i
        first = kept.text.start - (0 if gone is None else int(gone[line]))
        pages = table[0] * group.num_layers + line if len(table) == 1 else table[line]
        for block in range(first // size, len(pages)):
            if pages[block] < 0:
                continue
            for plane in planes.values():
                nan = {np.dtype(np.uint16): 0x7FC0, np.dtype(np.int8): -128}.get(plane.dtype, np.nan)
                plane[pages[block], max(0, first - block * size) :] = nan


# ---- what does not fit ----


@each_isa
def test_what_cannot_have_been_forgotten_is_refused(isa: str) -> None:
    rule = Rule(2, 1, 8, 8)
    rng = np.random.default_rng(0)
    kept = thinned(rng, rule, 40, 37, lanes=False)
    whole = Kept(kept.text, (np.arange(37, dtype=np.int32),))
    layout = Layout()
    q, out = layout.register(16), layout.register(16)
    none = np.zeros(0, np.int32)

    def run(of: Kept, lines: list[int] | None, mask: list[int] | None = None) -> None:
        """A step of the sequence's memory; it has blocks for what is kept, and no more."""
        planes, group = in_lines([of], rule, "float32", 16, rng, False, False)
        program = NativeProgram(pool(isa, 1), [attend_op(rule, [q], out)], layout, [planes], max_tokens=3, max_rows=1)
        dropped = None if lines is None else (np.array(lines, np.int32),)
        plan = plan_of([0, 3], [37], [replace(group, dropped=dropped)])
        memory = StepMemory(1)
        program.run(memory.args(replace(plan, mask=None if mask is None else np.array(mask, np.uint64)), none))

    group = in_lines([kept], rule, "float32", 16, rng, False, False)[1]
    assert group.dropped is not None
    good = group.dropped[0]
    assert good is not None
    run(kept, good.tolist())
    for bad in ([38, 0, 0], [0, -1, 0]):
        with pytest.raises(AssertionError, match="the step fits the program"):
            run(kept, bad)
    with pytest.raises(AssertionError, match="the step fits the program"):
        run(kept, good.tolist(), [1, 3, 7])
    run(whole, [0, 0, 0], [1, 3, 7])
    run(whole, None, [1, 3, 7])


@each_isa
def test_keys_and_values_are_kept_alike(isa: str) -> None:
    rule = Rule(4, 2, 16, 16)
    rng = np.random.default_rng(0)
    planes, group = in_lines([thinned(rng, rule, 9, 5, True)], rule, "float32", 4, rng, True, False)
    planes["v"] = np.repeat(planes["v"], 2, axis=2)
    x = np.zeros((4, 64), np.float32)
    for kind in ("attend", "write"):
        with pytest.raises(EngineError, match="keys and values are not kept alike"):
            execute(
                isa, 1, [x] if kind == "attend" else [x[:, :32], x[:, :32]], 64 if kind == "attend" else None,
                lambda r, out, kind=kind: attend_op(rule, r, out)  # type: ignore[misc]
                if kind == "attend" else NativeOp(Kind.WRITE, tuple(r), -1, (0, LAYER, 2, 16, 2, 16, 0, 1)),
                plan=plan_of([0, 4], [5], [group]), planes=[planes],
            )  # fmt: skip
