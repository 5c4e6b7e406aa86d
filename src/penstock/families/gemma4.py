"""Gemma 4, its text part: global layers with heads of their own size whose keys are values, too, experts that work
beside a dense feed-forward, and, in E2B and E4B, embeddings for every layer and layers that share keys and values.

Source: Gemma 4's model card; layout and absent fields as in transformers' Gemma4TextConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.base.errors import ModelError, UnsupportedError
from penstock.core.model_spec import Attention, Experts, FeedForward, FeedForwardKind, Layer, ModelSpec, QkNorm, Router
from penstock.core.weight_map import Cut, WeightMap
from penstock.families.fields import Fields
from penstock.families.llama_like import (
    FULL,
    SANDWICH_NORMS,
    SLIDING,
    LlamaNames,
    Start,
    attention,
    every,
    read_ffn,
    read_kinds,
    read_norm,
    read_optional,
    start,
)
from penstock.families.per_layer import (
    PER_LAYER_NAMES,
    PER_LAYER_TOP,
    is_unused,
    read_per_layer,
    read_sources,
)
from penstock.families.positions import read_ropes
from penstock.families.reading import MAX_EXPERTS, MAX_POSITION, MAX_SIZE, WHERE, finish, require
from penstock.families.sparse import read_width, stacked_rows
from penstock.formats.files import quoted

_TANH = "gelu_pytorch_tanh"
_THETAS = {FULL: ("rope_theta", 1e6), SLIDING: ("rope_local_base_freq", 1e4)}
_ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
_EXPERTS = {
    "router": "router.proj", "router_norm": "router.scale!", "router_scale": "router.per_expert_scale!",
    "experts_norm": "pre_feedforward_layernorm_2", "experts_post_norm": "post_feedforward_layernorm_2",
    "shared_post_norm": "post_feedforward_layernorm_1", "shared.gate": "mlp.gate_proj", "shared.up": "mlp.up_proj",
    "shared.down": "mlp.down_proj",
}  # fmt: skip
_HARMLESS = ("expert_intermediate_size",)


class Gemma4(LlamaNames):
    """The `ModelFamily` of Gemma4ForCausalLM."""

    name = "gemma4_text"
    architectures = ("Gemma4ForCausalLM",)
    top = PER_LAYER_TOP
    names = SANDWICH_NORMS | _EXPERTS | PER_LAYER_NAMES | {"layer_scale": "layer_scalar!"}

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        begun = start(
            config, max_position_embeddings=131072, num_key_value_heads=4, head_dim=256,
            hidden_size_per_layer_input=256,
        )  # fmt: skip
        fields, sizes = begun.fields, begun.sizes
        _refuse(fields)
        norm = read_norm(fields)
        kinds = read_kinds(fields, sizes.num_layers, every(fields, "sliding_window_pattern", 6))
        kinds = (*kinds[:-1], FULL)  # the last layer is global, whatever the list says
        mixers, sources = _mixers(begun, kinds, norm.eps), read_sources(fields, kinds)
        ffn, wide, per_layer = _feed_forward(fields), fields.flag("use_double_wide_mlp"), read_per_layer(fields)
        layers = [
            Layer(
                mixer=msgspec.structs.replace(mixers[kind], kv_from=source), placement="both", norm=norm,
                ffn=_doubled(ffn) if wide and source is not None else ffn, output_scale=True, per_layer=per_layer,
            )
            for kind, source in zip(kinds, sources, strict=True)
        ]  # fmt: skip
        return finish(
            fields, self.name, sizes, layers, bos=(2,), eos=(1,), tie=True, final_norm=norm, harmless=_HARMLESS,
            embed_scale=sizes.hidden_size**0.5, logit_soft_cap=read_optional(fields, "final_logit_softcapping"),
        )  # fmt: skip

    def weight_map(self, spec: ModelSpec) -> WeightMap:
        out: dict[str, str | Cut] = dict(super().weight_map(spec))
        for i, layer in enumerate(spec.layers):
            if isinstance(layer.ffn, Experts):
                out |= stacked_rows(f"layers.{i}.experts", f"model.layers.{i}.experts", layer.ffn, spec.hidden_size)
        return out

    def ignores(self, name: str, spec: ModelSpec) -> bool:
        return is_unused(name, spec) or super().ignores(name, spec)


def _refuse(fields: Fields) -> None:
    require(fields, "hidden_activation", _TANH)
    if fields.raw("use_bidirectional_attention") not in (None, "vision"):  # between tokens of one image
        raise UnsupportedError(f"{WHERE}: attention to tokens that come after (use_bidirectional_attention) is missing")


def _mixers(begun: Start, kinds: tuple[str, ...], eps: float) -> dict[str, Attention]:
    fields, sizes, heads = begun
    bias, same = fields.flag("attention_bias"), fields.flag("attention_k_eq_v")
    head_dim = fields.integer("global_head_dim", high=MAX_SIZE, default=512)
    kv_heads = fields.integer("num_global_key_value_heads", high=heads.num_heads, default=heads.num_kv_heads)
    kv_heads = kv_heads if same else heads.num_kv_heads
    given = fields.raw("per_layer_config")  # how transformers writes both down, layer by layer
    if given is not None:
        own = [given.get(str(i), {}) for i, kind in enumerate(kinds) if kind == FULL]
        if not isinstance(given, Mapping) or any(entry != own[0] for entry in own) or len(given) != len(own):
            raise UnsupportedError(f"{WHERE} gives per_layer_config {quoted(given, 60)}: only full layers may differ")
        read = Fields(own[0], WHERE)
        head_dim = read.integer("head_dim", high=MAX_SIZE, default=heads.head_dim)
        kv_heads = read.integer("num_key_value_heads", high=heads.num_heads, default=heads.num_kv_heads)
        read.refuse_unread()
    if heads.num_heads % kv_heads:
        raise ModelError(f"{WHERE}: {kv_heads} global kv heads do not divide {heads.num_heads} heads")
    source = fields if "rope_parameters" in fields else Fields({"rope_parameters": _ROPES}, WHERE)
    more: dict[str, Any] = {
        "qkv_bias": bias, "o_bias": bias, "scale": 1.0, "qk_norm": QkNorm(eps=eps), "v_norm": eps,
    }  # fmt: skip
    full = attention(
        heads._replace(head_dim=head_dim, num_kv_heads=kv_heads), v_from_k=same,
        rope=read_ropes(source, head_dim, sizes.max_position, _THETAS)[FULL], **more,
    )  # fmt: skip
    sliding = attention(
        heads, window=fields.integer("sliding_window", high=MAX_POSITION, default=512),
        rope=read_ropes(source, heads.head_dim, sizes.max_position, _THETAS)[SLIDING], **more,
    )  # fmt: skip
    return {FULL: full, SLIDING: sliding}


def _doubled(ffn: FeedForwardKind) -> FeedForwardKind:
    """Of a layer that has no keys and values to make: the dense feed-forward is twice as wide."""
    if isinstance(ffn, Experts):
        assert ffn.shared is not None
        return msgspec.structs.replace(ffn, shared=msgspec.structs.replace(ffn.shared, width=2 * ffn.shared.width))
    assert isinstance(ffn, FeedForward)
    return msgspec.structs.replace(ffn, width=2 * ffn.width)


def _feed_forward(fields: Fields) -> FeedForwardKind:
    dense = read_ffn(fields, act="hidden_activation", default=_TANH)
    sparse = fields.flag("enable_moe_block")
    if not sparse:
        for name in ("num_experts", "top_k_experts", "moe_intermediate_size"):
            fields.raw(name)  # without the block nothing has them
        return dense
    num_experts = fields.integer("num_experts", high=MAX_EXPERTS)
    return Experts(
        num_experts=num_experts, top_k=fields.integer("top_k_experts", high=num_experts),
        expert=msgspec.structs.replace(dense, width=read_width(fields, "moe_intermediate_size")),
        router=Router(renormalize=True, expert_scale=True), shared=dense, apart=read_norm(fields),
    )  # fmt: skip
