"""Every architecture that GGUF files are read of: a tiny model of its family, written as llama.cpp's converter does, is
the same model (catalogue row E21): the spec that its own folder gives, and the same logits.

The folders are compared with transformers elsewhere (tests/models/test_parity_*.py).
"""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import transformers
from safetensors.numpy import save_file

from penstock.backends.native.backend import NativeBackend
from penstock.backends.native.obstacle import native_obstacle
from penstock.base.errors import ModelError
from penstock.core.model_spec import (
    Attention,
    Experts,
    FeedForward,
    GatedDelta,
    Latent,
    Mamba,
    Mamba2,
    ModelSpec,
    Qrwkv6,
    Rwkv6,
    weight_shapes,
)
from penstock.families.checkpoint import Checkpoint
from penstock.families.gguf.architectures import ARCHITECTURES
from penstock.families.gguf.missing import NEEDS
from penstock.families.registry import FAMILIES, find_family, open_model
from penstock.formats.gguf import read_gguf
from penstock.ops.native.library import best_library
from penstock.ops.native.program import Pool
from penstock.weights.load import apply_cut, load_weights
from tests.ggml import stored_values, write_gguf
from tests.models.gguf_writer import RESCALE_EVERY, TURNED, file_metadata, file_tensors, write_model
from tests.models.llama_like_cases import as_exaone, as_internlm2, as_minicpm, restored
from tests.models.parity import TORCH, VOCAB, random_model
from tests.models.test_parity_delta import restore
from tests.models.test_step_parity import TEXT as STEP_TEXT
from tests.models.test_step_parity import VISION as STEP_VISION
from tests.models.vision_cases import CASES as SEEING
from tests.models.vision_cases import make_seeing
from tests.oracle import NaiveModel
from tests.paged import Paged

