"""Native operations on streams and sparse gates, against `ops/ref`."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from penstock.base.bf16 import F32
from penstock.base.errors import EngineError
from penstock.model.fuse import fuse
from penstock.model.graph import SELECTED, TOKENS
from penstock.ops.native.abi import Kind
from penstock.ops.native.program import NativeOp
from penstock.ops.ref import streams as ref
from tests import specs
from tests.native.running import ISAS, each_isa, each_threads, execute, plan_of, pytestmark_native, within
from tests.paged import Paged

pytestmark = pytestmark_native
WIDTHS = (1, 15, 16, 17, 896, 4097)


def normal(seed: int, *shape: int) -> F32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@each_isa
@each_threads
@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_streams_are_mixed_and_corrected(isa: str, threads: int, n: int) -> None:
    for width in WIDTHS:
        x, mixing, found, by = normal(1, 5, n, width), normal(2, 5, n * n), normal(3, 5, width), normal(4, 5, n)
        flat = x.reshape(5, -1)
        got = execute(
            isa, threads, [flat, mixing], n * width, lambda ins, out: NativeOp(Kind.STREAMS, tuple(ins), out, n=(n, 0))
        )
        expected = ref.mix_streams(x, mixing).reshape(5, -1)
        within(got, expected, 1e-5 * (1 + np.abs(expected)))
        active = n - 1
        got = execute(
            isa, threads, [flat, found, by], n * width,
            lambda ins, out, n=(n, 1, active): NativeOp(Kind.STREAMS, tuple(ins), out, n=n),
        )  # fmt: skip
        expected = ref.correct_streams(x, found, by, active).reshape(5, -1)
        within(got, expected, 1e-5 * (1 + np.abs(expected)))


@each_isa
@each_threads
def test_gates_are_cut_off_and_rows_made_as_large(isa: str, threads: int) -> None:
    for width in WIDTHS:
        x, like = normal(1, 5, width) + np.float32(0.3), normal(2, 5, width) * np.float32(7)
        x[4] *= np.float32(1e-4)  # smaller than the least
        got = execute(isa, threads, [x], width, lambda ins, out: NativeOp(Kind.CUT_OFF, tuple(ins), out, f=(0.52,)))
        within(got, ref.cut_off(x, 0.52), 1e-5 * (1 + np.abs(x)))
        got = execute(
            isa, threads, [x, like], width,
            lambda ins, out: NativeOp(Kind.MATCH, tuple(ins), out, f=(ref.LEAST_SQUARE,)),
        )  # fmt: skip
        expected = ref.match_magnitude(x, like)
        within(got, expected, 1e-5 * (1 + np.abs(expected)))
        weight = normal(3, width)
        got = execute(
            isa, threads, [x], width, lambda ins, out, w=weight: NativeOp(Kind.SCALE, tuple(ins), out, pointers=(w,))
        )
        assert np.array_equal(got, ref.scale_columns(x, weight))


def one(kind: Kind, f: tuple[float, ...], ins: list[int], out: int) -> NativeOp:
    return NativeOp(kind, tuple(ins), out, f=f)


@each_isa
def test_a_row_does_not_depend_on_its_company(isa: str) -> None:
    x, like = normal(1, 40, 333), normal(2, 40, 333)
    for kind, inputs, f in ((Kind.CUT_OFF, [x], (0.3,)), (Kind.MATCH, [x, like], (1e-5,))):
        make = partial(one, kind, f)
        together = execute(isa, 2, inputs, 333, make)
        for t in (0, 17, 39):
            alone = execute(isa, 1, [rows[t : t + 1] for rows in inputs], 333, make)
            assert np.array_equal(alone[0], together[t])


@each_isa
def test_selected_rows_stand_where_their_tokens_do(isa: str) -> None:
    """Queries of wanted rows alone turn and grow as among all tokens."""
    table = np.random.default_rng(5).standard_normal((2, 60, 4)).astype(np.float32)
    plan, rows = plan_of([0, 5, 12], [3, 40]), np.array([0, 4, 5, 11], np.int32)
    x = normal(1, 12, 16)
    turn, grow = {"n": (2, 8, 0, 4, 0, 60), "pointers": (table,)}, {"f": (0.3, 7.0, 1.0)}
    for kind, more in ((Kind.ROPE, turn), (Kind.SCALE_QUERIES, grow)):
        own = partial(in_place, kind, more)
        every = execute(isa, 2, [x], None, lambda ins, out, own=own: own(out), plan=plan)
        some = execute(
            isa, 2, [x], 16, lambda ins, out, own=own: [NativeOp(Kind.SELECT, tuple(ins), out), own(out)],
            plan=plan, rows=rows, out_rows=SELECTED,
        )  # fmt: skip
        assert np.array_equal(some, every[rows])
        assert not np.array_equal(every, x)


def in_place(kind: Kind, more: dict[str, Any], register: int) -> NativeOp:
    return NativeOp(kind, (register,), register, **more)


@pytest.mark.parametrize(("n", "words"), [((9, 0), "one to eight"), ((2, 2), "mixed"), ((2, 0), "its weights")])
def test_what_does_not_fit_is_refused(n: tuple[int, ...], words: str) -> None:
    with pytest.raises(EngineError, match=words):
        execute(
            ISAS[0], 1, [normal(1, 3, 36), normal(2, 3, 3)], 36,
            lambda ins, out: NativeOp(Kind.STREAMS, tuple(ins), out, n=n),
        )  # fmt: skip


def test_behind_the_last_keys_only_wanted_rows_are_computed() -> None:
    """C10: layers that share keys and values keep nothing, so a prompt's other tokens need not pass them."""
    spec, weights = specs.make("streams")
    paged = Paged(spec, weights)
    graph = paged.graph.copy()
    fuse(graph)
    rows = {(node.layer, node.op): node.out.rows for node in graph.nodes if node.out is not None}
    late = {key: value for key, value in rows.items() if key[0] in (2, 3)}
    assert {op for _, op in late} >= {"attention", "linear", "mix_streams", "correct_streams", "rope", "cut_off"}
    assert set(late.values()) == {SELECTED}
    assert rows[1, "attention"] == SELECTED
    assert rows[1, "mix_streams"] == rows[0, "attention"] == TOKENS
