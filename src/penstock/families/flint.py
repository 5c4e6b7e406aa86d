"""Flint: windows with positions beside full attention without, sinks in both, experts by plain sigmoid scores.

Source: RecursiveSI, Flint's model card (2026); absent fields as in transformers' FlintConfig.
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
    read_ffn,
    read_kinds,
    read_norm,
    read_window,
    start,
)
from penstock.families.positions import read_rope
from penstock.families.qwen_moe import sparse_layers
from penstock.families.reading import finish, read_activation
from penstock.families.sparse import SPARSE_MLP, read_experts, read_width

_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 262144, "num_key_value_heads": 4, "head_dim": 128, "sliding_window": 513,
    "intermediate_size": 6144, "num_experts": 256, "mlp_only_layers": [0, 1],
}  # fmt: skip
_NAMES = {
    "sinks": "self_attn.softmax_offset!",
    **{f"shared.{part}": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
}  # fmt: skip


class Flint(LlamaNames):
    """The `ModelFamily` of FlintForCausalLM."""

    name = "flint"
    architectures = ("FlintForCausalLM",)
    names = SPARSE_MLP | _NAMES

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields, sizes, heads = start(config, **_DEFAULTS)
        norm, bias, activation = read_norm(fields), fields.flag("attention_bias"), read_activation(fields)
        last = sizes.num_layers - 1
        kinds = read_kinds(fields, sizes.num_layers, lambda i: not (i < 2 or i % 4 == 1 or i == last))
        ropes = {SLIDING: read_rope(fields, heads.head_dim, sizes.max_position), FULL: None}
        mixer = attention(heads, sinks=True, qk_norm=QkNorm(eps=norm.eps), qkv_bias=bias, o_bias=bias)
        mixers = by_kind(mixer, kinds, read_window(fields), ropes)
        shared = read_width(fields, "shared_expert_intermediate_size", 1024)
        ffn = read_experts(
            fields, FeedForward(width=read_width(fields, "moe_intermediate_size", 512), activation=activation),
            Router(score="sigmoid", renormalize=fields.flag("norm_topk_prob", default=True)),
            number=("num_experts", "num_local_experts"), default_top_k=6,
            shared=FeedForward(width=shared, activation=activation),
        )  # fmt: skip
        dense = read_ffn(fields)
        layers = [
            Layer(mixer=mixer, ffn=ffn if sparse else dense, norm=norm)
            for mixer, sparse in zip(mixers, sparse_layers(fields, sizes.num_layers), strict=True)
        ]
        return finish(fields, self.name, sizes, layers, final_norm=norm)
