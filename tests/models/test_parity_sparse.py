"""Families with experts and with latent attention, against transformers (catalogue rows C65, C04, C85)."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from penstock.backends.native.obstacle import native_obstacle
from penstock.base.errors import ModelError
from penstock.core.model_spec import Attention, Experts, FeedForward, Layer, ModelSpec, cache_spec, weight_shapes
from penstock.families.registry import find_family, open_model
from penstock.ops.ref.experts import ExpertWeights, route
from penstock.ops.ref.experts import experts as run_experts
from penstock.ops.ref.product import linear
from penstock.plan.flops import model_work
from penstock.weights.load import load_weights
from tests import specs
from tests.models.parity import VOCAB, check, random_model, save
from tests.oracle import chosen_experts
from tests.paged import Paged

BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 43, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 192, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
MLA = {
    "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 21,
    "kv_lora_rank": 12, "q_lora_rank": 9, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5,
    "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
}  # fmt: skip
# With few heads scores of zero are many, and of equal ones torch takes any.
INDEX = {"index_n_heads": 24, "index_head_dim": 6, "index_topk": 9}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 5}),
    "mixtral-window": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 3, "sliding_window": 7}),
    "qwen2_moe": (
        "Qwen2Moe",
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 21,
         "shared_expert_intermediate_size": 23},
    ),
    "qwen2_moe-window-mixed": (
        "Qwen2Moe",
        {"num_experts": 4, "moe_intermediate_size": 21, "shared_expert_intermediate_size": 23, "num_experts_per_tok": 2,
         "norm_topk_prob": True, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2,
         "mlp_only_layers": [1]},
    ),
    "qwen3_moe": (
        "Qwen3Moe", {"num_experts": 6, "moe_intermediate_size": 21, "num_experts_per_tok": 2, "head_dim": 10}
    ),
    "qwen3_moe-step": (
        "Qwen3Moe",
        {"num_experts": 4, "moe_intermediate_size": 21, "num_experts_per_tok": 4, "head_dim": 8,
         "norm_topk_prob": True, "decoder_sparse_step": 2, "attention_bias": True, "rope_parameters": YARN},
    ),
    "olmoe": ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 2}),
    "olmoe-clip": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "clip_qkv": 0.7}),
    "gpt_oss": ("GptOss", {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 9}),
    "gpt_oss-yarn": (
        "GptOss",
        {"num_local_experts": 4, "num_experts_per_tok": 3, "head_dim": 10, "sliding_window": 5, "swiglu_limit": 0.8,
         "rope_parameters": YARN | {"truncate": False}},
    ),
    "glm4_moe": ("Glm4Moe", {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 21,
                             "head_dim": 8, "first_k_dense_replace": 1, "use_qk_norm": True}),
    "minimax_m2": ("MiniMaxM2", {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 8}),
    "phimoe": ("Phimoe", {"num_local_experts": 6, "router_jitter_noise": 0.15, "attention_bias": True,
                          "lm_head_bias": True, "sliding_window": 11}),
    "phimoe-longrope": (
        "Phimoe",
        {"num_local_experts": 4, "router_jitter_noise": 0.3, "hidden_size": 32, "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [1.5, 2.0, 3.0, 4.0], "short_mscale": 1.2, "long_mscale": 1.2, "factor": 4.0,
            "original_max_position_embeddings": 192}},  # transformers takes the short factors for any length
    ),
    "mimo_v2_flash": (
        "MiMoV2Flash",
        {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 21, "head_dim": 12, "v_head_dim": 5,
         "sliding_window": 9, "num_key_value_heads": 1, "n_group": 2, "routed_scaling_factor": 1.7, "rope_parameters": {
             "full_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
             "sliding_attention": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}}},
    ),
    "llama4": (
        "Llama4",
        {"num_local_experts": 4, "head_dim": 8, "intermediate_size_mlp": 37, "attention_chunk_size": 16,
         "floor_scale": 8, "num_hidden_layers": 4, "interleave_moe_layer_step": 2},
    ),
    "deepseek_v2": ("DeepseekV2", MLA | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5}),
    "deepseek_v2-lite": ("DeepseekV2", MLA | {"q_lora_rank": None, "n_group": None, "topk_group": None}),
    "deepseek_v2-yarn": (
        "DeepseekV2", MLA | {"topk_method": "greedy", "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}}
    ),
    "deepseek_v3": ("DeepseekV3", MLA),
    "deepseek_v32": ("DeepseekV32", MLA | INDEX),
    "deepseek_v32-yarn": (
        "DeepseekV32",
        MLA | INDEX | {"index_topk": 200, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}},
    ),
    "glm_moe_dsa": ("GlmMoeDsa", MLA | INDEX | {"n_group": 1, "topk_group": 1}),
    "glm_moe_dsa-shared": (
        "GlmMoeDsa", MLA | INDEX | {"num_hidden_layers": 5, "index_topk": 11,
                                    "indexer_types": ["full", "shared", "full", "shared", "shared"]},
    ),
    "deepseek_v3-yarn": (
        "DeepseekV3",
        MLA | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "attention_bias": True,
               "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}},
    ),
}  # fmt: skip


def make(case: str) -> Any:
    name, changes = CASES[case]
    config_class = "Llama4TextConfig" if name == "Llama4" else f"{name}Config"
    config = getattr(transformers, config_class)(**{**BASE, **changes})
    model = random_model(getattr(transformers, f"{name}ForCausalLM"), config, seed=len(case))
    # The plain loop over experts: the grouped product that is the default has no float64.
    model.set_experts_implementation("eager")
    for key, buffer in model.named_buffers():
        if key.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.3)
    return model


@pytest.mark.parametrize("case", CASES)
def test_sparse_families_equal_transformers(case: str, tmp_path: Path) -> None:
    model = make(case)
    save(model, tmp_path)
    found = check(tmp_path, model, count_params=False)
    assert native_obstacle(found.spec) is None, "all of it runs natively, so the check did that, too"


def test_experts_of_real_sizes_are_counted() -> None:
    """Every weight of every expert has a name: 128 experts in 4 layers of Qwen3-MoE, 3 matrices each."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 97, "hidden_size": 32,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_experts": 128, "moe_intermediate_size": 16,
        "max_position_embeddings": 64,
    }  # fmt: skip
    spec = find_family(config).spec(config)
    experts = [shape for name, shape in weight_shapes(spec).items() if ".experts." in name]
    assert len(experts) == 4 * 128 * 3
    assert {prod(shape) for shape in experts} == {16 * 32}


