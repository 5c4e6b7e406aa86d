"""A program against the naive loop, for every test model: any batch, any chunking, any paging, the same bits."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from itertools import product
from typing import Any

import numpy as np
import pytest

from penstock.backends.reference import ReferenceBackend
from penstock.base.bf16 import narrow, widen
from penstock.base.errors import ConfigError, ModelError
from penstock.model.builder import build
from penstock.ops.attention import ATTENTION_BACKENDS
from penstock.ops.ref import REF
from penstock.ops.table import BESIDE, CONTRACTS, OpTable
from tests import specs
from tests.oracle import NaiveModel, naive_generate
from tests.paged import Paged
from tests.sampled import some


def tokens(name: str, n: int, seed: int = 0) -> list[int]:
    spec, _ = specs.make(name)
    return np.random.default_rng([seed, n]).integers(0, spec.vocab_size, n).tolist()


@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    [(name, "float32") for name in specs.ALL] + some(product(specs.ALL, ("float16", "bfloat16", "int8"))),
)
def test_A02_prefill_and_decode_equal_recomputation(name: str, kv_dtype: str) -> None:
    """Bit for bit, although the row only asks for 1e-4. Entries are read in whole arrays, whose sums have another order
    than the naive loop's: there the bits of one step are those of any others."""
    spec, weights = specs.make(name)
    ids = tokens(name, 60)
    want = NaiveModel(spec, weights, kv_dtype).logits(ids)
    paged = Paged(spec, weights, kv_dtype=kv_dtype)
    if name == "entries":
        naive, want = want, Paged(spec, weights, kv_dtype=kv_dtype).one_go("alone", ids)
        # A rounding of the cache, where it falls to the other side, weighs more than the order of sums.
        np.testing.assert_allclose(want, naive, atol=1e-4 if kv_dtype == "float32" else 0.2)
    np.testing.assert_array_equal(paged.one_go("whole", ids), want)
    np.testing.assert_array_equal(paged.chunked("decode", ids, [37, 1]), want)
    np.testing.assert_array_equal(paged.chunked("one by one", ids, [1]), want)
    np.testing.assert_array_equal(paged.chunked("chunks", ids, [3, 8, 1, 7]), want)


@pytest.mark.parametrize("block_size", [1, 2, 16, 32])
@pytest.mark.parametrize("name", ["llama_gqa", "layernorm", "slots", "latent", "entries"])
def test_block_size_changes_no_bit(name: str, block_size: int) -> None:
    spec, weights = specs.make(name)
    ids = tokens(name, 45)
    want = Paged(spec, weights).one_go("a", ids) if name == "entries" else NaiveModel(spec, weights).logits(ids)
    paged = Paged(spec, weights, block_size=block_size)
    np.testing.assert_array_equal(paged.chunked("a", ids, [10, 1, 21]), want)


@pytest.mark.parametrize(
    ("name", "attention"),
    [(name, "ref") for name in specs.ALL]
    + [(name, other) for other in ATTENTION_BACKENDS.names() if other != "ref" for name in some(specs.ALL, 12)],
)
def test_A06_mixed_batches_equal_one_by_one(name: str, attention: str) -> None:
    """Random steps over five sequences, two of them ragged: prefill chunks, decodes and pauses in any mix."""
    spec, weights = specs.make(name)
    rng = np.random.default_rng([7, specs.ALL.index(name)])
    texts = {s: tokens(name, int(rng.integers(20, 70)), seed=s) for s in range(5)}
    alone = {s: Paged(spec, weights, attention=attention).one_go(s, ids) for s, ids in texts.items()}
    paged = Paged(spec, weights, attention=attention, seed=3)
    paged.make_ragged(1)
    paged.make_ragged(4)
    got: dict[int, list[Any]] = {s: [] for s in texts}
    steps = mixed = 0
    while any(paged.lens.get(s, 0) < len(ids) for s, ids in texts.items()):
        work = {}
        for s in rng.permutation(5).tolist():
            at = paged.lens.get(s, 0)
            n = min(int(rng.choice([0, 1, 1, 1, 4, 11])), len(texts[s]) - at)
            if n:
                work[s] = (texts[s][at : at + n], range(n))
        if not work:
            continue
        steps += 1
        mixed += len({len(ids) for ids, _ in work.values()}) > 1
        for s, rows in paged.run(work).items():
            got[s].append(rows)
    for s in texts:
        np.testing.assert_array_equal(np.concatenate(got[s]), alone[s])
    assert mixed > 5
    # embed and lm_head apart, every product of the model ran once per step, whatever the batch.
    per_step = sum(c.op == "linear" for c in paged.program.code)
    assert paged.program.calls["linear"] == per_step * steps
    assert paged.program.calls["attention"] == sum(c.op == "attention" for c in paged.program.code) * steps
    assert paged.program.calls["embed"] == sum(c.op == "embed" for c in paged.program.code) * steps


