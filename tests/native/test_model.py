"""Whole models as native programs: close to the reference, and the same bits in any company."""

from __future__ import annotations

import random
from functools import cache
from typing import Any
from unittest.mock import Mock

import numpy as np
import numpy.typing as npt
import pytest

from penstock.backends.native.forward import NativeForward
from penstock.backends.native.obstacle import native_matrices, native_obstacle
from penstock.base.bf16 import narrow
from penstock.core.matrix_format import parse_scheme
from penstock.core.model_spec import Attention, ModelSpec
from penstock.model.fuse import fuse, inputs_of
from penstock.ops.native.abi import SELECTED
from penstock.ops.native.program import Layout, NativeProgram
from tests import specs
from tests.native.running import ISAS, each_isa, pool, pytestmark_native
from tests.paged import Paged, nan_of
from tests.sampled import draws

pytestmark = pytestmark_native

KEEPING = {"attention", "token_shift", "causal_conv", "mamba_scan", "mamba2_scan", "recurrent", "retention",
           "wkv4", "wkv5", "wkv6", "shared_wkv6", "wkv7", "gated_delta", "rg_lru", "diagonal_scan", "mlstm_gates",
           "mlstm", "choose_tokens", "attend_chosen", "write_entries", "choose_entries", "attend_entries"}  # fmt: skip
"""Operations that all tokens pass through, or (attention, those over a choice) that see what others keep."""
NATIVE = [name for name in specs.ALL if native_obstacle(specs.make(name)[0]) is None]
SCHEMES = ("none", "int8-w8a8", "int8-w8a8:64", "int4-w4a8:32", "int8-wo", "int8-wo:32", "int4-wo:32")
DTYPES = {"float32": lambda w: w, "bfloat16": narrow, "float16": lambda w: w.astype(np.float16)}


def has_pages(name: str) -> bool:
    return any(isinstance(layer.mixer, Attention) for layer in specs.make(name)[0].layers)


def weights_as(name: str, dtype: str) -> tuple[ModelSpec, dict[str, npt.NDArray[Any]]]:
    spec, weights = specs.make(name)
    return spec, {key: DTYPES[dtype](w) for key, w in weights.items()}


def native(
    name: str, isa: str, *, dtype: str = "float32", scheme: str = "none", threads: int = 1, block_size: int = 4,
    kv_dtype: str = "float32", seed: int = 0, max_tokens: int = 16, **more: Any,
) -> Paged:  # fmt: skip
    """A paged model whose program is native. NaN stands wherever nothing was written."""
    spec, weights = weights_as(name, dtype)
    paged = Paged(spec, weights, kv_dtype=kv_dtype, block_size=block_size, seed=seed, num_slabs=900, **more)
    program: Any = NativeForward(
        paged.graph, paged.groups, pool(isa, threads), parse_scheme(scheme), max_tokens=max_tokens
    )
    paged.program = program
    return paged


@cache
def text(vocab: int, n: int = 70) -> tuple[int, ...]:
    rng = random.Random(5)
    return tuple(rng.randrange(3, vocab) for _ in range(n))


def test_which_specs_are_native() -> None:
    """A part that silently fell back would never be tested again."""
    assert {"llama_gqa", "llama_mha", "llama_mqa", "llama_rope3", "llama_biased", "layernorm", "scores", "parallel",
            "sandwich", "windowed", "all_windowed", "experts", "latent", "indexed", "slots", "mamba", "mamba2",
            "mamba2_hybrid", "rwkv4", "rwkv5", "rwkv6", "qrwkv6", "rwkv7", "delta", "short_conv", "lightning",
            "gated_lru", "mlstm", "diagonal", "retention", "shared", "shared_kv", "streams", "entries", "inner_norms",
            "yoco", "fixed_experts", "gated_diagonal", "key_bias"} <= set(NATIVE)  # fmt: skip


def test_what_layers_share_is_packed_once() -> None:
    """Two layers of three use block 0: each of its matrices is there once, none with a matrix of a layer."""
    names = [name.split() for name in native_matrices(specs.make("shared")[0])]
    shared = [parts for parts in names if any(part.startswith("shared.") for part in parts)]
    assert sorted(part for parts in shared for part in parts) == sorted(
        f"shared.{block}.{name}" for block in (0, 1) for name in ("q", "k", "v", "o", "gate", "up", "down")
    )


