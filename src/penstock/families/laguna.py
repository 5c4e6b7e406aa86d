"""Laguna: gates by softplus on attention, whose kinds of layers have their own positions and numbers of heads, and
experts by sigmoid scores.

Source: poolside, Laguna XS.2 (2026); absent fields as in transformers' LagunaConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.base.errors import ModelError, UnsupportedError
from penstock.core.model_spec import Attention, FeedForward, Layer, ModelSpec, QkNorm, Router
from penstock.families.fields import Fields
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
from penstock.families.reading import MAX_SIZE, WHERE, finish, read_activation, require
from penstock.families.sparse import SPARSE_MLP, read_experts, read_sparse, read_width
from penstock.formats.files import quoted

_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": 128, "sliding_window": 512,
    "intermediate_size": 8192, "num_experts": 256,
}  # fmt: skip
_ROPES = {
    FULL: {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
}
_NAMES = {
    "o_gate": "self_attn.g_proj", "router_correction": "mlp.experts.e_score_correction_bias!",
    **{f"shared.{part}": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
}  # fmt: skip
_ONLY = {
    "attention_bias": False, "moe_apply_router_weight_on_input": False,
    "moe_router_logit_softcapping": 0.0,
}  # fmt: skip


class Laguna(LlamaNames):
    """The `ModelFamily` of LagunaForCausalLM."""

    name = "laguna"
    architectures = ("LagunaForCausalLM",)
    names = SPARSE_MLP | _NAMES

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        ropes = {} if config.get("rope_parameters") else {"rope_parameters": _ROPES}
        fields, sizes, heads = start({**config, **ropes}, **_DEFAULTS)
        for name, value in _ONLY.items():
            require(fields, name, value)
        norm, activation = read_norm(fields), read_activation(fields)
        kinds = read_kinds(fields, sizes.num_layers, lambda _: False)
        own = {
            kind: read_rope(fields, heads.head_dim, sizes.max_position, partial=1.0, layer_kind=kind)
            for kind in (FULL, SLIDING)
        }
        mixer = attention(heads, qk_norm=QkNorm(eps=norm.eps), gate="softplus", **_gating(fields))
        mixers = _with_heads(fields, by_kind(mixer, kinds, read_window(fields), own))
        router = Router(
            score="sigmoid", renormalize=True, correction=True,
            scale=fields.number("moe_routed_scaling_factor", default=1.0),
        )  # fmt: skip
        shared = read_width(fields, "shared_expert_intermediate_size", 512)
        ffn = read_experts(
            fields, FeedForward(width=read_width(fields, "moe_intermediate_size", 512), activation=activation), router,
            number=("num_experts", "num_local_experts"), default_top_k=8,
            shared=FeedForward(width=shared, activation=activation),
        )  # fmt: skip
        dense = read_ffn(fields)
        layers = [
            Layer(mixer=m, ffn=ffn if sparse else dense, norm=norm)
            for m, sparse in zip(mixers, read_sparse(fields, sizes.num_layers, 1), strict=True)
        ]
        return finish(fields, self.name, sizes, layers, final_norm=norm)


def _gating(fields: Fields) -> dict[str, bool]:
    given = fields.raw("gating")
    if given in (None, True, "per-head"):
        return {"head_gate": True}
    if given == "per-element":
        return {"output_gate": True}
    raise UnsupportedError(f"{WHERE} sets gating to {quoted(given, 60)}; this family computes per-head and per-element")


def _with_heads(fields: Fields, mixers: tuple[Attention, ...]) -> list[Attention]:
    given = fields.integers("num_attention_heads_per_layer", low=1, high=MAX_SIZE)
    if given is None:
        return list(mixers)
    if len(given) != len(mixers) or any(n % m.num_kv_heads for n, m in zip(given, mixers, strict=False)):
        raise ModelError(
            f"{WHERE} must give num_attention_heads_per_layer for {len(mixers)} layers, each a multiple of "
            f"num_key_value_heads {mixers[0].num_kv_heads}"
        )
    return [msgspec.structs.replace(m, num_heads=n) for m, n in zip(mixers, given, strict=True)]