def test_A06_linear_layers_are_called_once_per_step() -> None:
    """Seven products per layer and the head: for one token, for one prompt, and for 40 sequences of all lengths."""
    spec, weights = specs.make("llama_gqa")
    paged = Paged(spec, weights)
    batches: list[dict[Any, Any]] = [
        {"a": ([1], [0])},
        {"b": (range(1, 50), [48])},
        {"a": ([5], [0]), "b": ([6, 7], [1]), **{i: (range(i + 1), [i]) for i in range(40)}},
    ]
    for batch in batches:
        paged.program.calls.clear()
        paged.run(batch)
        assert paged.program.calls["linear"] == 7 * 2 + 1
        assert paged.program.calls["attention"] == 2
        assert paged.program.calls["rope_angles"] == 1


def test_C61_no_padded_token_is_computed() -> None:
    """On skewed lengths every op sees sum(lengths) rows, where a padded batch has len(batch) * max(lengths)."""
    spec, weights = specs.make("llama_gqa")
    paged = Paged(spec, weights)
    lengths = [100, 1, 1, 2, 1, 3, 1, 1]
    paged.run({s: (tokens("llama_gqa", n, seed=s), [n - 1]) for s, n in enumerate(lengths)})
    rows, total = paged.program.rows, sum(lengths)
    layers = len(spec.layers)
    per_layer = {
        "heads": 3, "rope": 2, "flat": 1, "attention": 1, "add": 2, "activate_gated": 1, "write_kv": 1,
    }  # fmt: skip
    assert {op: rows[op] for op in per_layer} == {op: n * layers * total for op, n in per_layer.items()}
    assert rows["embed"] == total
    # The final norm and the head run on the eight rows that are sampled, and on no others.
    assert rows["linear"] == 7 * layers * total + len(lengths)
    assert rows["rms_norm"] == 2 * layers * total + len(lengths)
    assert total * 7 < len(lengths) * max(lengths)


def test_only_wanted_rows_get_logits_and_none_is_fine() -> None:
    spec, weights = specs.make("llama_mha")
    ids = tokens("llama_mha", 20)
    want = NaiveModel(spec, weights).logits(ids)
    paged = Paged(spec, weights)
    got = paged.run({"a": (ids[:12], [3, 11]), "b": (ids[:5], [])})
    np.testing.assert_array_equal(got["a"], want[[3, 11]])
    assert got["b"].shape == (0, 61)
    assert paged.run({"a": (ids[12:15], [])})["a"].shape == (0, 61)
    np.testing.assert_array_equal(paged.run({"a": (ids[15:], [4])})["a"], want[19:])


@pytest.mark.parametrize("name", specs.ALL)
def test_online_backend_stays_close(name: str) -> None:
    """Beyond one chunk of 256 the two backends sum in a different order, and agree to float32 rounding."""
    spec, weights = specs.make(name)
    ids = tokens(name, 270)
    full = Paged(spec, weights).chunked("a", ids, [200, 70])
    online = Paged(spec, weights, attention="ref-online").chunked("a", ids, [7, 250, 13])
    np.testing.assert_allclose(online, full, atol=1e-4)
    np.testing.assert_array_equal(online[:200], Paged(spec, weights, attention="ref-online").one_go("b", ids)[:200])


STEP_BY_STEP = some(specs.ALL, 8)
"""Whose naive text is made a token at a time, too."""


@pytest.mark.parametrize("name", specs.ALL)
def test_A01_greedy_text_equals_the_naive_loop_and_is_varied(name: str) -> None:
    spec, weights = specs.make(name)
    prompts = {n: tokens(name, n) for n in (3, 8, 33)}
    got = Paged(spec, weights).greedy(prompts, 64)
    model = NaiveModel(spec, weights)
    if name in STEP_BY_STEP:
        assert got[3] == model.greedy(prompts[3], 64)
    for n, prompt in prompts.items():
        # Token by token the naive model's choice after what was there: its greedy text, by induction, in one run.
        rows = model.logits([*prompt, *got[n][:-1]])[n - 1 :]
        assert got[n] == rows.argmax(axis=-1).tolist()
        assert len(set(got[n])) >= 8, "a test model that repeats itself hides mistakes"
        assert len(set(got[n][-24:])) >= 4
    assert len({tuple(text) for text in got.values()}) == 3


