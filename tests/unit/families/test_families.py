"""Families: real folders are understood to the last field; whatever is not is refused in one line that names it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from penstock.base.errors import ModelError, UnsupportedError
from penstock.core.matrix_format import MatrixFormat, Shared
from penstock.core.model_spec import Attention, ModelSpec, Rope, weight_shapes
from penstock.core.protocols import ModelFamily
from penstock.families.checkpoint import Checkpoint
from penstock.families.llama import Llama
from penstock.families.quantization import read_method
from penstock.families.registry import ARCHITECTURES, FAMILIES, find_family, open_model, read_model
from tests.shared import shared
from tests.unit.formats.test_formats import refusal, write_llama2c, write_tokenizer

TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "intermediate_size": 12,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 16,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32",
}  # fmt: skip


def tiny_tensors(config: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Random float32 tensors under the names a LlamaForCausalLM of this config is saved with."""
    spec = Llama().spec(config)
    rng = np.random.default_rng(7)
    shapes = weight_shapes(spec)
    names = Llama().weight_map(spec)
    return {names[k]: rng.standard_normal(shape, dtype=np.float32) for k, shape in shapes.items()}


def write_folder(
    folder: Path, config: dict[str, Any] | None = None, tensors: dict[str, np.ndarray[Any, Any]] | None = None
) -> Path:
    """A model folder with one safetensors file; the tensors that `config` asks for unless they are given."""
    config = TINY if config is None else config
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tiny_tensors(config) if tensors is None else tensors, folder / "model.safetensors")
    return folder


def spec_of(**changes: Any) -> ModelSpec:
    return Llama().spec({k: v for k, v in (TINY | changes).items() if v is not ...})


def attention(spec: ModelSpec) -> Attention:
    mixer = spec.layers[0].mixer
    assert isinstance(mixer, Attention)
    return mixer


def rope_of(**changes: Any) -> Rope:
    rope = attention(spec_of(**changes)).rope
    assert rope is not None
    return rope


# --- real configurations


@pytest.mark.parametrize(("name", "num_params", "dtype"), [
    ("meta-llama--Llama-3.1-8B", 8_030_261_248, "bfloat16"),
    ("meta-llama--Meta-Llama-3.1-8B", 8_030_261_248, "bfloat16"),
    ("meta-llama--Llama-3.2-3B", 3_212_749_824, "bfloat16"),
    ("meta-llama--Meta-Llama-3.1-70B", 70_553_706_496, "bfloat16"),
    ("meta-llama--Meta-Llama-3.1-405B", 405_853_388_800, "bfloat16"),
    ("TinyLlama--TinyLlama-1.1B-Chat-v1.0", 1_100_048_384, "float32"),
])  # fmt: skip
def test_real_llama_configs_give_the_published_sizes(name: str, num_params: int, dtype: str) -> None:
    config = json.loads(shared("data", "configs", "model", f"{name}.config.json").read_text())
    spec = find_family(config).spec(config)
    assert spec.num_params == num_params
    assert spec.dtype == dtype
    assert spec.max_position == config["max_position_embeddings"]
    assert (spec.bos_token_id, spec.eos_token_ids) == (config["bos_token_id"], (config["eos_token_id"],))
    rope = attention(spec).rope
    assert rope is not None
    assert rope.theta == config["rope_theta"]
    if config["rope_scaling"] is not None:
        assert (rope.kind, rope.factor) == ("llama3", config["rope_scaling"]["factor"])
        assert (rope.low_freq_factor, rope.high_freq_factor, rope.original_max_position) == (1.0, 4.0, 8192)


def test_a_real_fp8_folder_is_known_though_its_config_hides_it(tmp_path: Path) -> None:
    name = "nvidia--Llama-3.1-70B-Instruct-FP8.config.json"
    config = shared("data", "configs", "model", name).read_text()
    assert "quantization" not in config
    (tmp_path / "config.json").write_text(config)
    quant = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "x"}, "quantization": quant}))
    stored = read_model(tmp_path).stored
    assert set(stored.values()) == {MatrixFormat("e4m3", 8, (Shared("float32", 0, 0),))}
    assert len(stored) == 80 * 7
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": quant | {"quant_algo": "W4A8_AWQ"}}))
    refusal(lambda: open_model(tmp_path), "W4A8_AWQ", "hf_quant_config.json", kind=UnsupportedError)


