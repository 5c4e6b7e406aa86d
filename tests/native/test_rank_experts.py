"""H15: experts shared out over ranks, by outputs or whole, have the bits of one rank; what they exchange is counted."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from penstock.backends.native.backend import NativeBackend
from penstock.base.bf16 import F32
from penstock.base.errors import EngineError
from penstock.core.model_spec import (
    Attention,
    Experts,
    FeedForward,
    Layer,
    ModelSpec,
    Norm,
    Rope,
    Router,
    weight_shapes,
)
from penstock.ops.native.library import libraries, open_library
from penstock.ops.native.program import ExpertShare, NativeOp, Pool
from penstock.ops.ref.experts import Routes
from penstock.ops.stored import Weight
from penstock.parallel import shard as sharding
from penstock.parallel.comm import SharedComm, shared_memory
from penstock.parallel.experts import by_outputs, elsewhere
from penstock.plan.ranks import Ranges, even_ranges, expert_ranges
from tests import specs
from tests.native import test_experts as one_rank
from tests.native.running import ISAS, execute, pytestmark_native
from tests.native.test_experts import INNER, PACKINGS, choose, make
from tests.native.test_laws import in_turmoil
from tests.native.test_model import NATIVE, weights_as
from tests.native.test_ranks import Ranked, divides
from tests.native.test_stored import scaled_down
from tests.paged import Paged
from tests.sampled import draws, some
from tests.stored import random_stored

pytestmark = pytestmark_native
SLOT = 4096
WAYS = pytest.mark.parametrize("whole", [False, True], ids=["by outputs", "whole"])

# -- the operation -----------------------------------------------------------------------------------------------------


class Group:
    """Ranks in threads, each with threads of its own."""

    def __init__(self, size: int, threads: int, slot_bytes: int = SLOT) -> None:
        memory = shared_memory(size, slot_bytes)
        self.comms = [SharedComm(memory, rank, size, slot_bytes=slot_bytes, spin_us=20) for rank in range(size)]
        os.close(memory)
        library = open_library(libraries()[ISAS[-1]])
        self.pools = [Pool(library, threads, spin_us=5) for _ in range(size)]
        self.size, self.threads = size, threads
        self._ranks = ThreadPoolExecutor(size)

    def whole(
        self, layer: one_rank.Layer, starts: Sequence[int], x: F32, routes: Routes, residual: F32 | None,
        packings: Sequence[str] = (),
    ) -> list[F32]:  # fmt: skip
        """What each rank gives that has experts starts[rank] ... starts[rank + 1] - 1. `packings`: each rank's."""

        def one(rank: int) -> F32:
            own = replace(layer, weights=layer.weights[starts[rank] : starts[rank + 1]])
            if packings:
                own = replace(own, packing=PACKINGS[packings[rank]])
            share = ExpertShare(self.comms[rank].exchange, starts=starts)
            return self._run(rank, own, share, len(layer.weights), layer.weights[0].down.shape[0], x, routes, residual)

        return list(self._ranks.map(one, range(self.size), timeout=60))

    def by_outputs(
        self, layer: one_rank.Layer, inner: Ranges, outputs: Ranges, x: F32, routes: Routes, residual: F32 | None
    ) -> F32:  # fmt: skip
        """All ranks' outputs side by side; those of one, where all have all."""

        def one(rank: int) -> F32:
            own = replace(layer, weights=by_outputs(layer.weights, inner, outputs, rank))
            widths = [last - first for first, last in inner]
            share = ExpertShare(self.comms[rank].exchange, widths=widths) if inner else None
            first, last = outputs[rank] if outputs else (0, layer.weights[0].down.shape[0])
            part = None if residual is None else residual[:, first:last]
            return self._run(rank, own, share, len(layer.weights), last - first, x, routes, part)

        found = list(self._ranks.map(one, range(self.size), timeout=60))
        return np.concatenate(found, axis=1) if outputs else found[-1]

    def _run(
        self, rank: int, layer: one_rank.Layer, share: ExpertShare | None, total: int, width: int, x: F32,
        routes: Routes, residual: F32 | None,
    ) -> F32:  # fmt: skip
        both = np.concatenate([routes.ids.astype(np.float32), routes.weights], axis=1)
        more = [] if residual is None else [residual]

        def op(inputs: list[int], out: int) -> NativeOp:
            made = layer.op(routes.ids.shape[1], tuple(inputs), out)
            return replace(made, n=(total, *made.n[1:]), pointers=(*made.pointers, share))

        return execute(ISAS[-1], self.threads, [x, both, *more], width, op, on=self.pools[rank])

    def given(self) -> list[tuple[int, int]]:
        """Exchanges and bytes of each rank."""
        return [self.comms[0].exchange.given(rank) for rank in range(self.size)]