@cache
def by_reference(name: str, dtype: str, kv_dtype: str = "float32") -> npt.NDArray[np.float32]:
    """What the reference says of `text`: the same, whichever instruction set is asked."""
    spec, weights = weights_as(name, dtype)
    return Paged(spec, weights, num_slabs=200, kv_dtype=kv_dtype).one_go("a", text(spec.vocab_size))


@each_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NATIVE)
def test_logits_are_the_references(name: str, dtype: str, isa: str) -> None:
    expected = by_reference(name, dtype)
    ids = text(specs.make(name)[0].vocab_size)
    got = native(name, isa, dtype=dtype).one_go("a", ids)
    # bfloat16 rounds the rows before every product where the processor multiplies bfloat16. The random weights of
    # "sandwich" make of every rounding a hundred times as much (see tests/unit/train/test_train_tools.py), and in
    # "mamba" three products lead to what is added up over the whole text, in "mlstm" to exponents, in "qrwkv6" two to
    # exponents of exponents, in "shared" five products follow each other.
    if dtype == "bfloat16" and isa == "avx512bf16":
        error = np.sqrt(np.mean((got - expected) ** 2)) / np.std(expected)
        assert error < {"sandwich": 0.6, "mamba": 0.05, "mlstm": 0.25, "shared": 0.06, "qrwkv6": 0.06}.get(name, 0.03)
    else:
        assert np.abs(got - expected).max() <= 2e-4 * max(1.0, np.abs(expected).max())
        assert np.array_equal(got.argmax(-1), expected.argmax(-1))


@each_isa
@pytest.mark.parametrize("name", [name for name in NATIVE if has_pages(name)])
def test_logits_with_8_bits_of_keys_and_values_are_the_references(name: str, isa: str) -> None:
    """The same numbers are kept, so what differs is what differs with 16 bits; a rounding that falls otherwise is rare.

    That 8 bits are kept is seen by how far both are from float32.
    """
    exact, expected = by_reference(name, "float32"), by_reference(name, "float32", "int8")
    ids = text(specs.make(name)[0].vocab_size)
    got = native(name, isa, kv_dtype="int8").one_go("a", ids)
    error, cost = (np.sqrt(np.mean((x - expected) ** 2)) / np.std(expected) for x in (got, exact))
    assert cost > 1e-4
    assert error < max(2e-4, (2.0 if isa == "avx512bf16" else 0.5) * cost)


@each_isa
@pytest.mark.parametrize("scheme", SCHEMES[1:])
def test_quantised_logits_are_near_the_references(scheme: str, isa: str) -> None:
    expected = by_reference("llama_gqa", "float32")
    ids = text(specs.make("llama_gqa")[0].vocab_size)
    got = native("llama_gqa", isa, scheme=scheme).one_go("a", ids)
    error = np.sqrt(np.mean((got - expected) ** 2)) / np.std(expected)
    assert 1e-4 < error < (0.1 if "int8" in scheme else 0.7)


@each_isa
def test_quantised_logits_are_close_on_every_instruction_set(isa: str) -> None:
    """Integer products are exact, and what lies between them has one order; but base has no fused multiply-adds."""
    spec, _ = specs.make("llama_gqa")
    ids = text(spec.vocab_size)
    best = native("llama_gqa", ISAS[-1], scheme="int8-w8a8").one_go("a", ids)
    got = native("llama_gqa", isa, scheme="int8-w8a8").one_go("a", ids)
    assert np.abs(got - best).max() <= 0.02 * np.abs(best).max()


# Every combination for two models, every model for one.
COMBINATIONS = [(name, scheme, isa) for isa in ISAS for scheme in SCHEMES for name in ("llama_gqa", "scores")]
COMBINATIONS += [(name, "none", ISAS[-1]) for name in NATIVE if ISAS and name not in ("llama_gqa", "scores")]