def test_quantization_configs_of_real_models_are_read() -> None:
    """Of models that Penstock may not run, too: what is refused is refused by name."""
    found: dict[str, str] = {}
    for path in sorted(shared("data", "configs", "model").glob("*.config.json")):
        config = json.loads(path.read_text())
        inner = config.get("text_config") or {}
        given = config.get("quantization_config") or inner.get("quantization_config")
        if not given:
            continue
        try:
            method = read_method(given, "here")
        except UnsupportedError as error:
            found[path.name] = str(error)
        else:
            found[path.name] = "unknown" if method is None else method.method
    refused = {name for name, what in found.items() if " " in what or what == "unknown"}
    assert not refused
    assert set(found.values()) >= {"fp8", "modelopt", "compressed-tensors", "mxfp4"}
    assert len(found) > 20


# --- the registry


def test_registry_and_families_agree() -> None:
    for name in FAMILIES:
        family: ModelFamily = FAMILIES.get(name)()
        assert family.name == name
        assert set(family.architectures) == {a for a, owner in ARCHITECTURES.items() if owner == name}
    assert set(ARCHITECTURES.values()) == set(FAMILIES)


def test_family_is_found_by_architecture_or_else_by_model_type() -> None:
    assert isinstance(find_family(TINY), Llama)
    assert isinstance(find_family({"model_type": "llama"}), Llama)
    assert isinstance(find_family({"architectures": ["LlamaForCausalLM"]}), Llama)
    refusal(lambda: find_family(TINY | {"model_type": "mistral"}), "'mistral'", "'LlamaForCausalLM'")
    for nothing in ({}, {"model_type": "gpt9"}, {"architectures": []}, {"architectures": "LlamaForCausalLM"},
                    {"model_type": ["llama"]}):  # fmt: skip
        refusal(lambda c=nothing: find_family(c), "no architecture", "LlamaForCausalLM")
    for odd in (["Llama\nForCausalLM"], [["LlamaForCausalLM"]], ["LlamaForCausalLM", "X"], [None]):
        refusal(lambda c=odd: find_family({"architectures": c}), "does not know", kind=UnsupportedError)


def test_weight_names_cover_every_weight_of_every_variant() -> None:
    for changes in ({}, {"attention_bias": True, "mlp_bias": True}, {"tie_word_embeddings": True}):
        spec = spec_of(**changes)
        names = Llama().weight_map(spec)
        assert set(names) == set(weight_shapes(spec))
        assert len(set(names.values())) == len(names)
    names = Llama().weight_map(spec_of(attention_bias=True, mlp_bias=True))
    assert names["layers.1.q"] == "model.layers.1.self_attn.q_proj.weight"
    assert names["layers.1.o.bias"] == "model.layers.1.self_attn.o_proj.bias"
    assert names["layers.0.gate.bias"] == "model.layers.0.mlp.gate_proj.bias"
    assert names["layers.0.ffn_norm"] == "model.layers.0.post_attention_layernorm.weight"


# --- config.json of the Llama family


def test_heads_may_be_grouped_single_or_full_and_of_any_size() -> None:
    assert attention(spec_of()).num_kv_heads == 2
    assert attention(spec_of(num_key_value_heads=1)).num_kv_heads == 1
    assert attention(spec_of(num_key_value_heads=...)).num_kv_heads == 4
    assert attention(spec_of(num_key_value_heads=None)).num_kv_heads == 4
    assert attention(spec_of()).head_dim == 2
    assert attention(spec_of(head_dim=6)).head_dim == 6
    assert attention(spec_of(head_dim=6)).rope == Rope(dim=6)
    assert attention(spec_of(hidden_size=9, head_dim=2)).head_dim == 2


