"""Families that transformers has no class of, against a class that computes the same: Ling 1 and 2 (BailingMoe),
DeciLM-6B and PaLM's design (catalogue rows C86, C87).

The models of that class are written down by the families' own names, of config.json and of tensors, as published files
have them. What is compared stands in parity.py.
"""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from penstock.base.errors import ModelError
from penstock.core.cache_spec import group_layers
from penstock.core.model_spec import Attention, cache_spec
from penstock.families.registry import find_family
from tests.models.parity import VOCAB, check, random_model

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 43, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 192, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
COMMON = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 192, "eos_token_id": 2, "pad_token_id": 2, "hidden_act": "silu", "head_dim": 8,
    "torch_dtype": "float32", "tie_word_embeddings": False, "rope_scaling": None, "use_bias": False,
    "use_qkv_bias": False, "rms_norm_eps": 1e-6, "embedding_dropout": 0.0, "output_dropout": 0.0, "norm_softmax": False,
    "initializer_range": 0.02, "auto_map": {"AutoConfig": "configuration.Config"}, "use_sliding_window": False,
}  # fmt: skip


def write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def made(kind: str, seed: int, **fields: Any) -> Any:
    config = getattr(transformers, f"{kind}Config")(**deepcopy({**SIZES, **fields}))
    model = random_model(getattr(transformers, f"{kind}ForCausalLM"), config, seed=seed)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model


