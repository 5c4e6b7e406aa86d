"""Tiny models of Llama and the families around it, by the name `family-variant`.

Windows and original contexts are shorter than the prompts that parity.py takes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from typing import Any, NamedTuple

import torch
import transformers

from tests.models.parity import VOCAB, oracle, random_model

Config = dict[str, Any]
Edit = Callable[[Config], None]
MAX_MODEL_LEN = 192
LATENT: Config = {
    "num_key_value_heads": 4, "kv_lora_rank": 12, "q_lora_rank": 9, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
    "v_head_dim": 5,
}  # fmt: skip
MUP: Config = {
    "embedding_multiplier": 3.0, "logits_scaling": 0.6, "residual_multiplier": 0.7, "attention_multiplier": 0.2
}  # fmt: skip
SIZES: Config = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 48}
LINEAR = {"rope_type": "linear", "factor": 8.0}
SHORT, LONG = [1.0, 1.1, 1.3, 1.7], [1.5, 2.5, 6.0, 9.0]


def longrope(original: int, pairs: int = 4, **more: Any) -> Config:
    return {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": SHORT[:pairs], "long_factor": LONG[:pairs],
        "original_max_position_embeddings": original, **more,
    }  # fmt: skip


def old_rope(config: Config) -> None:
    """As before version 5: `rope_theta`, `rope_scaling` with `type`, `torch_dtype`."""
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    rope["type"] = rope.pop("rope_type")
    config["rope_scaling"] = None if rope["type"] == "default" else rope
    config["torch_dtype"] = config.pop("dtype")


def old_gemma3(config: Config) -> None:
    ropes = config.pop("rope_parameters")
    config["rope_local_base_freq"] = ropes["sliding_attention"]["rope_theta"]
    config["rope_theta"] = ropes["full_attention"].pop("rope_theta")
    config["rope_scaling"] = ropes["full_attention"]
    config["torch_dtype"] = config.pop("dtype")
    del config["layer_types"], config["_sliding_window_pattern"]
    config |= {"sliding_window_pattern": 2, "cache_implementation": "hybrid", "hidden_act": "gelu_pytorch_tanh"}


def without(*names: str, **more: Any) -> Edit:
    """Take these fields out, so that the family's own defaults hold, and put `more` in."""

    def edit(config: Config) -> None:
        for name in names:
            del config[name]
        config |= more

    return edit


def renamed(config: Config, architecture: str, model_type: str, names: dict[str, str], **more: Any) -> None:
    """Into the config.json of a model that transformers has no class for; `names`: its fields -> Llama's."""
    old_rope(config)
    for name, llama in names.items():
        config[name] = config.pop(llama)
    for name in ("attention_bias", "mlp_bias"):
        config.pop(name, None)
    config |= {"architectures": [architecture], "model_type": model_type, **more}


def as_internlm2(config: Config) -> None:
    renamed(config, "InternLM2ForCausalLM", "internlm2", {}, bias=config["attention_bias"])


def as_exaone(config: Config) -> None:
    names = {
        "num_layers": "num_hidden_layers",
        "activation_function": "hidden_act",
        "layer_norm_epsilon": "rms_norm_eps",
    }
    renamed(config, "ExaoneForCausalLM", "exaone", names)


def as_minicpm(config: Config) -> None:
    renamed(config, "MiniCPMForCausalLM", "minicpm", {}, scale_emb=3.0, dim_model_base=8, scale_depth=1.4)
    for name in ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier"):
        del config[name]


def as_chatglm(config: Config) -> None:
    """The config.json of ChatGLM2 that a Glm of these sizes has; its fields are all its own."""
    told = {
        "hidden_size": config["hidden_size"], "num_layers": config["num_hidden_layers"],
        "num_attention_heads": config["num_attention_heads"], "kv_channels": config["head_dim"],
        "multi_query_attention": True, "multi_query_group_num": config["num_key_value_heads"],
        "ffn_hidden_size": config["intermediate_size"], "padded_vocab_size": VOCAB,
        "seq_length": config["max_position_embeddings"], "layernorm_epsilon": config["rms_norm_eps"],
        "add_qkv_bias": config["attention_bias"], "rope_ratio": 0.02, "add_bias_linear": False, "rmsnorm": True,
        "apply_query_key_layer_scaling": True, "original_rope": True, "torch_dtype": "float32", "eos_token_id": 2,
        "architectures": ["ChatGLMModel"], "model_type": "chatglm", "tie_word_embeddings": False, "post_layer_norm":
        True, "apply_residual_connection_post_layernorm": False, "quantization_bit": 0, "pre_seq_len": None,
    }  # fmt: skip
    config.clear()
    config |= told


