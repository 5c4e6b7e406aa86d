"""Weights as files store them, in native panels: every value, and whole models of them."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.backends.native.forward import NativeForward
from penstock.backends.native.schemes import packing
from penstock.base.bf16 import F32
from penstock.core.matrix_format import NONE
from penstock.core.model_spec import Attention, FeedForward, Layer, ModelSpec, Rope, weight_shapes
from penstock.core.panels import PANEL_ROWS, panels_of
from penstock.ops.native.abi import Act, Format, Kind
from penstock.ops.native.library import libraries, open_library
from penstock.ops.native.matrix import Packed, Segments, order, pack
from penstock.ops.native.packed_file import PackedStore
from penstock.ops.native.program import NativeOp
from penstock.ops.ref import REF
from penstock.ops.stored import Weight
from penstock.quant.reference import QuantisedLinear
from tests.native.running import ISAS, each_isa, execute, pool, pytestmark_native
from tests.paged import Paged
from tests.stored import FORMATS, InMemory, random_stored

pytestmark = pytestmark_native


def packed(isa: str, parts: list[InMemory], pair: bool = False, row_bits: int = 0) -> Packed:
    how = packing(NONE, parts[0], isa, row_bits)
    assert how.as_stored
    return pack(
        open_library(libraries()[isa]), parts, how.format, how.act, panels=how.panels, as_stored=True, pair=pair,
        num_threads=2,
    )  # fmt: skip


@each_isa
@pytest.mark.parametrize("name", FORMATS)
def test_panels_hold_every_value_of_every_format(name: str, isa: str) -> None:
    """Bit for bit; where a value is subtracted, too, fused multiply-adds may round once instead of twice."""
    m = random_stored(name, 200, 1024)
    parts = (
        [m] if m.order is not None or panels_of(m.format, 1024).has_factor else [m, random_stored(name, 72, 1024, 1)]
    )
    found = packed(isa, parts)
    values = np.concatenate([part.values() for part in parts])
    inputs = slice(None) if found.order is None else found.order
    got, want = found.values(open_library(libraries()[isa]))[: len(values)], values[:, inputs]
    if m.format.zeros_are == "values":
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-7 * np.abs(want).max())
    else:
        np.testing.assert_array_equal(got, want)
    rows = -(-len(values) // PANEL_ROWS) * PANEL_ROWS
    estimate = panels_of(m.format, 1024).num_bytes((rows, 1024))
    assert estimate <= found.num_bytes <= 1.02 * estimate, "what a plan counts is what is taken"


@each_isa
@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "NVFP4", "bnb nf4"])
def test_a_pair_has_half_a_panel_of_each(name: str, isa: str) -> None:
    gate, up = random_stored(name, 72, 512), random_stored(name, 72, 512, 1)
    if name == "NVFP4":
        up._parts[1][1][:] = gate._parts[1][1]
    found = packed(isa, [gate, up], pair=True)
    where = order([72, 72], True)
    want = np.where(where[:, None] < 0, 0, np.concatenate([gate.values(), up.values()])[where])
    np.testing.assert_allclose(found.values(open_library(libraries()[isa])), want, rtol=0, atol=1e-6)


@each_isa
@pytest.mark.parametrize("name", FORMATS)
def test_products_are_those_of_rounded_rows_with_the_values(name: str, isa: str) -> None:
    m = random_stored(name, 70, 1024)
    x = np.random.default_rng(1).standard_normal((5, 1024)).astype(np.float32)
    exact = QuantisedLinear(NONE, row_bits=0)(x, m)
    for row_bits in (0, 8):
        segments = Segments([packed(isa, [m], row_bits=row_bits)])
        got = execute(
            isa, 2, [x], 70,
            lambda inputs, out, segments=segments: NativeOp(
                Kind.LINEAR, tuple(inputs), out, n=(0, 0, 0, 1), f=(0.0, 1.0, 0.0), pointers=(segments,)
            ),
        )  # fmt: skip
        want = QuantisedLinear(NONE, row_bits=row_bits)(x, m)
        assert far(got, want) < (5e-4 if row_bits else 2e-6), "next to no rounding falls otherwise"
        if row_bits and packing(NONE, m, isa).act == Act.I8:
            assert far(want, exact) > 2e-3


def test_groups_of_other_sizes_than_their_format_says_are_values() -> None:
    m = random_stored("GPTQ act-order", 72, 128)
    assert packing(NONE, m, ISAS[-1]).as_stored
    m.order[:] = 0
    how = packing(NONE, m, ISAS[-1])
    assert how == (Format.F32, Act.F32, None, False)
    found = pack(open_library(libraries()[ISAS[-1]]), [m], how.format, how.act)
    np.testing.assert_array_equal(found.values(open_library(libraries()[ISAS[-1]]))[:72], m.values())


# --- models

KINDS = {
    "layers.0.q": "Q4_K", "layers.0.k": "Q8_0", "layers.0.v": "Q6_K", "layers.0.o": "IQ4_XS", "layers.0.gate": "Q4_K",
    "layers.0.up": "Q6_K", "layers.1.q": "GPTQ act-order", "layers.1.gate": "NVFP4", "layers.1.up": "NVFP4",
    "layers.1.down": "bnb nf4", "layers.2.q": "FP8 block", "layers.2.k": None, "layers.2.v": "FP8 block",
    "layers.2.o": "HQQ", "embed": "Q6_K", "lm_head": "Q5_K",
}  # fmt: skip
"""By weight; every other matrix is Q4_0, and None plain."""


@cache
def model(tied: bool) -> tuple[ModelSpec, dict[str, Weight]]:
    layer = Layer(
        mixer=Attention(num_heads=4, num_kv_heads=2, head_dim=64, rope=Rope(dim=64)), ffn=FeedForward(width=512)
    )
    spec = ModelSpec(
        family="test", vocab_size=150, hidden_size=512, layers=(layer,) * 3, tie_embeddings=tied, max_position=256,
        bos_token_id=1,
    )  # fmt: skip
    weights: dict[str, Weight] = {}
    for i, (name, shape) in enumerate(weight_shapes(spec).items()):
        kind = KINDS.get(name, "Q4_0") if len(shape) == 2 else None
        if kind is not None:
            weights[name] = m = random_stored(kind, shape[0], shape[1], i)
            m._parts = (m._parts[0], *scaled_down(m, 0.05 if name != "embed" else 1.0))
        elif len(shape) == 2:
            weights[name] = np.random.default_rng(i).standard_normal(shape, np.float32) * np.float32(0.05)
        else:
            weights[name] = np.ones(shape, np.float32)
    return spec, weights


def scaled_down(m: InMemory, factor: float) -> tuple[Any, Any]:
    """The outermost scales (and zeros that are values) of a matrix, times `factor`, as far as their type is a float."""

    def smaller(parts: tuple[Any, ...]) -> tuple[Any, ...]:
        *others, last = parts
        return (*others, (last * last.dtype.type(factor)) if last.dtype.kind == "f" else last)

    scales, zeros = m._parts[1:]
    return smaller(scales), smaller(zeros) if zeros and m.format.zeros_are == "values" else zeros


def native(tied: bool, isa: str, threads: int = 1, row_bits: int = 8, **more: Any) -> Paged:
    spec, weights = model(tied)
    paged = Paged(spec, weights, num_slabs=900, **more)
    program: Any = NativeForward(paged.graph, paged.groups, pool(isa, threads), NONE, max_tokens=16, row_bits=row_bits)
    paged.program = program
    return paged


def reference(tied: bool, row_bits: int) -> F32:
    spec, weights = model(tied)
    table = REF.replaced("blocks", {"linear": QuantisedLinear(NONE, row_bits=row_bits)}, batch_invariant=False)
    return Paged(spec, weights, num_slabs=200, ops=table).one_go("a", text(spec))


def text(spec: ModelSpec, n: int = 40) -> list[int]:
    rng = random.Random(3)
    return [rng.randrange(2, spec.vocab_size) for _ in range(n)]


def far(a: F32, b: F32) -> float:
    return float(np.sqrt(np.mean((a - b) ** 2)) / np.std(b))


@each_isa
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_of_many_formats_is_what_its_codes_say(tied: bool, isa: str) -> None:
    spec, _ = model(tied)
    exact, rounded = reference(tied, 0), reference(tied, 8)
    weight_only = native(tied, isa, row_bits=0).one_go("a", text(spec))
    assert far(weight_only, exact) < 1e-4
    # A rounding that falls otherwise moves all those behind it: only sizes of errors can be compared.
    blocks = native(tied, isa).one_go("a", text(spec))
    cost = far(rounded, exact)
    assert 1e-3 < cost < 0.1
    assert 0.8 * cost < far(blocks, exact) < 1.25 * cost


@pytest.mark.parametrize("tied", [True, False])
def test_what_is_stored_in_other_ways_is_multiplied_side_by_side(tied: bool) -> None:
    program: Any = native(tied, ISAS[-1]).program
    labels, names = program.describe(), set(program.matrices)
    assert {"layers.0.q", "layers.0.k", "layers.0.v"} <= names
    assert "linear layers.0.q layers.0.k layers.0.v" in labels, "three formats, one product"
    assert {"linear layers.0.up layers.0.gate", "gated"} <= set(labels), "no pair, but side by side"
    assert "linear layers.2.gate layers.2.up" in labels, "a pair"
    assert "layers.1.k layers.1.v" in names, "q has an order of its own"
    assert {"layers.2.q layers.2.v", "layers.2.k"} <= names, "what is alike is one matrix, wherever it stands"
    assert "linear layers.2.q layers.2.v layers.2.k" in labels
    assert program._code.ops[0].pointers == (None, program.matrices["embed"]), "no second table"
    if tied:
        assert sum("embed" in name for name in names) == 1, "looked up in, and multiplied with, once in memory"


@each_isa
def test_nothing_but_the_text_decides_the_logits(isa: str) -> None:
    spec, _ = model(True)
    ids = text(spec)
    want = native(True, isa).one_go("a", ids).copy()
    for threads, sizes in ((2, [1]), (3, [7, 1, 16]), (1, [3, 40])):
        paged, got, rest = native(True, isa, threads, seed=threads), [], ids
        for size in [*sizes, *[sizes[-1]] * len(ids)]:
            if rest:
                got.append(paged.one_go("a", rest[:size]).copy())
            rest = rest[size:]
        np.testing.assert_array_equal(np.concatenate(got), want)
    company = native(True, isa, 2, seed=9)
    company.run({"b": (ids[:11], [0]), "c": (ids[5:], [])})
    both = company.run({"c": (ids[:9], [8]), "a": (ids, range(len(ids))), "b": (ids[3:5], [1])})["a"]
    np.testing.assert_array_equal(both, want)


@pytest.mark.parametrize("copy", [True, False])
def test_packed_weights_on_disk_give_the_same_bits(tmp_path: Path, copy: bool) -> None:
    spec, _ = model(True)
    ids, key = text(spec), "0" * 64
    first = native(True, ISAS[-1])
    store, program = PackedStore(tmp_path / "weights"), first.program
    assert store.save(key, program.matrices)
    found = store.load(key, copy=copy)
    assert found is not None
    second = native(True, ISAS[-1])
    again: Any = NativeForward(second.graph, second.groups, pool(ISAS[-1], 1), NONE, max_tokens=16, matrices=found)
    second.program = again
    np.testing.assert_array_equal(second.one_go("a", ids), first.one_go("a", ids))
    assert found["layers.1.q"].order is not None
