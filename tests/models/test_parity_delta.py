"""Qwen3-Next, Qwen3.5 and Kimi Linear, whose layers are mostly of the gated delta rule, against transformers."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from penstock.base.errors import ModelError
from penstock.core.model_spec import Attention, GatedDelta, Latent, ModelSpec
from penstock.families.registry import find_family
from tests.models.parity import VOCAB, check, save, vary

DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 5
}  # fmt: skip
BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 43, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 192, "bos_token_id": 1, "eos_token_id": 2,
    **DELTA,
}  # fmt: skip
MOE = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 21, "shared_expert_intermediate_size": 23
}  # fmt: skip
KIMI = {
    "num_experts": 8, "num_experts_per_token": 2, "moe_intermediate_size": 21, "num_key_value_heads": 4,
    "pad_token_id": 0,
    "linear_num_heads": 3, "linear_head_dim": 6, "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
    "v_head_dim": 5, "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
LING = {
    "num_experts": 8, "num_experts_per_token": 2, "moe_intermediate_size": 21, "num_key_value_heads": 4, "head_dim": 6,
    "pad_token_id": 0, "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5,
    "num_expert_group": 4, "topk_group": 2, "layer_group_size": 3, "first_k_dense_replace": 1,
}  # fmt: skip
AXES = {
    "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}  # fmt: skip
SEES = {
    "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32,
    "num_position_embeddings": 16,
}  # fmt: skip
LATENT_CASES = ("kimi", "bailing")
SEEING = ("qwen3_5", "qwen3_5_moe")
"""Cases whose text is a part of a checkpoint that also sees."""
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
    "qwen3_5": ("Qwen3_5", {"rope_parameters": AXES}),
    "qwen3_5_moe": ("Qwen3_5Moe", MOE | {"rope_parameters": AXES}),
    "kimi_linear": ("KimiLinear", KIMI),
    "bailing_hybrid": ("BailingHybrid", LING),
    "bailing_hybrid-unbounded": ("BailingHybrid", LING | {
        "kda_safe_gate": False, "short_conv_kernel_size": 3, "moe_renormalize": False, "first_k_dense_replace": 0,
        "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
    }),
    "kimi_linear-low": ("KimiLinear", KIMI | {
        "q_lora_rank": 9, "n_group": 2, "topk_group": 1, "moe_renormalize": False, "linear_conv_kernel_dim": 3,
        "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
    }),
}  # fmt: skip

SEEDS = {
    "qwen3_next": 17, "qwen3_next-mixed": 38, "qwen3_5_text": 15, "qwen3_5_text-tied": 30, "qwen3_5_moe_text": 7,
    "qwen3_5": 1, "qwen3_5_moe": 22, "kimi_linear": 34, "kimi_linear-low": 29, "bailing_hybrid": 1,
    "bailing_hybrid-unbounded": 2,
}  # fmt: skip
"""Chosen so that rounding stays small: where a query is nearly at right angles to all keys so far, the norm of what the
state gives for it makes any rounding large, in transformers' float32 as here."""


def config_of(case: str) -> Any:
    name, changes = CASES[case]
    kind = f"{name}Text" if name.startswith("Qwen3_5") else name
    fields = {**BASE, **changes}
    if name == "Qwen3_5Moe":
        del fields["intermediate_size"]
    if name == "KimiLinear":
        fields = {key: value for key, value in fields.items() if key != "head_dim" and key not in DELTA}
    if name == "BailingHybrid":
        fields = {key: value for key, value in fields.items() if key not in DELTA}
    if case in SEEING:
        return getattr(transformers, f"{name}Config")(text_config=fields, vision_config=SEES)
    return getattr(transformers, f"{kind}Config")(**fields)


def make(case: str) -> Any:
    head = "ForConditionalGeneration" if case in SEEING else "ForCausalLM"
    model = vary(getattr(transformers, CASES[case][0] + head)(config_of(case)), seed=SEEDS[case], gain=1.0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if (
                "norm" in name
                and "linear_attn" not in name
                and "visual" not in name
                and not case.startswith(LATENT_CASES)
            ):
                p.sub_(1.0)  # these norms keep their weights minus one
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.3)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    widen(model)
    return model


def restore(path: Path) -> None:
    """transformers 5.23 writes dense layers of Kimi Linear under the name of sparse ones; published files do not."""
    dense = re.compile(r"block_sparse_moe\.(gate|up|down)_proj")
    save_file({dense.sub(r"mlp.\1_proj", name): tensor for name, tensor in load_file(path).items()}, path)


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
            for name in ("qwen3_next", "qwen3_5", "qwen3_5_moe", "kimi_linear", "bailing_hybrid"):
                module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
                patch.setattr(module, "torch", _Wide())
            patch.setattr(torch.Tensor, "float", torch.Tensor.double)
            return plain(*args, **kwargs)

    model.forward = forward