def test_biases_ties_activations_and_ids() -> None:
    spec = spec_of(attention_bias=True, mlp_bias=True, tie_word_embeddings=True, hidden_act="gelu_new")
    assert (attention(spec).qkv_bias, attention(spec).o_bias, spec.layers[0].ffn.bias) == (True, True, True)
    assert spec.tie_embeddings
    assert spec.layers[0].ffn.activation == "gelu_tanh"
    assert spec.layers[0].ffn.gated
    assert not spec_of(tie_word_embeddings=...).tie_embeddings
    assert spec_of(eos_token_id=[2, 5, 2]).eos_token_ids == (2, 5)
    assert spec_of(eos_token_id=None, bos_token_id=None).eos_token_ids == ()
    assert spec_of(eos_token_id=None, bos_token_id=None).bos_token_id is None
    assert (spec_of(eos_token_id=...).eos_token_ids, spec_of(bos_token_id=...).bos_token_id) == ((2,), 1)
    assert spec_of(rms_norm_eps=1e-3).layers[1].norm.eps == spec_of(rms_norm_eps=1e-3).final_norm.eps == 1e-3
    assert spec_of(rms_norm_eps=...).final_norm.eps == 1e-6


def test_dtype_is_read_from_either_field() -> None:
    assert spec_of(torch_dtype="bfloat16").dtype == "bfloat16"
    assert spec_of(torch_dtype=..., dtype="torch.float16").dtype == "float16"
    refusal(lambda: spec_of(dtype="float16"), "dtype 'float16'", "torch_dtype 'float32'")
    refusal(lambda: spec_of(torch_dtype="float64"), "'float64'", kind=UnsupportedError)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def test_rope_in_the_old_and_the_new_layout() -> None:
    llama3 = Rope(kind="llama3", dim=2, theta=5e5, factor=8.0, original_max_position=8192)
    assert rope_of(rope_theta=5e5, rope_scaling=LLAMA3 | {"rope_type": "llama3"}) == llama3
    assert rope_of(rope_parameters=LLAMA3 | {"rope_type": "llama3", "rope_theta": 5e5}) == llama3
    assert rope_of(rope_theta=5e5, rope_parameters=LLAMA3 | {"rope_type": "llama3", "rope_theta": 5e5}) == llama3
    linear = Rope(kind="linear", dim=2, factor=2.0)
    assert rope_of(rope_scaling={"type": "linear", "factor": 2}) == linear
    assert rope_of(rope_scaling={"type": "linear", "rope_type": "linear", "factor": 2}) == linear
    for changes in ({}, {"rope_scaling": None}, {"rope_parameters": {}}, {"rope_scaling": {"rope_type": "default"}}):
        assert rope_of(rope_theta=7.0, **changes) == Rope(dim=2, theta=7.0)
    assert rope_of() == Rope(dim=2, theta=10000.0)
    assert rope_of(rope_parameters={"rope_theta": 7.0, "partial_rotary_factor": 1.0}) == Rope(dim=2, theta=7.0)
    assert rope_of(partial_rotary_factor=1.0) == Rope(dim=2)