def test_C04_latent_cache_holds_the_latent_and_the_rotary_key_alone(tmp_path: Path) -> None:
    """Absorbed form (ours) against the naive form (transformers expands keys and values): within 1e-4; and the bytes
    per token are (kv_rank + rope_dim) * layers * 4, measured on the storage that the program writes."""
    model = make("deepseek_v2-yarn")
    save(model, tmp_path)
    found = check(tmp_path, model, count_params=False, length=120)
    assert found.worst <= 1e-4
    layers = BASE["num_hidden_layers"]
    expected = (MLA["kv_lora_rank"] + MLA["qk_rope_head_dim"]) * layers * 4
    assert sum(cache_spec(layer, "float32").num_bytes for layer in found.spec.layers) == expected
    checkpoint = open_model(tmp_path)
    paged = Paged(checkpoint.spec, load_weights(checkpoint, checkpoint.spec, "float32"), block_size=4, num_slabs=10)
    for planes in paged.planes:  # NaN marks what nobody wrote
        assert all(np.isnan(plane).all() for plane in planes.values())
    paged.one_go("a", list(range(3, 23)))
    written = sum(int(np.isfinite(plane).sum()) * 4 for planes in paged.planes for plane in planes.values())
    assert written == 20 * expected
    full_heads = 2 * MLA["num_key_value_heads"] * (MLA["qk_nope_head_dim"] + MLA["qk_rope_head_dim"]) * layers * 4
    assert expected * 4 < full_heads, "the cache must be much smaller than that of full heads"


