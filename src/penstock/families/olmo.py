"""OLMo 1: Llama with layer norms that have no weights, and q, k and v that may be cut.

Source: Groeneveld et al., OLMo, arXiv 2402.00838; absent fields as in transformers' OlmoConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.core.model_spec import ModelSpec, Norm
from penstock.families.llama_like import LlamaNames, attention, read_ffn, read_optional, stack, start
from penstock.families.positions import read_rope
from penstock.families.reading import finish


class Olmo(LlamaNames):
    """The `ModelFamily` of OlmoForCausalLM."""

    name = "olmo"
    architectures = ("OlmoForCausalLM",)

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields, sizes, heads = start(config, max_position_embeddings=2048)
        norm, bias = Norm(kind="layer", eps=1e-5, weight=False, bias=False), fields.flag("attention_bias")
        mixer = attention(
            heads, rope=read_rope(fields, heads.head_dim, sizes.max_position), qkv_bias=bias, o_bias=bias,
            clip=read_optional(fields, "clip_qkv"),
        )  # fmt: skip
        layers = stack((mixer,) * sizes.num_layers, read_ffn(fields), norm)
        return finish(fields, self.name, sizes, layers, eos=(50279,), final_norm=norm)