@pytest.mark.parametrize(("changes", "culprit", "kind"), [
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "lacks original_max_position_embeddings", ModelError),
    ({"rope_scaling": {"type": "dynamic", "factor": 1.0}, "head_dim": 4}, "factor", ModelError),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "two pairs", ModelError),
    ({"rope_parameters": {"rope_type": "longrope"}}, "lacks short_factor", ModelError),
    ({"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0, 2.0]}}, "2 numbers",
     ModelError),
    ({"rope_scaling": {"rope_type": "mrope"}}, "'mrope'", UnsupportedError),
    ({"rope_scaling": {"type": "linear", "factor": 2.0, "mscale": 2}}, "'mscale'", UnsupportedError),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "'full_attention'", UnsupportedError),
    ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary", UnsupportedError),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", UnsupportedError),
    ({"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_theta": 1}}, "both", ModelError),
    ({"rope_scaling": {"type": "linear", "rope_type": "llama3"} | LLAMA3}, "two kinds", ModelError),
    ({"rope_theta": 1.0, "rope_parameters": {"rope_theta": 2.0}}, "rope_theta twice", ModelError),
    ({"rope_scaling": {"type": "linear"}}, "lacks factor", ModelError),
    ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor", ModelError),
    ({"rope_scaling": {"type": "linear", "factor": float("nan")}}, "factor", ModelError),
    ({"rope_scaling": {"type": "linear", "factor": 10**400}}, "factor", ModelError),
    ({"rope_scaling": LLAMA3 | {"type": "llama3", "high_freq_factor": 0.5}}, "high_freq_factor", ModelError),
    ({"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}},
     "lacks original_max_position_embeddings", ModelError),
    ({"rope_scaling": "linear"}, "rope_scaling", ModelError),
    ({"rope_theta": "big"}, "rope_theta", ModelError),
    ({"hidden_size": ...}, "lacks hidden_size", ModelError),
    ({"hidden_size": 8.0}, "hidden_size", ModelError),
    ({"hidden_size": -8}, "hidden_size", ModelError),
    ({"num_hidden_layers": True}, "num_hidden_layers", ModelError),
    ({"hidden_size": [8]}, "hidden_size as a list", ModelError),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers", ModelError),
    ({"num_hidden_layers": 0}, "num_hidden_layers", ModelError),
    ({"num_key_value_heads": 3}, "num_key_value_heads 3", ModelError),
    ({"num_attention_heads": 3, "num_key_value_heads": 1}, "num_attention_heads 3", ModelError),
    ({"num_attention_heads": 8, "num_key_value_heads": 8}, "head dimension 1", ModelError),
    ({"head_dim": 3}, "head dimension 3", ModelError),
    ({"max_position_embeddings": 2**31}, "max_position_embeddings", ModelError),
    ({"rms_norm_eps": "1e-5"}, "rms_norm_eps", ModelError),
    ({"attention_bias": 1}, "attention_bias", ModelError),
    ({"tie_word_embeddings": "no"}, "tie_word_embeddings", ModelError),
    ({"hidden_act": "geglu"}, "'geglu'", UnsupportedError),
    ({"hidden_act": ["silu"]}, "hidden_act", ModelError),
    ({"eos_token_id": 16}, "eos_token_id", ModelError),
    ({"eos_token_id": -1}, "eos_token_id", ModelError),
    ({"eos_token_id": [2, "3"]}, "eos_token_id", ModelError),
    ({"bos_token_id": [1, 2]}, "bos_token_id", ModelError),
    ({"sliding_window": 4096}, "'sliding_window' to '4096'", UnsupportedError),
    ({"logit_scale": 0.5}, "'logit_scale'", UnsupportedError),
    ({"embedding_multiplier": 0}, "'embedding_multiplier'", UnsupportedError),
    ({"rope_interleaved": True}, "'rope_interleaved'", UnsupportedError),
    ({"new\nfield": {"a": 1}}, "'new\\nfield'", UnsupportedError),
])  # fmt: skip
def test_what_the_llama_family_cannot_run_is_refused(
    changes: dict[str, Any], culprit: str, kind: type[ModelError]
) -> None:
    refusal(lambda: spec_of(**changes), culprit, kind=kind)


def test_unknown_fields_that_are_off_and_harmless_ones_pass() -> None:
    off = {"sliding_window": None, "rope_interleaved": False, "layer_types": [], "quirks": {}, "note": ""}
    harmless = {
        "use_cache": True,
        "pretraining_tp": 2,
        "pad_token_id": 0,
        "attention_dropout": 0.1,
        "auto_map": {"A": 1},
    }
    assert spec_of(**off, **harmless) == spec_of()


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=4)
    | st.sampled_from(["linear", "llama3"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["rope_type", "type", "factor", "rope_theta", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)
FIELDS = [
    *TINY,
    "rope_scaling",
    "rope_parameters",
    "rope_theta",
    "head_dim",
    "attention_bias",
    "mlp_bias",
    "dtype",
    "new",
]


@settings(max_examples=300, derandomize=True, deadline=None)
@given(changes=st.dictionaries(st.sampled_from(FIELDS), JSON, min_size=1, max_size=2))
def test_fuzz_config(changes: dict[str, Any]) -> None:
    message = ""
    try:
        config = TINY | changes
        spec = find_family(config).spec(config)
        assert set(Llama().weight_map(spec)) == set(weight_shapes(spec))
    except ModelError as error:
        message = str(error)
    assert message.isprintable(), message


# --- Hugging Face folders


def test_a_folder_is_opened(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 3], "temperature": 0.6}')
    checkpoint = open_model(str(folder))
    assert checkpoint == open_model(folder)
    assert isinstance(checkpoint, Checkpoint)
    assert checkpoint.path == folder
    assert {k: ref.tensor.shape for k, ref in checkpoint.weights.items()} == weight_shapes(checkpoint.spec)
    assert checkpoint.weights["layers.1.down"].tensor.name == "model.layers.1.mlp.down_proj.weight"
    assert checkpoint.spec.eos_token_ids == (2, 3)  # config.json knows of 2 only
    assert checkpoint.generation_config["temperature"] == 0.6
    assert checkpoint.tokenizer.kind == "none"
    assert "tokenizer.json" in checkpoint.tokenizer.reason


def test_a_missing_dtype_is_that_of_the_tensors(tmp_path: Path) -> None:
    config = {k: v for k, v in TINY.items() if k != "torch_dtype"}
    half = {k: v.astype(np.float16) for k, v in tiny_tensors(config).items()}
    assert open_model(write_folder(tmp_path / "m", config, half)).spec.dtype == "float16"


def test_tied_models_may_carry_a_copy_of_the_output_and_old_ones_rope_tables(tmp_path: Path) -> None:
    tied = TINY | {"tie_word_embeddings": True}
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(1, np.float32)}
    checkpoint = open_model(write_folder(tmp_path / "m", tied, tiny_tensors(TINY) | extra))
    assert "lm_head" not in checkpoint.weights
    assert len(checkpoint.weights) == len(weight_shapes(checkpoint.spec))


