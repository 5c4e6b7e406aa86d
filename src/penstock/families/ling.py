"""Ling 3 (Bailing hybrid): five layers of Kimi's delta attention to one of latent attention, and experts.

A state fades by a bounded amount per token, heads of latent attention have gates, and layers that predict further
tokens are not run. Source: Ling Team, Ling 3.0 (2026); absent fields as in transformers' BailingHybridConfig; versions
1 and 2 are in `bailing`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.core.model_spec import FeedForward, GatedDelta, Layer, ModelSpec
from penstock.core.weight_map import Cut, WeightMap
from penstock.families.deepseek import read_latent
from penstock.families.fields import Fields
from penstock.families.llama_like import FULL, LlamaNames, read_ffn, read_norm
from penstock.families.mamba import MAX_TAPS
from penstock.families.mixtral import beyond
from penstock.families.naming import LLAMA_LAYER, LLAMA_TOP, named
from penstock.families.qwen_next import LINEAR
from penstock.families.reading import (
    MAX_EXPERTS,
    MAX_LAYERS,
    MAX_SIZE,
    WHERE,
    Sizes,
    finish,
    read_activation,
    read_layer_types,
    read_sizes,
    require,
)
from penstock.families.sparse import SPARSE_MLP, grouped_router, read_experts, read_sparse, read_width

_TOP = LLAMA_TOP | {"embed": "model.word_embeddings"}
_SPARSE = SPARSE_MLP | {"router_correction": "mlp.gate.expert_bias!"}
_LATENT = {
    "q": "attention.q_proj", "kv_a": "attention.kv_a_proj_with_mqa", "kv_a_norm": "attention.kv_a_layernorm",
    "kv_b": "attention.kv_b_proj", "o": "attention.dense", "o_gate": "attention.g_proj",
}  # fmt: skip
_DELTA = {
    "q": "attention.q_proj", "k": "attention.k_proj", "v": "attention.v_proj", "o": "attention.dense",
    "beta": "attention.b_proj", "dt": "attention.f_proj", "z": "attention.g_proj", "head_norm": "attention.o_norm",
}  # fmt: skip
_OTHER_NAMES = {
    "model_max_length": "max_position_embeddings", "moe_renormalize": "norm_topk_prob", "num_expert_group": "n_group",
    "num_experts_per_token": "num_experts_per_tok", "num_shared_experts": "n_shared_experts",
    "num_local_experts": "num_experts",
}  # fmt: skip
_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 262144, "num_attention_heads": 32, "rope_theta": 6000000.0, "num_experts": 512,
    "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "intermediate_size": 6144,
}  # fmt: skip
_HARMLESS = (
    "num_nextn_predict_layers", "num_mtp_layers", "mtp_loss_scaling_factor", "linear_head_dim", "linear_num_heads",
    "linear_conv_kernel_dim",
)  # fmt: skip


class BailingHybrid(LlamaNames):
    """The `ModelFamily` of BailingHybridForCausalLM."""

    name = "bailing_hybrid"
    architectures = ("BailingHybridForCausalLM",)

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        given = {**_DEFAULTS, **{_OTHER_NAMES.get(name, name): value for name, value in config.items()}}
        if config.get("rope_parameters"):
            given.pop("rope_theta")
        # transformers writes the rotated part of latent attention as head_dim, and this beside it.
        head_dim = given.pop("head_dim", 128)
        head_dim = given.get("linear_head_dim", head_dim)
        given.pop("qk_head_dim", None)
        fields = Fields(given, WHERE)
        sizes = read_sizes(fields)
        require(fields, "q_lora_rank", None)
        require(fields, "attention_bias", False)
        norm, activation = read_norm(fields), read_activation(fields)
        latent = msgspec.structs.replace(read_latent(fields, sizes), head_gate=True)
        delta = _delta(fields, latent.num_heads, Fields({"head_dim": head_dim}, WHERE), norm.eps)
        width = read_width(fields, "moe_intermediate_size", 768)
        shared = width * fields.integer("n_shared_experts", high=MAX_EXPERTS, default=1)
        ffn = read_experts(
            fields, FeedForward(width=width, activation=activation), grouped_router(fields), default_top_k=8,
            shared=FeedForward(width=shared, activation=activation),
        )  # fmt: skip
        dense = read_ffn(fields)
        layers = [
            Layer(mixer=latent if kind == FULL else delta, ffn=ffn if sparse else dense, norm=norm)
            for kind, sparse in zip(_kinds(fields, sizes), read_sparse(fields, sizes.num_layers, 2), strict=True)
        ]
        return finish(fields, self.name, sizes, layers, eos=(156895,), final_norm=norm, harmless=_HARMLESS)

    def weight_map(self, spec: ModelSpec) -> WeightMap:
        out: dict[str, str | Cut] = named(spec, _TOP, LLAMA_LAYER | _SPARSE | _LATENT)
        delta: dict[str, str | Cut] = named(spec, _TOP, LLAMA_LAYER | _SPARSE | _DELTA)
        for i, layer in enumerate(spec.layers):
            if not isinstance(m := layer.mixer, GatedDelta):
                continue
            at, stored = f"layers.{i}.", f"model.layers.{i}.attention."
            out |= {name: place for name, place in delta.items() if name.startswith(at)}
            for name, channels in (("q", m.keys), ("k", m.keys), ("v", m.values)):
                out[f"{at}{name}.conv"] = Cut(f"{stored}{name}_conv1d.weight", (channels, 1, m.conv))
            out |= {at + "dt.bias": stored + "dt_bias", at + "a_log": stored + "A_log"}
        return out

    def ignores(self, name: str, spec: ModelSpec) -> bool:
        return super().ignores(name, spec) or beyond(name, spec)


def _kinds(fields: Fields, sizes: Sizes) -> tuple[str, ...]:
    """The last of every `layer_group_size` layers has full attention, unless a list says which."""
    size = fields.integer("layer_group_size", high=MAX_LAYERS, default=6)
    kinds = read_layer_types(fields, sizes.num_layers, (FULL, LINEAR))
    return kinds or tuple(FULL if (i + 1) % size == 0 else LINEAR for i in range(sizes.num_layers))


def _delta(fields: Fields, heads: int, told: Fields, eps: float) -> GatedDelta:
    require(fields, "hidden_act", "silu")  # it follows the convolutions, too
    dim = told.integer("head_dim", high=MAX_SIZE)
    bounded = fields.flag("kda_safe_gate", default=True)
    floor = fields.number("kda_lower_bound", above=-1e9, default=-5.0)
    return GatedDelta(
        key_heads=heads, value_heads=heads, key_dim=dim, value_dim=dim, eps=eps, channel_decay=True, gate="sigmoid",
        conv=fields.integer("short_conv_kernel_size", low=2, high=MAX_TAPS, default=4),
        floor=min(floor, -1e-6) if bounded else None,
    )  # fmt: skip