@pytest.mark.parametrize("case", CASES)
def test_layers_of_the_delta_rule_equal_transformers(case: str, tmp_path: Path) -> None:
    model = make(case)
    save(model, tmp_path)
    if case.startswith("kimi"):
        restore(tmp_path / "model.safetensors")
    found = check(tmp_path, model, count_params=not case.startswith(LATENT_CASES) and case not in SEEING)
    assert found.spec.family == case.split("-")[0]
    assert msgspec.json.decode(msgspec.json.encode(found.spec), type=ModelSpec) == found.spec, "as ranks are sent it"
    kinds = {type(layer.mixer) for layer in found.spec.layers}
    assert kinds == {GatedDelta, Latent if case.startswith(LATENT_CASES) else Attention}


def fields_of(case: str, **changes: Any) -> dict[str, Any]:
    """Its config.json; `changes`: None takes a field out."""
    fields = config_of(case).to_dict() | {"architectures": [f"{CASES[case][0]}ForCausalLM"]} | changes
    return {key: value for key, value in fields.items() if value is not None}


def test_published_fields_of_kimi_linear_say_the_same() -> None:
    """As in the config.json of moonshotai/Kimi-Linear-48B-A3B-Instruct, whose layers are counted from 1."""
    saved = fields_of("kimi_linear")
    moved = ("layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim")
    published = {key: value for key, value in saved.items() if key not in moved} | {
        "linear_attn_config": {
            "full_attn_layers": [3], "kda_layers": [1, 2, 4], "head_dim": 6, "num_heads": 3, "short_conv_kernel_size": 4
        },
        "auto_map": {"AutoConfig": "configuration_kimi.KimiLinearConfig"}, "first_k_dense_replace": 1,
        "mla_use_nope": True, "moe_layer_freq": 1, "moe_router_activation_func": "sigmoid", "rope_theta": 10000.0,
        "rope_scaling": None, "num_nextn_predict_layers": 0, "use_grouped_topk": True,
    }  # fmt: skip
    family = find_family(published)
    assert family.spec(published) == family.spec(saved)


@pytest.mark.parametrize("name", ["Qwen3Next", "Qwen3_5", "Qwen3_5Moe", "KimiLinear"])
def test_absent_fields_mean_what_transformers_takes_for_them(name: str) -> None:
    """A config.json of bare sizes gives the same spec as transformers' config of these sizes, written out in full."""
    kind = f"{name}Text" if name.startswith("Qwen3_5") else name
    sizes: dict[str, Any] = {"vocab_size": 200_000, "hidden_size": 512, "num_hidden_layers": 9,
                             "num_attention_heads": 32}  # fmt: skip
    sizes |= {"num_experts": 16} if name == "KimiLinear" else {}
    sizes |= {"intermediate_size": 128} if name == "Qwen3_5" else {}
    sizes |= {"num_experts": 512} if name == "Qwen3Next" else {"num_experts": 256} if name == "Qwen3_5Moe" else {}
    full = getattr(transformers, f"{kind}Config")(**sizes).to_dict()
    bare = sizes | {"architectures": [f"{name}ForCausalLM"]}
    family = find_family(bare)
    assert family.spec(full).layers == family.spec(bare).layers


@pytest.mark.parametrize(("case", "changes", "words"), [
    ("qwen3_next", {"attn_output_gate": False}, "attn_output_gate to 'False'"),
    ("qwen3_next", {"hidden_act": "gelu"}, "hidden_act to 'gelu'"),
    ("qwen3_next", {"linear_num_value_heads": 3}, "linear_num_key_heads 2 does not divide linear_num_value_heads 3"),
    ("qwen3_next", {"layer_types": ["sliding_attention"] * 4}, "sliding_attention"),
    ("qwen3_5_text", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim as '1'"),
    ("qwen3_5_text", {"linear_dt_rank": 3}, "'linear_dt_rank'"),
    ("qwen3_5_moe_text", {"norm_topk_prob": False}, "norm_topk_prob to 'False'"),
    ("bailing_hybrid", {"q_lora_rank": 9}, "q_lora_rank to '9'"),
    ("bailing_hybrid", {"num_key_value_heads": 2}, "as many key-value heads"),
    ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope to 'False'"),
    ("kimi_linear", {"num_key_value_heads": 2}, "as many key-value heads"),
    ("kimi_linear", {"linear_attn_config": {"full_attn_layers": [1], "kda_layers": [2, 3]}}, "do not name each of 4"),
    ("kimi_linear", {"mlp_layer_types": ["dense", "moe", "moe", "moe"]}, "mlp_layer_types"),
])  # fmt: skip
def test_what_they_do_not_compute_is_refused(case: str, changes: dict[str, Any], words: str) -> None:
    config = fields_of(case)
    find_family(config).spec(config)
    with pytest.raises(ModelError, match=words):
        find_family(config).spec(config | changes)