Tensors = dict[str, torch.Tensor]
RENAMED = {
    "internlm2": {
        "model.embed_tokens": "model.tok_embeddings", "lm_head": "output", "self_attn.o_proj": "attention.wo",
        "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2",
    },
    "exaone": {
        "model.embed_tokens": "transformer.wte", "model.norm": "transformer.ln_f", "model.layers": "transformer.h",
        "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2", "self_attn.o_proj": "attn.attention.out_proj",
        "self_attn": "attn.attention", "mlp.gate_proj": "mlp.c_fc_0", "mlp.up_proj": "mlp.c_fc_1",
        "mlp.down_proj": "mlp.c_proj",
    },
    "chatglm": {
        "model.embed_tokens": "transformer.embedding.word_embeddings", "model.layers": "transformer.encoder.layers",
        "model.norm": "transformer.encoder.final_layernorm", "lm_head": "transformer.output_layer",
        "self_attn.o_proj": "self_attention.dense", "mlp.gate_up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
    },
}  # fmt: skip
"""Parts of tensor names: Llama's -> the family's. Written down here once more, from the models' published files."""


def restored(model: Any, family: str) -> Tensors | None:
    """The weights of a Llama as `family` stores them; None where transformers does it by itself.

    InternLM2 has for each kv head the rows of its query heads, its key and its value, in one matrix.
    """
    if family not in RENAMED:
        return None
    out: Tensors = {}
    for name, tensor in model.state_dict().items():
        new = name
        for old, by in RENAMED[family].items():
            new = new.replace(old, by)
        out[new] = tensor
    if family == "chatglm":
        for name in [name for name in out if "q_proj" in name]:
            parts = [out.pop(name.replace("q_proj", part)) for part in ("q_proj", "k_proj", "v_proj")]
            out[name.replace("self_attn.q_proj", "self_attention.query_key_value")] = torch.cat(parts)
    if family == "internlm2":
        groups, dim = model.config.num_key_value_heads, model.config.head_dim
        for name in [name for name in out if "q_proj" in name]:
            q, k, v = (out.pop(name.replace("q_proj", part)) for part in ("q_proj", "k_proj", "v_proj"))
            heads = [x.reshape(groups, -1, dim, *x.shape[1:]) for x in (q, k, v)]
            whole = torch.cat(heads, dim=1).flatten(0, 2)
            out[name.replace("self_attn.q_proj", "attention.wqkv")] = whole.contiguous()
    return out


class Case(NamedTuple):
    """`model`: the class names of transformers without their endings; `fields` go into its config."""

    model: str
    fields: Config
    edit: Edit | None = None
    seed: int = 0


