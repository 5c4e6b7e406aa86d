"""Mellum 2: Qwen3's layers with experts, where each kind of layer has its own rotary positions.

Layers that predict further tokens (`mtp.`) are not run. Source: JetBrains, Mellum 2 (2026); absent fields as in
transformers' MellumConfig.
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
from penstock.families.reading import finish, read_activation
from penstock.families.sparse import SPARSE_MLP, read_experts, read_sparse, read_width

_THETAS = {FULL: 500000.0, SLIDING: 10000.0}
_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 131072, "num_key_value_heads": 4, "head_dim": 128, "sliding_window": 1024,
    "intermediate_size": 7168, "num_experts": 64,
}  # fmt: skip
_HARMLESS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_layer_types", "mtp_mlp_layer_types")


class Mellum(LlamaNames):
    """The `ModelFamily` of MellumForCausalLM."""

    name = "mellum"
    architectures = ("MellumForCausalLM",)
    names = SPARSE_MLP

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        default = {} if "num_local_experts" not in config else {"num_experts": None}
        fields, sizes, heads = start(config, **_DEFAULTS | default)
        norm, bias, activation = read_norm(fields), fields.flag("attention_bias"), read_activation(fields)
        kinds = read_kinds(fields, sizes.num_layers, lambda _: False)
        ropes = {
            kind: read_rope(fields, heads.head_dim, sizes.max_position, theta=theta, partial=1.0, layer_kind=kind)
            for kind, theta in _THETAS.items()
        }
        mixer = attention(heads, qk_norm=QkNorm(eps=norm.eps), qkv_bias=bias, o_bias=bias)
        mixers = by_kind(mixer, kinds, read_window(fields), ropes)
        ffn = read_experts(
            fields, FeedForward(width=read_width(fields, "moe_intermediate_size", 896), activation=activation),
            Router(renormalize=fields.flag("norm_topk_prob", default=True)),
            number=("num_experts", "num_local_experts"), default_top_k=8,
        )  # fmt: skip
        dense = read_ffn(fields)
        layers = [
            Layer(mixer=mixer, ffn=ffn if sparse else dense, norm=norm)
            for mixer, sparse in zip(mixers, read_sparse(fields, sizes.num_layers, 0), strict=True)
        ]
        return finish(fields, self.name, sizes, layers, final_norm=norm, harmless=_HARMLESS)

    def ignores(self, name: str, spec: ModelSpec) -> bool:
        return super().ignores(name, spec) or name.startswith("mtp.")
