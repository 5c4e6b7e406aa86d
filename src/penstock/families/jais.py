"""Jais 2: Llama with layer norms, biases and a plain feed-forward of squared relu.

Source: Inception, Jais 2 (2025); absent fields as in transformers' Jais2Config.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.core.model_spec import ModelSpec
from penstock.families.llama_like import LlamaNames, attention, read_ffn, read_norm, stack, start
from penstock.families.positions import read_rope
from penstock.families.reading import finish


class Jais2(LlamaNames):
    """The `ModelFamily` of Jais2ForCausalLM."""

    name = "jais2"
    architectures = ("Jais2ForCausalLM",)

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields, sizes, heads = start(config, max_position_embeddings=8192)
        norm = read_norm(fields, "layer_norm_eps", 1e-5, kind="layer")
        bias = fields.flag("attention_bias", default=True)
        rope = read_rope(fields, heads.head_dim, sizes.max_position)
        ffn = read_ffn(fields, default="relu2", gated=False, bias=fields.flag("mlp_bias", default=True))
        layers = stack((attention(heads, rope=rope, qkv_bias=bias, o_bias=bias),) * sizes.num_layers, ffn, norm)
        return finish(fields, self.name, sizes, layers, bos=(0,), eos=(150024,), final_norm=norm)
