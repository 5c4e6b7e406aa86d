"""MiniMax-M3 against transformers: blocks that an indexer chooses for each kv head, experts by sigmoid scores.

The model of transformers' class is written down by the names of the released files (its conversion mapping has them).
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from penstock.base.errors import ModelError
from penstock.core.model_spec import BlockAttention, Experts, ModelSpec
from penstock.families.registry import find_family
from tests.models.parity import VOCAB, check, random_model, save
from tests.models.test_parity_renamed import write

KINDS = ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"]
BLOCKS = {
    "sparse_attention_freq": [0, 1, 1], "sparse_block_size": 5, "sparse_disable_index_value": [0, 1, 1],
    "sparse_index_dim": 6, "sparse_init_block": 0, "sparse_local_block": 1, "sparse_num_index_heads": 2,
    "sparse_score_type": "max", "sparse_topk_blocks": 4, "use_sparse_attention": True,
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "architectures": ["MiniMaxM3ForCausalLM"], "model_type": "minimax_m3", "vocab_size": VOCAB, "hidden_size": 32,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rotary_dim": 4,
    "partial_rotary_factor": 0.5, "rope_theta": 1e4, "max_position_embeddings": 192, "dense_intermediate_size": 43,
    "intermediate_size": 21, "moe_intermediate_size": 21, "shared_intermediate_size": 19, "num_local_experts": 6,
    "num_experts_per_tok": 2, "moe_layer_freq": [0, 1, 1], "first_k_dense_replace": 1, "rms_norm_eps": 1e-6,
    "routed_scaling_factor": 2.0, "scoring_func": "sigmoid", "hidden_act": "swigluoai", "swiglu_alpha": 1.702,
    "swiglu_limit": 0.8, "use_gemma_norm": True, "use_qk_norm": True, "qk_norm_type": "per_head",
    "use_routing_bias": True, "attention_output_gate": False, "n_shared_experts": 1, "num_mtp_modules": 7,
    "num_nextn_predict_layers": 1, "tie_word_embeddings": False, "torch_dtype": "float32", "bos_token_id": 1,
    "eos_token_id": 2, "sparse_attention_config": BLOCKS,
}  # fmt: skip
RENAMED = {
    "self_attn.indexer.q_proj": "self_attn.index_q_proj", "self_attn.indexer.k_proj": "self_attn.index_k_proj",
    "self_attn.indexer.q_norm": "self_attn.index_q_norm", "self_attn.indexer.k_norm": "self_attn.index_k_norm",
    "mlp.gate.e_score_correction_bias": "block_sparse_moe.e_score_correction_bias",
    "mlp.gate.weight": "block_sparse_moe.gate.weight", "mlp.shared_experts": "block_sparse_moe.shared_experts",
}  # fmt: skip


def made(seed: int, **changes: Any) -> Any:
    fields = {name: CONFIG[name] for name in (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
        "rotary_dim", "max_position_embeddings", "dense_intermediate_size", "intermediate_size",
        "shared_intermediate_size", "num_local_experts", "num_experts_per_tok", "rms_norm_eps", "swiglu_limit",
        "routed_scaling_factor", "bos_token_id", "eos_token_id", "moe_layer_freq", "sparse_attention_config",
    )}  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    config = transformers.MiniMaxM3VLTextConfig(**deepcopy({**fields, "rope_parameters": rope, **changes}))
    config._attn_implementation = "eager"
    model = random_model(transformers.MiniMaxM3VLForCausalLM, config, seed=seed)
    model.set_experts_implementation("eager")
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.3)
    return model


def released(model: Any) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        for old, new in RENAMED.items():
            name = name.replace(old, new)
        stem, _, last = name.rpartition(".mlp.experts.")
        if last.startswith("gate_up_proj"):
            for i, both in enumerate(tensor):
                halves = both.chunk(2)
                out |= {
                    f"{stem}.block_sparse_moe.experts.{i}.{w}.weight": x
                    for w, x in zip(("w1", "w3"), halves, strict=True)
                }
        elif last.startswith("down_proj"):
            out |= {f"{stem}.block_sparse_moe.experts.{i}.w2.weight": x for i, x in enumerate(tensor)}
        elif ".gate_up_proj." in name:
            halves = tensor.chunk(2)
            out |= {name.replace("gate_up", part): x for part, x in zip(("gate", "up"), halves, strict=True)}
        else:
            out[name] = tensor
    return {name: tensor.clone() for name, tensor in out.items()}


def spec_of(**changes: Any) -> ModelSpec:
    config = CONFIG | changes
    return find_family(config).spec(config)


@pytest.mark.parametrize("local", [1, 2])
def test_minimax_m3_equals_transformers(tmp_path: Path, local: int) -> None:
    """Over 60 tokens, of which a query reads the best four blocks of five."""
    blocks = BLOCKS | {"sparse_local_block": local}
    model = made(3 + local, sparse_attention_config=blocks)
    found = check(
        write(tmp_path, CONFIG | {"sparse_attention_config": blocks}, released(model)), model, count_params=False
    )
    # What corrects the choice of six experts in two layers is no parameter there.
    assert found.spec.num_params == sum(p.numel() for p in model.parameters()) + 12
    assert found.spec.family == "minimax_m3"
    assert [type(layer.mixer).__name__ for layer in found.spec.layers] == ["Attention", *["BlockAttention"] * 2]
    assert [isinstance(layer.ffn, Experts) for layer in found.spec.layers] == [False, True, True]


def test_the_text_part_of_a_checkpoint_that_sees(tmp_path: Path) -> None:
    """As transformers writes it, by the names of the released files."""
    text = made(5).config.to_dict() | {"model_type": "minimax_m3_vl_text"}
    sees = {"hidden_size": 24, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.MiniMaxM3VLConfig(text_config=text, vision_config=sees, projector_hidden_size=16)
    model = random_model(transformers.MiniMaxM3SparseForConditionalGeneration, config, seed=6)
    model.set_experts_implementation("eager")
    model.config._attn_implementation = model.config.text_config._attn_implementation = "eager"
    save(model, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert "language_model.model.layers.1.self_attn.index_q_proj.weight" in stored
    assert "language_model.model.layers.1.block_sparse_moe.experts.3.w2.weight" in stored
    assert check(tmp_path, model, count_params=False).spec.family == "minimax_m3_vl"


def test_as_transformers_says_it() -> None:
    """Fields by the names of transformers' configuration give the same spec as the released ones."""
    gone = ("sparse_attention_config", "moe_layer_freq", "moe_intermediate_size", "first_k_dense_replace")
    flat = {name: value for name, value in CONFIG.items() if name not in gone} | {
        "architectures": ["MiniMaxM3VLForCausalLM"], "hidden_act": "silu", "layer_types": KINDS,
        "mlp_layer_types": ["dense", "sparse", "sparse"], "index_n_heads": 2, "index_head_dim": 6,
        "index_block_size": 5, "index_topk_blocks": 4, "index_local_blocks": 1,
    }  # fmt: skip
    assert find_family(flat).spec(flat) == spec_of()
    mixer = spec_of().layers[1].mixer
    assert isinstance(mixer, BlockAttention)
    assert (mixer.block, mixer.top_k, mixer.local, mixer.index_dim) == (5, 4, 1, 6)