def bailing(model: Any) -> dict[str, torch.Tensor]:
    """Tensors by the names of Ling's files: q, k and v in one matrix, every expert in matrices of its own."""
    names = {
        "model.embed_tokens": "model.word_embeddings", "self_attn.o_proj": "attention.dense",
        "self_attn.q_norm": "attention.query_layernorm", "self_attn.k_norm": "attention.key_layernorm",
        "e_score_correction_bias": "expert_bias", "block_sparse_moe.router": "mlp.gate",
    }  # fmt: skip
    out: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        new = name
        for old, by in names.items():
            new = new.replace(old, by)
        stem = new.rsplit(".", 2)[0]
        if "q_proj" in new:
            parts = [model.state_dict()[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
            out[new.replace("self_attn.q_proj", "attention.query_key_value")] = torch.cat(parts)
        elif "k_proj" in new or "v_proj" in new:
            continue
        elif "experts.gate_up_proj" in new or "block_sparse_moe.experts.gate_up_proj" in new:
            stem = new.removesuffix(".gate_up_proj").replace("block_sparse_moe", "mlp")
            for i, matrix in enumerate(tensor):
                gate, up = matrix.chunk(2)
                out |= {f"{stem}.{i}.gate_proj.weight": gate, f"{stem}.{i}.up_proj.weight": up}
        elif "experts.down_proj" in new and "shared" not in new:
            stem = new.removesuffix(".down_proj").replace("block_sparse_moe", "mlp")
            out |= {f"{stem}.{i}.down_proj.weight": matrix for i, matrix in enumerate(tensor)}
        elif "shared_mlp.input_linear" in new:
            stem = new.replace("shared_mlp.input_linear.weight", "mlp.shared_experts.")
            gate, up = tensor.chunk(2)
            out |= {f"{stem}gate_proj.weight": gate, f"{stem}up_proj.weight": up}
        else:
            out[new.replace("shared_mlp.output_linear", "mlp.shared_experts.down_proj")] = tensor
    return out


def test_ling_is_granite_with_experts_by_its_own_names(tmp_path: Path) -> None:
    """Granite's shared-expert model without its multipliers: a softmax over the chosen experts is one over all of them,
    divided by its sum over the chosen."""
    model = made(
        "GraniteMoeShared", 3, num_local_experts=6, num_experts_per_tok=2, shared_intermediate_size=42,
        intermediate_size=21, attention_multiplier=8**-0.5, rope_parameters={"rope_type": "default", "rope_theta": 6e5},
    )  # fmt: skip
    config = COMMON | {
        "architectures": ["BailingMoeForCausalLM"], "model_type": "bailing_moe", "num_experts": 6,
        "num_experts_per_tok": 2, "num_shared_experts": 2, "moe_intermediate_size": 21, "intermediate_size": 43,
        "first_k_dense_replace": 0, "norm_topk_prob": True, "rope_theta": 6e5, "norm_head": False,
    }  # fmt: skip
    found = check(write(tmp_path, config, bailing(model)), model, count_params=False)
    assert found.spec.family == "bailing_moe"


@pytest.mark.parametrize("normed", [True, False])
def test_ling_2_is_glm_with_experts_by_its_own_names(tmp_path: Path, normed: bool) -> None:
    model = made(
        "Glm4Moe", 4, n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=21, head_dim=8, n_group=4,
        topk_group=2, routed_scaling_factor=2.5, first_k_dense_replace=1, use_qk_norm=normed, rms_norm_eps=1e-6,
        attention_bias=not normed,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    )  # fmt: skip
    for key, buffer in model.named_buffers():
        if key.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.3)
    config = COMMON | {
        "architectures": ["BailingMoeV2ForCausalLM"], "model_type": "bailing_moe_v2", "num_experts": 8,
        "num_experts_per_tok": 3, "num_shared_experts": 1, "moe_intermediate_size": 21, "intermediate_size": 43,
        "first_k_dense_replace": 1, "norm_topk_prob": True, "rope_theta": 1e4, "partial_rotary_factor": 0.5,
        "rotary_dim": 4, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "use_qk_norm": normed,
        "use_qkv_bias": not normed, "score_function": "sigmoid", "moe_router_enable_expert_bias": True,
        "router_dtype": "fp32", "moe_shared_expert_intermediate_size": 21, "num_nextn_predict_layers": 0,
        "use_rmsnorm": True, "max_window_layers": 3, "sliding_window": None, "mtp_loss_scaling_factor": 0,
    }  # fmt: skip
    tensors = bailing(model)
    for name in [name for name in tensors if "attention.query_key_value.weight" in name and not normed]:
        parts = [model.state_dict()[name.replace("attention.query_key_value.weight", f"self_attn.{x}_proj.bias")]
                 for x in "qkv"]  # fmt: skip
        tensors[name.replace(".weight", ".bias")] = torch.cat(parts)
    found = check(write(tmp_path, config, tensors), model, count_params=False)
    assert found.spec.family == "bailing_moe_v2"


@pytest.mark.parametrize(("changes", "words"), [
    ({"norm_head": True}, "norm_head"), ({"score_function": "softmax"}, "score_function"),
    ({"rotary_dim": 8}, "rotary_dim"), ({"n_group": 3}, "3 groups"), ({"use_bias": True}, "use_bias"),
    ({"moe_router_topk_noise": 1}, "moe_router_topk_noise"),
])  # fmt: skip
def test_what_ling_2_does_not_compute_is_refused(changes: dict[str, Any], words: str) -> None:
    config = COMMON | {
        "architectures": ["BailingMoeV2ForCausalLM"], "num_experts": 8, "num_experts_per_tok": 3, "n_group": 4,
        "moe_intermediate_size": 21, "intermediate_size": 43, "partial_rotary_factor": 0.5, "rotary_dim": 4,
    }  # fmt: skip
    find_family(config).spec(config)
    with pytest.raises(ModelError, match=words):
        find_family(config).spec(config | changes)


# --- kv heads that differ from layer to layer

GROUPS = [4, 1, 2]
DECI = {
    "architectures": ["DeciLMForCausalLM"], "model_type": "deci", "vocab_size": VOCAB, "hidden_size": 32,
    "intermediate_size": 43, "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 192,
    "num_key_value_heads_per_layer": GROUPS, "rms_norm_eps": 1e-6, "rope_scaling": {"type": "dynamic", "factor": 2.0},
    "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
    "naive_attention_prefill": True, "naive_attention_decode_batched": True, "naive_attention_decode_single": False,
    "tie_word_embeddings": False, "torch_dtype": "float32", "pretraining_tp": 1, "rope_theta": 10000.0,
}  # fmt: skip


def test_C87_kv_heads_that_differ_by_layer_equal_a_llama_that_repeats_them(tmp_path: Path) -> None:
    """DeciLM-6B says the kv heads of every layer. The oracle is a Llama with as many as queries, in whose layers those
    that belong together are the same; the file has one of them. Bytes of the cache are those of the heads that are."""
    model = made("Llama", 5, num_key_value_heads=4)
    tensors = dict(model.state_dict())
    for n, groups in enumerate(GROUPS):
        for part in "kv":
            name = f"model.layers.{n}.self_attn.{part}_proj.weight"
            heads = tensors[name].view(4, 8, 32)
            kept = heads[:: 4 // groups].clone()
            heads.copy_(kept.repeat_interleave(4 // groups, 0))
            tensors[name] = kept.reshape(-1, 32)
    config = DECI | {"rope_scaling": None}
    found = check(write(tmp_path, config, tensors), model, count_params=False)
    mixers = [layer.mixer for layer in found.spec.layers]
    assert [m.num_kv_heads for m in mixers if isinstance(m, Attention)] == GROUPS
    specs = [cache_spec(layer, "float32") for layer in found.spec.layers]
    assert [spec.num_bytes for spec in specs if spec is not None] == [2 * g * 8 * 4 for g in GROUPS]
    assert len(group_layers(specs)) == 3, "layers of another number of heads have pages of another size"


@pytest.mark.parametrize(("changes", "words"), [
    ({"num_key_value_heads_per_layer": [4, 1]}, "for 2 layers, but the model has 3"),
    ({"num_key_value_heads_per_layer": [4, 3, 1]}, "3 of num_key_value_heads_per_layer does not divide 4"),
    ({"num_key_value_heads_per_layer": [4, 8, 1]}, "integers from 1 to 4"),
    ({"num_key_value_heads_per_layer": None}, "intermediate_size"),
    ({"attention_bias": True}, "attention_bias"),
])  # fmt: skip
def test_C87_layers_that_make_no_sense_are_refused(changes: dict[str, Any], words: str) -> None:
    assert find_family(DECI).spec(DECI).family == "nemotron-nas"
    with pytest.raises(ModelError, match=words):
        find_family(DECI).spec(DECI | changes)


# --- PaLM


def test_C86_the_design_of_palm_is_a_cohere_of_one_kv_head(tmp_path: Path) -> None:
    """PaLM, arXiv 2204.02311, section 2: SwiGLU, halves in parallel behind one norm, one kv head, rotary positions, no
    biases, one matrix for input and output. Nobody has published its weights; this configuration is all of that."""
    model = made("Cohere", 6, num_key_value_heads=1, logit_scale=1.0, tie_word_embeddings=True)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(0.05)
        model.model.norm.weight.add_(3.0)
    model.save_pretrained(tmp_path)
    spec = check(tmp_path, model).spec
    assert spec.tie_embeddings
    for layer in spec.layers:
        assert isinstance(layer.mixer, Attention)
        assert layer.mixer.num_kv_heads == 1
        assert not layer.mixer.qkv_bias
        assert layer.mixer.rope is not None
        assert layer.parallel
        assert layer.shared_norm
        assert not layer.norm.bias
