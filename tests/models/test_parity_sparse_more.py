"""Further families with experts, against transformers (catalogue rows C65, C85); natively, too."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from penstock.backends.native.obstacle import native_obstacle
from penstock.base.errors import ModelError
from penstock.core.model_spec import Experts, cache_groups
from penstock.families.registry import find_family
from tests.models.parity import VOCAB, check, random_model, save

BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 43, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 192, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
ERNIE = {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 21, "head_dim": 8}
DOTS = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 21, "head_dim": 8}
HUNYUAN = {"num_experts": 5, "head_dim": 8}
GRANITE = {
    "num_local_experts": 5, "embedding_multiplier": 3.0, "logits_scaling": 0.6, "residual_multiplier": 0.7,
    "attention_multiplier": 0.2,
}  # fmt: skip
LITE = {
    "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 21,
    "kv_lora_rank": 12, "q_lora_rank": 9, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5,
}  # fmt: skip
EXAONE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 21}
COHERE = {"num_experts": 6, "head_dim": 8, "sliding_window": 9, "logit_scale": 0.5}
DBRX = {
    "d_model": 32, "n_heads": 4, "n_layers": 3, "max_seq_len": 192,
    "attn_config": {"kv_n_heads": 2, "rope_theta": 500.0, "clip_qkv": 8.0},
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    "ffn_config": {"ffn_hidden_size": 21, "moe_num_experts": 6, "moe_top_k": 2},
}  # fmt: skip
FLINT = {"head_dim": 8, "sliding_window": 9, "shared_expert_intermediate_size": 23, "num_hidden_layers": 4}
LAGUNA = {"head_dim": 8, "sliding_window": 9, "shared_expert_intermediate_size": 23}
GROWING = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0,
    "mscale_all_dim": 0.5, "llama_4_scaling_beta": 0.4,
}  # fmt: skip
TRINITY = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 21, "head_dim": 8, "sliding_window": 9}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "afmoe": ("Afmoe", TRINITY | {"layer_types": KINDS, "route_scale": 1.7, "mup_enabled": True}),
    "afmoe-dense": (
        "Afmoe", TRINITY | {"global_attn_every_n_layers": 2, "num_dense_layers": 2, "num_shared_experts": 1}
    ),
    "cohere2_moe": ("Cohere2Moe", COHERE | {"layer_types": KINDS, "num_shared_experts": 2}),
    "cohere2_moe-sum": (
        "Cohere2Moe",
        COHERE | {"num_shared_experts": 1, "shared_expert_combination_strategy": "sum", "rms_norm_eps": 1e-5,
                  "expert_selection_fn": "sigmoid", "first_k_dense_replace": 1, "prefix_dense_intermediate_size": 37,
                  "sliding_window_pattern": 2},
    ),
    "cohere2_moe-bare": (
        "Cohere2Moe", COHERE | {"expert_selection_fn": "sigmoid", "norm_topk_prob": False, "attention_bias": True}
    ),
    "axk1": ("AXK1", LITE | {"n_group": 4, "topk_group": 2, "mlp_layer_types": ["dense", "sparse", "sparse"]}),
    "dbrx": ("Dbrx", DBRX),
    "dbrx-cut": (
        "Dbrx", DBRX | {"attn_config": {"kv_n_heads": 1, "clip_qkv": 0.7, "rope_theta": 500.0}, "ffn_config": {
            "ffn_hidden_size": 21, "moe_num_experts": 4, "moe_top_k": 3, "moe_normalize_expert_weights": None,
            "ffn_act_fn": {"name": "gelu"}}},
    ),
    "flint": ("Flint", EXAONE | FLINT),
    "flint-sparse": (
        "Flint", EXAONE | FLINT | {"mlp_only_layers": [], "norm_topk_prob": False, "attention_bias": True,
                                   "layer_types": [*KINDS, KINDS[1]]},
    ),
    "granitemoe_swa": ("GraniteMoeSWA", GRANITE | {"sliding_window": 7, "layer_rope_theta": [0, 1e4, 300.0]}),
    "granitemoe_swa-shared": (
        "GraniteMoeSWA", GRANITE | {"sliding_window": 9, "shared_intermediate_size": 23, "layer_types": KINDS,
                                    "attention_bias": True}
    ),
    "hy_v3": ("HYV3", EXAONE | {"head_dim": 8}),
    "hy_v3-biased": (
        "HYV3", EXAONE | {"head_dim": 8, "attention_bias": True, "mlp_bias": True, "num_shared_experts": 2,
                          "router_scaling_factor": 1.3, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    ),
    "laguna": ("Laguna", EXAONE | LAGUNA),
    "laguna-heads": (
        "Laguna", EXAONE | LAGUNA | {"gating": "per-element", "layer_types": KINDS, "moe_routed_scaling_factor": 1.7,
                                     "num_attention_heads_per_layer": [2, 6, 4],
                                     "mlp_layer_types": ["sparse", "dense", "sparse"]},
    ),
    "mellum": ("Mellum", EXAONE | {"head_dim": 8}),
    "mellum-kinds": (
        "Mellum", EXAONE | {"head_dim": 8, "layer_types": KINDS, "sliding_window": 9, "norm_topk_prob": False,
                            "mlp_layer_types": ["sparse", "dense", "sparse"], "attention_bias": True},
    ),
    "mistral4": ("Mistral4", LITE | {"n_group": 4, "topk_group": 2, "rope_parameters": GROWING}),
    "mistral4-dense": (
        "Mistral4", LITE | {"q_lora_rank": None, "first_k_dense_replace": 1, "norm_topk_prob": False,
                            "routed_scaling_factor": 1.5, "attention_bias": True, "rope_parameters": GROWING,
                            "rope_interleave": False},
    ),
    "solar_open": ("SolarOpen", DOTS),
    "solar_open-biased": (
        "SolarOpen", DOTS | {"head_dim": 10, "attention_bias": True, "n_group": 2, "norm_topk_prob": False,
                             "n_shared_experts": 2, "routed_scaling_factor": 1.4},
    ),
    "dots1": (
        "Dots1", DOTS | {"first_k_dense_replace": 1, "n_group": 2, "norm_topk_prob": True, "n_shared_experts": 2}
    ),
    "dots1-window": (
        "Dots1", DOTS | {"sliding_window": 9, "max_window_layers": 1, "attention_bias": True, "n_shared_experts": 1,
                         "routed_scaling_factor": 1.5},
    ),
    "ernie4_5_moe": ("Ernie4_5_Moe", ERNIE),
    "ernie4_5_moe-biased": (
        "Ernie4_5_Moe",
        ERNIE | {"use_bias": True, "moe_num_shared_experts": 0, "moe_layer_interval": 2, "moe_layer_start_index": 0,
                 "tie_word_embeddings": False},
    ),
    "exaone_moe": ("ExaoneMoe", EXAONE | {"layer_types": KINDS, "sliding_window": 9}),
    "exaone_moe-pattern": (
        "ExaoneMoe", EXAONE | {"sliding_window": 7, "sliding_window_pattern": 2, "num_shared_experts": 2, "n_group": 2,
                               "mlp_layer_types": ["sparse", "dense", "sparse"]},
    ),
    "flex_olmo": ("FlexOlmo", {"num_experts": 6, "num_experts_per_tok": 2}),
    "flex_olmo-normed": (
        "FlexOlmo", {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "attention_bias": True}
    ),
    "glm4_moe_lite": ("Glm4MoeLite", LITE),
    "glm4_moe_lite-kinds": (
        "Glm4MoeLite", LITE | {"q_lora_rank": None, "n_group": 4, "topk_group": 2, "rope_interleave": False,
                               "mlp_layer_types": ["sparse", "dense", "sparse"]},
    ),
    "granitemoe": ("GraniteMoe", GRANITE),
    "granitemoe-biased": ("GraniteMoe", GRANITE | {"attention_bias": True, "num_experts_per_tok": 3}),
    "granitemoeshared": ("GraniteMoeShared", GRANITE | {"shared_intermediate_size": 23}),
    "granitemoeshared-none": ("GraniteMoeShared", GRANITE | {"shared_intermediate_size": 0}),
    "hunyuan_v1_moe": ("HunYuanMoEV1", HUNYUAN | {"moe_topk": 2}),
    "hunyuan_v1_moe-lists": ("HunYuanMoEV1", HUNYUAN | {"moe_topk": [1, 3, 2], "attention_bias": True}),
}  # fmt: skip


def made_config(case: str) -> Any:
    name, changes = CASES[case]
    base = {key: BASE[key] for key in ("vocab_size", "bos_token_id", "eos_token_id")} if name == "Dbrx" else BASE
    return getattr(transformers, f"{name}Config")(**deepcopy({**base, **changes}))  # it writes into what it is given


def make(case: str) -> Any:
    name = CASES[case][0]
    config = made_config(case)
    model = random_model(getattr(transformers, f"{name}ForCausalLM"), config, seed=len(case))
    model.set_experts_implementation("eager")
    with torch.no_grad():
        for key, value in [*model.named_buffers(), *model.named_parameters()]:
            if key.endswith(("e_score_correction_bias", "expert_bias")):
                value.normal_(std=0.3)
    if model.config.tie_word_embeddings:
        with torch.no_grad():  # or the model repeats what it reads: layers must outweigh the embedding
            model.get_input_embeddings().weight.mul_(0.1)
            model.model.norm.weight.add_(3.0)
    return model


@pytest.mark.parametrize("case", CASES)
def test_sparse_families_equal_transformers(case: str, tmp_path: Path) -> None:
    model = make(case)
    found = check(save(model, tmp_path), model, count_params=False)
    assert found.spec.family == case.split("-")[0]
    assert native_obstacle(found.spec) is None, "all of it runs natively, so the check did that, too"


@pytest.mark.parametrize("factor", [2, 3])
def test_layers_of_hunyuan_share_keys_and_values(factor: int, tmp_path: Path) -> None:
    """transformers does not compute `use_cla`: its layers are given what the first of their number projects."""
    name, changes = CASES["hunyuan_v1_moe"]
    config = getattr(transformers, f"{name}Config")(**{**BASE, **changes, "moe_topk": 2, "num_hidden_layers": 4})
    model = random_model(getattr(transformers, f"{name}ForCausalLM"), config, seed=factor)
    model.set_experts_implementation("eager")
    for n, layer in enumerate(model.model.layers):
        own = model.model.layers[n - n % factor].self_attn
        if n % factor:
            layer.self_attn.k_proj, layer.self_attn.v_proj = _Again(own.k_proj), _Again(own.v_proj)

    def told(config: dict[str, Any]) -> None:
        config |= {"use_cla": True, "cla_share_factor": factor}

    found = check(save(model, tmp_path, told), model, count_params=False)
    assert [layer.kv_from for layer in found.spec.layers] == [n - n % factor if n % factor else None for n in range(4)]
    assert native_obstacle(found.spec) is None
    own = sum(layer.kv_from is None for layer in found.spec.layers)
    plain, shared = (
        sum(g.token_bytes(16) for g in cache_groups(spec, "bfloat16"))
        for spec in (find_family(config.to_dict()).spec(config.to_dict()), found.spec)
    )
    assert (own, shared * 4) == (2, plain * own)


class _Again(torch.nn.Module):
    """What another module gave last."""

    def __init__(self, other: torch.nn.Module) -> None:
        super().__init__()
        self.last: Any = None
        other.register_forward_hook(lambda _module, _inputs, out: setattr(self, "last", out))

    def forward(self, x: Any) -> Any:
        return self.last


def test_released_files_of_axk1_have_no_correction(tmp_path: Path) -> None:
    """And norms of dense layers that nothing reads."""
    model = make("axk1")
    for key, buffer in model.named_buffers():
        if key.endswith("e_score_correction_bias"):
            buffer.zero_()
    save(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith("e_score_correction_bias")}
    assert len(kept) == len(tensors) - 2
    kept["model.layers.0.post_mlp_layernorm.weight"] = torch.ones(32)
    save_file(kept, tmp_path / "model.safetensors")
    found = check(tmp_path, model, count_params=False)
    assert not any(isinstance(layer.ffn, Experts) and layer.ffn.router.correction for layer in found.spec.layers)


@pytest.mark.parametrize(("case", "changes", "words"), [
    ("afmoe", {"route_norm": False}, ["route_norm", "'True' only"]),
    ("cohere2_moe", {"expert_selection_fn": "sparsemax"}, ["expert_selection_fn", "softmax, sigmoid"]),
    ("cohere2_moe", {"shared_expert_combination_strategy": "max"}, ["'max'", "sum, average"]),
    ("axk1", {"scoring_func": "softmax"}, ["scoring_func", "'sigmoid' only"]),
    ("dbrx", {"attn_config": {"kv_n_heads": 3}}, ["kv_n_heads 3"]),
    ("dbrx", {"ffn_config": {"moe_normalize_expert_weights": 2}}, ["moe_normalize_expert_weights"]),
    ("flint", {"sliding_window": None}, ["no sliding_window"]),
    ("granitemoe_swa", {"layer_rope_theta": [0, 1e4]}, ["layer_rope_theta as 3 numbers"]),
    ("hy_v3", {"mlp_layer_types": ["dense"]}, ["mlp_layer_types", "3 of dense and sparse"]),
    ("laguna", {"gating": "per-row"}, ["gating", "per-head and per-element"]),
    ("laguna", {"moe_router_logit_softcapping": 3.0}, ["moe_router_logit_softcapping"]),
    ("laguna", {"num_attention_heads_per_layer": [3, 4, 4]}, ["num_attention_heads_per_layer", "multiple of"]),
    ("mellum", {"num_experts_per_tok": 7}, ["num_experts_per_tok", "1 to 6"]),
    ("mistral4", {"head_dim": 12}, ["head_dim", "'10' only"]),
    ("mistral4", {"n_group": 3}, ["3 groups", "8 experts"]),
    ("solar_open", {"use_qk_norm": True}, ["use_qk_norm", "'False' only"]),
    ("dots1", {"topk_method": "greedy"}, ["topk_method"]),
    ("ernie4_5_moe", {"moe_gate": "top2_fused"}, ["moe_gate", "'topk' only"]),
    ("exaone_moe", {"mlp_layer_types": ["dense"]}, ["mlp_layer_types", "3 of dense and sparse"]),
    ("exaone_moe", {"is_moe_layer": [True] * 3}, ["is_moe_layer differs"]),
    ("glm4_moe_lite", {"n_group": 3}, ["3 groups", "8 experts"]),
    ("granitemoe", {"num_experts_per_tok": 6}, ["num_experts_per_tok", "1 to 5"]),
    ("hunyuan_v1_moe", {"moe_topk": [1, 2]}, ["moe_topk for 2 layers", "has 3"]),
    ("hunyuan_v1_moe", {"moe_topk": 7}, ["moe_topk", "more experts"]),
    ("hunyuan_v1_moe", {"use_cla": True, "cla_share_factor": 0}, ["cla_share_factor"]),
])  # fmt: skip
def test_what_these_families_do_not_compute_is_refused(case: str, changes: dict[str, Any], words: list[str]) -> None:
    config = made_config(case).to_dict() | {"architectures": [f"{CASES[case][0]}ForCausalLM"]}
    find_family(config).spec(config)
    with pytest.raises(ModelError) as caught:
        find_family(config).spec(config | changes)
    assert all(word in str(caught.value) for word in words), str(caught.value)