KINDS = ["full_attention", "sliding_attention"]
MISTRAL3 = YARN | {
    "llama_4_scaling_beta": 0.4, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 16
}  # fmt: skip
GEMMA3 = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": LINEAR | {"rope_theta": 1e6},
}
CASES: dict[str, Case] = {
    "llama-default": Case("Llama", {"head_dim": 10}),
    "llama-tied": Case("Llama", {"tie_word_embeddings": True}, old_rope),
    "llama-biased": Case("Llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    "llama-linear": Case("Llama", {"rope_parameters": LINEAR | {"rope_theta": 1e4}}, old_rope),
    "llama-dynamic": Case(
        "Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
                  "max_position_embeddings": 48},
    ),
    "llama-dynamic_old": Case(
        "Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0},
                  "max_position_embeddings": 20}, old_rope,
    ),
    "llama-llama3": Case("Llama", {"rope_parameters": LLAMA3}),
    "llama-llama3_old": Case("Llama", {"rope_parameters": LLAMA3}, old_rope),
    "llama-yarn": Case("Llama", {"rope_parameters": YARN}),
    "llama-yarn_old": Case(
        "Llama", {"rope_parameters": YARN | {"rope_theta": 100.0, "beta_fast": 4.0, "beta_slow": 0.5,
                                             "truncate": False}}, old_rope,
    ),
    "llama-yarn_mscale": Case("Llama", {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}}),
    "llama-yarn_factor": Case("Llama", {"rope_parameters": YARN | {"attention_factor": 1.4}}),
    "llama-longrope_short": Case("Llama", {"rope_parameters": longrope(MAX_MODEL_LEN)}),
    "llama-longrope_long": Case("Llama", {"rope_parameters": longrope(20)}),
    "llama-longrope_factor": Case("Llama", {"rope_parameters": longrope(20, factor=4.0)}, old_rope, seed=3),
    "mistral-window": Case("Mistral", {"sliding_window": 8, "head_dim": 10}),
    "mistral-full": Case("Mistral", {"sliding_window": None, "tie_word_embeddings": True}, old_rope),
    "mistral-defaults": Case("Mistral", {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 4},
                             without("num_key_value_heads", "sliding_window")),
    "ministral-mixed": Case("Ministral", {"sliding_window": 8, "head_dim": 8, "layer_types": KINDS}),
    "ministral-all": Case("Ministral", {"sliding_window": 5, "head_dim": 8}, without("layer_types")),
    "ministral3-yarn": Case("Ministral3", {"rope_parameters": MISTRAL3, "head_dim": 8}),
    "ministral3-window": Case(
        "Ministral3", {"rope_parameters": MISTRAL3, "head_dim": 12, "sliding_window": 9},
        lambda c: c["rope_parameters"].update(max_position_embeddings=256),
    ),
    "qwen2-full": Case("Qwen2", {"tie_word_embeddings": True}, old_rope),
    "qwen2-window": Case(
        "Qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1, "num_hidden_layers": 3},
        without("layer_types", use_mrope=False),
    ),
    "qwen2-kinds": Case(
        "Qwen2", {"use_sliding_window": True, "sliding_window": 6, "layer_types": KINDS[::-1], "rope_parameters": YARN}
    ),
    "qwen3-full": Case("Qwen3", {"head_dim": 10}, old_rope),
    "qwen3-biased": Case("Qwen3", {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True}),
    "qwen3-window": Case(
        "Qwen3", {"head_dim": 8, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
        without("layer_types"),
    ),
    "mimo-as_qwen2": Case(
        "Qwen2", {}, lambda c: c.update(
            architectures=["MiMoForCausalLM"], model_type="mimo", attention_bias=True, num_nextn_predict_layers=1
        ),
    ),
    "gemma-plain": Case("Gemma", {"head_dim": 10}, without("head_dim", hidden_act="gelu", head_dim=10)),
    "gemma-mqa": Case(
        "Gemma", {"head_dim": 8, "num_key_value_heads": 1, "attention_bias": True},
        lambda c: (old_rope(c), c.pop("tie_word_embeddings"), c.update(hidden_activation="gelu_pytorch_tanh"))[0],
    ),
    "gemma2-alternating": Case(
        "Gemma2", {"head_dim": 10, "sliding_window": 8, "query_pre_attn_scalar": 5, "attn_logit_softcapping": 2.0,
                   "final_logit_softcapping": 3.0, "attn_implementation": "eager"},
        without("layer_types", "tie_word_embeddings", cache_implementation="hybrid", sliding_window_size=8), seed=1
    ),
    "gemma2-uncapped": Case(
        "Gemma2", {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": None,
                   "final_logit_softcapping": None, "layer_types": KINDS, "attention_bias": True}, old_rope,
    ),
    "gemma2-absent": Case(
        "Gemma2", {"head_dim": 8, "attn_implementation": "eager"},
        without("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "sliding_window"), seed=1
    ),
    "gemma3_text-new": Case(
        "Gemma3", {"head_dim": 10, "sliding_window": 8, "query_pre_attn_scalar": 12, "rope_parameters": GEMMA3,
                   "layer_types": KINDS},
    ),
    "gemma3_text-old": Case(
        "Gemma3", {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8, "rope_parameters": GEMMA3,
                   "sliding_window_pattern": 2, "num_hidden_layers": 4}, old_gemma3, seed=1
    ),
    "gemma3_text-capped": Case(
        "Gemma3", {"head_dim": 8, "sliding_window": 5, "final_logit_softcapping": 3.0, "attention_bias": True},
        without("rope_parameters", "layer_types"), seed=1
    ),
    "phi3-plain": Case("Phi3", {"sliding_window": 9}, old_rope),
    "phi3-partial": Case(
        "Phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
                 "tie_word_embeddings": True, "num_key_value_heads": 1},
    ),
    "phi3-longrope_short": Case(
        "Phi3", {"rope_parameters": longrope(200), "original_max_position_embeddings": 200}
    ),
    "phi3-longrope_long": Case(
        "Phi3", {"rope_parameters": longrope(20, 3, partial_rotary_factor=0.75),
                 "original_max_position_embeddings": 20}, seed=2,
    ),
    "phi3-longrope_old": Case(
        "Phi3", {"rope_parameters": longrope(20), "original_max_position_embeddings": 20},
        lambda c: (old_rope(c), c["rope_scaling"].pop("original_max_position_embeddings"),
                   c["rope_scaling"].update(type="su"), c.update(embd_pdrop=0.0, attention_bias=False))[0],
    ),
    "granite-multipliers": Case(
        "Granite", {"embedding_multiplier": 3.0, "logits_scaling": 0.6, "residual_multiplier": 0.7,
                    "attention_multiplier": 0.2},
    ),
    "granite-biased": Case(
        "Granite", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "attention_multiplier": 0.5},
        old_rope,
    ),
    "hyperclovax-both": Case(
        "HyperCLOVAX", {"embedding_multiplier": 2.0, "logits_scaling": 0.6, "residual_multiplier": 0.7}
    ),
    "hyperclovax-pre": Case(
        "HyperCLOVAX", {"use_post_norm": False, "attention_multiplier": 0.3, "head_dim": 10, "mlp_bias": True}
    ),
    "olmo2-plain": Case("Olmo2", {}, old_rope),
    "olmo2-biased": Case("Olmo2", {"attention_bias": True, "num_key_value_heads": 1}),
    "olmo3-pattern": Case(
        "Olmo3", {"sliding_window": 8, "num_hidden_layers": 4, "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}, "full_attention": YARN}},
        without("layer_types"),
    ),
    "olmo3-old": Case(
        "Olmo3", {"sliding_window": 8, "layer_types": KINDS},
        without("rope_parameters", rope_theta=500000.0, rope_scaling=None),
    ),
    "smollm3-interval": Case(
        "SmolLM3", {"num_hidden_layers": 4, "no_rope_layer_interval": 2}, without("no_rope_layers", "layer_types")
    ),
    "smollm3-window": Case(
        "SmolLM3", {"no_rope_layers": [0, 1], "use_sliding_window": True, "sliding_window": 7, "attention_bias": True,
                    "mlp_bias": True, "tie_word_embeddings": False}, old_rope,
    ),
    "cohere-plain": Case("Cohere", {"logit_scale": 0.5}, old_rope),
    "cohere-qk_norm": Case(
        "Cohere", {"use_qk_norm": True, "attention_bias": True, "tie_word_embeddings": False, "logit_scale": 1.5}
    ),
    "cohere2-pattern": Case(
        "Cohere2", {"sliding_window": 8, "num_hidden_layers": 4, "logit_scale": 0.5},
        without("layer_types", use_gated_activation=True, rotary_pct=1.0, layer_switch=4, use_qk_norm=False),
    ),
    "cohere2-kinds": Case(
        "Cohere2", {"sliding_window": 8, "layer_types": KINDS, "attention_bias": True, "logit_scale": 0.5}, old_rope
    ),
    "glm-plain": Case("Glm", {"head_dim": 12}),
    "glm4-plain": Case("Glm4", {"head_dim": 8}, old_rope, seed=1),
    "glm4-unbiased": Case("Glm4", {"head_dim": 8, "attention_bias": False, "tie_word_embeddings": True}),
    "internlm3-as_llama": Case(
        "Llama", {"head_dim": 10, "attention_bias": True, "mlp_bias": True},
        without("attention_bias", "mlp_bias", "pretraining_tp", architectures=["InternLM3ForCausalLM"],
                model_type="internlm3", qkv_bias=True, bias=True),
    ),
    "internlm2-as_llama": Case("Llama", {}, as_internlm2),
    "internlm2-biased": Case("Llama", {"attention_bias": True, "num_key_value_heads": 4}, as_internlm2),
    "minicpm-as_granite": Case(
        "Granite", {"embedding_multiplier": 3.0, "logits_scaling": 4.0, "residual_multiplier": 1.4 / 2**0.5,
                    "attention_multiplier": 8**-0.5}, as_minicpm,
    ),
    "exaone-as_llama": Case("Llama", {"head_dim": 10, "rope_parameters": LLAMA3}, as_exaone),
    "exaone4-pattern": Case(
        "Exaone4", {"sliding_window": 8, "num_hidden_layers": 4}, without("layer_types")
    ),
    "exaone4-string": Case(
        "Exaone4", {"sliding_window": 8, "layer_types": KINDS, "sliding_window_pattern": "GL"}, old_rope
    ),
    "exaone4-full": Case(
        "Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2, "tie_word_embeddings": True}
    ),
    "seed_oss-plain": Case("SeedOss", {"head_dim": 8}),
    "seed_oss-biased": Case("SeedOss", {"head_dim": 10, "attention_out_bias": True, "mlp_bias": True}, old_rope),
    "hunyuan_v1_dense-plain": Case("HunYuanDenseV1", {"head_dim": 8, "tie_word_embeddings": True}),
    "hunyuan_v1_dense-alpha": Case(
        "HunYuanDenseV1", {"head_dim": 8, "attention_bias": True, "rope_parameters": {
            "rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0, "beta_fast": 32}}, old_rope,
    ),
    "ernie4_5-plain": Case("Ernie4_5", {"head_dim": 8}, old_rope),
    "ernie4_5-biased": Case("Ernie4_5", {"head_dim": 10, "use_bias": True, "tie_word_embeddings": False}),
    "apertus-plain": Case("Apertus", {"rope_parameters": LLAMA3}),
    "apertus-biased": Case("Apertus", {"attention_bias": True, "rope_parameters": YARN, "num_key_value_heads": 1}),
    "arcee-plain": Case("Arcee", {"rope_parameters": YARN}),
    "arcee-biased": Case("Arcee", {"attention_bias": True, "mlp_bias": True, "head_dim": 10}, old_rope),
    "nanochat-plain": Case("NanoChat", {}, old_rope),
    "nanochat-uncapped": Case("NanoChat", {"final_logit_softcapping": None, "num_key_value_heads": 1}),
    "nemotron-plain": Case("Nemotron", {"head_dim": 8}, old_rope),
    "nemotron-biased": Case("Nemotron", {"head_dim": 12, "attention_bias": True, "mlp_bias": True}),
    "helium-plain": Case("Helium", {"head_dim": 8}, old_rope),
    "bitnet-plain": Case("BitNet", {}),
    "bitnet-biased": Case(
        "BitNet", {"attention_bias": True, "hidden_act": "silu", "tie_word_embeddings": True}, old_rope
    ),
    "chatglm-as_glm": Case("Glm", {"head_dim": 8, "rope_parameters": {
        "rope_type": "default", "rope_theta": 200.0, "partial_rotary_factor": 0.5}}, as_chatglm),
    "cwm-window": Case("Cwm", {"head_dim": 8, "sliding_window": 7, "layer_types": KINDS, "rope_parameters": LLAMA3}),
    "cwm-pattern": Case(
        "Cwm", {"head_dim": 10, "sliding_window": 9, "num_hidden_layers": 5, "mlp_bias": True},
        without("layer_types", "rope_parameters"),
    ),
    "doge-plain": Case("Doge", {"attn_implementation": "eager"}),
    "doge-window": Case(
        "Doge", {"attention_bias": True, "mlp_bias": True, "sliding_window": 9, "num_key_value_heads": 1,
                 "keep_window_size": 210, "attn_implementation": "eager"},
    ),
    "granite_swa-thetas": Case("GraniteSWA", MUP | {
        "sliding_window": 7, "num_hidden_layers": 4, "layer_rope_theta": [0, 1e4, 500.0, 1e4]}),
    "granite_swa-plain": Case(
        "GraniteSWA", {"sliding_window": 9, "attention_bias": True, "mlp_bias": True, "layer_types": KINDS[::-1],
                       "attention_multiplier": 0.3}, without("layer_rope_theta"),
    ),
    "jais2-plain": Case("Jais2", {}),
    "jais2-unbiased": Case("Jais2", {"attention_bias": False, "mlp_bias": False, "rope_parameters": YARN}),
    "minicpm3-plain": Case("MiniCPM3", LATENT | {"dim_model_base": 8}),
    "minicpm3-whole": Case("MiniCPM3", LATENT | {
        "q_lora_rank": None, "v_head_dim": None, "attention_bias": True, "dim_model_base": 16, "scale_depth": None,
        "tie_word_embeddings": False, "rope_parameters": longrope(20, 2)}),
    "olmo-plain": Case("Olmo", {}, old_rope),
    "olmo-cut": Case("Olmo", {"clip_qkv": 0.7, "attention_bias": True}),
    "vaultgemma-plain": Case(
        "VaultGemma", {"head_dim": 10, "sliding_window": 8, "query_pre_attn_scalar": 5, "attn_logit_softcapping": 2.0,
                       "final_logit_softcapping": 3.0, "attn_implementation": "eager", "layer_types": KINDS}, seed=1
    ),
    "vaultgemma-pattern": Case(
        "VaultGemma", {"head_dim": 8, "sliding_window": 8, "attn_implementation": "eager"}, without("layer_types")
    ),
    "youtu-plain": Case("Youtu", LATENT),
    "youtu-yarn": Case("Youtu", LATENT | {
        "q_lora_rank": None, "attention_bias": True, "tie_word_embeddings": False, "rope_interleave": False,
        "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}}),
    "helium-biased": Case("Helium", {"head_dim": 8, "attention_bias": True, "mlp_bias": True}),
}  # fmt: skip
HERE = sorted({name.split("-")[0] for name in CASES})


def made_config(name: str) -> Any:
    case = CASES[name]
    config = getattr(transformers, case.model + ("TextConfig" if case.model == "Gemma3" else "Config"))
    return config(**deepcopy({**SIZES, **case.fields}))  # transformers writes into what it is given


def make(name: str) -> Any:
    case = CASES[name]
    model = random_model(getattr(transformers, case.model + "ForCausalLM"), made_config(name), seed=case.seed)
    if model.config.tie_word_embeddings:
        with torch.no_grad():  # or the model repeats what it reads: layers must outweigh the embedding
            model.get_input_embeddings().weight.mul_(0.05)
            model.model.norm.weight.add_(3.0)
    rotary = model.model.rotary_emb
    if rotary.rope_type == "dynamic":
        # transformers lets theta grow with the text it has seen, so that old keys do not fit new ones. Penstock fixes
        # it at start, for contexts of max_model_len. Here, too: one text of that length, then no further updates.
        oracle(model, [3] * MAX_MODEL_LEN)
        rotary.rope_type = "default"
    return model


def config_of(name: str) -> Config:
    """config.json of a case, as transformers writes it and its edit changes it."""
    config: Config = json.loads(_config_text(name))
    return config


@cache
def _config_text(name: str) -> str:
    case = CASES[name]
    config: Config = json.loads(made_config(name).to_json_string(use_diff=False))
    config = {k: v for k, v in config.items() if not k.startswith("_") or k == "_sliding_window_pattern"}
    config |= {"architectures": [case.model + "ForCausalLM"], "dtype": "float32"}
    if case.edit is not None:
        case.edit(config)
    return json.dumps(config)
