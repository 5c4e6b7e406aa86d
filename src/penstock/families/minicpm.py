"""MiniCPM: Llama with embeddings, residuals and logits scaled by what its sizes were tuned on; MiniCPM3 with latent
attention.

Source: Hu et al., MiniCPM, arXiv 2404.06395, section 3.1 and appendix A.1; absent fields of MiniCPM3 as in
transformers' MiniCPM3Config.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from penstock.core.model_spec import ModelSpec
from penstock.families.deepseek import LATENT, read_latent
from penstock.families.fields import Fields
from penstock.families.llama_like import LlamaNames, attention, read_ffn, read_norm, stack, start
from penstock.families.positions import read_rope
from penstock.families.reading import MAX_SIZE, WHERE, finish, read_sizes, require

_LATENT: dict[str, Any] = {
    "kv_lora_rank": 256, "q_lora_rank": 768, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "scale_depth": 1.4,
    "dim_model_base": 256, "rope_interleave": False,
}  # fmt: skip


class MiniCPM(LlamaNames):
    """The `ModelFamily` of MiniCPMForCausalLM (1, 2 and 4, dense)."""

    name = "minicpm"
    architectures = ("MiniCPMForCausalLM",)

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields, sizes, heads = start(config, max_position_embeddings=2048)
        require(fields, "num_experts", 0)
        require(fields, "mup_denominator", sizes.num_layers)
        norm, bias = read_norm(fields), fields.flag("attention_bias")
        rope = read_rope(fields, heads.head_dim, sizes.max_position)
        mixer = attention(heads, rope=rope, qkv_bias=bias, o_bias=bias)
        layers = stack(
            (mixer,) * sizes.num_layers, read_ffn(fields), norm,
            residual_scale=fields.number("scale_depth", default=1.0) / math.sqrt(sizes.num_layers),
        )  # fmt: skip
        return finish(
            fields, self.name, sizes, layers, bos=(1,), eos=(2,), tie=True, final_norm=norm,
            embed_scale=fields.number("scale_emb", default=1.0),
            logit_scale=fields.integer("dim_model_base", high=MAX_SIZE, default=1) / sizes.hidden_size,
        )  # fmt: skip


class MiniCPM3(LlamaNames):
    """The `ModelFamily` of MiniCPM3ForCausalLM."""

    name = "minicpm3"
    architectures = ("MiniCPM3ForCausalLM",)
    names = LATENT

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields = Fields({**_LATENT, **config}, WHERE)
        sizes = read_sizes(fields, default_positions=32768)
        heads = fields.integer("num_attention_heads", high=MAX_SIZE)
        if "v_head_dim" not in fields:
            fields = Fields({**_LATENT, **config, "v_head_dim": max(1, sizes.hidden_size // heads)}, WHERE)
            sizes = read_sizes(fields, default_positions=32768)
        require(fields, "rope_interleave", False)
        norm, layers = read_norm(fields, default=1e-5), sizes.num_layers
        depth = fields.number("scale_depth", default=math.sqrt(layers))
        base = fields.integer("dim_model_base", high=MAX_SIZE, default=sizes.hidden_size)
        made = stack(
            (read_latent(fields, sizes),) * layers, read_ffn(fields, bias=fields.flag("mlp_bias")), norm,
            residual_scale=depth / math.sqrt(layers),
        )  # fmt: skip
        return finish(
            fields, self.name, sizes, made, bos=(1,), eos=(2,), tie=True, final_norm=norm,
            embed_scale=fields.number("scale_emb", default=12.0), logit_scale=base / sizes.hidden_size,
        )  # fmt: skip
