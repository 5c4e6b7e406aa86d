"""Doge: Llama whose scores have a bias of every key, and whose residuals are weighed by channel.

Beyond `keep_window_size` tokens only those of the largest biases would be seen; the context ends there. Its mixture of
experts is refused: it chooses by a table in which tokens of a text are mixed. Source: Shi et al., Wonderful Matrices,
arXiv 2412.11834; absent fields as in transformers' DogeConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.core.model_spec import ModelSpec, QkNorm
from penstock.families.llama_like import LlamaNames, attention, read_ffn, read_norm, read_window, stack, start
from penstock.families.positions import read_rope
from penstock.families.reading import MAX_POSITION, finish, require

_EXPERTS = ("num_experts", "num_experts_per_tok", "norm_topk_prob")
"""Sizes of experts, written where there are none."""


class Doge(LlamaNames):
    """The `ModelFamily` of DogeForCausalLM."""

    name = "doge"
    architectures = ("DogeForCausalLM",)
    names: Mapping[str, str] = {
        "bias_dt": "self_attn.dt_proj", "bias_a": "self_attn.A!", "attn_residual": "input_residual!",
        "ffn_residual": "post_attention_residual!",
    }  # fmt: skip

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields, sizes, heads = start(config, max_position_embeddings=2048)
        require(fields, "is_moe", False)
        norm, bias = read_norm(fields), fields.flag("attention_bias")
        mixer = attention(
            heads, rope=read_rope(fields, heads.head_dim, sizes.max_position), qkv_bias=bias, o_bias=bias,
            qk_norm=QkNorm(eps=norm.eps), window=read_window(fields), key_bias=True,
        )  # fmt: skip
        kept = fields.integer("keep_window_size", high=MAX_POSITION, default=2048)
        sizes = sizes._replace(max_position=min(sizes.max_position, kept))
        ffn = read_ffn(fields, bias=fields.flag("mlp_bias"))
        layers = stack((mixer,) * sizes.num_layers, ffn, norm, residual_weights=True)
        return finish(fields, self.name, sizes, layers, final_norm=norm, harmless=_EXPERTS)
