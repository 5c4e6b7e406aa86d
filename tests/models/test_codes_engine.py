"""GPTQ and AWQ through the whole engine: what a checkpoint of codes says is what one of their values says."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from penstock import LLM, SamplingParams
from penstock.backends import BACKENDS
from penstock.backends.native import backend as native_backend
from penstock.backends.native.backend import NOT_BUILT
from penstock.backends.native.forward import NativeForward
from penstock.backends.reference import BlasBackend
from penstock.config import from_kwargs
from penstock.core.matrix_format import NONE, parse_scheme, row_matrices
from penstock.core.model_spec import Experts, ModelSpec, cache_groups, weight_shapes
from penstock.eval.scorer import LoadedModel, ProgramScorer, load, make_scorer, weight_sizes
from penstock.families.registry import find_family, open_model, read_model
from penstock.model.builder import build
from penstock.ops.blas import BLAS
from penstock.ops.native.abi import Act, Format
from penstock.ops.native.library import best_library, libraries, open_library
from penstock.ops.native.matrix import order
from penstock.ops.native.program import Pool
from penstock.ops.stored import StoredMatrix
from penstock.plan.weights import hold_weights
from penstock.weights.load import load_weights
from tests import specs
from tests.codes import MODEL, Kind, coded, write
from tests.native.running import each_isa
from tests.quantised import write as write_quantised
from tests.unit.weights.test_oracles import CASES

KINDS = {
    "symmetric": Kind(), "act-order": Kind(ordered=True), "asymmetric": Kind(symmetric=False, version=2),
    "whole rows": Kind(group=-1, lm_head=True), "8 bits": Kind(bits=8, ordered=True), "awq": Kind("awq"),
}  # fmt: skip
OPS = ["ref", pytest.param("native", marks=pytest.mark.skipif(best_library() is None, reason=NOT_BUILT))]
SMALL: dict[str, Any] = {
    "skip_tokenizer_init": True, "num_gpu_blocks_override": 32, "max_num_seqs": 4, "threads": 1,
    "activation_quantization": "none",
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("codes")
    return {name: write(root / name, kind) for name, kind in KINDS.items()}


def tokens(folder: Path, vocab: int = 48, **more: Any) -> list[list[int]]:
    rng = random.Random(3)
    prompts = [[rng.randrange(3, vocab) for _ in range(n)] for n in (1, 3, 8, 13)]
    llm = LLM(folder, **SMALL | more)
    found = llm.generate([{"prompt_token_ids": p} for p in prompts], SamplingParams(temperature=0, max_tokens=24))
    return [output.outputs[0].token_ids for output in found]


def dense_of(folder: Path) -> Path:
    return folder.with_name(folder.name + "-dense")


@pytest.mark.parametrize("ops", [*OPS, "blas"])
@pytest.mark.parametrize("name", list(KINDS))
def test_codes_and_their_values_say_the_same(folders: dict[str, Path], name: str, ops: str) -> None:
    want = tokens(dense_of(folders[name]), ops="ref", dtype="float32")
    assert len({tuple(t) for t in want}) == 4
    assert tokens(folders[name], ops=ops, dtype="float32") == want


@pytest.mark.parametrize("case", [
    "gptq: 3 bits act-order", "compressed-tensors: 4 bits float16", "compressed-tensors: nvfp4", "bitsandbytes: nf4",
    "hqq: 4 bits", "modelopt: fp8", "bitsandbytes: nf4 across rows",
])  # fmt: skip
def test_a_matrix_of_any_library_says_the_same_on_all_operations(tmp_path: Path, case: str) -> None:
    """Held as it is stored by the reference, natively by panels of its codes, or as its values."""
    checkpoint = open_model(write_quantised(tmp_path / "m", CASES[case]))
    values = load_weights(checkpoint, checkpoint.spec, "float32")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "dense").mkdir()
    (tmp_path / "dense" / "config.json").write_text(json.dumps(config))
    places = find_family(config).weight_map(checkpoint.spec)
    save_file(
        {str(places[n]): np.ascontiguousarray(x) for n, x in values.items()}, tmp_path / "dense" / "model.safetensors"
    )
    want = tokens(tmp_path / "dense", 16, ops="ref", dtype="float32")
    for ops in ["ref", *(["native"] if best_library() is not None else [])]:
        assert tokens(tmp_path / "m", 16, ops=ops, dtype="float32") == want


def native_of(folder: Path, isa: str) -> tuple[NativeForward, dict[str, Any]]:
    checkpoint = open_model(folder)
    held = hold_weights(
        checkpoint.spec, "float32", NONE, checkpoint.stored, traits=BACKENDS.traits("native"), exact=True
    )
    weights = load_weights(checkpoint, checkpoint.spec, held)
    groups = cache_groups(checkpoint.spec, "float32")
    graph = build(checkpoint.spec, weights, groups, max_model_len=32)
    pool = Pool(open_library(libraries()[isa]), 1)
    return NativeForward(graph, groups, pool, NONE, max_tokens=8), weights


@each_isa
@pytest.mark.parametrize("name", list(KINDS))
def test_panels_hold_the_stored_codes_exactly(folders: dict[str, Path], name: str, isa: str) -> None:
    forward, weights = native_of(folders[name], isa)
    coded = {n for n, w in weights.items() if isinstance(w, StoredMatrix)}
    assert len(coded) == 14 + KINDS[name].lm_head
    for label, packed in forward.matrices.items():
        parts = [weights[n] for n in label.split()]
        if not isinstance(parts[0], StoredMatrix):
            continue
        assert packed.struct.format == Format.BLOCK
        where = order([w.shape[0] for w in parts], bool(packed.struct.pair))
        values = np.concatenate([w.values() for w in parts])
        want = np.where(where[:, None] < 0, np.float32(0), values[where])
        inputs = slice(None) if packed.order is None else packed.order
        np.testing.assert_array_equal(packed.values(forward.pool.library), want[:, inputs], err_msg=label)
    if not KINDS[name].ordered:
        assert {"layers.0.q layers.0.k layers.0.v", "layers.0.gate layers.0.up"} <= set(forward.matrices)


@pytest.mark.skipif(best_library() is None, reason=NOT_BUILT)
@pytest.mark.parametrize("name", ["symmetric", "act-order", "awq", "8 bits"])
def test_tokens_of_rounded_activations_depend_on_nothing_else(folders: dict[str, Path], name: str) -> None:
    more: dict[str, Any] = {"ops": "native", "dtype": "float32", "activation_quantization": "int8"}
    want = tokens(folders[name], **more)
    assert tokens(folders[name], **more | {"threads": 2, "max_num_seqs": 1}) == want
    assert tokens(folders[name], **more | {"max_num_batched_tokens": 4, "block_size": 4}) == want
    (said,) = (d for d in LLM(folders[name], **SMALL | more).engine.decisions if d.name == "activation_quantization")
    assert said.value == "int8"
    assert "per 32 inputs" in said.why


@pytest.mark.skipif(best_library() is None, reason=NOT_BUILT)
def test_what_is_of_different_codes_lies_side_by_side_and_starts_again_from_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """v has 8 bits, q and k have 4. The second start finds the same matrices packed."""
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(native_backend, "SMALL_BYTES", 0)
    name = "model.layers.1.self_attn.v_proj."
    parts, values = coded_matrix(32, 64, Kind(bits=8, group=32))
    folder = write(tmp_path / "m", Kind(), **{name + part: value for part, value in parts.items()})
    dense = load_file(dense_of(folder) / "model.safetensors")
    save_file(dense | {name + "weight": values}, dense_of(folder) / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["dynamic"] = {"+:.*v_proj": {"bits": 8}}
    (folder / "config.json").write_text(json.dumps(config))
    forward, weights = native_of(folder, best_library().pst_isa_name().decode())
    assert {"layers.1.q layers.1.k", "layers.1.v", "layers.0.q layers.0.k layers.0.v"} <= set(forward.matrices)
    assert "linear layers.1.q layers.1.k layers.1.v" in forward.describe()
    assert isinstance(weights["layers.1.v"], StoredMatrix)
    want = tokens(dense_of(folder), ops="ref", dtype="float32")
    for _ in range(2):
        assert tokens(folder, ops="native", dtype="float32") == want
        assert len(list((tmp_path / "cache").rglob("*.pst"))) == 1
    # Rounded weights, another type of the rest, rounded activations: other bytes, so other files.
    others: list[dict[str, str]] = [
        {"quantization": "int4-w4a8:32"}, {"dtype": "float16"}, {"activation_quantization": "int8"},
    ]  # fmt: skip
    for count, more in enumerate(others, 2):
        first = tokens(folder, ops="native", **{"dtype": "float32"} | more)
        assert tokens(folder, ops="native", **{"dtype": "float32"} | more) == first
        assert len(list((tmp_path / "cache").rglob("*.pst"))) == count


@pytest.mark.skipif(best_library() is None, reason=NOT_BUILT)
def test_a_second_start_reads_no_codes_and_holds_each_number_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tied table of codes is looked up in the panels that it is multiplied with."""
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(native_backend, "SMALL_BYTES", 0)
    name = "model.embed_tokens."
    parts, _ = coded_matrix(48, 64, Kind())
    changes: dict[str, Any] = {name + part: value for part, value in parts.items()} | {name + "weight": None}
    folder = write(tmp_path / "m", Kind(), MODEL | {"tie_word_embeddings": True}, **changes)
    more: dict[str, Any] = {"ops": "native", "activation_quantization": "int8"}
    want = tokens(folder, **more)
    for memory in ("copied", "mapped"):
        assert tokens(folder, **more, packed_weights=memory) == want
    llm = LLM(folder, **SMALL | more)
    assert llm.engine.plan.held.matrices["embed"].bits == 4
    (only,) = (tmp_path / "cache").rglob("*.pst")
    assert only.stat().st_size < 100_000
    # A scheme rounds what is multiplied with; the table that is looked up in is not in the file.
    rounded = tokens(folder, **more, quantization="int4-w4a8:64")
    assert tokens(folder, **more, quantization="int4-w4a8:64") == rounded
    assert len(list((tmp_path / "cache").rglob("*.pst"))) == 2
    checkpoint = open_model(folder)
    scheme = parse_scheme("int4-w4a8:64")
    held = hold_weights(
        checkpoint.spec, "float32", scheme, checkpoint.stored, traits=BACKENDS.traits("native"), exact=True
    )
    weights = load_weights(checkpoint, checkpoint.spec, held)
    assert held.beside == ("embed",)
    assert isinstance(weights["embed"], np.ndarray)
    assert isinstance(weights["layers.0.q"], StoredMatrix), "rounded from its codes, once"


