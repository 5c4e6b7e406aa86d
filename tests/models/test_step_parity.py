"""Step-3.7's text part against transformers: a gate on every head, limits behind activations, stacked experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Step3p7Config, Step3p7ForConditionalGeneration
from transformers.models.step3p7.modeling_step3p7 import Step3p7TextModel

from penstock.backends.native.obstacle import native_obstacle
from penstock.base.errors import ModelError
from penstock.families.registry import find_family, read_spec
from tests.models.parity import VOCAB, check, random_model, save

TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 43, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 192, "bos_token_id": 1, "eos_token_id": 2,
    "n_routed_experts": 6, "num_local_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 21,
    "share_expert_dim": 17, "sliding_window": 9, "moe_router_scaling_factor": 1.7, "pad_token_id": 0,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "own heads": {"num_sliding_attention_heads": 6, "rope_theta": [1e4, 500.0, 500.0, 1e4, 500.0],
                  "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5, 1.0], "moe_layers_enum": "1,3,4"},
    "limits": {"swiglu_limits": [0.0, 0.0, 0.0, 0.4, 0.0], "swiglu_limits_shared": [0.5, 0.0, 0.0, 0.3, 0.0]},
}  # fmt: skip
VISION = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}


def reference(case: str) -> Any:
    config = Step3p7Config(text_config=TEXT | CASES[case], vision_config=dict(VISION))
    model = random_model(Step3p7ForConditionalGeneration, config, seed=len(case))
    model.set_experts_implementation("eager")
    for key, buffer in model.named_buffers():
        if key.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.3)
    return model


@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_text_equal_transformers(case: str, tmp_path: Path) -> None:
    model = reference(case)
    found = check(save(model, tmp_path), model, count_params=False)
    assert native_obstacle(found.spec) is None, "all of it runs natively, so the check did that, too"


def test_published_fields_say_the_same_as_those_of_transformers(tmp_path: Path) -> None:
    model = reference("own heads")

    def rename(config: dict[str, Any]) -> None:
        text = config["text_config"]
        text["num_attention_groups"], text["moe_top_k"] = text.pop("num_key_value_heads"), 2
        text["attention_other_setting"] = {
            "attention_type": "sliding_attention", "num_attention_heads": text.pop("num_sliding_attention_heads"),
            "num_attention_groups": 2, "head_dim": 8,
        }  # fmt: skip
        for name in ("n_routed_experts", "num_local_experts", "rope_parameters", "mlp_layer_types", "per_layer_config"):
            text.pop(name, None)
        text |= {"moe_num_experts": 6, "moe_layers_enum": "1,3,4", "num_nextn_predict_layers": 1}
        text |= {"rope_theta": [1e4, 500.0, 500.0, 1e4, 500.0, 1e4], "layer_types": [*TEXT["layer_types"], "mtp"]}
        text["partial_rotary_factors"] = [0.5, 1.0, 1.0, 0.5, 1.0, 0.5]

    plain = read_spec(save(model, tmp_path / "a"))
    assert read_spec(save(model, tmp_path / "b", rename)) == plain


@pytest.mark.parametrize(("changes", "words"), [
    ({"layer_types": ["full_attention"]}, ["layer_types", "5 layers"]),
    ({"sliding_window": None}, ["no sliding_window"]),
    ({"mlp_bias": True}, ["mlp_bias"]),
    ({"moe_num_experts": 7}, ["num_experts twice"]),
])  # fmt: skip
def test_what_is_not_computed_is_refused(changes: dict[str, Any], words: list[str]) -> None:
    config = json.loads(Step3p7Config(text_config=dict(TEXT), vision_config=dict(VISION)).to_json_string())
    config["architectures"] = ["Step3p7ForConditionalGeneration"]
    find_family(config).spec(config)
    config["text_config"] |= changes
    with pytest.raises(ModelError) as caught:
        find_family(config).spec(config)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_published_shape_has_as_many_parameters_as_in_transformers() -> None:
    """Of Step-3.7-Flash, 288 experts in 42 of 45 layers."""
    kinds = [("sliding_attention" if i % 4 else "full_attention") for i in range(45)]
    text = {"num_hidden_layers": 45, "layer_types": kinds, "vocab_size": 128896}
    config = Step3p7Config(text_config=text, vision_config=dict(VISION))
    with torch.device("meta"):
        model = Step3p7TextModel(config.text_config)
    head = 128896 * 4096
    corrections = sum(b.numel() for n, b in model.named_buffers() if n.endswith("e_score_correction_bias"))
    flat = {"architectures": ["Step3p7FlashForCausalLM"], "model_type": "step3p7", "hidden_size": 4096,
            "num_attention_heads": 64, "sliding_window": 512, **text}  # fmt: skip
    assert find_family(flat).spec(flat).num_params == model.num_parameters() + head + corrections
