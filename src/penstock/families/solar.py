"""Solar Open: Llama's attention and GLM-4.5's experts in every layer.

Source: Upstage, Solar Open 100B (2025); absent fields as in transformers' SolarOpenConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.core.model_spec import FeedForward, Layer, ModelSpec
from penstock.families.llama_like import LlamaNames, attention, read_norm, start
from penstock.families.positions import read_rope
from penstock.families.reading import MAX_EXPERTS, finish, read_activation, require
from penstock.families.sparse import SPARSE_MLP, grouped_router, read_experts, read_width


class SolarOpen(LlamaNames):
    """The `ModelFamily` of SolarOpenForCausalLM."""

    name = "solar_open"
    architectures = ("SolarOpenForCausalLM",)
    names = SPARSE_MLP

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields, sizes, heads = start(
            config, max_position_embeddings=131072, num_key_value_heads=8, head_dim=128, n_routed_experts=128
        )
        # What files carry over from GLM-4.5's: no layer is dense, q and k are not normed.
        for name, value in (("first_k_dense_replace", 0), ("use_qk_norm", False)):
            require(fields, name, value)
        norm, activation = read_norm(fields, default=1e-5), read_activation(fields)
        mixer = attention(
            heads, rope=read_rope(fields, heads.head_dim, sizes.max_position, theta=1e6),
            qkv_bias=fields.flag("attention_bias"),
        )  # fmt: skip
        width = read_width(fields, "moe_intermediate_size", 1280)
        num_shared = fields.integer("n_shared_experts", high=MAX_EXPERTS, default=1)
        ffn = read_experts(
            fields, FeedForward(width=width, activation=activation), grouped_router(fields),
            number=("n_routed_experts", "num_local_experts"), default_top_k=8,
            shared=FeedForward(width=num_shared * width, activation=activation),
        )  # fmt: skip
        layers = (Layer(mixer=mixer, ffn=ffn, norm=norm),) * sizes.num_layers
        return finish(fields, self.name, sizes, layers, final_norm=norm, harmless=("intermediate_size",))