def whole_ranges(num: int, size: int) -> list[int]:
    return [num * r // size for r in range(size + 1)]


CASES: list[Any] = some((packing, inner, {}) for packing in PACKINGS for inner in INNER)
CASES += [("float32", "gated", {"scale_input": True}), ("int4", "cut", {"scale_input": True, "bias": True})]
CASES += [(p, "clamped", {"split": True, "bias": True, "scale_input": s}) for p in ("float32", "int4") for s in (0, 1)]


@WAYS
@pytest.mark.parametrize(("packing", "inner", "more"), CASES)
@pytest.mark.sampled
def test_H15_the_operation_has_the_bits_of_one_rank(
    packing: str, inner: str, more: dict[str, Any], whole: bool
) -> None:
    """Numbers of tokens and experts that ranks do not divide; steps in which a rank's experts have nothing to do, and
    such that do not fit a slot; with and without what is added."""
    rng = np.random.default_rng([len(packing), len(inner), len(more)])
    draw = random.Random(f"{packing} {inner} {more}")
    num, e, f, top_k = 7, 72, 45, 3
    layer = make(ISAS[-1], rng, num, e, f, packing, inner, **{"bias": True, **more})
    for size in (2, 3, 4):
        group = Group(size, draw.choice([1, 2]))
        for tokens in (1, 2, 5, 40):
            x = rng.standard_normal((tokens, e)).astype(np.float32)
            residual = rng.standard_normal((tokens, e)).astype(np.float32) if draw.random() < 0.5 else None
            routes = choose(rng, tokens, num, top_k, draw.choice([None, None, [0, 1, 2], [3, 5, 6]]))
            want = layer.run(ISAS[-1], 1, x, routes, residual)
            if whole:
                for got in group.whole(layer, whole_ranges(num, size), x, routes, residual):
                    np.testing.assert_array_equal(got, want)
                continue
            ways = [even_ranges(f, size, 5), even_ranges(e, size, 8)]
            for inner_parts, outputs in (ways, (ways[0], ()), ((), ways[1])):
                got = group.by_outputs(layer, inner_parts, outputs, x, routes, residual)
                np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_H15_bytes_are_those_of_results_that_change_ranks_and_of_combined_rows(tokens: int, size: int) -> None:
    rng = np.random.default_rng([tokens, size])
    num, e, f, top_k = 6, 64, 45, 3
    layer, group = make(ISAS[-1], rng, num, e, f), Group(size, 1)
    x, routes = rng.standard_normal((tokens, e)).astype(np.float32), choose(rng, tokens, num, top_k)
    starts, cuts = whole_ranges(num, size), [tokens * r // size for r in range(size + 1)]
    group.whole(layer, starts, x, routes, None)
    most = SLOT // (4 * e)
    moved = [0] * size
    for token, ids in enumerate(routes.ids):
        here = next(r for r in range(size) if token < cuts[r + 1])
        for expert in ids:
            there = next(r for r in range(size) if expert < starts[r + 1])
            moved[there] += there != here
    turns = -(-max(moved) // most) + -(-max(b - a for a, b in pairwise(cuts)) // most)
    rows = [last - first for first, last in pairwise(cuts)]
    assert group.given() == [(turns, 4 * e * (moved[r] + rows[r] * (size - 1))) for r in range(size)]

    other = Group(size, 1)
    inner = even_ranges(f, size, 1)
    widths = [last - first for first, last in inner]
    other.by_outputs(layer, inner, even_ranges(e, size, 1), x, routes, None)
    turns = -(-tokens * top_k // (SLOT // (4 * max(widths))))
    assert other.given() == [(turns, 4 * tokens * top_k * width * (size - 1)) for width in widths]


@WAYS
def test_a_step_that_is_too_long_for_its_memory_is_done_in_the_same_parts_by_all(whole: bool) -> None:
    """Some hundred tokens at a time here."""
    rng = np.random.default_rng(5)
    layer, group = make(ISAS[-1], rng, 2, 8, 24_000, "bfloat16"), Group(2, 2, 256 << 10)
    x = rng.standard_normal((220, 8)).astype(np.float32)
    routes = choose(rng, 220, 2, 2)
    want = layer.run(ISAS[-1], 2, x, routes)
    if whole:
        for got in group.whole(layer, [0, 1, 2], x, routes, None):
            np.testing.assert_array_equal(got, want)
    else:
        got = group.by_outputs(layer, even_ranges(24_000, 2, 64), (), x, routes, None)
        np.testing.assert_array_equal(got, want)


def test_H15_ranks_with_experts_of_other_formats_take_the_same_tokens_at_a_time() -> None:
    """Rows of 8 bits take a quarter of the memory of others."""
    rng = np.random.default_rng(6)
    layer, group = make(ISAS[-1], rng, 2, 32, 24_000), Group(2, 1, 256 << 10)
    x, routes = rng.standard_normal((500, 32)).astype(np.float32), choose(rng, 500, 2, 2)
    found = group.whole(layer, [0, 1, 2], x, routes, None, ["float32", "int4"])
    np.testing.assert_array_equal(found[0], found[1])
    for first, last in ((0, 20), (480, 500)):
        part = Routes(routes.ids[first:last], routes.weights[first:last])
        few = group.whole(layer, [0, 1, 2], x[first:last], part, None, ["float32", "int4"])
        np.testing.assert_array_equal(few[1], found[0][first:last])


@pytest.mark.parametrize(
    ("slot", "starts", "words"),
    [(64, [0, 2, 4], "a slot holds a row"), (SLOT, [0, 4, 4], "every rank has an expert"), (SLOT, [0, 2, 3], "on one")],
)  # fmt: skip
def test_what_ranks_cannot_share_out_is_refused(slot: int, starts: list[int], words: str) -> None:
    rng = np.random.default_rng(7)
    layer, group = make(ISAS[-1], rng, 4, 40, 24), Group(2, 1, slot)
    x, routes = rng.standard_normal((2, 40)).astype(np.float32), choose(rng, 2, 4, 2)
    with pytest.raises(EngineError, match=words):
        group.whole(layer, starts, x, routes, None)


# -- models ------------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts of tiny models are shared out, too, 2 numbers at a time."""
    monkeypatch.setattr(sharding, "UNIT", 2)
    monkeypatch.setattr(sharding, "LEAST_ROWS", 2)


def has_experts(name: str) -> bool:
    return any(isinstance(layer.ffn, Experts) for layer in specs.make(name)[0].layers)


MIXTURES = [name for name in NATIVE if has_experts(name)]


def mixture(*ffns: Experts) -> tuple[ModelSpec, dict[str, Any]]:
    layers = tuple(
        Layer(mixer=Attention(num_heads=4, num_kv_heads=2, head_dim=8, rope=Rope(dim=8)), ffn=ffn) for ffn in ffns
    )
    spec = ModelSpec(family="test", vocab_size=61, hidden_size=32, max_position=256, bos_token_id=1, layers=layers)
    rng = np.random.default_rng(9)
    weights = {}
    for name, shape in weight_shapes(spec).items():
        noise = rng.standard_normal(shape).astype(np.float32)
        weights[name] = 1 + noise / 10 if len(shape) == 1 else noise * np.float32(2 / np.sqrt(shape[1]))
    return spec, weights


SHARED = FeedForward(width=9)
FFNS: dict[str, Experts] = {
    "the weight multiplies what goes in": Experts(
        num_experts=5, top_k=1, expert=FeedForward(width=13), shared=SHARED,
        router=Router(score="sigmoid", scale_input=True),
    ),
    "narrower inside": Experts(num_experts=7, top_k=3, expert=FeedForward(width=12), latent=20, shared=SHARED),
    "apart": Experts(
        num_experts=6, top_k=2, expert=FeedForward(width=12, activation="gelu_tanh"), shared=SHARED, apart=Norm(),
        router=Router(renormalize=True, expert_scale=True),
    ),
    "not gated, with biases": Experts(
        num_experts=9, top_k=4, expert=FeedForward(width=11, gated=False, activation="relu2", bias=True)
    ),
    "too narrow between": Experts(num_experts=4, top_k=2, expert=FeedForward(width=1)),
}  # fmt: skip


def on_one(spec: ModelSpec, weights: Any, **how: Any) -> Paged:
    alone = Paged(spec, weights, **how)
    return alone.on(NativeBackend(Pool(open_library(libraries()[ISAS[-1]]), 1, spin_us=5)))


def compared(spec: ModelSpec, weights: Any, size: int, threads: int, whole: bool, **how: Any) -> Ranked:
    """Steps of 1 to 40 tokens of several sequences, on one rank and on several."""
    rng = random.Random(f"{spec.num_params} {size} {whole}")
    alone = on_one(spec, weights, **how)
    ranked = Ranked(spec, weights, size, threads=threads, whole_experts=whole, **how)
    for step, count in enumerate((1, 40, 2, 7, 1, 23)):
        work = {}
        for seq in "ab"[: 1 + step % 2]:
            ids = [rng.randrange(3, spec.vocab_size) for _ in range(count)]
            work[seq] = (ids, range(count) if step != 3 else [count - 1])
        want = {seq: np.array(rows) for seq, rows in alone.run(work).items()}
        assert all(np.isfinite(rows).all() for rows in want.values())
        for got in ranked.run(work):
            for seq, rows in want.items():
                np.testing.assert_array_equal(got[seq], rows)
    return ranked


@WAYS
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", MIXTURES)
def test_H15_mixtures_have_the_bits_of_one_rank(name: str, size: int, whole: bool) -> None:
    spec, weights = weights_as(name, "bfloat16")
    if not divides(spec, size):
        pytest.skip("heads do not divide")
    threads = random.Random(f"{name} {size} {whole}").choice([1, 2])
    ranked = compared(spec, weights, size, threads, whole, kv_dtype="bfloat16")
    assert shares(ranked, whole), "something is shared out"


@WAYS
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", FFNS)
def test_H15_whatever_is_around_experts_the_bits_are_those_of_one_rank(name: str, size: int, whole: bool) -> None:
    spec, weights = mixture(FFNS[name], FFNS["not gated, with biases"])
    compared(spec, weights, size, 1 + size % 3 % 2, whole)


def shares(ranked: Ranked, whole: bool) -> bool:
    """Every expert is on one rank; or every output of each."""
    (graph, _, _), *_ = ranked.held
    parts = [[n for n in own.nodes if n.op == "experts"] for _, own, _ in ranked.held]
    for i, node in enumerate(n for n in graph.nodes if n.op == "experts"):
        own = [nodes[i].bound[0] for nodes in parts]
        if whole:
            assert [w.name for weights in own for w in weights] == [w.name for w in node.bound[0]]
            assert max(map(len, own)) - min(map(len, own)) <= 1
        else:
            for first, *more in zip(*own, strict=True):
                assert first.up.shape[0] + sum(w.up.shape[0] for w in more) == node.bound[0][0].up.shape[0]
                assert first.down.shape[0] + sum(w.down.shape[0] for w in more) == node.bound[0][0].down.shape[0]
    return bool(parts[0])


def stored_mixture() -> tuple[ModelSpec, dict[str, Weight]]:
    """Experts of several formats: rows are prepared differently for experts of one layer, and for gate and up."""
    layer = Layer(
        mixer=Attention(num_heads=4, num_kv_heads=2, head_dim=64, rope=Rope(dim=64)),
        ffn=Experts(num_experts=5, top_k=2, expert=FeedForward(width=512), router=Router(renormalize=True)),
    )
    spec = ModelSpec(
        family="test", vocab_size=150, hidden_size=512, layers=(layer,) * 4, max_position=256, bos_token_id=1
    )
    kinds = [
        ["Q4_K"] * 15,
        ["Q4_K", "Q6_K", "Q5_0"] * 5,
        [*["Q8_0"] * 6, *["GPTQ act-order"] * 9],
        [*["MXFP4"] * 3, *["IQ4_XS"] * 3, *["FP8 block"] * 3, *["bnb nf4"] * 3, *["HQQ"] * 3],
    ]
    weights: dict[str, Weight] = {}
    for i, (name, shape) in enumerate(weight_shapes(spec).items()):
        if ".experts." in name:
            _, layer_number, _, expert, part = name.split(".")
            kind = kinds[int(layer_number)][3 * int(expert) + ("gate", "up", "down").index(part)]
            weights[name] = m = random_stored(kind, shape[0], shape[1], i)
            m._parts = (m._parts[0], *scaled_down(m, 0.05))
        elif len(shape) == 2:
            weights[name] = np.random.default_rng(i).standard_normal(shape, np.float32) * np.float32(0.05)
        else:
            weights[name] = np.ones(shape, np.float32)
    return spec, weights


@WAYS
@pytest.mark.parametrize("size", [2, 4])
def test_H15_experts_of_stored_formats_are_shared_out_as_they_are(size: int, whole: bool) -> None:
    spec, weights = stored_mixture()
    compared(spec, weights, size, 1, whole)


LAWS = some((name, size) for name in MIXTURES for size in (2, 4) if divides(specs.make(name)[0], size))


@pytest.mark.parametrize(("name", "size"), LAWS)
def test_H15_tokens_are_those_of_one_rank(name: str, size: int) -> None:
    """The engine's laws, with whole experts (by outputs: H01's)."""
    in_turmoil(
        name, "float32", "float32", random.Random(f"experts-{name}-{size}"), draws(1, 4), ranks=size, depth=1,
        whole_experts=True,
    )  # fmt: skip


def test_weights_that_are_elsewhere_are_those_of_no_own_expert() -> None:
    spec, weights = weights_as("experts", "float32")
    for size in (2, 3, 4):
        away = [elsewhere(spec, rank, size) for rank in range(size)]
        for name in weights:
            layer, found, rest = name.partition(".experts.")
            here = [name not in names for names in away]
            if not found:
                assert all(here), name
                continue
            ffn = spec.layers[int(layer.split(".")[1])].ffn
            assert isinstance(ffn, Experts)
            first, last = expert_ranges(ffn.num_experts, size)[here.index(True)]
            assert sum(here) == 1
            assert first <= int(rest.split(".")[0]) < last
