"""Configs of the families around GPT-2: spellings, defaults, what changes nothing and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.base.errors import ModelError, UnsupportedError
from penstock.core.model_spec import ModelSpec
from penstock.families.registry import find_family
from tests.models.gpt_like import BASE, IDS, config_of


def spec_of(kind: str, **changes: Any) -> ModelSpec:
    config = config_of(kind, **changes)
    return find_family(config).spec(config)


@pytest.mark.parametrize(("kind", "changes"), [
    ("GPT2", {"n_ctx": 192, "reorder_and_upcast_attn": True, "n_embd": ..., "hidden_size": 32, "n_layer": ...,
              "num_hidden_layers": 2, "num_attention_heads": 4, "summary_type": "cls_index", "n_inner": 128}),
    ("OpenAIGPT", {"n_ctx": 192, "n_special": 0, "predict_special_tokens": True, "afn": "gelu_new"}),
    ("GPTNeo", {"attention_layers": ["global", "local"], "num_hidden_layers": 2}),
    ("GPTJ", {"rotary": True, "scale_attn_weights": True, "n_ctx": 192}),
    ("GPTBigCode", {"num_key_value_heads": 1, "attention_softmax_in_fp32": False, "pad_key_length": True,
                    "inference_runner": 0, "max_batch_size": None, "validate_runner_input": True}),
    ("GPTNeoX", {"rope_parameters": ..., "rotary_pct": 0.25, "rotary_emb_base": 10000, "rope_theta": 10000,
                 "partial_rotary_factor": 0.25, "rope_scaling": None, "classifier_dropout": 0.1}),
    ("OPT", {"enable_bias": ..., "layer_norm_elementwise_affine": ..., "word_embed_proj_dim": 32, "prefix": "</s>",
             "activation_dropout": 0.0}),
    ("BioGpt", {"layer_norm_eps": 1e-3}),
    ("Bloom", {"hidden_size": ..., "n_embed": 32, "n_head": ..., "num_attention_heads": 4, "n_inner": None,
               "pretraining_tp": 4, "seq_length": 2048, "slow_but_exact": None, "skip_bias_add": True,
               "offset_alibi": 100, "attention_softmax_in_fp32": True, "masked_softmax_fusion": True}),
    ("Mpt", {"norm_type": "layernorm", "verbose": 0, "init_config": {"name": "kaiming_normal_"},
             "attn_config": {"alibi": True, "attn_impl": "triton", "alibi_bias_max": 8, "softmax_scale": None}}),
    ("Falcon", {"num_kv_heads": 71, "apply_residual_connection_post_layernorm": False, "ff_factor": 4,
                "rope_parameters": ..., "activation": ..., "alibi": None, "tie_word_embeddings": ...}),
    ("Phi", {"rope_parameters": ..., "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "rope_scaling": None}),
    ("Starcoder2", {"layer_norm_epsilon": 1e-5, "mlp_type": "default", "norm_type": "layer_norm",
                    "activation_function": "gelu_pytorch_tanh", "scale_attn_weights": True,
                    "attention_softmax_in_fp32": True}),
    ("StableLm", {"rope_parameters": ..., "rope_theta": 10000, "use_qkv_bias": None}),
])  # fmt: skip
def test_other_spellings_and_harmless_fields_change_nothing(kind: str, changes: dict[str, Any]) -> None:
    if kind == "Falcon":  # 71 kv heads mean nothing without the new architecture
        changes = {**changes, "num_kv_heads": 3}
    assert spec_of(kind, **changes) == spec_of(kind)


@pytest.mark.parametrize("kind", list(BASE))
def test_absent_fields_mean_what_they_mean_to_transformers(kind: str) -> None:
    """Every field that is no size and has its default there may be left out."""
    full = spec_of(kind)
    optional = [name for name in config_of(kind) if name not in BASE[kind] and name not in IDS]
    assert len(optional) > 10
    for name in optional:
        assert spec_of(kind, **{name: ...}) == full, name


@pytest.mark.parametrize(("kind", "changes", "words", "error"), [
    ("GPT2", {"add_cross_attention": True}, "'add_cross_attention'", UnsupportedError),
    ("GPT2", {"num_key_value_heads": 2}, "'num_key_value_heads'", UnsupportedError),
    ("GPT2", {"head_dim": 16}, "'head_dim'", UnsupportedError),
    ("GPT2", {"hidden_size": 64}, "n_embd and hidden_size", ModelError),
    ("GPT2", {"n_head": 5}, "n_head 5", ModelError),
    ("GPT2", {"activation_function": "quick_gelu"}, "'quick_gelu'", UnsupportedError),
    ("GPT2", {"n_positions": ...}, "lacks n_positions", ModelError),
    ("GPT2", {"scale_attn_weights": 0.5}, "scale_attn_weights", ModelError),
    ("OpenAIGPT", {"afn": "tanh"}, "'tanh'", UnsupportedError),
    ("OpenAIGPT", {"afn": ["gelu"]}, "afn", ModelError),
    ("GPTNeo", {"attention_types": [[["global", "far"], 1]]}, "'far'", UnsupportedError),
    ("GPTNeo", {"attention_types": [[["global"], 1]]}, "number of layers", ModelError),
    ("GPTNeo", {"attention_types": [["global"], 10**12]}, "attention_types", ModelError),
    ("GPTNeo", {"attention_types": [[["global"], 10**12]]}, "number of layers", ModelError),
    ("GPTNeo", {"attention_types": 3}, "attention_types", ModelError),
    ("GPTNeo", {"attention_layers": ["global", "global"]}, "attention_layers", UnsupportedError),
    ("GPTNeo", {"window_size": 0}, "window_size", ModelError),
    ("GPTJ", {"rotary_dim": None}, "rotary_dim", UnsupportedError),
    ("GPTJ", {"rotary_dim": 12}, "rotary_dim", ModelError),
    ("GPTJ", {"rotary_dim": 5}, "rotary_dim 5", ModelError),
    ("GPTJ", {"rotary_dim": ...}, "rotary_dim 64", ModelError),
    ("GPTJ", {"rotary": False}, "rotary", UnsupportedError),
    ("GPTJ", {"n_head": 8}, "head dimension 5", ModelError),
    ("CodeGen", {"n_head": 2, "rotary_dim": 4}, "n_head 2", UnsupportedError),
    ("CodeGen", {"rope_theta": 500.0}, "'rope_theta'", UnsupportedError),
    ("GPTBigCode", {"num_key_value_heads": 2}, "num_key_value_heads", UnsupportedError),
    ("GPTBigCode", {"add_cross_attention": True}, "'add_cross_attention'", UnsupportedError),
    ("GPTNeoX", {"rotary_pct": 0.5, "partial_rotary_factor": 0.25}, "partial_rotary_factor and rotary_pct", ModelError),
    ("GPTNeoX", {"rotary_emb_base": 500}, "rope_theta", ModelError),
    ("GPTNeoX", {"num_key_value_heads": 2}, "'num_key_value_heads'", UnsupportedError),
    ("GPTNeoX", {"is_decoder": True}, "'is_decoder'", UnsupportedError),
    ("Persimmon", {"num_attention_heads": 5}, "num_attention_heads 5", ModelError),
    ("Persimmon", {"attention_bias": True}, "'attention_bias'", UnsupportedError),
    ("OPT", {"activation_function": "gelu_python"}, "'gelu_python'", UnsupportedError),
    ("OPT", {"layer_norm_eps": 1e-3}, "'layer_norm_eps'", UnsupportedError),
    ("OPT", {"word_embed_proj_dim": 0}, "word_embed_proj_dim", ModelError),
    ("BioGpt", {"intermediate_size": ...}, "lacks intermediate_size", ModelError),
    ("BioGpt", {"add_cross_attention": True}, "'add_cross_attention'", UnsupportedError),
    ("Bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection", UnsupportedError),
    ("Bloom", {"slow_but_exact": True}, "slow_but_exact", UnsupportedError),
    ("Bloom", {"n_inner": 64}, "n_inner", UnsupportedError),
    ("Bloom", {"n_embed": 64}, "hidden_size and n_embed", ModelError),
    ("Mpt", {"no_bias": False}, "no_bias", UnsupportedError),
    ("Mpt", {"expansion_ratio": 3}, "expansion_ratio", UnsupportedError),
    ("Mpt", {"norm_type": "rmsnorm"}, "norm_type", UnsupportedError),
    ("Mpt", {"logit_scale": 0.5}, "'logit_scale'", UnsupportedError),
    ("Mpt", {"attn_config": {"alibi": False}}, "alibi", UnsupportedError),
    ("Mpt", {"attn_config": {"attn_type": "multiquery_attention"}}, "attn_type", UnsupportedError),
    ("Mpt", {"attn_config": {"qk_ln": True}}, "'qk_ln'", UnsupportedError),
    ("Mpt", {"attn_config": {"prefix_lm": True}}, "'prefix_lm'", UnsupportedError),
    ("Mpt", {"attn_config": {"attn_uses_sequence_id": True}}, "'attn_uses_sequence_id'", UnsupportedError),
    ("Mpt", {"attn_config": {"clip_qkv": -1}}, "clip_qkv", ModelError),
    ("Mpt", {"attn_config": ["alibi"]}, "attn_config", ModelError),
    ("Falcon", {"new_decoder_architecture": True, "parallel_attn": False}, "parallel_attn", UnsupportedError),
    ("Falcon", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn", UnsupportedError),
    ("Falcon", {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 3}, "num_ln_in_parallel", ModelError),
    ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 3}, "num_kv_heads 3", ModelError),
    ("Falcon", {"multi_query": False, "num_kv_heads": 2}, "num_kv_heads", UnsupportedError),
    ("Falcon", {"ff_factor": 3}, "ff_factor", UnsupportedError),
    ("Falcon", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
     "partial_rotary_factor", UnsupportedError),
    ("Falcon", {"sliding_window": 7}, "'sliding_window'", UnsupportedError),
    ("Phi", {"num_key_value_heads": 3}, "num_key_value_heads 3", ModelError),
    ("Phi", {"partial_rotary_factor": 0.4, "rope_parameters": ...}, "partial_rotary_factor 0.4", ModelError),
    ("Phi", {"attention_bias": True}, "'attention_bias'", UnsupportedError),
    ("Starcoder2", {"num_key_value_heads": ...}, "lacks num_key_value_heads", ModelError),
    ("Starcoder2", {"mlp_type": "gated"}, "mlp_type", UnsupportedError),
    ("Starcoder2", {"norm_type": "rms_norm"}, "norm_type", UnsupportedError),
    ("Starcoder2", {"layer_norm_epsilon": 1e-3}, "layer_norm_epsilon", UnsupportedError),
    ("Starcoder2", {"sliding_window": -1}, "sliding_window", ModelError),
    ("StableLm", {"head_dim": 16}, "head_dim", UnsupportedError),
    ("StableLm", {"num_key_value_heads": ...}, "lacks num_key_value_heads", ModelError),
    ("StableLm", {"sliding_window": 7}, "'sliding_window'", UnsupportedError),
])  # fmt: skip
def test_what_a_family_cannot_run_is_refused(
    kind: str, changes: dict[str, Any], words: str, error: type[ModelError]
) -> None:
    with pytest.raises(ModelError) as caught:
        spec_of(kind, **changes)
    assert type(caught.value) is error, caught.value
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
