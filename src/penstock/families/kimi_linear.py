"""Kimi Linear: three layers of Kimi's delta attention (KDA) to one of latent attention without positions, and experts.

KDA is the gated delta rule with a decay for every component of a key. Source: Kimi Team, arXiv 2510.26692, sections 3
and 4; the published config.json and modeling_kimi.py; absent fields as in transformers' KimiLinearConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.base.errors import ModelError
from penstock.core.model_spec import FeedForward, GatedDelta, Latent, Layer, ModelSpec, Norm
from penstock.core.weight_map import Cut, WeightMap
from penstock.families.deepseek import LATENT
from penstock.families.fields import Fields
from penstock.families.llama import ignored
from penstock.families.llama_like import FULL
from penstock.families.mamba import MAX_TAPS
from penstock.families.mixtral import beyond
from penstock.families.naming import LLAMA_LAYER, LLAMA_TOP, named
from penstock.families.qwen_next import LINEAR
from penstock.families.reading import (
    MAX_EXPERTS,
    MAX_LAYERS,
    MAX_SIZE,
    WHERE,
    finish,
    read_activation,
    read_layer_types,
    read_sizes,
    require,
)
from penstock.families.sparse import SPARSE_BLOCK, grouped_router, read_experts, read_width

_DELTA = {
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
    "beta": "self_attn.b_proj", "dt_down": "self_attn.f_a_proj", "dt": "self_attn.f_b_proj",
    "z_down": "self_attn.g_a_proj", "z": "self_attn.g_b_proj", "head_norm": "self_attn.o_norm",
}  # fmt: skip
_SPARSE = SPARSE_BLOCK | {
    "router_correction": "block_sparse_moe.gate.e_score_correction_bias!",
    **{f"shared.{part}": f"block_sparse_moe.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
}
# Nothing is rotated, so that theta says nothing; the head's size is another part's. Layers that predict are not run.
_HARMLESS = ("head_dim", "rope_theta", "num_nextn_predict_layers", "ep_size", "qk_head_dim")
_OTHER_NAMES = {
    "model_max_length": "max_position_embeddings", "moe_renormalize": "norm_topk_prob", "num_expert_group": "n_group",
    "num_experts_per_token": "num_experts_per_tok", "num_shared_experts": "n_shared_experts",
}  # fmt: skip
"""Names of the published files -> those of DeepSeek's."""


class KimiLinear:
    """The `ModelFamily` of KimiLinearForCausalLM."""

    name = "kimi_linear"
    architectures = ("KimiLinearForCausalLM",)

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        renamed = {_OTHER_NAMES.get(name, name): value for name, value in config.items()}
        fields = Fields({"routed_scaling_factor": 2.446, **renamed}, WHERE)
        sizes = read_sizes(fields, default_positions=1048576)
        for name, value in (
            ("mla_use_nope", True), ("moe_router_activation_func", "sigmoid"), ("use_grouped_topk", True),
            ("moe_layer_freq", 1), ("attention_bias", False), ("rope_scaling", None),
        ):  # fmt: skip
            require(fields, name, value)
        fields.section("rope_parameters")
        norm = Norm(eps=fields.number("rms_norm_eps", default=1e-5))
        latent, delta = _latent(fields), _delta(fields, norm.eps)
        activation = read_activation(fields)
        dense = FeedForward(width=read_width(fields, "intermediate_size", 9216), activation=activation)
        width = read_width(fields, "moe_intermediate_size", 1024)
        num_shared = fields.integer("n_shared_experts", high=MAX_EXPERTS, default=1)
        ffn = read_experts(
            fields, FeedForward(width=width, activation=activation), grouped_router(fields),
            number=("num_experts", "num_local_experts"), default_top_k=8,
            shared=FeedForward(width=num_shared * width, activation=activation),
        )  # fmt: skip
        layers = [
            Layer(mixer=latent if kind == FULL else delta, ffn=ffn if sparse else dense, norm=norm)
            for kind, sparse in zip(_kinds(fields, sizes.num_layers), _sparse(fields, sizes.num_layers), strict=True)
        ]
        return finish(
            fields, self.name, sizes, layers, bos=(163584,), eos=(163586,), final_norm=norm, harmless=_HARMLESS
        )

    def weight_map(self, spec: ModelSpec) -> WeightMap:
        dense = LLAMA_LAYER | LATENT | _SPARSE
        out: dict[str, str | Cut] = named(spec, LLAMA_TOP, dense)
        delta: dict[str, str | Cut] = named(spec, LLAMA_TOP, dense | _DELTA)
        for i, layer in enumerate(spec.layers):
            if not isinstance(m := layer.mixer, GatedDelta):
                continue
            at, stored = f"layers.{i}.", f"model.layers.{i}.self_attn."
            out |= {name: place for name, place in delta.items() if name.startswith(at)}
            for name, channels in (("q", m.keys), ("k", m.keys), ("v", m.values)):
                out[f"{at}{name}.conv"] = Cut(f"{stored}{name}_conv1d.weight", (channels, 1, m.conv))
            out[at + "dt.bias"] = stored + "dt_bias"
            out[at + "a_log"] = Cut(stored + "A_log", (1, 1, m.value_heads, 1))
        return out

    def ignores(self, name: str, spec: ModelSpec) -> bool:
        return ignored(name, spec) or beyond(name, spec)


