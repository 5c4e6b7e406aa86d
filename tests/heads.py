"""Checkpoints with heads for multi-token prediction, in the published layouts, with weights of the tests' own."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from penstock.core.model_spec import ModelSpec, weight_shapes
from penstock.core.weight_map import Cut
from penstock.families.mtp import count_mtp, mtp_heads
from penstock.families.registry import find_family, open_model
from penstock.weights.load import load_weights

F32 = npt.NDArray[np.float32]
SIZE = 32
"""Tokens, and numbers of a hidden state: a token can be a direction of its own."""
BASE: dict[str, Any] = {
    "vocab_size": SIZE, "hidden_size": SIZE, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 192, "bos_token_id": 1, "eos_token_id": 2,
    "tie_word_embeddings": False, "dtype": "float32",
}  # fmt: skip
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
SPARSE = EXPERTS | {"first_k_dense_replace": 1}
LINEAR = {
    "num_hidden_layers": 4, "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 6, "linear_value_head_dim": 6,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek_v3": BASE | SPARSE | {
        "architectures": ["DeepseekV3ForCausalLM"], "num_key_value_heads": 4, "kv_lora_rank": 12, "q_lora_rank": 9,
        "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5, "n_group": 1, "topk_group": 1,
        "n_shared_experts": 1, "num_nextn_predict_layers": 1,
    },
    "glm4_moe": BASE | SPARSE | {
        "architectures": ["Glm4MoeForCausalLM"], "head_dim": 8, "use_qk_norm": True, "num_nextn_predict_layers": 1,
        "n_shared_experts": 1,
    },
    "mimo": BASE | {"architectures": ["MiMoForCausalLM"], "attention_bias": True, "num_nextn_predict_layers": 1},
    "qwen3_next": BASE | LINEAR | {
        "architectures": ["Qwen3NextForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 12, "shared_expert_intermediate_size": 12, "mtp_num_hidden_layers": 1,
    },
    "qwen3_5": BASE | LINEAR | {"architectures": ["Qwen3_5ForCausalLM"], "mtp_num_hidden_layers": 1},
}  # fmt: skip
CONFIGS |= {
    "deepseek_v3 x2": CONFIGS["deepseek_v3"] | {"num_nextn_predict_layers": 2},
    "qwen3_next x2": CONFIGS["qwen3_next"] | {"mtp_num_hidden_layers": 2},
    "deepseek_v32": CONFIGS["deepseek_v3"] | {
        "architectures": ["DeepseekV32ForCausalLM"], "index_n_heads": 2, "index_head_dim": 6, "index_topk": 7,
    },
    "mimo x4": CONFIGS["mimo"] | {"num_nextn_predict_layers": 4},
    # Its released files have three heads, and do not say so.
    "mimo_v2_flash x3": BASE | EXPERTS | {
        "architectures": ["MiMoV2FlashForCausalLM"], "hybrid_layer_pattern": [0, 1, 1], "moe_layer_freq": [0, 1, 1],
        "num_hidden_layers": 3, "head_dim": 8, "v_head_dim": 6, "swa_num_key_value_heads": 4, "swa_head_dim": 8,
        "swa_v_head_dim": 6, "sliding_window": 9, "swa_rope_theta": 10000, "rope_theta": 5000000,
        "partial_rotary_factor": 0.5, "num_nextn_predict_layers": 3,
    },
    "qwen3_5 seeing": {
        "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "tie_word_embeddings": False,
        "vision_config": {"depth": 2}, "image_token_id": 30,
        "text_config": {
            **{k: v for k, v in CONFIGS["qwen3_5"].items() if k != "architectures"}, "model_type": "qwen3_5_text",
        },
    },
    "qwen3_5_moe seeing": {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
        "tie_word_embeddings": False, "vision_config": {"depth": 2},
        "text_config": {k: v for k, v in BASE.items() if k != "intermediate_size"} | LINEAR | {
            "model_type": "qwen3_5_moe_text", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
            "shared_expert_intermediate_size": 12, "mtp_num_hidden_layers": 1,
        },
    },
}  # fmt: skip


def follower() -> npt.NDArray[np.int64]:
    """[SIZE]: the token that follows each, one circle through all of them."""
    order = np.random.default_rng(5).permutation(SIZE)
    out = np.empty(SIZE, np.int64)
    out[order] = np.roll(order, -1)
    return out


def write(folder: Path, case: str, *, right: str = "", seed: int = 1) -> Path:
    """A checkpoint with its heads. `right`: "" random weights; "token", "hidden": the next token follows from the
    newest one alone, and a head finds it by the embedding or by the hidden state that it reads."""
    config = CONFIGS[case]
    family, rng = find_family(config), np.random.default_rng(seed)
    spec = family.spec(config)
    heads = mtp_heads(family, spec, count_mtp(family, config))
    assert heads
    tensors: dict[str, F32] = {}
    for own, places in ((spec, family.weight_map(spec)), *heads):
        shapes = weight_shapes(own)
        for name, place in places.items():
            shape, stored = (place.shape, place.name) if isinstance(place, Cut) else (shapes[name], place)
            if stored not in tensors:
                tensors[stored] = _numbers(name, shape, rng, spec.final_norm.offset if spec.final_norm else 0.0, right)
    if right:
        follows, eye = follower(), np.eye(SIZE, dtype=np.float32)
        step = np.zeros((SIZE, SIZE), np.float32)
        step[follows, np.arange(SIZE)] = 1.0
        places = family.weight_map(spec)
        tensors[str(places["embed"])] = eye
        tensors[str(places["lm_head"])] = step
        nothing = np.zeros_like(eye)
        parts = [eye, nothing] if right == "token" else [nothing, step]
        for head in heads:
            assert head.spec.pair is not None
            tensors[str(head.places["embed_in"])] = np.concatenate(
                parts[::-1] if head.spec.pair.hidden_first else parts, axis=1
            )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def _numbers(name: str, shape: tuple[int, ...], rng: np.random.Generator, offset: float, right: str) -> F32:
    noise = rng.standard_normal(shape).astype(np.float32)
    if "norm" in name and len(shape) == 1:
        own = 0.0 if name.endswith("head_norm") else offset
        return np.full(shape, 1 - own, np.float32) + (0.0 if right else np.float32(0.1)) * noise
    end = name.rsplit(".", 1)[-1]
    if right and end in ("o", "down"):
        return np.zeros(shape, np.float32)
    if name.endswith(("a_log", "dt.bias")):
        return 0.5 * noise
    return noise * np.float32(0.4 if name in ("embed", "lm_head") else 2 / shape[-1] ** 0.5)


@cache
def loaded(case: str) -> tuple[tuple[ModelSpec, dict[str, Any]], ...]:
    """The model with random weights, and its heads, in float32."""
    with tempfile.TemporaryDirectory() as folder:
        found = open_model(write(Path(folder), case))
        parts = [
            (c.spec, {n: np.array(a) for n, a in load_weights(c, c.spec, "float32").items()})
            for c in (found, *found.heads)
        ]
    for spec, weights in parts[1:]:
        assert spec.pair is not None
        weights["embed"] = np.zeros((spec.pair.rows, 2 * spec.hidden_size), np.float32)  # its drafter writes here
    return tuple(parts)
