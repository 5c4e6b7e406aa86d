"""Gemma 3n's text part against transformers: streams, embeddings for every layer, sparse gates, shared keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

from penstock.backends.native.obstacle import native_obstacle
from penstock.base.errors import ModelError
from penstock.core.model_spec import AltUp, PerLayer, cache_groups
from penstock.families.registry import find_family, open_model
from tests.models.parity import VOCAB, check, random_model, save

SLIDING, FULL = "sliding_attention", "full_attention"
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 43, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": VOCAB,
    "sliding_window": 9, "max_position_embeddings": 192, "num_kv_shared_layers": 3, "laurel_rank": 5,
    "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL, SLIDING], "final_logit_softcapping": 5.0,
    "activation_sparsity_pattern": [0.7, 0.0, 0.95, 0.0, 0.3, 0.0],
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "nothing shared": {"num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0] * 6, "attention_bias": True},
    "three streams": {"altup_num_inputs": 3, "altup_active_idx": 1, "altup_correct_scale": False},
    "a smaller table": {
        "vocab_size_per_layer_input": 50,
        "intermediate_size": [43, 43, 43, 50, 50, 50],
        "attention_bias": True,
    },
}


def reference(case: str, **more: Any) -> Any:
    config = Gemma3nTextConfig(**TEXT | CASES[case] | more)
    model = random_model(Gemma3nForCausalLM, config, seed=len(case))
    with torch.no_grad():  # layers must outweigh the embedding, or a tied model repeats its input
        model.model.embed_tokens.weight.mul_(0.15)
        for layer in model.model.layers:  # what a router says is divided by the hidden size
            layer.altup.modality_router.weight.mul_(4.0)
            layer.altup.prediction_coefs.weight.mul_(0.3)
    return model


@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_text_equal_transformers(case: str, tmp_path: Path) -> None:
    model = reference(case)
    found = check(save(model, tmp_path), model, count_params=case != "three streams")
    layers = found.spec.layers
    assert native_obstacle(found.spec) is None
    sources = [None, None, None, 2, 1, 2] if case != "nothing shared" else [None] * 6
    assert [layer.kv_from for layer in layers] == sources
    rows = 50 if case == "a smaller table" else VOCAB
    assert found.spec.per_layer == PerLayer(width=12, rows=rows)
    assert found.spec.altup == (
        AltUp(streams=3, active=1, scale=False) if case == "three streams" else AltUp(streams=4)
    )


def test_layers_that_share_keep_nothing() -> None:
    config = Gemma3nTextConfig(**TEXT).to_dict() | {"architectures": ["Gemma3nForCausalLM"]}
    spec, whole = (find_family(config).spec(config | {"num_kv_shared_layers": n}) for n in (3, 0))
    kept = [group.layers for group in cache_groups(spec, "bfloat16")]
    assert sorted(n for layers in kept for n in layers) == [0, 1, 2]
    sizes = [sum(g.token_bytes(16) for g in cache_groups(s, "bfloat16")) for s in (spec, whole)]
    assert sizes[0] * 2 == sizes[1], "half of the layers keep half of the bytes"


def test_a_checkpoint_may_carry_what_nobody_uses(tmp_path: Path) -> None:
    """Published files have keys and values for layers that read those of others."""
    from safetensors.torch import load_file, save_file

    save(reference("plain"), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.4.self_attn.k_proj.weight"] = torch.zeros(16, 32)
    tensors["model.layers.5.self_attn.v_norm.weight"] = torch.zeros(8)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert open_model(tmp_path).spec.layers[4].kv_from == 1
    tensors["model.layers.1.self_attn.k_more.weight"] = torch.zeros(16, 32)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="k_more"):
        open_model(tmp_path)


def test_the_text_part_of_a_checkpoint_that_sees_and_hears(tmp_path: Path) -> None:
    """transformers needs a library of its own to make the tower that sees: its tensors are stood in for by one each."""
    from safetensors.torch import load_file, save_file

    model = reference("plain")
    save(model, tmp_path / "text")
    tensors = load_file(tmp_path / "text" / "model.safetensors")
    moved = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    towers = ("vision_tower.timm_model.conv_stem.conv", "audio_tower.conformer.0.norm", "embed_vision.embedding")
    moved |= {f"model.{name}.weight": torch.zeros(3) for name in towers}
    config = json.loads((tmp_path / "text" / "config.json").read_text())
    outer = {
        "architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n", "dtype": "float32",
        "text_config": config, "vision_config": {"model_type": "gemma3n_vision"}, "audio_config": {"hidden_size": 8},
        "image_token_id": 90, "audio_token_id": 91, "audio_soft_tokens_per_image": 188,
    }  # fmt: skip
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / "config.json").write_text(json.dumps(outer))
    save_file(moved, tmp_path / "all" / "model.safetensors", metadata={"format": "pt"})
    assert check(tmp_path / "all", model, count_params=False).spec.family == "gemma3n"


@pytest.mark.parametrize(("changes", "words"), [
    ({"num_kv_shared_layers": 5}, ["num_kv_shared_layers", "full_attention"]),
    ({"activation_sparsity_pattern": [1.0] * 6}, ["activation_sparsity_pattern", "below 1"]),
    ({"activation_sparsity_pattern": [0.5] * 5}, ["activation_sparsity_pattern", "6 layers"]),
    ({"intermediate_size": [43] * 5}, ["intermediate_size", "5 layers"]),
    ({"altup_num_inputs": 9}, ["altup_num_inputs", "8"]),
    ({"altup_active_idx": 4}, ["altup_active_idx", "3"]),
    ({"hidden_activation": "silu"}, ["hidden_activation"]),
])  # fmt: skip
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], words: list[str]) -> None:
    config = Gemma3nTextConfig(**TEXT).to_dict() | {"architectures": ["Gemma3nForCausalLM"]}
    find_family(config).spec(config)
    with pytest.raises(ModelError) as caught:
        find_family(config).spec(config | changes)
    assert all(word in str(caught.value) for word in words), str(caught.value)