def test_tensors_must_be_the_expected_ones(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    whole = tiny_tensors(TINY)
    norm, head = "model.norm.weight", "lm_head.weight"
    cut = {k: v for k, v in whole.items() if k not in (norm, head)}
    refusal(lambda: open_model(write_folder(folder, TINY, cut)), f"2 of the {len(whole)}", f"'{norm}'")
    bias = {"model.layers.0.self_attn.q_proj.bias": np.ones(8, np.float32)}
    refusal(lambda: open_model(write_folder(folder, TINY, whole | bias)), *bias, kind=UnsupportedError)
    third = {"model.layers.2.self_attn.q_proj.weight": np.ones((8, 8), np.float32)}
    refusal(lambda: open_model(write_folder(folder, TINY, whole | third)), *third, kind=UnsupportedError)
    turned = whole | {"model.layers.1.mlp.up_proj.weight": whole["model.layers.1.mlp.up_proj.weight"].T.copy()}
    refusal(lambda: open_model(write_folder(folder, TINY, turned)), "up_proj", "(8, 12)", "(12, 8)")
    double = whole | {norm: whole[norm].astype(np.float64)}
    refusal(lambda: open_model(write_folder(folder, TINY, double)), norm, "F64", kind=UnsupportedError)


def test_sharded_folders_are_opened_and_pickles_are_not(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    whole = open_model(folder)
    tensors = tiny_tensors(TINY)
    (folder / "model.safetensors").rename(folder / "pytorch_model.safetensors")
    refusal(lambda: open_model(folder), "'pytorch_model.safetensors'", "model.safetensors.index.json")
    (folder / "pytorch_model.safetensors").unlink()
    refusal(lambda: open_model(folder), "no model.safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"PK\3\4")
    refusal(lambda: open_model(folder), "'pytorch_model.bin'", "convert it to safetensors", kind=UnsupportedError)
    weight_map = {}
    for i, name in enumerate(tensors):
        shard = f"model-{i % 3}.safetensors"
        weight_map[name] = shard
    for shard in set(weight_map.values()):
        save_file({k: v for k, v in tensors.items() if weight_map[k] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    sharded = open_model(folder)
    assert sharded.spec == whole.spec
    assert {k: r.tensor.shape for k, r in sharded.weights.items()} == {
        k: r.tensor.shape for k, r in whole.weights.items()
    }
    assert len({ref.tensor.path for ref in sharded.weights.values()}) == 3
    (folder / "model-1.safetensors").unlink()
    refusal(lambda: open_model(folder), "1 of 3 shards", "'model-1.safetensors'")


@pytest.mark.parametrize(("quantization", "method"), [
    ({"quant_method": "gptq", "bits": 4}, "'gptq'"), ({"quant_algo": "W4A8_AWQ"}, "W4A8_AWQ"),
    ({"quant_method": "aqlm"}, "'aqlm'"), ({"bits": 4}, "unnamed"),
    ([1], "unnamed"),
])  # fmt: skip
def test_quantised_folders_are_refused_by_method(tmp_path: Path, quantization: object, method: str) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "config.json").write_text(json.dumps(TINY | {"quantization_config": quantization}))
    refusal(lambda: open_model(folder), "quantised", method, kind=UnsupportedError)


def test_remote_code_is_never_run(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "modeling_evil.py").write_text("raise SystemExit('ran')")
    auto_map = {"auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil"}}
    (folder / "config.json").write_text(json.dumps(TINY | auto_map))
    assert open_model(folder).spec == spec_of()
    (folder / "config.json").write_text(json.dumps(TINY | auto_map | {"architectures": ["Evil"]}))
    refusal(lambda: open_model(folder), "'Evil'", "nearest names", "never run", kind=UnsupportedError)


@pytest.mark.parametrize(("config", "culprit"), [
    (b"{", "not JSON"), (b"[]", "a list"), (b"\xff", "not UTF-8"), (b'{"a":' * 9999, "too deeply"),
    (b'{"model_type":"llama","model_type":"gpt2"}', "'model_type' twice"),
])  # fmt: skip
def test_a_broken_config_is_refused(tmp_path: Path, config: bytes, culprit: str) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "config.json").write_bytes(config)
    refusal(lambda: open_model(folder), "config.json", culprit)


def test_a_bad_end_token_in_generation_config_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 99]}')
    refusal(lambda: open_model(folder), "generation_config.json", "eos_token_id")


