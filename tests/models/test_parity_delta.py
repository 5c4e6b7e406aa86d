"""Qwen3-Next and Qwen3.5, whose layers are mostly of the gated delta rule, against transformers."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from penstock.core.model_spec import Attention, GatedDelta
from tests.models.parity import VOCAB, check, save, vary

BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 43, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 192, "bos_token_id": 1, "eos_token_id": 2,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 5,
}  # fmt: skip
MOE = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 21, "shared_expert_intermediate_size": 23
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3Next", MOE),
    "qwen3_next-mixed": ("Qwen3Next", MOE | {
        "norm_topk_prob": False, "mlp_only_layers": [1], "attention_bias": True, "linear_conv_kernel_dim": 3,
        "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
        "linear_num_value_heads": 6, "linear_num_key_heads": 6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
    }),
    "qwen3_5_text": ("Qwen3_5", {}),
    "qwen3_5_text-tied": ("Qwen3_5", {
        "tie_word_embeddings": True, "linear_num_value_heads": 6, "num_hidden_layers": 5,
        "rope_parameters": YARN | {"partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]},
    }),
    "qwen3_5_moe_text": ("Qwen3_5Moe", MOE),
}  # fmt: skip

SEEDS = {"qwen3_next": 17, "qwen3_next-mixed": 38, "qwen3_5_text": 15, "qwen3_5_text-tied": 30, "qwen3_5_moe_text": 7}
"""Chosen so that rounding stays small: where a query is nearly at right angles to all keys so far, the norm of what the
state gives for it makes any rounding large, in transformers' float32 as here."""


def config_of(case: str) -> Any:
    name, changes = CASES[case]
    kind = name if name == "Qwen3Next" else f"{name}Text"
    fields = {**BASE, **changes}
    if name == "Qwen3_5Moe":
        del fields["intermediate_size"]
    return getattr(transformers, f"{kind}Config")(**fields)


def make(case: str) -> Any:
    model = vary(getattr(transformers, f"{CASES[case][0]}ForCausalLM")(config_of(case)), seed=SEEDS[case], gain=1.0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name and "linear_attn" not in name:
                p.sub_(1.0)  # these norms keep their weights minus one
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    widen(model)
    return model


class _Wide:
    """The module torch, but what is called float32 there is float64."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def widen(model: Any) -> None:
    """transformers computes norms and the delta rule in float32 whatever type a model has; as oracle in float64."""
    plain = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            for name in ("qwen3_next", "qwen3_5", "qwen3_5_moe"):
                module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
                patch.setattr(module, "torch", _Wide())
            patch.setattr(torch.Tensor, "float", torch.Tensor.double)
            return plain(*args, **kwargs)

    model.forward = forward


@pytest.mark.parametrize("case", CASES)
def test_layers_of_the_delta_rule_equal_transformers(case: str, tmp_path: Path) -> None:
    model = make(case)
    save(model, tmp_path)
    found = check(tmp_path, model)
    assert found.spec.family == case.split("-")[0]
    kinds = [type(layer.mixer) for layer in found.spec.layers]
    assert {Attention, GatedDelta} == set(kinds)