@pytest.mark.parametrize(("changes", "words"), [
    ({"attention_output_gate": True}, "attention_output_gate"), ({"use_gemma_norm": False}, "use_gemma_norm"),
    ({"hidden_act": "gelu"}, "hidden_act"), ({"rotary_dim": 8}, "rotary_dim"), ({"swiglu_alpha": 1.0}, "swiglu_alpha"),
    ({"moe_layer_freq": [0, 1]}, "3 layers"), ({"n_shared_experts": 2}, "n_shared_experts"),
    ({"sparse_attention_config": BLOCKS | {"sparse_init_block": 1}}, "sparse_init_block"),
    ({"sparse_attention_config": BLOCKS | {"sparse_score_type": "mean"}}, "sparse_score_type"),
    ({"sparse_attention_config": BLOCKS | {"sparse_disable_index_value": [0, 0, 1]}}, "sparse_disable_index_value"),
    ({"sparse_attention_config": BLOCKS | {"sparse_num_index_heads": 4}}, "index_n_heads"),
    ({"sparse_attention_config": BLOCKS | {"sparse_index_dim": 2}}, "index_head_dim"),
    ({"sparse_attention_config": BLOCKS | {"sparse_local_block": 5}}, "index_local_blocks"),
    ({"sparse_attention_config": BLOCKS | {"sparse_attention_freq": [0, 1]}}, "3 layers"),
    ({"sparse_attention_config": BLOCKS | {"sparse_new": 1}}, "sparse_new"),
])  # fmt: skip
def test_what_is_not_computed_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        spec_of(**changes)
