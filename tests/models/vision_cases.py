"""Tiny checkpoints with a vision tower, of which the text part is run, by the name `family-variant`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.models.parity import VOCAB, random_model

TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 43, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 192, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_QWEN_SEES = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
_SIGLIP = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
           "image_size": 28, "patch_size": 14}  # fmt: skip
_QWEN3_SEES = _QWEN_SEES | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
_AXES = {"rope_type": "default", "rope_theta": 1e4}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 21, "head_dim": 8}
_LATENT = {
    "model_type": "deepseek_v3", "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 21, "kv_lora_rank": 12, "q_lora_rank": 9, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
    "v_head_dim": 5, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
}  # fmt: skip


NOTHING: dict[str, Any] = {}


class Seeing(NamedTuple):
    """`kind`: transformers' class without its ending; `text`, `vision`, `outer`: what their configs have."""

    kind: str
    text: dict[str, Any]
    vision: dict[str, Any]
    outer: dict[str, Any] = NOTHING


CASES = {
    "qwen2_vl": Seeing("Qwen2VL", {"rope_parameters": _AXES | {"mrope_section": [1, 1, 2]}}, {
        "depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 32,
    }),
    "qwen2_5_vl": Seeing("Qwen2_5_VL", {"rope_parameters": _AXES | {"mrope_section": [2, 1, 1]}}, _QWEN_SEES),
    "qwen2_5_vl-tied": Seeing("Qwen2_5_VL", {"rope_parameters": _AXES | {"mrope_section": [2, 1, 1]}}, _QWEN_SEES,
                              {"tie_word_embeddings": True}),
    "qwen3_vl": Seeing("Qwen3VL", {
        "head_dim": 12, "rope_parameters": _AXES | {"mrope_section": [2, 2, 2], "mrope_interleaved": True},
    }, _QWEN3_SEES),
    "qwen3_vl-tied": Seeing("Qwen3VL", {"head_dim": 8, "rope_parameters": _AXES | {"mrope_section": [2, 1, 1]}},
                            _QWEN3_SEES, {"tie_word_embeddings": True}),
    "qwen3_vl_moe": Seeing("Qwen3VLMoe", {
        **_EXPERTS, "rope_parameters": _AXES | {"mrope_section": [2, 1, 1], "mrope_interleaved": True},
        "mlp_only_layers": [1],
    }, _QWEN3_SEES),
    "llama4": Seeing("Llama4", {
        "num_local_experts": 4, "head_dim": 8, "intermediate_size_mlp": 37, "attention_chunk_size": 16,
        "floor_scale": 8, "num_hidden_layers": 4, "interleave_moe_layer_step": 2,
    }, {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
        "vision_output_dim": 16, "image_size": 28, "patch_size": 14, "projector_input_dim": 16,
        "projector_output_dim": 16,
    }),
    "gemma3": Seeing("Gemma3", {
        "head_dim": 8, "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }, _SIGLIP),
    "gemma4": Seeing("Gemma4", {
        "head_dim": 8, "global_head_dim": 16, "sliding_window": 7, "hidden_size_per_layer_input": 0,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    }, {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 8, "patch_size": 4, "position_embedding_size": 16,
    }),
    "gemma4-small": Seeing("Gemma4", {
        "head_dim": 8, "global_head_dim": 16, "sliding_window": 7, "hidden_size_per_layer_input": 12,
        "vocab_size_per_layer_input": VOCAB, "num_hidden_layers": 4, "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }, {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 8, "patch_size": 4, "position_embedding_size": 16,
    }),
    "mistral3": Seeing("Mistral3", {"model_type": "mistral", "head_dim": 8, "sliding_window": None}, {
        "model_type": "pixtral", **_SIGLIP, "head_dim": 8,
    }),
    "mistral3-ministral": Seeing("Mistral3", {
        "model_type": "ministral3", "head_dim": 8,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                            "original_max_position_embeddings": 48, "llama_4_scaling_beta": 0.1},
    }, {"model_type": "pixtral", **_SIGLIP, "head_dim": 8}, {"tie_word_embeddings": False}),
    "kimi_k25": Seeing("Kimi_K25", _LATENT, {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
        "pos_emb_height": 4, "pos_emb_width": 4,
    }, {"tie_word_embeddings": False}),
    "llava": Seeing("Llava", {"model_type": "llama"}, {"model_type": "clip_vision_model", **_SIGLIP}),
}  # fmt: skip


def restored(folder: Path) -> None:
    """transformers 5.23 writes the decoder's layers of Kimi K2.5 under the name that the vision tower's have in the
    published files; those of the decoder are `layers` there."""
    path = folder / "model.safetensors"
    save_file({name.replace("model.blocks.", "model.layers."): t for name, t in load_file(path).items()}, path)


def make(case: str) -> Any:
    return make_seeing(CASES[case], len(case))


def make_seeing(case: Seeing, seed: int) -> Any:
    config = getattr(transformers, f"{case.kind}Config")(
        text_config={**TEXT, **case.text}, vision_config=case.vision, **case.outer
    )
    model = random_model(getattr(transformers, f"{case.kind}ForConditionalGeneration"), config, seed)
    if model.config.tie_word_embeddings:
        with torch.no_grad():  # or the model repeats what it reads: layers must outweigh the embedding
            model.get_input_embeddings().weight.mul_(0.05)
            model.model.language_model.norm.weight.add_(3.0)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    with torch.no_grad():
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.3)
    return model