def _kinds(fields: Fields, num_layers: int) -> list[str]:
    """Of every layer; published files count their layers from 1, in `linear_attn_config`."""
    inner = fields.section("linear_attn_config") or Fields({}, WHERE)
    full, linear = (inner.integers(name, low=1, high=num_layers) for name in ("full_attn_layers", "kda_layers"))
    if full is not None and linear is not None:
        fields.raw("layer_types")
        if sorted(full + linear) != list(range(1, num_layers + 1)):
            raise ModelError(f"{WHERE}: full_attn_layers and kda_layers do not name each of {num_layers} layers once")
        return [FULL if i + 1 in full else LINEAR for i in range(num_layers)]
    kinds = read_layer_types(fields, num_layers, (FULL, LINEAR))
    return list(kinds or (FULL if i and i % 4 == 0 else LINEAR for i in range(num_layers)))


def _sparse(fields: Fields, num_layers: int) -> list[bool]:
    kinds = fields.strings("mlp_layer_types")
    first = fields.integer("first_k_dense_replace", low=0, high=MAX_LAYERS, default=1)
    if kinds is None:
        return [i >= first for i in range(num_layers)]
    if len(kinds) != num_layers or not set(kinds) <= {"dense", "sparse"}:
        raise ModelError(f"{WHERE} gives mlp_layer_types that are not dense or sparse for each of {num_layers} layers")
    return [kind == "sparse" for kind in kinds]


def _latent(fields: Fields) -> Latent:
    heads = fields.integer("num_attention_heads", high=MAX_SIZE)
    if fields.integer("num_key_value_heads", high=MAX_SIZE, default=heads) != heads:
        raise ModelError(f"{WHERE}: latent attention has as many key-value heads as query heads, {heads}")
    return Latent(
        num_heads=heads, kv_rank=fields.integer("kv_lora_rank", high=MAX_SIZE, default=512),
        nope_dim=fields.integer("qk_nope_head_dim", high=MAX_SIZE, default=128),
        rope_dim=fields.integer("qk_rope_head_dim", high=MAX_SIZE, default=64),
        v_dim=fields.integer("v_head_dim", high=MAX_SIZE, default=128), rope=None,
        q_rank=fields.integer("q_lora_rank", high=MAX_SIZE) if "q_lora_rank" in fields else None,
    )  # fmt: skip


def _delta(fields: Fields, eps: float) -> GatedDelta:
    """Its sizes stand in `linear_attn_config`, or beside it, as transformers 5 writes them."""
    require(fields, "hidden_act", "silu")  # it follows the convolutions, too
    inner = fields.section("linear_attn_config") or Fields({}, WHERE)
    heads, dim, taps = (
        inner.integer(name, low=low, high=high, default=fields.integer(other, low=low, high=high, default=usual))
        for name, other, low, high, usual in (
            ("num_heads", "linear_num_heads", 1, MAX_SIZE, 32), ("head_dim", "linear_head_dim", 1, MAX_SIZE, 128),
            ("short_conv_kernel_size", "linear_conv_kernel_dim", 2, MAX_TAPS, 4),
        )
    )  # fmt: skip
    return GatedDelta(
        key_heads=heads, value_heads=heads, key_dim=dim, value_dim=dim, conv=taps, eps=eps, channel_decay=True,
        decay_rank=dim, gate="sigmoid", gate_rank=dim,
    )  # fmt: skip
