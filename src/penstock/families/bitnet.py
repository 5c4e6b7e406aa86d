"""BitNet b1.58: Llama with squared relu and a norm inside of both halves, in front of their last product.

Its weights are -1, 0 and +1 times one number of each matrix: `families.quantization.bitnet` reads them.
Source: Ma et al., The Era of 1-bit LLMs, arXiv 2402.17764; BitNet b1.58 2B4T, arXiv 2504.12285, section 2; defaults of
absent fields as in transformers' BitNetConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.core.model_spec import ModelSpec
from penstock.families.llama_like import LlamaNames, attention, read_ffn, read_norm, stack, start
from penstock.families.positions import read_rope
from penstock.families.reading import finish


class BitNet(LlamaNames):
    """The `ModelFamily` of BitNetForCausalLM."""

    name = "bitnet"
    architectures = ("BitNetForCausalLM",)
    names: Mapping[str, str] = {"o_norm": "self_attn.attn_sub_norm", "down_norm": "mlp.ffn_sub_norm"}

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields, sizes, heads = start(config, max_position_embeddings=2048, num_key_value_heads=5)
        norm, bias = read_norm(fields, default=1e-5), fields.flag("attention_bias")
        rope = read_rope(fields, heads.head_dim, sizes.max_position, theta=500000.0)
        mixer = attention(heads, rope=rope, qkv_bias=bias, o_bias=bias, o_norm=norm.eps)
        ffn = msgspec.structs.replace(read_ffn(fields, default="relu2"), down_norm=norm.eps)
        layers = stack((mixer,) * sizes.num_layers, ffn, norm)
        return finish(fields, self.name, sizes, layers, bos=(128000,), eos=(128001,), final_norm=norm)
