"""Gemma, Gemma 2, VaultGemma and the text part of Gemma 3.

Source: Gemma Team, arXiv 2403.08295, 2408.00118 and 2503.19786; defaults of absent fields as in transformers'
GemmaConfig, Gemma2Config and Gemma3TextConfig. All of them keep norm weights minus one, multiply embeddings by the
square root of the hidden size, and tie the output to the embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.core.model_spec import ModelSpec, QkNorm
from penstock.families.llama_like import (
    FULL,
    SANDWICH_NORMS,
    SLIDING,
    LlamaNames,
    attention,
    by_kind,
    every,
    read_ffn,
    read_kinds,
    read_norm,
    read_optional,
    read_window,
    stack,
    start,
)
from penstock.families.positions import read_rope, read_ropes
from penstock.families.reading import finish, require

_TANH = "gelu_pytorch_tanh"
# Which cache transformers takes, and what it wrote down of how it made `layer_types`.
_HARMLESS = ("cache_implementation", "_sliding_window_pattern")


class Gemma(LlamaNames):
    """The `ModelFamily` of GemmaForCausalLM."""

    name = "gemma"
    architectures = ("GemmaForCausalLM",)

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        # Released files say "gelu" and mean its tanh form, as `hidden_activation` says where it is given.
        act = _TANH if config.get("hidden_act") in (None, "gelu") else config["hidden_act"]
        fields, sizes, heads = start(
            {**config, "hidden_act": act}, max_position_embeddings=8192, num_key_value_heads=16, head_dim=256
        )
        require(fields, "hidden_activation", _TANH)
        require(fields, "use_bidirectional_attention", False)
        norm, bias = read_norm(fields, offset=1.0), fields.flag("attention_bias")
        rope = read_rope(fields, heads.head_dim, sizes.max_position)
        mixer = attention(heads, rope=rope, qkv_bias=bias, o_bias=bias)
        layers = stack((mixer,) * sizes.num_layers, read_ffn(fields), norm)
        return finish(
            fields, self.name, sizes, layers, bos=(2,), eos=(1,), tie=True, final_norm=norm, harmless=_HARMLESS,
            embed_scale=sizes.hidden_size**0.5,
        )  # fmt: skip


class Gemma2(LlamaNames):
    """The `ModelFamily` of Gemma2ForCausalLM."""

    name = "gemma2"
    architectures = ("Gemma2ForCausalLM",)
    names = SANDWICH_NORMS

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields, sizes, heads = start(
            config, max_position_embeddings=8192, num_key_value_heads=4, head_dim=256, query_pre_attn_scalar=256,
            sliding_window=4096, attn_logit_softcapping=50.0, final_logit_softcapping=30.0,
        )  # fmt: skip
        require(fields, "hidden_act", _TANH)  # the model goes by `hidden_activation`
        require(fields, "use_bidirectional_attention", False)
        norm, bias, window = read_norm(fields, offset=1.0), fields.flag("attention_bias"), read_window(fields)
        require(fields, "sliding_window_size", window)
        kinds = read_kinds(fields, sizes.num_layers, lambda i: i % 2 == 0)
        mixer = attention(
            heads, rope=read_rope(fields, heads.head_dim, sizes.max_position), qkv_bias=bias, o_bias=bias,
            scale=fields.number("query_pre_attn_scalar") ** -0.5,
            soft_cap=read_optional(fields, "attn_logit_softcapping"),
        )  # fmt: skip
        ffn = read_ffn(fields, act="hidden_activation", default=_TANH)
        layers = stack(by_kind(mixer, kinds, window), ffn, norm, placement="both")
        return finish(
            fields, self.name, sizes, layers, bos=(2,), eos=(1,), tie=True, final_norm=norm, harmless=_HARMLESS,
            embed_scale=sizes.hidden_size**0.5, logit_soft_cap=read_optional(fields, "final_logit_softcapping"),
        )  # fmt: skip


class VaultGemma(LlamaNames):
    """The `ModelFamily` of VaultGemmaForCausalLM: Gemma 2 with norms in front of its halves alone."""

    name = "vaultgemma"
    architectures = ("VaultGemmaForCausalLM",)
    names: Mapping[str, str] = {"ffn_norm": "pre_feedforward_layernorm"}

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        spec = Gemma2().spec(config)
        layers = tuple(msgspec.structs.replace(layer, placement="pre") for layer in spec.layers)
        return msgspec.structs.replace(spec, family=self.name, layers=layers)


class Gemma3(LlamaNames):
    """The `ModelFamily` of Gemma3ForCausalLM (text only): q and k are normed, each kind of layer has its rope."""

    name = "gemma3_text"
    architectures = ("Gemma3ForCausalLM",)
    names = SANDWICH_NORMS

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields, sizes, heads = start(
            config, max_position_embeddings=131072, num_key_value_heads=4, head_dim=256, query_pre_attn_scalar=256,
            sliding_window=4096,
        )  # fmt: skip
        require(fields, "hidden_act", _TANH)
        require(fields, "use_bidirectional_attention", False)
        norm, bias, window = read_norm(fields, offset=1.0), fields.flag("attention_bias"), read_window(fields)
        kinds = read_kinds(fields, sizes.num_layers, every(fields, "sliding_window_pattern", 6))
        thetas = {FULL: ("rope_theta", 1e6), SLIDING: ("rope_local_base_freq", 1e4)}
        ropes = read_ropes(fields, heads.head_dim, sizes.max_position, thetas)
        mixer = attention(
            heads, qkv_bias=bias, o_bias=bias, qk_norm=QkNorm(eps=norm.eps, offset=1.0),
            scale=fields.number("query_pre_attn_scalar") ** -0.5,
        )  # fmt: skip
        ffn = read_ffn(fields, act="hidden_activation", default=_TANH)
        layers = stack(by_kind(mixer, kinds, window, ropes), ffn, norm, placement="both")
        return finish(
            fields, self.name, sizes, layers, bos=(2,), eos=(1,), tie=True, final_norm=norm, harmless=_HARMLESS,
            embed_scale=sizes.hidden_size**0.5, logit_soft_cap=read_optional(fields, "final_logit_softcapping"),
        )  # fmt: skip