ROOT = Path(__file__).resolve().parents[2]
BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 192, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
PLAIN: dict[str, Any] = {k: v for k, v in BASE.items() if k not in ("intermediate_size", "num_key_value_heads")}
GPT: dict[str, Any] = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 192}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 48}
MISTRAL3 = YARN | {"llama_4_scaling_beta": 0.4, "mscale": 1.0, "mscale_all_dim": 1.0}
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.25, 1.5, 1.75],
    "long_factor": [1.5, 2.5, 6.0, 9.0], "original_max_position_embeddings": 20,
}  # fmt: skip
GEMMA3N = {
    "head_dim": 8, "num_hidden_layers": 6, "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": VOCAB,
    "sliding_window": 9, "num_kv_shared_layers": 3, "laurel_rank": 5, "final_logit_softcapping": 5.0,
    "activation_sparsity_pattern": [0.7, 0.0, 0.95, 0.0, 0.3, 0.0],
    "layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding", "full", "sliding")],
}  # fmt: skip
GEMMA4 = {
    "head_dim": 8, "global_head_dim": 16, "num_hidden_layers": 4, "vocab_size_per_layer_input": VOCAB,
    "sliding_window": 9, "final_logit_softcapping": 5.0,
    "layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "full")],
}  # fmt: skip
GEMMA3 = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
MOE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
MLA = {
    "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 21,
    "kv_lora_rank": 12, "q_lora_rank": 9, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5,
    "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
}  # fmt: skip
GATED = {
    "head_dim": 16, "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
STATE = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 7}
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 2}
GRANITE = {
    "num_local_experts": 5, "embedding_multiplier": 3.0, "logits_scaling": 0.6, "residual_multiplier": 0.7,
    "attention_multiplier": 0.2, "shared_intermediate_size": 40,
}  # fmt: skip
HYBRID = GRANITE | {
    "mamba_n_heads": 8, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
CONVOLVED = {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False}
INDEX = {"index_n_heads": 24, "index_head_dim": 64, "index_topk": 9, "num_key_value_heads": 4}
TRINITY = {
    "num_hidden_layers": 4, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8,
    "sliding_window": 9, "route_scale": 1.7, "mup_enabled": True,
}  # fmt: skip
COHERE = {"num_experts": 6, "head_dim": 8, "sliding_window": 9, "logit_scale": 0.5, "layer_types": KINDS}
JAMBA = {"num_hidden_layers": 4, "num_experts": 4, "attn_layer_period": 3, "attn_layer_offset": 1, "mamba_d_state": 7,
         "use_mamba_kernels": False}  # fmt: skip
H1 = {
    "mamba_n_heads": 8, "mamba_d_state": 16, "mamba_chunk_size": 16, "mamba_d_ssm": 48, "num_hidden_layers": 2,
    "head_dim": 8, "lm_head_multiplier": 0.7, "embedding_multiplier": 2.5, "mlp_multipliers": [0.8, 1.3],
    "key_multiplier": 0.6, "attention_out_multiplier": 1.4, "attention_in_multiplier": 0.9, "ssm_in_multiplier": 1.1,
    "ssm_multipliers": [0.7, 1.2, 0.9, 1.3, 0.8], "ssm_out_multiplier": 0.6,
}  # fmt: skip
MIMO = {
    "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 12, "v_head_dim": 8,
    "sliding_window": 9, "num_key_value_heads": 1, "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}},
}  # fmt: skip
STEP = {"num_sliding_attention_heads": 6, "rope_theta": [1e4, 500.0, 500.0, 1e4, 500.0],
        "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5, 1.0]}  # fmt: skip
KIMI = {
    "num_experts": 8, "num_experts_per_token": 2, "moe_intermediate_size": 24, "num_key_value_heads": 4,
    "linear_num_heads": 4, "linear_head_dim": 8, "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
    "v_head_dim": 5, "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
LING = BASE | {
    "architectures": ["BailingMoeForCausalLM"], "model_type": "bailing_moe", "num_experts": 6, "num_experts_per_tok": 2,
    "num_shared_experts": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 0, "norm_topk_prob": True,
    "rms_norm_eps": 1e-6, "rope_theta": 6e5,
}  # fmt: skip
LING2 = BASE | {
    "architectures": ["BailingMoeV2ForCausalLM"], "model_type": "bailing_moe_v2", "num_experts": 8, "head_dim": 8,
    "num_experts_per_tok": 3, "num_shared_experts": 1, "moe_intermediate_size": 24, "first_k_dense_replace": 1,
    "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-6,
    "rope_theta": 6e5,
}  # fmt: skip
RWKV6 = {
    "architectures": ["Rwkv6ForCausalLM"], "model_type": "rwkv6", "vocab_size": VOCAB, "hidden_size": 128,
    "num_hidden_layers": 3, "head_size": 64, "intermediate_size": 56, "time_mix_extra_dim": 6,
    "time_decay_extra_dim": 5, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
QRWKV6 = {
    "architectures": ["RWKV6Qwen2ForCausalLM"], "model_type": "rwkv6qwen2", "vocab_size": VOCAB, "hidden_size": 128,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 56,
    "lora_rank_tokenshift": 6, "lora_rank_decay": 5, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
RWKV7 = {
    "architectures": ["RWKV7ForCausalLM"], "model_type": "rwkv7", "vocab_size": VOCAB, "hidden_size": 128,
    "num_hidden_layers": 3, "head_dim": 64, "intermediate_size": 56, "decay_low_rank_dim": 6, "a_low_rank_dim": 5,
    "v_low_rank_dim": 3, "gate_low_rank_dim": 7, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ARWKV7 = {
    **{name: value for name, value in RWKV7.items() if name != "head_dim"}, "architectures": ["RwkvHybridForCausalLM"],
    "model_type": "arwkv7", "head_size": 64,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "afmoe": ("Afmoe", TRINITY),
    "afmoe-dense": ("Afmoe", TRINITY | {"num_dense_layers": 2, "num_shared_experts": 1}),
    "bailingmoe": ("", LING),
    "bailingmoe-weights": ("", LING | {"norm_topk_prob": False, "use_qkv_bias": True, "head_dim": 10}),
    "bailingmoe2": ("", LING2),
    "bailingmoe2-whole": ("", LING2 | {"partial_rotary_factor": 1.0, "first_k_dense_replace": 0, "n_group": 1,
                                       "topk_group": 1, "norm_topk_prob": False, "num_shared_experts": 2}),
    "bitnet": ("BitNet", {"hidden_act": "silu", "num_key_value_heads": 4, "tie_word_embeddings": True}),
    "mistral4": ("Mistral4", MLA | {"first_k_dense_replace": 0, "rope_parameters": YARN | {
        "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4}}),
    "mistral4-dense": ("Mistral4", MLA | {"n_group": 1, "topk_group": 1, "norm_topk_prob": False,
                                          "routed_scaling_factor": 1.5, "rope_parameters": YARN | {
                                              "mscale": 1.0, "mscale_all_dim": 1.0}}),
    "cohere2moe": ("Cohere2Moe", COHERE | {"num_shared_experts": 2}),
    "cohere2moe-dense": ("Cohere2Moe", COHERE | {
        "rms_norm_eps": 1e-5, "expert_selection_fn": "sigmoid", "first_k_dense_replace": 1, "num_shared_experts": 1,
        "prefix_dense_intermediate_size": 40}),
    "deepseek32": ("DeepseekV32", MLA | INDEX),
    "deepseek32-yarn": ("DeepseekV32", MLA | INDEX | {"index_topk": 200, "rope_parameters": YARN | {
        "mscale": 1.0, "mscale_all_dim": 1.0}}),
    "exaone-moe": ("ExaoneMoe", {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                                 "layer_types": KINDS, "sliding_window": 9}),
    "falcon-h1": ("FalconH1", H1),
    "falcon-h1-normed": (
        "FalconH1", H1 | {"mamba_rms_norm": True, "mamba_n_groups": 2, "mamba_norm_before_gate": False}
    ),
    "glm-dsa": ("GlmMoeDsa", MLA | INDEX | {"n_group": 1, "topk_group": 1}),
    "glm-dsa-shared": ("GlmMoeDsa", MLA | INDEX | {"n_group": 1, "topk_group": 1, "index_topk": 11, "indexer_types": [
        "full", "shared", "full"]}),
    "jamba": ("Jamba", JAMBA),
    "jamba-dense": ("Jamba", JAMBA | {"num_experts": 1, "mamba_dt_rank": 5}),
    "kimi-linear": ("KimiLinear", KIMI),
    "mamba-normed": ("FalconMamba", STATE | {"mixer_rms_eps": 1e-5}),
    "mimo2": ("MiMoV2Flash", MIMO),
    "phimoe": ("Phimoe", {"num_local_experts": 5, "router_jitter_noise": 0.01, "attention_bias": True,
                          "lm_head_bias": True, "sliding_window": 11}),
    "rwkv6": ("", RWKV6),
    "rwkv7": ("", RWKV7),
    "rwkv6qwen2": ("", QRWKV6),
    "rwkv6qwen2-equal": ("", QRWKV6 | {"num_key_value_heads": 4}),
    "arwkv7": ("", ARWKV7),
    "arwkv7-bare": ("", ARWKV7 | {"wkv_has_gate": False, "wkv_has_group_norm": False}),
    "step35": ("Step3p7", STEP),
    "step35-limits": ("Step3p7", STEP | {"swiglu_limits": [0.0, 0.0, 0.0, 0.4, 0.0],
                                         "swiglu_limits_shared": [0.5, 0.0, 0.0, 0.3, 0.0]}),
    "dots1": ("Dots1", ROUTED | {"first_k_dense_replace": 1, "norm_topk_prob": True, "head_dim": 8,
                                 "sliding_window": None, "routed_scaling_factor": 2.5, "num_key_value_heads": 4}),
    "ernie4_5-moe": ("Ernie4_5_Moe", {"moe_num_experts": 5, "moe_k": 2, "moe_intermediate_size": 24, "head_dim": 8}),
    "granitehybrid": ("GraniteMoeHybrid", HYBRID),
    "granitehybrid-dense": ("GraniteMoeHybrid", HYBRID | {"num_local_experts": 0}),
    "granitemoe": ("GraniteMoeShared", GRANITE),
    "granitemoe-alone": ("GraniteMoeShared", GRANITE | {"shared_intermediate_size": 0}),
    "hunyuan-moe": ("HunYuanMoEV1", {"num_experts": 5, "moe_topk": 2, "head_dim": 8}),
    "lfm2": ("Lfm2", CONVOLVED),
    "lfm2moe": ("Lfm2Moe", {"layer_types": CONVOLVED["layer_types"], "num_experts": 6, "num_experts_per_tok": 2,
                            "moe_intermediate_size": 24, "num_dense_layers": 1}),
    "llama": ("Llama", {"attention_bias": True}),
    "llama-mixtral": ("Mixtral", {"num_local_experts": 5, "sliding_window": None}),
    "llama-mistral": ("Mistral", {"sliding_window": None, "tie_word_embeddings": True, "head_dim": 10}),
    "arcee": ("Arcee", {"rope_parameters": YARN}),
    "bloom": ("Bloom", {"n_layer": 2, "n_head": 4, "seq_length": 192}),
    "chatglm": ("Glm", {"head_dim": 8}),
    "cohere2": ("Cohere2", {"sliding_window": 8, "layer_types": KINDS, "logit_scale": 0.5}),
    "command-r": ("Cohere", {"logit_scale": 0.5}),
    "command-r-normed": ("Cohere", {"logit_scale": 0.5, "use_qk_norm": True}),
    "deepseek2": ("DeepseekV2", MLA | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5,
                                       "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}}),
    "deepseek2-lite": ("DeepseekV2", MLA | {"q_lora_rank": None, "n_group": None, "topk_group": None}),
    "deepseek2-v3": ("DeepseekV3", MLA),
    "ernie4_5": ("Ernie4_5", {"head_dim": 8}),
    "exaone4": ("Exaone4", {"sliding_window": 8, "layer_types": KINDS}),
    "exaone4-full": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "falcon": ("Falcon", {}),
    "falcon-40b": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-11b": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}),
    "gemma": ("Gemma", {"head_dim": 10}),
    "gemma2": ("Gemma2", {"head_dim": 10, "sliding_window": 8, "query_pre_attn_scalar": 10,
                          "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3", {"head_dim": 10, "sliding_window": 8, "query_pre_attn_scalar": 10, "rope_parameters": GEMMA3,
                          "layer_types": KINDS}),
    "gemma3n": ("Gemma3n", GEMMA3N),
    "gemma3n-deep": ("Gemma3n", GEMMA3N | {"num_hidden_layers": 25, "num_kv_shared_layers": 5, "layer_types": None,
                                           "hidden_size_per_layer_input": 256, "laurel_rank": 64,
                                           "final_logit_softcapping": 30.0,
                                           "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 15}),
    "gemma4": ("Gemma4", GEMMA4 | {"hidden_size_per_layer_input": 12, "num_kv_shared_layers": 2}),
    "gemma4-same": ("Gemma4", GEMMA4 | {"hidden_size_per_layer_input": 12, "attention_k_eq_v": True,
                                        "num_global_key_value_heads": 1, "num_kv_shared_layers": 2,
                                        "use_double_wide_mlp": True}),
    "gemma4-moe": ("Gemma4", GEMMA4 | {"hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 6,
                                       "top_k_experts": 2, "moe_intermediate_size": 21}),
    "glm4": ("Glm4", {"head_dim": 8}),
    "glm4moe": ("Glm4Moe", {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 21, "head_dim": 8,
                            "first_k_dense_replace": 1, "use_qk_norm": True, "routed_scaling_factor": 2.5}),
    "gpt2": ("GPT2", GPT),
    "gpt-oss": ("GptOss", {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 9,
                           "rope_parameters": YARN | {"truncate": False}}),
    "gptneox": ("GPTNeoX", {"intermediate_size": 43}),
    "gptneox-sequential": ("GPTNeoX", {"intermediate_size": 43, "use_parallel_residual": False}),
    "granite": ("Granite", {"embedding_multiplier": 3.0, "logits_scaling": 0.6, "residual_multiplier": 0.7,
                            "attention_multiplier": 0.2}),
    "hunyuan-dense": ("HunYuanDenseV1", {"head_dim": 8, "tie_word_embeddings": True}),
    "llama4": ("Llama4", {"num_local_experts": 4, "head_dim": 8, "intermediate_size_mlp": 37, "num_hidden_layers": 4,
                          "interleave_moe_layer_step": 2}),
    "mamba": ("Mamba", STATE),
    "mamba-biased": ("Mamba", STATE | {"use_bias": True, "conv_kernel": 3, "time_step_rank": 5, "use_conv_bias": False,
                                       "tie_word_embeddings": False}),
    "mamba2": ("Mamba2", STATE | {"num_heads": 8, "head_dim": 8, "n_groups": 4, "chunk_size": 16}),
    "minimax-m2": ("MiniMaxM2", {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 8,
                                 "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                                     "partial_rotary_factor": 0.5}}),
    "mistral3": ("Ministral3", {"rope_parameters": MISTRAL3, "head_dim": 8}),
    "mpt": ("Mpt", {"d_model": 32, "n_layers": 3, "n_heads": 8, "max_seq_len": 192, "attn_config": {"clip_qkv": 0.7}}),
    "nemotron": ("Nemotron", {"head_dim": 8}),
    "nemotron_h": ("NemotronH", {"hybrid_override_pattern": "M-MM*-*M-", "mlp_bias": True, "n_groups": 2}),
    "nemotron_h_moe": ("NemotronH", {"hybrid_override_pattern": "ME*EM", "n_groups": 1, "n_routed_experts": 8,
                                     "n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5}),
    "nemotron_h_moe-latent": ("NemotronH", {"hybrid_override_pattern": "ME*EM", "n_groups": 1, "n_routed_experts": 6,
                                            "n_group": 1, "topk_group": 1, "moe_latent_size": 12}),
    "olmo2": ("Olmo2", {}),
    "olmo2-olmo3": ("Olmo3", {"sliding_window": 8, "layer_types": KINDS, "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}, "full_attention": YARN}}),
    "olmoe": ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 2, "num_key_value_heads": 4}),
    "phi2": ("Phi", {}),
    "phi2-normed": ("Phi", {"qk_layernorm": True}),
    "phi3": ("Phi3", {"sliding_window": 9, "rope_parameters": LONG, "original_max_position_embeddings": 20}),
    "phi3-partial": ("Phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                                  "partial_rotary_factor": 0.75}}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2moe": ("Qwen2Moe", MOE | {"shared_expert_intermediate_size": 40, "norm_topk_prob": False}),
    "qwen2vl": ("Qwen2VL", {}),
    "qwen3": ("Qwen3", {"head_dim": 10}),
    "qwen3moe": ("Qwen3Moe", MOE | {"head_dim": 10}),
    "qwen3next": ("Qwen3Next", MOE | GATED | {"shared_expert_intermediate_size": 40}),
    "qwen35": ("Qwen3_5", GATED),
    "qwen35-equal": ("Qwen3_5", GATED | {"linear_num_value_heads": 2, "linear_value_head_dim": 8}),
    "qwen35moe": ("Qwen3_5Moe", MOE | GATED | {"shared_expert_intermediate_size": 40, "linear_num_value_heads": 6}),
    "qwen3vl": ("Qwen3VL", {"head_dim": 10}),
    "qwen3vlmoe": ("Qwen3VLMoe", MOE | {"head_dim": 8, "mlp_only_layers": []}),
    "seed_oss": ("SeedOss", {"head_dim": 8}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4}),
    "stablelm": ("StableLm", {"use_qkv_bias": True}),
    "stablelm-parallel": ("StableLm", {"qk_layernorm": True, "use_parallel_residual": True}),
    "starcoder": ("GPTBigCode", GPT),
    "starcoder2": ("Starcoder2", {"sliding_window": 9}),
    "deci": ("Llama", {"hidden_size": 32, "intermediate_size": 256}),
    "exaone": ("Llama", {}),
    "internlm2": ("Llama", {}),
    "minicpm": ("Granite", {"embedding_multiplier": 3.0, "logits_scaling": 4.0, "residual_multiplier": 1.4 / 3**0.5,
                            "attention_multiplier": 8**-0.5}),
}  # fmt: skip
TEXTS = ("Gemma3", "Gemma3n", "Gemma4", "Llama4", "Qwen3_5", "Qwen3_5Moe")
OTHER_FIELDS = ("Falcon", "GPTNeoX")
NO_BASE = ("GPT2", "GPTBigCode", "Mamba", "Mamba2", "FalconMamba", "Mpt", "Bloom")
EDITS = {"exaone": as_exaone, "internlm2": as_internlm2, "minicpm": as_minicpm}


def as_deci(config: dict[str, Any]) -> None:
    """A Llama whose second layer lacks its attention, by the name of a family that transformers has no class for."""
    groups = config["num_attention_heads"] // config["num_key_value_heads"]
    attention, ffn = {"n_heads_in_group": groups}, {"ffn_mult": 256 * 1.5 / 32}
    config["block_configs"] = [
        {"attention": {"no_op": True} if i == 1 else attention, "ffn": ffn} for i in range(config["num_hidden_layers"])
    ]
    config |= {"architectures": ["DeciLMForCausalLM"], "model_type": "nemotron-nas", "head_dim": None}
    for name in ("intermediate_size", "num_key_value_heads"):
        del config[name]


def architecture(case: str) -> str:
    return case if case in ARCHITECTURES else case.rsplit("-", 1)[0]


def model_of(case: str) -> Any:
    name, changes = CASES[case]
    if "VL" in name:
        seeing = next(own for own in SEEING.values() if own.kind == name)
        return make_seeing(seeing._replace(text=BASE | seeing.text | changes), len(case))
    if name == "Step3p7":
        config = transformers.Step3p7Config(text_config=STEP_TEXT | changes, vision_config=dict(STEP_VISION))
        return corrected(random_model(transformers.Step3p7ForConditionalGeneration, config, seed=len(case)))
    ids = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2}
    fields = {**(ids if name in NO_BASE else PLAIN if name in OTHER_FIELDS else BASE), **changes}
    if name == "NemotronH":
        fields |= {
            "head_dim": 8, "ssm_state_size": 7, "mamba_num_heads": 8, "mamba_head_dim": 6, "chunk_size": 16,
            "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 24,
        }  # fmt: skip
    if name == "Bloom":
        fields["hidden_size"] = 32
    if name == "Qwen3_5Moe":
        del fields["intermediate_size"], fields["norm_topk_prob"]
    config_class = f"{name}TextConfig" if name in TEXTS else f"{name}Config"
    config = getattr(transformers, config_class)(**json.loads(json.dumps(fields)))
    head = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    model = random_model(getattr(transformers, head), config, seed=len(case))
    if case == "gemma3n-deep":  # or 25 layers make of any rounding, that of gelu in llama.cpp, another text
        for key, p in model.named_parameters():
            calm = (
                "post_attention_layernorm",
                "post_feedforward_layernorm",
                "post_laurel_norm",
                "per_layer_input_norm",
            )
            if key.split(".")[-2].endswith((*calm, "prediction_coefs", "correction_coefs")):
                p.data.mul_(0.1)
    return corrected(model)


def corrected(model: Any) -> Any:
    """The same model; what corrects its routers' scores is random, too."""
    for key, value in [*model.named_buffers(), *model.named_parameters()]:
        if key.endswith(("e_score_correction_bias", "expert_bias")):
            value.data.normal_(std=0.3)
    return model


def own_folder(config: dict[str, Any], folder: Path) -> Checkpoint:
    """A random model of a family that transformers has no class for, as the family names its weights."""
    family, rng = find_family(config), np.random.default_rng(5)
    spec = family.spec(config)
    places, stored = family.weight_map(spec), {}
    for name, shape in weight_shapes(spec).items():
        array = rng.standard_normal(shape) * (0.25 if len(shape) == 1 else 2 / shape[-1] ** 0.5)
        if name.endswith("norm"):
            array += 1.0
        place = places[name]
        if isinstance(place, str):
            stored[place] = array.astype(np.float32)
        else:
            whole = stored.setdefault(place.name, np.zeros(place.shape, np.float32))
            part = apply_cut(whole, place)
            part[...] = array.reshape(part.shape)
    folder.mkdir()
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return open_model(folder)


def folder_of(case: str, folder: Path) -> Checkpoint:
    """The model as a folder of its own family."""
    if not CASES[case][0]:
        return own_folder(CASES[case][1], folder)
    model = model_of(case)
    edit = as_deci if case == "deci" else EDITS.get(case)
    model.save_pretrained(folder, state_dict=restored(model, case) if case in EDITS else None)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if CASES[case][0] == "NemotronH" and "E" not in config.get("hybrid_override_pattern", "E"):
        config = {k: v for k, v in config.items() if "expert" not in k and "moe" not in k}
    if edit is not None:
        edit(config)
    path.write_text(json.dumps(config))
    if case == "deci":
        _drop_attention(folder / "model.safetensors", 1)
    if CASES[case][0] == "KimiLinear":
        restore(folder / "model.safetensors")
    return open_model(folder)


def _drop_attention(path: Path, index: int) -> None:
    from safetensors.torch import load_file, save_file

    gone = (f"model.layers.{index}.self_attn.", f"model.layers.{index}.input_layernorm.")
    kept = {name: tensor for name, tensor in load_file(path).items() if not name.startswith(gone)}
    save_file(kept, path, metadata={"format": "pt"})


def both(case: str, tmp_path: Path) -> tuple[Checkpoint, Checkpoint]:
    own = folder_of(case, tmp_path / "folder")
    weights = {name: np.array(a) for name, a in load_weights(own, own.spec, "float32").items()}
    return own, open_model(write_model(tmp_path / "m.gguf", own.spec, weights, architecture(case)))


def logits(checkpoint: Checkpoint, ids: list[int]) -> Any:
    weights = load_weights(checkpoint, checkpoint.spec, "float32")
    return Paged(checkpoint.spec, weights, max_model_len=192).one_go("a", ids)


def as_converted(spec: ModelSpec, arch: str) -> ModelSpec:
    """What the converter leaves different: norms have their one added, rows of q and k are in another order, decays are
    no logarithms, and `kv_b` comes in halves."""
    change = msgspec.structs.replace
    if arch == "falcon-h1":
        spec = unscaled(spec)
    layers = []
    for i, layer in enumerate(spec.layers):
        m: Any = layer.mixer
        if isinstance(m, Attention):
            norm = None if m.qk_norm is None else change(m.qk_norm, offset=0.0)
            turn = m.rope is not None and arch in TURNED
            m = change(m, qk_norm=norm, rope=change(m.rope, interleaved=True) if turn else m.rope)
        elif isinstance(m, Latent):
            m = change(m, split=True)
        elif isinstance(m, Mamba | Mamba2):
            m = change(m, decay_is_log=False)
        elif isinstance(m, Qrwkv6):
            m = change(m, mixed="wkvrg")
        elif isinstance(m, GatedDelta):
            m = change(m, decay_is_log=False, in_turn=arch.startswith("qwen35") and m.value_heads > m.key_heads)
        scale = 2.0 ** (i // RESCALE_EVERY) if isinstance(m, Rwkv6) else layer.residual_scale
        layers.append(change(layer, mixer=m, norm=change(layer.norm, offset=0.0), residual_scale=scale))
    final = None if spec.final_norm is None else change(spec.final_norm, offset=0.0)
    return change(spec, layers=tuple(layers), final_norm=final, eos_token_ids=spec.eos_token_ids[:1])


def unscaled(spec: ModelSpec) -> ModelSpec:
    """Falcon-H1, whose multipliers its file has in the weights."""
    change = msgspec.structs.replace
    layers = []
    for layer in spec.layers:
        m, ffn = layer.mixer, layer.ffn
        if isinstance(m, Attention):
            m = change(m, scale=m.head_dim**-0.5)
        elif isinstance(m, Mamba2):
            m = change(m, scales=(1.0,) * 5)
        if isinstance(ffn, FeedForward):
            ffn = change(ffn, gate_scale=1.0)
        layers.append(change(layer, mixer=m, ffn=ffn, mixer_scale=1.0, residual_scale=1.0))
    return change(spec, layers=tuple(layers), embed_scale=1.0, logit_scale=1.0)


def close(a: Any, b: Any) -> bool:
    """Equal, but for float32's rounding of numbers in a file."""
    if isinstance(a, float) and isinstance(b, float | int):
        return math.isclose(a, b, rel_tol=1e-6)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(close(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(close, a, b))
    return bool(a == b)


@pytest.mark.parametrize("case", list(CASES))
def test_a_written_file_is_the_same_model(case: str, tmp_path: Path) -> None:
    own, gguf = both(case, tmp_path)
    want, got = as_converted(own.spec, architecture(case)), gguf.spec
    if want.family.startswith("qwen3_5"):
        want = msgspec.structs.replace(want, family=got.family)  # files are of the part of a checkpoint that also sees
    if gguf.spec.family == "llama" and own.spec.family == "mistral":
        want = msgspec.structs.replace(want, family="llama")  # files do not say which of them they are
    assert close(msgspec.to_builtins(got), msgspec.to_builtins(want))
    ids = np.random.default_rng(1).integers(3, VOCAB, 60).tolist()
    expected = logits(own, ids)
    assert expected.std() > 0.05, "a flat model proves nothing"
    np.testing.assert_allclose(logits(gguf, ids), expected, atol=1e-4)


@pytest.mark.parametrize("case", ["mimo2", "step35", "exaone-moe", "cohere2moe", "glm-dsa-shared", "deepseek32"])
def test_blocks_behind_the_layers_are_passed_over(case: str, tmp_path: Path) -> None:
    """Lists of the metadata have entries for them, too."""
    _, gguf = both(case, tmp_path)
    file, arch = read_gguf(gguf.path), architecture(case)
    n = file.metadata[f"{arch}.block_count"]
    assert isinstance(n, int)
    more: dict[str, Any] = {
        key: [*value, value[-1]] for key, value in file.metadata.items() if isinstance(value, list) and len(value) == n
    }
    tensors = {name: ref.shape for name, ref in file.tensors.items()}
    tensors |= {name.replace(f"blk.{n - 1}.", f"blk.{n}."): shape for name, shape in tensors.items()}
    tensors[f"blk.{n}.nextn.eh_proj.weight"] = (32, 64)
    metadata = file.metadata | more | {f"{arch}.block_count": n + 1, f"{arch}.nextn_predict_layers": 1}
    zeros = {name: ("F32", np.zeros(shape, np.float32)) for name, shape in tensors.items()}
    longer = open_model(write_gguf(tmp_path / "longer.gguf", metadata, zeros))
    assert longer.spec == gguf.spec
    assert longer.heads == ()


def test_values_that_are_smaller_than_keys_lie_below_them_in_one_tensor(tmp_path: Path) -> None:
    """As in files of MiMo-V2.5."""
    own, gguf = both("mimo2", tmp_path)
    weights = {name: np.array(a) for name, a in load_weights(own, own.spec, "float32").items()}
    tensors = file_tensors(own.spec, weights, "mimo2")
    for i in range(len(own.spec.layers)):
        parts = [tensors.pop(f"blk.{i}.attn_{name}.weight") for name in "qkv"]
        tensors[f"blk.{i}.attn_qkv.weight"] = np.concatenate(parts)
    kinds = {name: ("F32", array) for name, array in tensors.items()}
    fused = open_model(write_gguf(tmp_path / "fused.gguf", file_metadata(own.spec, "mimo2"), kinds))
    assert fused.spec == gguf.spec
    want, got = (load_weights(c, c.spec, "float32") for c in (gguf, fused))
    assert all(np.array_equal(got[name], array) for name, array in want.items())


@pytest.mark.parametrize("every", [0, 1])
def test_older_files_of_rwkv_6_have_their_mixes_apart(tmp_path: Path, every: int) -> None:
    """And files say how often the residual is halved; at 0 it never is, and their weights are not divided."""
    own, gguf = both("rwkv6", tmp_path)
    weights = {name: np.array(a) for name, a in load_weights(own, own.spec, "float32").items()}
    tensors, scales = file_tensors(own.spec, weights, "rwkv6"), [2.0**i if every else 1.0 for i in range(3)]
    for i, scale in enumerate(scales):
        rows = tensors.pop(f"blk.{i}.time_mix_lerp_fused.weight").reshape(5, -1)
        tensors |= {f"blk.{i}.time_mix_lerp_{n}.weight": row for n, row in zip("wkvrg", rows, strict=True)}
        for name, stored in (("o", "time_mix_output"), ("down", "channel_mix_value")):
            tensors[f"blk.{i}.{stored}.weight"] = weights[f"layers.{i}.{name}"] / np.float32(scale)
    kinds = {name: ("F32", array) for name, array in tensors.items()}
    metadata = file_metadata(own.spec, "rwkv6") | {"rwkv6.rescale_every_n_layers": every}
    apart = open_model(write_gguf(tmp_path / "apart.gguf", metadata, kinds))
    assert [layer.residual_scale for layer in apart.spec.layers] == scales
    ids = np.random.default_rng(1).integers(3, VOCAB, 20).tolist()
    np.testing.assert_array_equal(logits(apart, ids), logits(own, ids))
    np.testing.assert_array_equal(logits(gguf, ids), logits(own, ids))


def test_value_heads_in_another_order_stay_blocks(tmp_path: Path) -> None:
    """Qwen3.5, whose heads lie so that each next one has the next key head; columns of o lie so, too."""
    CASES["qwen35-wide"] = ("Qwen3_5", GATED | {"linear_key_head_dim": 16, "linear_value_head_dim": 16})
    try:
        own = folder_of("qwen35-wide", tmp_path / "folder")
    finally:
        del CASES["qwen35-wide"]
    weights = {name: np.array(a) for name, a in load_weights(own, own.spec, "float32").items()}
    tensors = file_tensors(own.spec, weights, "qwen35")
    coded = {name: "Q8_0" if name.startswith("blk.") and a.ndim == 2 and "conv" not in name else "F32"
             for name, a in tensors.items() if a.shape[-1] % 32 == 0}  # fmt: skip
    kinds = {name: (coded.get(name, "F32"), a) for name, a in tensors.items()}
    values = {name: ("F32", stored_values(kind, a)) for name, (kind, a) in kinds.items()}
    metadata = file_metadata(own.spec, "qwen35")
    blocks = open_model(write_gguf(tmp_path / "blocks.gguf", metadata, kinds))
    plain = open_model(write_gguf(tmp_path / "plain.gguf", metadata, values))
    want = load_weights(plain, plain.spec, "float32")
    got = load_weights(blocks, blocks.spec, "float32")
    assert all(np.array_equal(got[name], array) for name, array in want.items())
    kept = {name.removeprefix("layers.0.") for name in blocks.stored if name.startswith("layers.0.")}
    assert kept >= {"q", "k", "v", "z", "beta", "dt", "o"}


@pytest.mark.parametrize("case", ["deepseek2-v3", "mamba", "mamba2", "qwen35"])
def test_the_naive_loop_equals_the_program_bit_for_bit(case: str, tmp_path: Path) -> None:
    """Where files hold other weights than folders: halves of latent attention, decays that are no logarithms."""
    _, gguf = both(case, tmp_path)
    weights = load_weights(gguf, gguf.spec, "float32")
    ids = np.random.default_rng(3).integers(3, VOCAB, 40).tolist()
    want = NaiveModel(gguf.spec, weights).logits(ids)
    np.testing.assert_array_equal(Paged(gguf.spec, weights).chunked("a", ids, (7, 1, 16)), want)


OTHER_THAN_FOLDERS = [
    "qwen35", "qwen35moe", "kimi-linear", "rwkv6", "rwkv7", "rwkv6qwen2", "arwkv7", "arwkv7-bare", "jamba", "falcon-h1",
    "mimo2", "glm-dsa-shared",
]  # fmt: skip
"""Where a file's weights are others than a folder's, or the family has no other suite."""


@pytest.mark.parametrize("case", OTHER_THAN_FOLDERS)
def test_every_backend_computes_the_same_of_a_file(case: str, tmp_path: Path) -> None:
    own, gguf = both(case, tmp_path)
    weights, ids = load_weights(gguf, gguf.spec, "float32"), np.random.default_rng(1).integers(3, VOCAB, 60).tolist()
    expected = logits(own, ids)

    def on(backend: Any) -> Paged:
        return Paged(gguf.spec, weights, max_model_len=192).on(backend)

    torched = on(TORCH).chunked("a", ids, (23, 1, 16))
    np.testing.assert_allclose(torched, expected, atol=3e-4)
    if best_library() is None or native_obstacle(gguf.spec) is not None:
        return
    native = NativeBackend(Pool(best_library(), 2))
    whole = on(native).one_go("a", ids)
    np.testing.assert_allclose(whole, expected, atol=3e-4)
    np.testing.assert_array_equal(on(native).chunked("a", ids, (7, 1, 16, 3)), whole)


def test_every_architecture_has_a_case_and_a_family() -> None:
    encoders = {"bert", "modern-bert", "nomic-bert"}  # test_gguf_encoders.py
    assert {architecture(case) for case in CASES} | encoders == set(ARCHITECTURES)
    for entry in ARCHITECTURES.values():
        assert set(entry.families) <= set(FAMILIES.names())
    assert not set(NEEDS) & set(ARCHITECTURES)
    assert find_family({"model_type": "gemma2"}).name == "gemma2"


ODD: list[Any] = [
    None, 0, 1, 3, 2**32 - 1, -1, 0.0, 1e-38, float("nan"), True, False, "x", [], [0, 0, 0], [True, False, True], ["a"],
]  # fmt: skip
"""What a metadata entry is made to be; None takes it away."""
MORE = [
    "nextn_predict_layers", "attention.sliding_window_pattern", "rope.scaling.type", "expert_gating_func",
    "logit_scale", "attention.temperature_scale", "leading_dense_block_count",
]  # fmt: skip


@pytest.mark.parametrize("case", [
    "deci", "deepseek2", "gemma3", "gemma3n", "gemma4-moe", "falcon-40b", "mamba2", "mistral3", "nemotron_h_moe",
    "cohere2moe-dense", "glm-dsa-shared", "jamba", "kimi-linear", "mimo2", "rwkv6", "rwkv7", "rwkv6qwen2",
    "arwkv7-bare", "step35-limits",
])  # fmt: skip
def test_odd_metadata_are_refused_in_one_sentence_or_harmless(case: str, tmp_path: Path) -> None:
    _, checkpoint = both(case, tmp_path)
    gguf, arch = read_gguf(checkpoint.path), architecture(case)
    tensors = {name: ("F32", np.zeros(ref.shape, np.float32)) for name, ref in gguf.tensors.items()}
    entries = [*(key for key in gguf.metadata if key.startswith(arch + ".")), *(f"{arch}.{key}" for key in MORE)]
    refused: list[str] = []
    for key, value in [(key, ODD[n % len(ODD)]) for n, key in enumerate(entries * 7)]:
        metadata = {k: v for k, v in gguf.metadata.items() if k != key} | ({} if value is None else {key: value})
        try:
            open_model(write_gguf(tmp_path / "odd.gguf", metadata, tensors))
        except ModelError as error:
            refused.append(str(error))
    assert len(refused) > len(entries)
    assert all(len(message.splitlines()) == 1 for message in refused)


def test_a_bias_that_one_block_lacks_is_missed(tmp_path: Path) -> None:
    _, checkpoint = both("llama", tmp_path)
    gguf = read_gguf(checkpoint.path)
    tensors = {
        name: ("F32", np.zeros(ref.shape, np.float32)) for name, ref in gguf.tensors.items()
        if name != "blk.0.attn_output.bias"
    }  # fmt: skip
    with pytest.raises(ModelError, match=r"lacks 1 of .* 'blk\.0\.attn_output\.bias'"):
        open_model(write_gguf(tmp_path / "less.gguf", gguf.metadata, tensors))


LLAMA_CPP = "PENSTOCK_LLAMA_CPP"
"""Names a Python that has llama-cpp-python, for the tests that compare with llama.cpp itself."""
UNLIKE = {
    "phimoe": "llama.cpp norms by RMS and weighs by a softmax where the model has layer norms and SparseMixer",
    "deepseek2": "a group of experts is worth its two best in llama.cpp, its best in DeepSeek-V2",
    "exaone4": "llama.cpp uses the window in the model with 64 layers only",
    "gemma3n": "in llama.cpp the first 20 layers share nothing, and some sizes are those of the released files",
    "olmo2-olmo3": "llama.cpp rotates both kinds of layers with one theta, as the released files have it",
    "phi3": "llama.cpp has Phi-3's window switched off",
    "starcoder2": "llama.cpp does not read StarCoder2's window",
    "command-r-normed": "llama.cpp reads norms of q and k in the model with 64 layers only",
    "deepseek2-lite": "llama.cpp lets the query's rank be missing in models of 26, 27 and 48 layers only",
    "mamba-biased": "llama.cpp needs the convolution's bias",
    "phi2-normed": "llama.cpp does not read norms of q and k of this architecture",
}  # fmt: skip
"""Cases in which llama.cpp computes something else than the family's own code, or refuses the file."""


@pytest.mark.parametrize("case", [case for case in CASES if case not in UNLIKE])
def test_llama_cpp_computes_the_same_of_a_written_file(case: str, tmp_path: Path) -> None:
    """llama.cpp looks gelu up in a table of float16, so models with it are less near."""
    python = os.environ.get(LLAMA_CPP)
    if not python:
        pytest.skip(f"{LLAMA_CPP} does not name a Python with llama-cpp-python")
    _, gguf = both(case, tmp_path)
    ids = np.random.default_rng(1).integers(3, VOCAB, 60).tolist()
    out = tmp_path / "out.npz"
    tool = ROOT / "tools" / "oracles" / "llama_cpp_logits.py"
    subprocess.run([python, tool, gguf.path, out, "--ids", ",".join(map(str, ids))], check=True, env=dict(os.environ))
    ffn = gguf.spec.layers[-1].ffn
    ffn = ffn.expert if isinstance(ffn, Experts) else ffn
    rough = isinstance(ffn, FeedForward) and ffn.activation.startswith("gelu")
    got, want = logits(gguf, ids), np.load(out)["logits"]
    if case == "gemma3n-deep":
        assert np.array_equal(got.argmax(-1), want.argmax(-1))
        assert np.median(np.abs(got - want).max(-1)) < 0.02 * want.std()
        return
    twice = gguf.spec.per_layer is not None  # so many more activations
    np.testing.assert_allclose(got, want, atol=(4e-2 if twice else 2e-2) if rough else 5e-4)


def test_bitnet_with_grouped_heads_is_refused(tmp_path: Path) -> None:
    """BitNet b1.58 2B4T, whose activation a file cannot say, and llama.cpp computes with another."""
    _, checkpoint = both("bitnet", tmp_path)
    gguf = read_gguf(checkpoint.path)
    tensors = {name: ("F32", np.zeros(ref.shape, np.float32)) for name, ref in gguf.tensors.items()}
    metadata = gguf.metadata | {"bitnet.attention.head_count_kv": 2}
    with pytest.raises(ModelError, match="relu2"):
        open_model(write_gguf(tmp_path / "grouped.gguf", metadata, tensors))