def test_naive_generate_asks_pick_for_every_token() -> None:
    model = NaiveModel(*specs.make("llama_gqa"))
    seen: list[int] = []

    def second_best(row: Any, so_far: Any) -> int:
        seen.append(len(so_far))
        return int(np.argsort(-row, kind="stable")[1])

    out = naive_generate(model, [3, 4], second_best, 5)
    assert seen == [2, 3, 4, 5, 6]
    assert out[0] == np.argsort(-model.logits([3, 4])[-1])[1]
    assert out != model.greedy([3, 4], 5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "name", ["llama_biased", "latent", "slots", "layernorm", "mamba", "mamba2", "rwkv4", "rwkv5", "rwkv6", "rwkv7"]
)
def test_16_bit_weights_compute_in_float32(name: str, dtype: str) -> None:
    spec, wide = specs.make(name)
    if dtype == "bfloat16":
        stored: dict[str, Any] = {k: narrow(w) for k, w in wide.items()}
        same = {k: widen(w) for k, w in stored.items()}
    else:
        stored = {k: w.astype(np.float16) for k, w in wide.items()}
        same = {k: w.astype(np.float32) for k, w in stored.items()}
    ids = tokens(name, 30)
    got = Paged(spec, stored).chunked("a", ids, [11, 1])
    np.testing.assert_array_equal(got, NaiveModel(spec, stored).logits(ids))
    np.testing.assert_allclose(got, Paged(spec, same).one_go("a", ids), atol=1e-4)


def test_a_poisoned_row_ends_alone() -> None:
    """A token whose embedding is NaN spoils its own sequence; the others keep their bits, and nothing warns."""
    spec, weights = specs.make("llama_gqa")
    weights["embed"] = weights["embed"].copy()
    weights["embed"][60] = np.nan
    ids = [i % 60 for i in tokens("llama_gqa", 30)]
    alone = Paged(spec, weights).chunked("b", ids, [20, 1])
    paged = Paged(spec, weights)
    first = paged.run({"a": ([60, 1, 2], [2]), "b": (ids[:20], range(20))})
    assert np.isnan(first["a"]).all()
    np.testing.assert_array_equal(first["b"], alone[:20])
    for i in range(20, 30):
        step = paged.run({"b": (ids[i : i + 1], [0]), "a": ([5], [0])})
        np.testing.assert_array_equal(step["b"][0], alone[i])
        assert np.isnan(step["a"]).all()


def test_weights_that_do_not_fit_are_named() -> None:
    spec, weights = specs.make("llama_gqa")
    groups = Paged(spec, weights).groups

    def refused(changed: dict[str, Any], message: str) -> None:
        with pytest.raises(ModelError, match=message):
            build(spec, changed, groups, max_model_len=64)

    refused({k: w for k, w in weights.items() if k != "layers.1.up"}, r"missing, the first: layers\.1\.up")
    refused({**weights, "layers.2.up": weights["layers.1.up"]}, r"not part of the model, the first: layers\.2\.up")
    refused({**weights, "layers.0.k": weights["layers.0.q"]}, r"layers\.0\.k has shape \[32, 32\].* needs \[16, 32\]")
    refused({**weights, "layers.0.k": weights["layers.0.k"].astype(np.int8)}, r"layers\.0\.k is int8")
    with pytest.raises(ConfigError, match="ref-online"):
        ReferenceBackend("flash")
    with pytest.raises(AssertionError):
        build(spec, weights, (), max_model_len=64)


def test_positions_beyond_the_rope_table_are_refused() -> None:
    paged = Paged(*specs.make("llama_gqa"), max_model_len=10)
    paged.one_go("a", list(range(10)))
    with pytest.raises(AssertionError, match="max_model_len"):
        paged.one_go("a", [1])


def test_describe_names_every_call() -> None:
    spec, weights = specs.make("llama_gqa")
    program = Paged(spec, weights).program
    lines = program.describe()
    assert lines[0] == "x = embed(token_ids, embed [61, 32])"
    assert "k = linear(h, layers.1.k [16, 32])" in lines
    assert "write_kv(step, k, v, 0, 1, ('k', 'v'))" in lines
    assert lines[-1] == "logits = linear(x, lm_head [61, 32])"
    assert Counter(line.split("(")[0].split()[-1] for line in lines)["linear"] == 15


def test_every_op_has_a_contract_and_entries_can_be_replaced() -> None:
    names = [c.name for c in CONTRACTS]
    assert len(names) == len(set(names))
    assert set(REF) == set(names) - BESIDE
    spec, weights = specs.make("slots")
    seen: list[int] = []

    def add(x: Any, y: Any) -> Any:
        seen.append(len(x))
        return x + y

    ops = REF.replaced("mine", {"add": add})
    ids = tokens("slots", 9)
    np.testing.assert_array_equal(Paged(spec, weights, ops=ops).one_go("a", ids), NaiveModel(spec, weights).logits(ids))
    assert seen == [9] * 8
    with pytest.raises(AssertionError, match="atention"):
        REF.replaced("typo", {"atention": add})
    with pytest.raises(AssertionError, match="embed"):
        OpTable("short", {k: f for k, f in REF.items() if k != "embed"})


def test_the_reference_runs_without_torch() -> None:
    code = (
        "import sys, penstock.model.builder, penstock.ops.ref.attention.full, penstock.ops.ref.attention.online;"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_test_models_are_the_same_every_time() -> None:
    for name in specs.ALL:
        first, second = specs.make(name)[1], specs.make(name)[1]
        specs._weights.cache_clear()
        third = specs.make(name)[1]
        assert first is not second
        for key in first:
            np.testing.assert_array_equal(first[key], third[key])