@pytest.mark.parametrize(("name", "scheme", "isa"), COMBINATIONS)
def test_nothing_but_the_text_decides_the_logits(name: str, scheme: str, isa: str) -> None:
    """Chunks, company, place in the step, pages, block size, threads: the same bits."""
    types = (("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16"), ("bfloat16", "int8"))
    for dtype, kv_dtype in types:
        more = {"dtype": dtype, "kv_dtype": kv_dtype, "scheme": scheme}
        spec, _ = specs.make(name)
        ids = text(spec.vocab_size)
        whole = native(name, isa, **more).one_go("a", ids).copy()
        assert np.isfinite(whole).all()
        rng = random.Random(f"{name}-{scheme}-{dtype}")
        for draw in range(draws(2, 4)):
            paged = native(
                name, isa, threads=rng.choice([1, 2, 3]), block_size=rng.choice([1, 4, 16, 33]), seed=draw,
                max_tokens=rng.choice([1, 40]), **more,
            )  # fmt: skip
            if rng.random() < 0.4:
                paged.make_ragged("a")
            got, at, others = [], 0, 0
            while at < len(ids):
                n = min(rng.choice([1, 1, 2, 3, 7, 24]), len(ids) - at)
                work: dict[Any, Any] = {"a": (ids[at : at + n], range(n))}
                company = {("b", i): (ids[5 : 5 + rng.randrange(1, 9)], [0]) for i in range(rng.randrange(3))}
                company = {(*key, others): job for key, job in company.items()}
                others += 1
                order = [*work.items(), *company.items()]
                rng.shuffle(order)
                got.append(paged.run(dict(order))["a"].copy())
                at += n
            assert np.array_equal(np.concatenate(got), whole), f"draw {draw}, {dtype}"


@each_isa
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
def test_C50_B07_attention_through_an_index_for_each_token_has_the_bits_of_blocks(isa: str, kv_dtype: str) -> None:
    """Blocks of one token in any order of memory; one chunk, and chunk by chunk behind what is cached."""
    dtype = "bfloat16" if kv_dtype == "bfloat16" else "float32"
    ids = text(specs.make("llama_gqa")[0].vocab_size)
    blocks, tokens, chunks = (
        native("llama_gqa", isa, dtype=dtype, kv_dtype=kv_dtype, block_size=size, seed=seed)
        for size, seed in ((16, 0), (1, 3), (1, 5))
    )
    expected = blocks.one_go("a", ids)
    assert np.array_equal(tokens.one_go("a", ids), expected)
    assert np.array_equal(chunks.chunked("a", ids, [33, 1, 1, 29, 1, 1, 4]), expected)


