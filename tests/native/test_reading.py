"""Whole models natively where attention uses the cache otherwise: raw keys, shown queries, lanes, chosen pages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.backends.native.forward import NativeForward
from penstock.backends.program import Program
from penstock.base.bf16 import F32
from penstock.core.selection import PageReads
from penstock.model.emitter import Reading
from tests import specs
from tests.native.running import each_isa, pytestmark_native
from tests.native.test_model import native, text, weights_as
from tests.paged import Paged

pytestmark = pytestmark_native


def chunked(paged: Paged, seq: str, ids: tuple[int, ...], sizes: tuple[int, ...]) -> F32:
    """As `Paged.chunked`, of results that the next step overwrites."""
    parts: list[F32] = []
    at = 0
    while at < len(ids):
        size = sizes[min(len(parts), len(sizes) - 1)]
        parts.append(paged.one_go(seq, ids[at : at + size]).copy())
        at += size
    return np.concatenate(parts)


MODELS = ("llama_gqa", "llama_mha", "llama_biased", "llama_rope3")


@each_isa
@pytest.mark.parametrize("name", MODELS)
def test_raw_keys_give_the_bits_of_rotated_ones(name: str, isa: str) -> None:
    """F01: with float32 caches nothing is rounded between the product and the rotation."""
    spec, _ = specs.make(name)
    ids = text(spec.vocab_size)
    want = native(name, isa).one_go("a", ids).copy()
    paged = native(name, isa, reading=Reading(raw_keys=True), threads=2)
    np.testing.assert_array_equal(chunked(paged, "a", ids, (33, 1, 7)), want)
    raw = Paged(spec, weights_as(name, "float32")[1], reading=Reading(raw_keys=True)).one_go("a", ids)
    np.testing.assert_allclose(want, raw, atol=2e-4 * max(1.0, float(np.abs(raw).max())))


@each_isa
@pytest.mark.parametrize("name", MODELS)
def test_queries_are_shown_as_attention_has_them(name: str, isa: str) -> None:
    spec, weights = weights_as(name, "float32")
    ids, reading = text(spec.vocab_size), Reading(observe=True)
    reference, shown = Paged(spec, weights, reading=reading), native(name, isa, reading=reading, threads=2)
    plain = native(name, isa)
    assert isinstance(reference.program, Program)
    for part in (ids[:40], ids[40:41], ids[41:]):
        want = reference.one_go("a", part)
        got = shown.one_go("a", part).copy()
        np.testing.assert_array_equal(got, plain.one_go("a", part))
        forward: Any = shown.program
        assert isinstance(forward, NativeForward)
        queries, expected = forward.queries(len(part)), reference.program.queries(len(part))
        assert len(queries) == len(expected) == len(spec.layers)
        for a, b in zip(queries, expected, strict=True):
            assert a.shape == b.shape
            np.testing.assert_allclose(a, b, atol=2e-4 * max(1.0, float(np.abs(b).max())))
        assert np.abs(got - want).max() < 2e-4 * max(1.0, float(np.abs(want).max()))


@each_isa
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
def test_lanes_change_no_bit(kv_dtype: str, isa: str) -> None:
    spec, _ = specs.make("llama_gqa")
    ids = text(spec.vocab_size)
    lanes = spec.layers[0].mixer.num_kv_heads  # type: ignore[union-attr]
    want = native("llama_gqa", isa, kv_dtype=kv_dtype).one_go("a", ids).copy()
    for ragged in (False, True):
        paged = native("llama_gqa", isa, kv_dtype=kv_dtype, lanes=lanes, threads=2)
        if ragged:
            paged.make_ragged("a")
        np.testing.assert_array_equal(chunked(paged, "a", ids, (33, 1, 7)), want)


@each_isa
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("lanes", [False, True], ids=["layers", "heads"])
def test_F13_quest_is_the_references_and_a_full_budget_is_exact(lanes: bool, kv_dtype: str, isa: str) -> None:
    """F13: tokens one by one behind a prompt, in company and alone."""
    spec, weights = weights_as("llama_gqa", "float32")
    ids = text(spec.vocab_size)
    more: dict[str, Any] = {"kv_dtype": kv_dtype, "lanes": spec.layers[0].mixer.num_kv_heads if lanes else 1}  # type: ignore[union-attr]
    sizes = (40, 1)
    plain = chunked(native("llama_gqa", isa, kv_dtype=kv_dtype), "a", ids, sizes)
    full = chunked(native("llama_gqa", isa, reading=Reading(pages=PageReads()), threads=2, **more), "a", ids, sizes)
    np.testing.assert_array_equal(full, plain)
    reading = Reading(pages=PageReads(share=0.3, recent=5, dense_layers=1))
    quest = chunked(native("llama_gqa", isa, reading=reading, **more), "a", ids, sizes)
    np.testing.assert_array_equal(quest[:40], plain[:40])
    cost = np.abs(quest - plain)[40:].max()
    assert cost > 1e-3, "less is read"
    if kv_dtype == "float32":
        reference = chunked(Paged(spec, weights, num_slabs=200, reading=reading, lanes=more["lanes"]), "a", ids, sizes)
        assert np.abs(quest - reference).max() <= 2e-4 * max(1.0, float(np.abs(reference).max()))
    paged = native("llama_gqa", isa, reading=reading, threads=2, seed=3, **more)
    first = paged.run({"b": (ids[:50], [0]), "a": (ids[:40], range(40))})["a"].copy()
    rows = [paged.run({"c": (ids[:9], [0]), "a": ([i], [0]), "b": ([i], [0])})["a"][0].copy() for i in ids[40:]]
    np.testing.assert_array_equal(np.concatenate([first, rows]), quest)


@each_isa
def test_F13_tokens_behind_their_prompt_choose_however_they_come(isa: str) -> None:
    """F13: where the plan says from which position on, no cut of the text changes a bit."""
    ids = text(specs.make("llama_gqa")[0].vocab_size)
    reading = Reading(pages=PageReads(share=0.3, recent=5, dense_layers=1))
    want = chunked(native("llama_gqa", isa, reading=reading), "a", ids, (40, 1))
    for n, sizes in enumerate([(1,), (70,), (17, 24, 3, 1, 9)]):
        paged = native("llama_gqa", isa, reading=reading, threads=1 + n % 2, seed=n)
        paged.choose_from["a"] = 40
        np.testing.assert_array_equal(chunked(paged, "a", ids, sizes), want)