def test_tokenizer_files_are_found(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "tokenizer.model").write_bytes(b"x")
    assert open_model(folder).tokenizer.kind == "sentencepiece"
    (folder / "tokenizer.json").write_text("{}")
    tokenizer = open_model(folder).tokenizer
    assert (tokenizer.kind, tokenizer.path, tokenizer.config) == ("hf", folder / "tokenizer.json", {})
    assert tokenizer.chat_template is None
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    for value, template in (("{{ x }}", "{{ x }}"), (named, "D"), (named[:1], None)):
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": value, "add_bos_token": True}))
        tokenizer = open_model(folder).tokenizer
        assert tokenizer.chat_template == template
        assert tokenizer.config["add_bos_token"] is True
    (folder / "tokenizer_config.json").write_text('{"chat_template": 3}')
    refusal(lambda: open_model(folder), "chat_template")
    (folder / "chat_template.jinja").write_text("{{ from_file }}")
    assert open_model(folder).tokenizer.chat_template == "{{ from_file }}"
    (folder / "chat_template.jinja").write_bytes(bytes(4 * 1024 * 1024 + 1))
    refusal(lambda: open_model(folder), "chat_template.jinja", "at most")


def test_real_tokenizer_configs_are_read(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    paths = sorted(shared("data", "configs", "chat").glob("*.tokenizer_config.json"))
    with_template = 0
    for path in paths:
        (folder / "tokenizer_config.json").write_bytes(path.read_bytes())
        tokenizer = open_model(folder).tokenizer
        assert tokenizer.config == json.loads(path.read_text())
        with_template += tokenizer.chat_template is not None
    assert len(paths) >= 14
    assert with_template >= 8


# --- llama2.c, and paths that hold no model


def test_llama2c_folder_and_file(tmp_path: Path) -> None:
    arrays = write_llama2c(tmp_path / "m.bin", tied=False)
    write_tokenizer(tmp_path / "tok.bin", [(b"%d" % i, 0.0) for i in range(16)])
    write_tokenizer(tmp_path / "other.bin", [(b"%d" % i, 0.0) for i in range(17)])
    checkpoint = open_model(tmp_path)
    assert open_model(tmp_path / "m.bin") == checkpoint
    assert checkpoint.path == tmp_path / "m.bin"
    assert (checkpoint.tokenizer.kind, checkpoint.tokenizer.path) == ("llama2c", tmp_path / "tok.bin")
    spec = checkpoint.spec
    assert (spec.family, spec.max_position, spec.bos_token_id, set(spec.eos_token_ids)) == ("llama", 10, 1, {1, 2})
    assert not spec.tie_embeddings
    assert attention(spec).rope == Rope(dim=2, theta=10000.0, interleaved=True)
    assert (spec.final_norm.eps, spec.layers[0].norm.eps, spec.layers[0].ffn.activation) == (1e-5, 1e-5, "silu")
    data = (tmp_path / "m.bin").read_bytes()
    for logical, name in (("gate", "w1"), ("down", "w2"), ("up", "w3"), ("k", "wk"), ("attn_norm", "att_norm")):
        ref = checkpoint.weights[f"layers.1.{logical}"].tensor
        assert data[ref.offset : ref.offset + ref.nbytes] == arrays[name][1].tobytes()
        assert ref.shape == arrays[name][1].shape
    ref = checkpoint.weights["lm_head"].tensor
    assert data[ref.offset : ref.offset + ref.nbytes] == arrays["wcls"].tobytes()


def test_llama2c_folders_that_are_ambiguous_or_incomplete(tmp_path: Path) -> None:
    write_llama2c(tmp_path / "m.bin")
    assert open_model(tmp_path).tokenizer.kind == "none"
    assert "16 tokens" in open_model(tmp_path).tokenizer.reason
    tokens = [(b"%d" % i, 0.0) for i in range(16)]
    write_tokenizer(tmp_path / "tok1.bin", tokens)
    write_tokenizer(tmp_path / "tok2.bin", tokens)
    refusal(lambda: open_model(tmp_path), "'tok1.bin', 'tok2.bin'")
    write_tokenizer(tmp_path / "tokenizer.bin", tokens)
    assert open_model(tmp_path).tokenizer.path == tmp_path / "tokenizer.bin"
    write_llama2c(tmp_path / "n.bin")
    refusal(lambda: open_model(tmp_path), "'m.bin', 'n.bin'", "name the file")
    assert open_model(tmp_path / "n.bin").path == tmp_path / "n.bin"
    for name in ("m.bin", "n.bin"):
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-4])
    refusal(lambda: open_model(tmp_path), "neither a config.json nor a llama2.c model", "m.bin")