@each_isa
def test_a_sick_sequence_harms_nobody(isa: str) -> None:
    """NaN in one sequence's cache stays there."""
    for dtype, kv_dtype in (("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "int8")):
        paged = native("llama_gqa", isa, dtype=dtype, kv_dtype=kv_dtype, threads=2)
        ids = text(paged.spec.vocab_size)
        clean = native("llama_gqa", isa, dtype=dtype, kv_dtype=kv_dtype).one_go("b", ids).copy()
        paged.one_go("a", ids[:9])
        for planes, table in zip(paged.planes, paged._tables["a"], strict=True):
            for plane in planes.values():
                plane[table[0, 0]] = nan_of(plane)
        both = paged.run({"a": (ids[9:30], [20]), "b": (ids, range(len(ids)))})
        assert np.array_equal(both["b"], clean)


def test_the_arena_grows_and_hidden_states_are_given() -> None:
    from dataclasses import replace

    from penstock.ops.plan import GroupPlan, StepPlan

    spec, weights = specs.make("llama_gqa")
    reference, paged = (Paged(spec, weights, num_slabs=200) for _ in range(2))
    program: Any = NativeForward(paged.graph, paged.groups, pool(ISAS[-1], 2), parse_scheme("none"), max_tokens=2)
    ids = np.array(text(spec.vocab_size, 12), np.int32)
    tables = tuple(np.arange(3, dtype=np.int32)[None] for _ in reference.groups)
    groups = tuple(GroupPlan(len(g.layers), 4, (t,)) for g, t in zip(reference.groups, tables, strict=True))
    bounds, lens = np.array([0, 12], np.int32), np.array([12], np.int32)
    plan = StepPlan(ids, np.arange(12, dtype=np.int32), bounds, lens, np.array([3, 11], np.int32), groups)
    plan = replace(plan, hidden_indices=np.array([0, 1, 5, 11], np.int32))
    want_logits, want_hidden = reference.program.run_pooling(plan, reference.planes)
    logits, hidden = program.run_pooling(plan, paged.planes)
    np.testing.assert_allclose(logits, want_logits, atol=1e-4)
    np.testing.assert_allclose(hidden, want_hidden, atol=1e-4)
    again = program.run(replace(plan, hidden_indices=np.zeros(0, np.int32)), paged.planes)
    assert np.array_equal(again, logits)


def test_a_program_that_cannot_grow_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, weights = specs.make("llama_gqa")
    paged = Paged(spec, weights, num_slabs=200)
    program: Any = NativeForward(paged.graph, paged.groups, pool(ISAS[-1], 2), parse_scheme("none"), max_tokens=2)
    ids = text(spec.vocab_size, 12)
    paged.program = program
    first = paged.run({"a": (ids[:2], [1])})["a"]
    with monkeypatch.context() as patched:
        patched.setattr("penstock.backends.native.forward.NativeProgram", Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            paged.run({"b": (ids, [11])})
        assert np.array_equal(paged.run({"c": (ids[:2], [1])})["c"], first)
    whole = paged.run({"d": (ids, [1, 11])})["d"]
    assert np.array_equal(whole[0], first[0])


def logits_alone(name: str, isa: str, **more: Any) -> Any:
    """tokens -> logits [V] of the next one, each text computed from nothing: the naive loop on native kernels."""
    paged = native(name, isa, **more)

    return cache(paged.alone)


@pytest.mark.parametrize("name", NATIVE)
def test_behind_the_last_keys_and_values_only_selected_rows_go_on(name: str) -> None:
    """A prompt's other tokens are needed for what the cache keeps of them, and no further."""
    spec, weights = specs.make(name)
    paged = Paged(spec, weights, num_slabs=8)
    traced = paged.graph.copy()
    fuse(traced)
    nodes = [node.op for node in traced.nodes]
    writing = {node.layer for node in traced.nodes if node.op == "write_kv"}
    # C10: where a layer reads the keys and values of another, nothing of its own is kept.
    reads = ("attention", "attend_chosen")
    keeps = [node.op in KEEPING and (node.op not in reads or node.layer in writing) for node in traced.nodes]
    last = max(i for i, keeping in enumerate(keeps) if keeping)
    ends = last + (nodes[last] not in reads)
    # What keeping needs is made of all tokens; attention's own result is not kept.
    needed = {id(node) for node, keeping in zip(traced.nodes[:ends], keeps, strict=False) if keeping}
    for node, keeping in reversed(list(zip(traced.nodes, keeps, strict=True))):
        if node.op == "write_kv" or keeping or id(node) in needed:
            needed |= {id(v.maker) for v in inputs_of(node)}
    for i, node in enumerate(traced.nodes):
        if node.out is not None:
            found = node.out.rows == SELECTED
            assert found == (id(node) not in needed), (i, nodes[i])
    most = {"streams": 6, "qrwkv6": 5}.get(name, 3)  # what each of the last layers is given of a token
    assert 1 <= nodes.count("select") <= most, "the residual, what runs beside attention, a shifted row and its own"


@each_isa
def test_rows_of_registers_begin_on_cache_lines(isa: str) -> None:
    """Else every vector of 16 lies on two; widths that are no multiple of 16 too."""
    layout = Layout()
    for width in (1, 16, 50, 4864):
        layout.register(width)
    program = NativeProgram(pool(isa, 1), [], layout, [], max_tokens=3, max_rows=1)
    for array, (width, _) in zip(program.arena, layout.buffers, strict=True):
        assert array.shape == (3, width)
        assert [row.ctypes.data % 64 for row in array] == [0, 0, 0]
