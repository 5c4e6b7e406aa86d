"""Arcee's Trinity: gated attention that slides but every fourth layer, norms on both sides, experts by sigmoid scores.

Source: arcee-ai, Trinity (2025); absent fields as in transformers' AfmoeConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.core.model_spec import FeedForward, Layer, ModelSpec, QkNorm, Router
from penstock.families.llama_like import (
    FULL,
    SLIDING,
    LlamaNames,
    attention,
    by_kind,
    every,
    read_ffn,
    read_kinds,
    read_norm,
    read_window,
    start,
)
from penstock.families.positions import read_rope
from penstock.families.reading import MAX_EXPERTS, MAX_LAYERS, finish, read_activation, require
from penstock.families.sparse import SPARSE_MLP, read_experts, read_width

_NAMES = {
    "attn_post_norm": "post_attention_layernorm", "ffn_norm": "pre_mlp_layernorm",
    "ffn_post_norm": "post_mlp_layernorm", "o_gate": "self_attn.gate_proj", "router": "mlp.router.gate",
    "router_correction": "mlp.expert_bias!",
}  # fmt: skip
_ONLY = {
    "route_norm": True, "score_func": "sigmoid", "n_group": 1, "topk_group": 1, "num_expert_groups": 1,
    "num_limited_groups": 1, "attention_bias": False,
}  # fmt: skip


class Afmoe(LlamaNames):
    """The `ModelFamily` of AfmoeForCausalLM."""

    name = "afmoe"
    architectures = ("AfmoeForCausalLM",)
    names = SPARSE_MLP | _NAMES

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields, sizes, heads = start(
            config, max_position_embeddings=16384, head_dim=128, sliding_window=1024
        )  # fmt: skip
        for name, value in _ONLY.items():
            require(fields, name, value)
        norm, activation = read_norm(fields, default=1e-5), read_activation(fields)
        kinds = read_kinds(fields, sizes.num_layers, every(fields, "global_attn_every_n_layers", 4))
        mixer = attention(heads, qk_norm=QkNorm(eps=norm.eps), output_gate=True)
        ropes = {SLIDING: read_rope(fields, heads.head_dim, sizes.max_position), FULL: None}
        mixers = by_kind(mixer, kinds, read_window(fields), ropes)
        dense, width = read_ffn(fields), read_width(fields, "moe_intermediate_size", 1408)
        num_shared = fields.integer("num_shared_experts", high=MAX_EXPERTS, default=2)
        router = Router(
            score="sigmoid", renormalize=True, correction=True, scale=fields.number("route_scale", default=1.0)
        )  # fmt: skip
        ffn = read_experts(
            fields, FeedForward(width=width, activation=activation), router, default_top_k=6,
            shared=FeedForward(width=num_shared * width, activation=activation),
        )  # fmt: skip
        num_dense = fields.integer("num_dense_layers", low=0, high=MAX_LAYERS, default=1)
        layers = [
            Layer(mixer=mixer, ffn=dense if i < num_dense else ffn, norm=norm, placement="both")
            for i, mixer in enumerate(mixers)
        ]
        return finish(
            fields, self.name, sizes, layers, final_norm=norm, harmless=("load_balance_coeff", "use_grouped_mm"),
            embed_scale=sizes.hidden_size**0.5 if fields.flag("mup_enabled") else 1.0,
        )  # fmt: skip
