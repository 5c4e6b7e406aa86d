"""Gemma 4's text part against transformers: global heads of their own size, keys as values, experts beside, embeddings
for every layer, and layers that share keys and values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

from penstock.backends.native.obstacle import native_obstacle
from penstock.base.errors import ModelError
from penstock.core.model_spec import Attention, FeedForward
from penstock.families.registry import find_family
from tests.models.parity import VOCAB, check, random_model, save

TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 43, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 1,
    "attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "sliding_window": 9, "max_position_embeddings": 192,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "final_logit_softcapping": 5.0,
}  # fmt: skip
SMALL = {
    "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": VOCAB, "num_kv_shared_layers": 2,
    "attention_k_eq_v": False,
}  # fmt: skip
"""As E2B and E4B are made."""
MOE = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 21}
CASES: dict[str, dict[str, Any]] = {
    "dense": {},
    "values of their own": {"attention_k_eq_v": False, "final_logit_softcapping": None},
    "experts": MOE,
    "small": SMALL,
    "small, wide": SMALL | {"use_double_wide_mlp": True, "attention_k_eq_v": True, "vocab_size_per_layer_input": VOCAB},
}


def reference(case: str) -> Any:
    model = random_model(Gemma4ForCausalLM, Gemma4TextConfig(**TEXT | CASES[case]), seed=len(case))
    model.set_experts_implementation("eager")
    with torch.no_grad():  # layers must outweigh the embedding, or a tied model repeats its input
        model.model.embed_tokens.weight.mul_(0.15)
    for key, buffer in model.named_buffers():
        if key.endswith("layer_scalar"):
            buffer.fill_(0.8)
    return model


@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_text_equal_transformers(case: str, tmp_path: Path) -> None:
    model = reference(case)
    found = check(save(model, tmp_path), model, count_params=False)
    sizes = [(m.head_dim, m.num_kv_heads) for layer in found.spec.layers if isinstance(m := layer.mixer, Attention)]
    kv_heads = 2 if case in ("values of their own", "small") else 1
    assert sizes == [(8, 2), (16, kv_heads)] * 2
    shared = (0, 1) if "small" in case else (None, None)
    assert [layer.kv_from for layer in found.spec.layers] == [None, None, *shared]
    widths = [layer.ffn.width for layer in found.spec.layers if isinstance(layer.ffn, FeedForward)]
    assert case == "experts" or widths == [43, 43, *((86, 86) if "wide" in case else (43, 43))]
    assert native_obstacle(found.spec) is None, "all of it runs natively, so the check did that, too"


def test_the_last_layer_is_global_whatever_the_list_says() -> None:
    config = Gemma4TextConfig(**TEXT).to_dict() | {"architectures": ["Gemma4ForCausalLM"]}
    spec = find_family(config).spec(config)
    config["layer_types"] = [*config["layer_types"][:-1], "sliding_attention"]
    assert find_family(config).spec(config) == spec


@pytest.mark.parametrize(("changes", "words"), [
    ({"num_kv_shared_layers": 3}, ["num_kv_shared_layers", "full_attention"]),
    ({"use_bidirectional_attention": "all"}, ["use_bidirectional_attention"]),
    ({"per_layer_config": {"0": {"head_dim": 4}}}, ["per_layer_config"]),
])  # fmt: skip
def test_what_is_not_computed_is_refused(changes: dict[str, Any], words: list[str]) -> None:
    config = Gemma4TextConfig(**TEXT).to_dict() | {"architectures": ["Gemma4ForCausalLM"]}
    find_family(config).spec(config)
    with pytest.raises(ModelError) as caught:
        find_family(config).spec(config | changes)
    assert all(word in str(caught.value) for word in words), str(caught.value)