def test_C65_chosen_experts_equal_the_dense_masked_reference() -> None:
    """Every expert on every token in float64, times a weight that is zero where it was not chosen."""
    spec, weights = specs.make("experts")
    rng = np.random.default_rng(3)
    x = rng.standard_normal((37, spec.hidden_size)).astype(np.float32)
    for n, layer in enumerate(spec.layers):
        f, p = layer.ffn, f"layers.{n}."
        assert isinstance(f, Experts)
        wide = {name.removeprefix(p): w.astype(np.float64) for name, w in weights.items() if name.startswith(p)}
        logits = x.astype(np.float64) @ wide["router"].T + wide.get("router.bias", 0.0)
        share = np.zeros((len(x), f.num_experts))
        for t, row in enumerate(logits):
            for expert, weight in chosen_experts(row.astype(np.float32), f, weights.get(p + "router_correction")):
                share[t, expert] = weight
        assert ((share > 0).sum(axis=1) == f.top_k).all()
        want = sum(share[:, e : e + 1] * _dense(x, wide, e, f) for e in range(f.num_experts))
        experts_of = [
            ExpertWeights(*(weights.get(f"{p}experts.{e}.{name}") for name in (
                "gate", "up", "down", "gate.bias", "up.bias", "down.bias")))
            for e in range(f.num_experts)
        ]  # fmt: skip
        routes = route(
            linear(x, weights[p + "router"], weights.get(p + "router.bias")), f.top_k, f.router,
            weights.get(p + "router_correction"),
        )  # fmt: skip
        got = run_experts(x, routes, experts_of, f.expert.activation, f.expert.limit, False, linear)
        np.testing.assert_allclose(got, want, atol=1e-4)


def _dense(x: np.ndarray, w: dict[str, np.ndarray], e: int, f: Experts) -> np.ndarray:
    def product(h: np.ndarray, name: str) -> np.ndarray:
        return h @ w[f"experts.{e}.{name}"].T + w.get(f"experts.{e}.{name}.bias", 0.0)

    gate, up = product(x.astype(np.float64), "gate"), product(x.astype(np.float64), "up")
    if f.expert.activation == "swiglu_clamped":
        gate, up = np.minimum(gate, f.expert.limit), np.clip(up, -f.expert.limit, f.expert.limit)
        return product(gate / (1 + np.exp(-1.702 * gate)) * (up + 1), "down")
    return product(gate / (1 + np.exp(-gate)) * up, "down")


def test_C65_work_grows_with_the_chosen_experts_not_with_all() -> None:
    def model(num_experts: int, top_k: int) -> ModelSpec:
        attention = Attention(num_heads=2, num_kv_heads=2, head_dim=8)
        ffn = Experts(num_experts=num_experts, top_k=top_k, expert=FeedForward(width=24))
        layers = (Layer(mixer=attention, ffn=ffn),) * 2
        return ModelSpec(family="test", vocab_size=50, hidden_size=16, layers=layers)

    def flops(num_experts: int, top_k: int) -> int:
        router = 2 * 2 * 16 * num_experts
        return model_work(model(num_experts, top_k), "float32").linear_flops_per_token - router

    assert flops(4, 2) == flops(64, 2)
    one = flops(64, 2) - flops(64, 1)
    assert one == 2 * 2 * 3 * 16 * 24
    assert flops(64, 8) - flops(64, 1) == 7 * one
    # And what runs: the rows that pass through the experts' products are tokens x chosen experts x matrices.
    rows = 0

    def counted(x: np.ndarray, *rest: Any) -> np.ndarray:
        nonlocal rows
        rows += len(x)
        return linear(x, *rest)

    spec = model(16, 3)
    rng = np.random.default_rng(1)
    weights = [
        ExpertWeights(*(rng.standard_normal(s).astype(np.float32) for s in ((24, 16), (24, 16), (16, 24))))
        for _ in range(16)
    ]
    x = rng.standard_normal((29, 16)).astype(np.float32)
    ffn = spec.layers[0].ffn
    assert isinstance(ffn, Experts)
    routes = route(rng.standard_normal((29, 16)).astype(np.float32), 3, ffn.router)
    run_experts(x, routes, weights, "silu", None, False, counted)
    assert rows == 29 * 3 * 3