def test_the_real_stories_folder() -> None:
    folder = shared("models", "stories260K")
    checkpoint = open_model(folder)  # beside an int8 model, which is not a version 0 file
    assert checkpoint.path == folder / "stories260K.bin"
    assert checkpoint.tokenizer.path == folder / "tok512.bin"
    assert checkpoint.spec.num_params == 260_032
    assert checkpoint.spec.tie_embeddings
    assert open_model(folder / "stories260K-q8.bin").spec == checkpoint.spec
    refusal(lambda: open_model(folder / "reference_greedy.txt"), "reference_greedy.txt", "name the folder")


def test_paths_that_hold_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    refusal(lambda: open_model("org/name-1.5"), "'org/name-1.5'", "no model at")
    refusal(lambda: open_model("./org/name"), "no model at './org/name'")
    refusal(lambda: open_model("/no/such\nplace"), "'/no/such\\nplace'")
    refusal(lambda: open_model("a\0b"), "no model at")
    refusal(lambda: open_model(""), "no model was named")
    refusal(lambda: open_model(tmp_path), "neither a config.json nor a llama2.c model")
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\3\4" + bytes(100))
    refusal(lambda: open_model(tmp_path), "convert it to safetensors", kind=UnsupportedError)
    refusal(lambda: open_model(tmp_path / "pytorch_model.bin"), "convert it to safetensors", kind=UnsupportedError)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    refusal(lambda: open_model(tmp_path), "m.gguf", "not a GGUF file")
    refusal(lambda: open_model(tmp_path / "m.gguf"), "m.gguf", "not a GGUF file")
    (tmp_path / "org").mkdir()
    os.mkfifo(tmp_path / "org" / "m.bin")
    refusal(lambda: open_model("org"), "not a regular file")


def test_opening_a_model_needs_no_torch(tmp_path: Path) -> None:
    write_folder(tmp_path / "m")
    code = (
        "import sys; from penstock.families.registry import open_model as om; from penstock.weights.load import *;"
        "c = om(sys.argv[1]); load_weights(c, c.spec, 'float32'); print('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path / "m")], capture_output=True, text=True, timeout=60)
    assert run.stdout == "False\n", run.stderr
