"""Granite with windows and sinks, dense and with experts: every layer may have a theta of its own, or no positions.

Source: IBM, Granite SWASH (2026); absent fields as in transformers' GraniteSWAConfig and GraniteMoeSWAConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.base.errors import ModelError
from penstock.core.model_spec import Attention, Experts, FeedForwardKind, Layer, ModelSpec
from penstock.core.weight_map import WeightMap
from penstock.families.fields import Fields
from penstock.families.granite_moe import GraniteMoeShared, granite_experts, granite_scales, granite_stacks
from penstock.families.llama_like import LlamaNames, attention, by_kind, read_ffn, read_kinds, read_norm, start
from penstock.families.positions import read_rope
from penstock.families.reading import MAX_POSITION, MAX_SIZE, WHERE, Heads, Sizes, finish
from penstock.families.sparse import stacked_rows

_SINKS: Mapping[str, str] = {"sinks": "self_attn.sinks!"}


class GraniteSwa(LlamaNames):
    """The `ModelFamily` of GraniteSWAForCausalLM."""

    name = "granite_swa"
    architectures = ("GraniteSWAForCausalLM",)
    names = _SINKS
    _defaults: Mapping[str, Any] = {
        "max_position_embeddings": 8192, "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    }  # fmt: skip
    _ids = 100257, 100257

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields, sizes, heads = start(config, **self._defaults)
        norm, ffn = read_norm(fields), self._feed_forward(fields)
        by = fields.number("residual_multiplier", default=1.0)
        layers = [Layer(mixer=m, ffn=ffn, norm=norm, residual_scale=by) for m in _mixers(fields, heads, sizes)]
        bos, eos = self._ids
        return finish(
            fields, self.name, sizes, layers, bos=(bos,), eos=(eos,), final_norm=norm, **granite_scales(fields)
        )  # fmt: skip

    def _feed_forward(self, fields: Fields) -> FeedForwardKind:
        return read_ffn(fields, bias=fields.flag("mlp_bias"))


class GraniteMoeSwa(GraniteSwa):
    """The `ModelFamily` of GraniteMoeSWAForCausalLM."""

    name = "granitemoe_swa"
    architectures = ("GraniteMoeSWAForCausalLM",)
    names: Mapping[str, str] = {**GraniteMoeShared.names, **_SINKS, "router": "block_sparse_moe.router"}
    _defaults: Mapping[str, Any] = {"max_position_embeddings": 2048}
    _ids = 1, 2

    def _feed_forward(self, fields: Fields) -> FeedForwardKind:
        return granite_experts(fields, fields.integer("shared_intermediate_size", low=0, high=MAX_SIZE, default=0))

    def weight_map(self, spec: ModelSpec) -> WeightMap:
        out = {**super().weight_map(spec), **granite_stacks(spec)}
        for i, layer in enumerate(spec.layers):
            if isinstance(layer.ffn, Experts):
                stored = f"{self.prefix}.{i}.block_sparse_moe.experts"
                out |= stacked_rows(f"layers.{i}.experts", stored, layer.ffn, spec.hidden_size)
        return out


def _mixers(fields: Fields, heads: Heads, sizes: Sizes) -> list[Attention]:
    kinds = read_kinds(fields, sizes.num_layers, lambda i: i % 4 != 0)
    bias = fields.flag("attention_bias")
    rope = read_rope(fields, heads.head_dim, sizes.max_position)
    mixer = attention(
        heads, rope=rope, qkv_bias=bias, o_bias=bias, sinks=True,
        scale=fields.number("attention_multiplier", default=1.0),
    )  # fmt: skip
    mixers = by_kind(mixer, kinds, fields.integer("sliding_window", high=MAX_POSITION, default=128))
    thetas = fields.raw("layer_rope_theta")
    if thetas is None:
        return list(mixers)
    if not isinstance(thetas, list) or len(thetas) != sizes.num_layers or not all(map(_is_theta, thetas)):
        raise ModelError(f"{WHERE} must give layer_rope_theta as {sizes.num_layers} numbers, 0 for no positions")
    own = {t: None if t == 0 else msgspec.structs.replace(rope, theta=float(t)) for t in thetas}
    return [msgspec.structs.replace(m, rope=own[t]) for m, t in zip(mixers, thetas, strict=True)]


def _is_theta(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e30