@pytest.mark.parametrize(("case", "changes", "words"), [
    ("mixtral", {"num_experts_per_tok": 6}, ["num_experts_per_tok", "1 to 5"]),
    ("mixtral", {"num_experts": 4}, ["twice", "num_local_experts"]),
    ("qwen3_moe", {"use_qk_norm": False}, ["use_qk_norm", "'True' only"]),
    ("qwen2_moe", {"layer_types": ["full_attention", "linear_attention", "full_attention"]}, ["'linear_attention'"]),
    ("deepseek_v3", {"topk_method": "greedy"}, ["topk_method", "'noaux_tc' only"]),
    ("deepseek_v3", {"moe_layer_freq": 2}, ["moe_layer_freq"]),
    ("deepseek_v3", {"n_group": 3}, ["3 groups", "8 experts"]),
    ("deepseek_v32", {"q_lora_rank": None}, ["indexer", "q_lora_rank"]),
    ("deepseek_v32", {"index_head_dim": 2}, ["index_head_dim 2", "qk_rope_head_dim 4"]),
    ("glm_moe_dsa", {"indexer_types": ["shared", "full", "full"]}, ["indexer_types"]),
    ("glm_moe_dsa", {"mlp_layer_types": ["sparse"] * 3}, ["mlp_layer_types"]),
    ("deepseek_v3", {"index_topk": 2048}, ["'index_topk'", "does not know"]),
    ("deepseek_v2", {"norm_topk_prob": True}, ["norm_topk_prob"]),
    ("deepseek_v2", {"num_key_value_heads": 2}, ["key-value heads"]),
    ("gpt_oss", {"swiglu_alpha": 1.5}, ["swiglu_alpha", "'1.702' only"]),
    ("gpt_oss", {"layer_types": ["full_attention"]}, ["layer_types for 1 layers", "has 3"]),
    ("llama4", {"no_rope_layers": [1, 0]}, ["no_rope_layers for 2 layers"]),
    ("minimax_m2", {"attn_type_list": [1, 0, 1]}, ["linear attention"]),
    ("olmoe", {"qk_layernorm": True}, ["'qk_layernorm'"]),
    ("phimoe", {"num_experts_per_tok": 3}, ["num_experts_per_tok", "SparseMixer chooses 2"]),
    ("phimoe", {"rope_parameters": {"long_mscale": 1.2, "short_mscale": 1.1}}, ["short_mscale 1.1", "long_mscale 1.2"]),
])  # fmt: skip
def test_what_sparse_families_do_not_compute_is_refused(case: str, changes: dict[str, Any], words: list[str]) -> None:
    name, given = CASES[case]
    config_class = "Llama4TextConfig" if name == "Llama4" else f"{name}Config"
    config = getattr(transformers, config_class)(**{**BASE, **given}).to_dict()
    config["architectures"] = [f"{name}ForCausalLM"]
    find_family(config).spec(config)
    with pytest.raises(ModelError) as caught:
        find_family(config).spec(config | changes)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    "name", ["Mixtral", "Qwen2Moe", "Qwen3Moe", "Olmoe", "GptOss", "Glm4Moe", "MiniMaxM2", "Llama4", "Phimoe"]
)
def test_absent_sizes_of_heads_are_those_of_transformers(name: str) -> None:
    """A file may leave out what its family has a default for: eight kv heads in most, not one per query head."""
    kind = "Llama4Text" if name == "Llama4" else name
    full = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCAB, hidden_size=128, num_hidden_layers=1, num_attention_heads=32, intermediate_size=16
    ).to_dict() | {"architectures": [f"{name}ForCausalLM"]}  # fmt: skip
    full |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 2)
    bare = {key: value for key, value in full.items() if key not in ("num_key_value_heads", "head_dim")}
    assert find_family(bare).spec(bare).layers == find_family(full).spec(full).layers
