"""Gemma 3n, its text part: residuals of several streams, embeddings for every layer, gates of which a share works, and
last layers that read the keys and values of earlier ones.

Source: Google, Gemma 3n (2025); layout and absent fields as in transformers' Gemma3nTextConfig.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock.base.errors import ModelError
from penstock.core.model_spec import AltUp, FeedForward, Layer, ModelSpec, QkNorm
from penstock.families.fields import Fields
from penstock.families.llama_like import (
    FULL,
    SANDWICH_NORMS,
    SLIDING,
    LlamaNames,
    attention,
    by_kind,
    read_kinds,
    read_norm,
    read_optional,
    read_window,
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
from penstock.families.reading import MAX_SIZE, WHERE, finish, require
from penstock.formats.files import quoted

_TANH = "gelu_pytorch_tanh"
_THETAS = {FULL: ("rope_theta", 1e6), SLIDING: ("rope_local_base_freq", 1e4)}
_MAX_STREAMS = 8
_SPARSE_LAYERS, _SPARSITY = 10, 0.95
"""Of a model of more layers, where nothing is said."""
# What coefficients are cut to while they are learned.
_HARMLESS = ("altup_coef_clip",)


class Gemma3n(LlamaNames):
    """The `ModelFamily` of Gemma3nForCausalLM."""

    name = "gemma3n_text"
    architectures = ("Gemma3nForCausalLM",)
    top = PER_LAYER_TOP | {f"altup_in_{i}": f"model.altup_projections.{i - 1}" for i in range(1, _MAX_STREAMS)} | {
        f"altup_out_{i}": f"model.altup_unembed_projections.{i - 1}" for i in range(1, _MAX_STREAMS)
    }  # fmt: skip
    names = SANDWICH_NORMS | PER_LAYER_NAMES | {
        "altup_norm": "altup.router_norm", "altup_router": "altup.modality_router",
        "altup_predict": "altup.prediction_coefs", "altup_correct": "altup.correction_coefs",
        "altup_scale": "altup.correct_output_scale!", "laurel_in": "laurel.linear_left",
        "laurel_out": "laurel.linear_right", "laurel_norm": "laurel.post_laurel_norm",
    }  # fmt: skip

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields, sizes, heads = start(
            config, max_position_embeddings=32768, num_attention_heads=8, num_key_value_heads=2, head_dim=256,
            sliding_window=512, final_logit_softcapping=30.0, hidden_size_per_layer_input=256,
        )  # fmt: skip
        require(fields, "hidden_activation", _TANH)
        require(fields, "use_bidirectional_attention", False)
        norm, bias = read_norm(fields), fields.flag("attention_bias")
        kinds = read_kinds(fields, sizes.num_layers, lambda i: (i + 1) % 5 != 0)
        mixer = attention(heads, qkv_bias=bias, o_bias=bias, scale=1.0, qk_norm=QkNorm(eps=norm.eps), v_norm=norm.eps)
        ropes = read_ropes(fields, heads.head_dim, sizes.max_position, _THETAS)
        own = by_kind(mixer, kinds, read_window(fields), ropes)
        sources = read_sources(fields, kinds, default=15)
        shared: dict[str, Any] = {
            "norm": norm,
            "placement": "both",
            "per_layer": read_per_layer(fields),
            "altup": _altup(fields),
        }
        laurel = fields.integer("laurel_rank", high=MAX_SIZE, default=64)
        layers = [
            Layer(mixer=msgspec.structs.replace(m, kv_from=source), ffn=ffn, laurel=laurel, **shared)
            for m, source, ffn in zip(own, sources, _feed_forwards(fields, sizes.num_layers), strict=True)
        ]
        return finish(
            fields, self.name, sizes, layers, bos=(2,), eos=(1,), tie=True, final_norm=norm, harmless=_HARMLESS,
            embed_scale=sizes.hidden_size**0.5, logit_soft_cap=read_optional(fields, "final_logit_softcapping"),
        )  # fmt: skip

    def ignores(self, name: str, spec: ModelSpec) -> bool:
        unscaled = name.endswith(".altup.correct_output_scale") and spec.altup is not None and not spec.altup.scale
        return unscaled or is_unused(name, spec) or super().ignores(name, spec)


def _altup(fields: Fields) -> AltUp:
    streams = fields.integer("altup_num_inputs", low=2, high=_MAX_STREAMS, default=4)
    active = fields.integer("altup_active_idx", low=0, high=streams - 1, default=0)
    return AltUp(streams=streams, active=active, scale=fields.flag("altup_correct_scale", default=True))


def _feed_forwards(fields: Fields, num_layers: int) -> list[FeedForward]:
    """One width, or one for each layer; shares of idle gates in the same way."""
    given = fields.raw("intermediate_size")
    widths = fields.integers("intermediate_size", low=1, high=MAX_SIZE) if isinstance(given, list) else None
    if widths is None:
        widths = [fields.integer("intermediate_size", high=MAX_SIZE, default=16384)] * num_layers
    shares = _sparsities(fields.raw("activation_sparsity_pattern"), num_layers)
    if len(widths) != num_layers:
        raise ModelError(f"{WHERE} gives intermediate_size for {len(widths)} layers, but the model has {num_layers}")
    return [
        FeedForward(width=width, activation="gelu_tanh", sparsity=share)
        for width, share in zip(widths, shares, strict=True)
    ]


def _sparsities(given: Any, num_layers: int) -> Sequence[float]:
    if given is None:
        sparse = _SPARSE_LAYERS if num_layers > _SPARSE_LAYERS else 0
        return [_SPARSITY] * sparse + [0.0] * (num_layers - sparse)
    good = isinstance(given, list) and all(
        isinstance(x, int | float) and not isinstance(x, bool) and 0 <= x < 1 for x in given
    )
    if not good or len(given) != num_layers:
        raise ModelError(
            f"{WHERE} gives activation_sparsity_pattern as {quoted(given, 60)}; it must be a number from 0 to below 1 "
            f"for each of the {num_layers} layers"
        )
    return [float(x) for x in given]
