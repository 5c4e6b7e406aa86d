"""MiMo-V2-Flash: windows with sinks beside full attention, each with heads of its own, values smaller than keys.

Source: MiMo-V2-Flash's technical report, arXiv 2601.02780, section 2; absent fields as in transformers'
MiMoV2FlashConfig, published ones by its makers' names (`hybrid_layer_pattern`, `swa_*`, `moe_layer_freq`). Layers that
predict further tokens (`model.mtp`) may draft (`families.mtp`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.base.errors import ModelError
from penstock.core.model_spec import Attention, FeedForward, Layer, ModelSpec, Norm, Rope
from penstock.families.fields import Fields
from penstock.families.llama_like import FULL, SLIDING, LlamaNames
from penstock.families.mixtral import beyond
from penstock.families.mtp import MtpNames
from penstock.families.positions import read_rope
from penstock.families.reading import (
    MAX_POSITION,
    MAX_SIZE,
    WHERE,
    Sizes,
    finish,
    read_activation,
    read_heads,
    read_layer_types,
    read_sizes,
    require,
)
from penstock.families.sparse import SPARSE_MLP, grouped_router, read_experts, read_width

_ROTATED = 0.334
_THETAS = {FULL: ("rope_theta", 5e6), SLIDING: ("swa_rope_theta", 1e4)}


def _light_layer(spec: ModelSpec) -> Layer | None:
    """What predicts further tokens is small: attention with a window, and no experts (section 2.2)."""
    slides = [layer for layer in spec.layers if isinstance(layer.mixer, Attention) and layer.mixer.window is not None]
    dense = [layer for layer in spec.layers if isinstance(layer.ffn, FeedForward)]
    return Layer(mixer=slides[0].mixer, ffn=dense[0].ffn, norm=dense[0].norm) if slides and dense else None


class MiMoV2Flash(LlamaNames):
    """The `ModelFamily` of MiMoV2FlashForCausalLM."""

    name = "mimo_v2_flash"
    architectures = ("MiMoV2FlashForCausalLM",)
    names = SPARSE_MLP | {"sinks": "self_attn.attention_sink_bias!"}
    mtp = MtpNames(
        block="model.mtp.layers.{k}", final_norm="{block}.final_layernorm", layer=_light_layer,
        renamed=(("post_attention_layernorm", "pre_mlp_layernorm"),),
    )  # fmt: skip

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        defaults = {"num_key_value_heads": 4, "head_dim": 192, "max_position_embeddings": 131072}
        fields = Fields({**defaults, **config}, WHERE)
        sizes = read_sizes(fields)
        eps = fields.number("layernorm_epsilon" if "layernorm_epsilon" in fields else "rms_norm_eps", default=1e-5)
        require(fields, "rms_norm_eps", eps)
        norm = Norm(eps=eps)
        mixers = _mixers(fields, sizes)
        activation = read_activation(fields)
        dense = FeedForward(width=read_width(fields, "intermediate_size", 16384), activation=activation)
        for name, value in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
            require(fields, name, value)
        if "n_shared_experts" in fields:
            require(fields, "n_shared_experts", 0)
        ffn = read_experts(
            fields, FeedForward(width=read_width(fields, "moe_intermediate_size", 2048), activation=activation),
            grouped_router(fields), number=("n_routed_experts", "num_local_experts"), default_top_k=8,
        )  # fmt: skip
        layers = [
            Layer(mixer=mixers[kind], ffn=ffn if sparse else dense, norm=norm)
            for kind, sparse in zip(_kinds(fields, sizes.num_layers), _sparse(fields, sizes.num_layers), strict=True)
        ]
        return finish(
            fields, self.name, sizes, layers, bos=(1,), final_norm=norm, harmless=("num_nextn_predict_layers",)
        )

    def ignores(self, name: str, spec: ModelSpec) -> bool:
        return super().ignores(name, spec) or beyond(name, spec) or name.startswith("model.mtp.")


def _mixers(fields: Fields, sizes: Sizes) -> dict[str, Attention]:
    """Attention of each kind of layer. Without fields of its own (`swa_*`) one with a window has twice the kv heads."""
    heads = read_heads(fields, sizes.hidden_size)
    v_dim = fields.integer("v_head_dim", high=MAX_SIZE, default=128)
    # `sliding_window_size` counts the tokens before the one that sees them, `sliding_window` counts this one, too.
    window = fields.integer("sliding_window", high=MAX_POSITION, default=129)
    if "sliding_window_size" in fields:
        window = fields.integer("sliding_window_size", high=MAX_POSITION) + 1
        require(fields, "attention_chunk_size", window - 1)  # how the published code calls it
    bias = fields.flag("attention_bias")
    more: dict[str, Any] = {
        "qkv_bias": bias, "value_scale": fields.number("attention_value_scale", default=0.707),
    }  # fmt: skip
    full = Attention(
        num_heads=heads.num_heads, num_kv_heads=heads.num_kv_heads, head_dim=heads.head_dim, v_dim=v_dim,
        rope=_rope(fields, FULL, heads.head_dim, sizes), sinks=fields.flag("add_full_attention_sink_bias"), **more,
    )  # fmt: skip
    num_heads = fields.integer("swa_num_attention_heads", high=MAX_SIZE, default=heads.num_heads)
    kv_heads = fields.integer("swa_num_key_value_heads", high=num_heads, default=2 * heads.num_kv_heads)
    if num_heads % kv_heads:
        raise ModelError(f"{WHERE}: swa_num_key_value_heads {kv_heads} does not divide {num_heads} heads")
    head_dim = fields.integer("swa_head_dim", high=MAX_SIZE, default=heads.head_dim)
    sliding = Attention(
        num_heads=num_heads, num_kv_heads=kv_heads, head_dim=head_dim, window=window,
        v_dim=fields.integer("swa_v_head_dim", high=MAX_SIZE, default=v_dim),
        rope=_rope(fields, SLIDING, head_dim, sizes),
        sinks=fields.flag("add_swa_attention_sink_bias", default=True), **more,
    )  # fmt: skip
    return {FULL: full, SLIDING: sliding}


def _rope(fields: Fields, kind: str, head_dim: int, sizes: Sizes) -> Rope:
    name, theta = _THETAS[kind]
    if "rope_parameters" in fields:
        return read_rope(fields, head_dim, sizes.max_position, theta=theta, partial=_ROTATED, layer_kind=kind)
    section = {
        "rope_theta": fields.number(name, default=theta),
        "partial_rotary_factor": fields.number("partial_rotary_factor", default=_ROTATED),
    }
    return read_rope(Fields({"rope_parameters": section}, WHERE), head_dim, sizes.max_position, partial=_ROTATED)


def _kinds(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """The first layer and every sixth have full attention, unless a list says which."""
    pattern = fields.integers("hybrid_layer_pattern", low=0, high=1)
    if pattern is not None:
        kinds = tuple(SLIDING if slides else FULL for slides in pattern)
        if len(kinds) != num_layers:
            raise ModelError(f"{WHERE} gives hybrid_layer_pattern for {len(kinds)} layers, but has {num_layers}")
        return kinds
    found = read_layer_types(fields, num_layers, (SLIDING, FULL))
    return found or tuple(FULL if i == 0 or (i + 1) % 6 == 0 else SLIDING for i in range(num_layers))


def _sparse(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Which layers have experts: all but the first, unless a list says which."""
    flags, kinds = fields.integers("moe_layer_freq", low=0, high=1), fields.strings("mlp_layer_types")
    if flags is None and kinds is None:
        return tuple(i > 0 for i in range(num_layers))
    found = tuple(kind == "sparse" for kind in kinds or ()) if flags is None else tuple(map(bool, flags))
    if len(found) != num_layers or not set(kinds or ()) <= {"sparse", "dense"}:
        raise ModelError(f"{WHERE} does not say of {num_layers} layers which are dense and which sparse")
    return found
