"""The models whose shapes are run: specs out of the published settings, with random weights."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.core.model_spec import ModelSpec
from penstock.families.registry import find_family

_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "attention_bias": False, "mlp_bias": False, "max_position_embeddings": 131072, "bos_token_id": 0,
    "eos_token_id": 1, "torch_dtype": "bfloat16",
}  # fmt: skip
_QWEN_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0, "attention_bias": False, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "use_sliding_window": False, "tie_word_embeddings": False, "bos_token_id": 0,
    "eos_token_id": 1, "torch_dtype": "bfloat16",
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": _LLAMA | {
        "hidden_size": 2048, "num_hidden_layers": 16, "head_dim": 64, "intermediate_size": 8192,
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": _LLAMA | {
        "hidden_size": 4096, "num_hidden_layers": 32, "head_dim": 128, "intermediate_size": 14336,
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": _QWEN_MOE | {
        "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
        "num_experts_per_tok": 8, "vocab_size": 151936, "max_position_embeddings": 40960,
    },
}  # fmt: skip
"""As their publishers' config.json has them."""
_SMALL = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 128, "vocab_size": 1024, "max_position_embeddings": 512,
}  # fmt: skip
_FEW_EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}


def config_of(name: str, tiny: bool) -> dict[str, Any]:
    """What config.json would say; `tiny`: a small model of the same kind."""
    config = CONFIGS[name]
    if tiny:
        config = config | _SMALL | (_FEW_EXPERTS if "num_experts" in config else {})
    return config


def spec_of(name: str, tiny: bool) -> ModelSpec:
    """The model of `config_of`, in bfloat16."""
    config = config_of(name, tiny)
    return msgspec.structs.replace(find_family(config).spec(config), dtype="bfloat16")