@pytest.mark.skipif(best_library() is None, reason=NOT_BUILT)
def test_what_a_checkpoint_spared_starts_again_from_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """q and k are codes, v has always been 16 bits: they share no matrix, at no start."""
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(native_backend, "SMALL_BYTES", 0)
    spared: dict[str, Any] = {}
    for i in range(2):
        name = f"model.layers.{i}.self_attn.v_proj."
        values = np.random.default_rng(i).standard_normal((32, 64)).astype(np.float16)
        spared |= {name + part: None for part in ("qweight", "qzeros", "scales")} | {name + "weight": values}
    folder = write(tmp_path / "m", Kind("awq"), **spared)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["v_proj", "lm_head"]
    (folder / "config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_model(tmp_path).stored == open_model(folder).stored
    assert len(open_model(folder).stored) == 12
    first = tokens(folder, ops="native")
    assert len(list((tmp_path / "cache").rglob("*.pst"))) == 1
    assert tokens(folder, ops="native") == first


def coded_matrix(n: int, k: int, kind: Kind) -> Any:
    return coded(np.random.default_rng(2), n, k, kind)


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("tied", [True, False])
def test_a_table_of_codes_is_looked_up_in_its_values(tmp_path: Path, tied: bool, ops: str) -> None:
    name = "model.embed_tokens."
    parts, values = coded_matrix(48, 64, Kind())
    changes: dict[str, Any] = {name + part: value for part, value in parts.items()} | {name + "weight": None}
    folder = write(tmp_path / "m", Kind(), MODEL | {"tie_word_embeddings": tied}, **changes)
    dense = load_file(dense_of(folder) / "model.safetensors")
    save_file(dense | {name + "weight": values}, dense_of(folder) / "model.safetensors")
    want = tokens(dense_of(folder), ops="ref", dtype="float32")
    assert tokens(folder, ops=ops, dtype="float32") == want
    if ops == "native":
        assert tokens(folder, ops=ops, dtype="float32", quantization="int4-wo:32")


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("kind", ["symmetric", "act-order", "asymmetric", "awq"])
def test_experts_are_codes_too(
    tmp_path: Path, kind: str, ops: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Qwen3's mixture: codes of every expert, each with an order of inputs of its own if there is one; a router that is
    none. What is packed is found again on the disk."""
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(native_backend, "SMALL_BYTES", 0)
    config = MODEL | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "moe_intermediate_size": 32,
        "num_experts": 3, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "norm_topk_prob": True, "head_dim": 16,
    }  # fmt: skip
    family = find_family(config)
    spec = family.spec(config)
    names, rng = family.weight_map(spec), np.random.default_rng(1)
    stored: dict[str, Any] = {}
    dense: dict[str, Any] = {}
    for logical, shape in weight_shapes(spec).items():
        at = names[logical]
        assert isinstance(at, str)
        if len(shape) == 2 and logical.startswith("layers.") and "router" not in logical:
            parts, dense[at] = coded(rng, shape[0], shape[1], KINDS[kind])
            stored |= {at.removesuffix("weight") + part: value for part, value in parts.items()}
        else:
            stored[at] = dense[at] = rng.standard_normal(shape, dtype=np.float32)
    for folder, tensors, more in (("m", stored, {"quantization_config": KINDS[kind].config}), ("m-dense", dense, {})):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps(config | more))
        save_file(tensors, tmp_path / folder / "model.safetensors")
    assert any(isinstance(layer.ffn, Experts) for layer in spec.layers)
    assert any(".experts.2." in name for name in open_model(tmp_path / "m").stored)
    want = tokens(tmp_path / "m-dense", dtype="float32", ops="ref")
    for memory in ("copied", "mapped"):
        assert tokens(tmp_path / "m", dtype="float32", ops=ops, packed_weights=memory) == want
    assert len(list((tmp_path / "cache").rglob("*.pst"))) == (ops == "native")
    if ops != "native":
        return
    # Rounded anew from their codes, and the same again from the disk; the router is not rounded.
    rounded = tokens(tmp_path / "m", dtype="float32", ops=ops, quantization="int8-w8a8")
    assert tokens(tmp_path / "m", dtype="float32", ops=ops, quantization="int8-w8a8") == rounded
    forward, _ = native_of(tmp_path / "m", best_library().pst_isa_name().decode())
    assert forward.matrices["layers.0.router"].struct.act == Act.F32
    expert = next(m for name, m in forward.matrices.items() if name.startswith("layers.0.experts.0.down"))
    assert expert.count == 3


@pytest.mark.parametrize("ops", OPS)
def test_a_draft_model_of_codes_drafts_as_its_values_do(folders: dict[str, Path], ops: str) -> None:
    """Greedy tokens are the target's whoever drafts; that drafts are right shows that the draft model computes."""
    target = dense_of(folders["symmetric"])
    llm = LLM(
        target, **SMALL, ops=ops, dtype="float32",
        speculative_config={"method": "draft-model", "model": str(folders["symmetric"]), "num_speculative_tokens": 3},
    )  # fmt: skip
    assert len(llm.engine.plan.drafts[0].held.matrices) == 14
    params = SamplingParams(temperature=0, max_tokens=24)
    (found,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], params)
    plain = LLM(target, **SMALL, ops=ops, dtype="float32")
    (want,) = plain.generate([{"prompt_token_ids": [5, 6, 7]}], params)
    assert found.outputs[0].token_ids == want.outputs[0].token_ids


# --- evaluation reads the same decision


@pytest.mark.parametrize("name", [*specs.ALL])
def test_the_matrices_that_a_plan_counts_are_those_that_the_program_multiplies(name: str) -> None:
    spec, weights = specs.make(name)
    met: set[int] = set()

    def linear(x: Any, weight: Any, bias: Any = None) -> Any:
        met.add(id(weight))
        return np.zeros((len(x), len(weight)), np.float32)

    ops = BLAS.replaced("names", {"linear": linear}, batch_invariant=False)
    run_one_token(spec, weights, ops)
    multiplied = {n for n, w in weights.items() if id(w) in met or (w.ndim == 2 and ".experts." in n)}
    assert set(row_matrices(spec)) == multiplied


def run_one_token(spec: ModelSpec, weights: Any, ops: Any) -> None:
    model = LoadedModel("m", spec, weights, "float32", "float32", 32)
    ProgramScorer(model, BlasBackend(table=ops)).logits([0])


@pytest.mark.parametrize("ops", OPS)
def test_an_evaluation_measures_codes_as_the_engine_holds_them(folders: dict[str, Path], ops: str) -> None:
    model = load(
        from_kwargs(
            model=str(folders["symmetric"]), ops=ops, dtype="float32", skip_tokenizer_init=True,
            activation_quantization="none",
        )
    )  # fmt: skip
    dense = load(from_kwargs(model=str(dense_of(folders["symmetric"])), ops=ops, skip_tokenizer_init=True))
    ids = [1, 7, 9, 30, 2, 2, 11]
    want = make_scorer(dense, NONE).logits(ids)
    assert np.abs(make_scorer(model, NONE).logits(ids) - want).max() < 2e-4 * np.abs(want).max()
    sizes = weight_sizes(model, NONE)
    assert 4 < sizes.bits_per_weight < weight_sizes(dense, NONE).bits_per_weight / 1.5
    # The scheme of the checkpoint's own groups rounds its codes not again, another does; the lm_head it rounds.
    schemes = [parse_scheme(name) for name in ("int4-wo:32", "int4-wo")]
    exact, again = (np.abs(make_scorer(model, scheme).logits(ids) - want).max() for scheme in schemes)
    assert 0 < exact < again
