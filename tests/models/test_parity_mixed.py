"""Families that mix state spaces or convolutions with attention, against transformers (catalogue row C34)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from penstock.backends.native.obstacle import native_obstacle
from penstock.base.errors import ModelError
from penstock.families.registry import find_family, open_model
from penstock.weights.load import load_weights
from tests.models.parity import VOCAB, check, save, vary
from tests.oracle import NaiveModel
from tests.paged import Paged

BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 43, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 300, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_state": 7, "mamba_chunk_size": 16}
GRANITE = MAMBA2 | {
    "num_local_experts": 5, "embedding_multiplier": 3.0, "logits_scaling": 0.6, "residual_multiplier": 0.7,
    "attention_multiplier": 0.2, "shared_intermediate_size": 23, "num_experts_per_tok": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
}  # fmt: skip
JAMBA = {
    "num_experts": 4,
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "mamba_d_state": 7,
    "use_mamba_kernels": False,
}
H1 = MAMBA2 | {"mamba_d_ssm": 48, "num_hidden_layers": 2, "head_dim": 8}
MULTIPLIERS = {
    "lm_head_multiplier": 0.7, "embedding_multiplier": 2.5, "mlp_multipliers": [0.8, 1.3], "key_multiplier": 0.6,
    "attention_out_multiplier": 1.4, "attention_in_multiplier": 0.9, "ssm_multipliers": [0.7, 1.2, 0.9, 1.3, 0.8],
    "ssm_in_multiplier": 1.1, "ssm_out_multiplier": 0.6,
}  # fmt: skip
LFM2 = {"layer_types": ["conv", "full_attention", "conv", "conv"], "block_multiple_of": 8}
LFM3 = {
    "layer_types": ["conv", "sliding_attention", "full_attention", "conv"], "head_dim": 8, "sliding_window": 9
}  # fmt: skip
MINIMAX = {
    "num_local_experts": 5, "num_experts_per_tok": 2, "block_size": 16, "head_dim": 8,
    **{f"{half}_{greek}_factor": n for half in ("mlp", "full_attn", "linear_attn")
       for greek, n in (("alpha", 3.5), ("beta", 0.8))},
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bamba": ("Bamba", MAMBA2 | {"attn_layer_indices": [1, 3], "mamba_n_groups": 2}),
    "bamba-biased": (
        "Bamba", MAMBA2 | {"attn_layer_indices": [0], "mamba_proj_bias": True, "mamba_conv_bias": False,
                           "attention_bias": True, "mamba_d_conv": 2, "tie_word_embeddings": True},
    ),
    "falcon_h1": ("FalconH1", H1 | MULTIPLIERS),
    "falcon_h1-normed": (
        "FalconH1", H1 | MULTIPLIERS | {"mamba_rms_norm": True, "mamba_n_groups": 2, "mamba_norm_before_gate": False}
    ),
    "falcon_h1-biased": (
        "FalconH1", H1 | MULTIPLIERS | {"mamba_rms_norm": True, "mamba_proj_bias": True, "projectors_bias": True,
                                        "attention_bias": True, "mamba_d_ssm": None, "mamba_conv_bias": False},
    ),
    "falcon_mamba": ("FalconMamba", {"state_size": 7, "num_hidden_layers": 2, "mixer_rms_eps": 1e-4}),
    "granitemoehybrid": ("GraniteMoeHybrid", GRANITE),
    "granitemoehybrid-dense": (
        "GraniteMoeHybrid", GRANITE | {"num_local_experts": 0, "position_embedding_type": "rope", "mamba_n_groups": 2}
    ),
    "jamba": ("Jamba", JAMBA),
    "jamba-dense": ("Jamba", JAMBA | {"num_experts": 1, "mamba_proj_bias": True, "mamba_dt_rank": 5}),
    "lfm2": ("Lfm2", LFM2),
    "lfm2-biased": ("Lfm2", LFM2 | {"conv_bias": True, "block_auto_adjust_ff_dim": False, "conv_L_cache": 4}),
    "lfm2_moe": (
        "Lfm2Moe", {"layer_types": LFM2["layer_types"], "num_experts": 6, "num_experts_per_tok": 2,
                    "moe_intermediate_size": 21},
    ),
    "lfm3": ("Lfm3", LFM3),
    "lfm3-plain": ("Lfm3", LFM3 | {"use_sandwich_norm": False, "use_attention_gate": False, "attention_bias": True,
                                   "conv_bias": True, "conv_L_cache": 4}),
    "minimax": ("MiniMax", MINIMAX),
    "minimax-linear": ("MiniMax", {**MINIMAX, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}),
}  # fmt: skip


def made_config(case: str) -> Any:
    name, changes = CASES[case]
    fields = {**BASE, **changes}
    if name == "FalconMamba":
        names = ("vocab_size", "hidden_size", "bos_token_id", "eos_token_id", "pad_token_id")
        fields = {name: BASE[name] for name in names} | changes
    return getattr(transformers, f"{name}Config")(**fields)


def make(case: str) -> Any:
    config = made_config(case)
    model = vary(getattr(transformers, f"{CASES[case][0]}ForCausalLM")(config), len(case), norms=0.2, gain=1.5)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    with torch.no_grad():
        for key, buffer in model.named_buffers():
            if key.endswith("expert_bias"):
                buffer.normal_(std=0.3)
    return model


@pytest.mark.parametrize("case", CASES)
def test_C34_mixed_families_equal_transformers(case: str, tmp_path: Path) -> None:
    model = make(case)
    found = check(save(model, tmp_path), model, length=90, max_model_len=300, count_params=False, slack=2.0)
    assert found.spec.family == case.split("-")[0]
    assert native_obstacle(found.spec) is None, "all of it runs natively, so the check did that, too"
    weights = load_weights(open_model(tmp_path), found.spec, "float32")
    ids = np.random.default_rng(3).integers(0, VOCAB, 40).tolist()
    want = NaiveModel(found.spec, weights).logits(ids)
    np.testing.assert_allclose(Paged(found.spec, weights).chunked("a", ids, (2, 1, 16)), want, atol=1e-5)


@pytest.mark.parametrize(("case", "changes", "words"), [
    ("bamba", {"mamba_n_heads": 7}, ["mamba_n_heads 7", "64 channels"]),
    ("bamba", {"mamba_n_groups": 3}, ["mamba_n_groups 3", "8 heads"]),
    ("falcon_h1", {"ssm_multipliers": [1.0, 2.0]}, ["2 ssm_multipliers", "must give 5"]),
    ("falcon_h1", {"projectors_bias": True}, ["projectors_bias", "'False' only"]),
    ("falcon_mamba", {"hidden_act": "gelu"}, ["hidden_act", "'silu' only"]),
    ("granitemoehybrid", {"layer_types": ["mamba", "rwkv", "mamba", "mamba"]}, ["'rwkv'", "full_attention"]),
    ("granitemoehybrid", {"position_embedding_type": "alibi"}, ["'alibi'", "nope, rope"]),
    ("jamba", {"attn_layer_offset": 3}, ["attn_layer_offset", "0 to 2"]),
    ("minimax", {"mlp_alpha_factor": 2.0}, ["alpha: 2.0, 3.5", "one for all"]),
    ("minimax", {"attn_type_list": [0, 1]}, ["attn_type_list for 2 layers", "has 4"]),
    ("minimax", {"hidden_act": "gelu"}, ["hidden_act", "'silu' only"]),
    ("lfm2", {"layer_types": ["conv"]}, ["layer_types for 1 layers", "has 4"]),
    ("lfm3", {"layer_types": ["conv", "mamba", "conv", "conv"]}, ["'mamba'"]),
    ("lfm2_moe", {"num_experts_per_tok": 7}, ["num_experts_per_tok", "1 to 6"]),
])  # fmt: skip
def test_what_mixed_families_do_not_compute_is_refused(case: str, changes: dict[str, Any], words: list[str]) -> None:
    config = made_config(case).to_dict() | {"architectures": [f"{CASES[case][0]}ForCausalLM"]}
    config["time_step_limit"] = None
    find_family(config).spec(config)
    with pytest.raises(ModelError) as caught:
        find_family(config).spec(config | changes)
    assert all(word in str(caught.value) for word in words), str(caught.value)
