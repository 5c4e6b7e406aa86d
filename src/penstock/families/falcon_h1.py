"""Falcon-H1: in every layer Mamba-2 and attention side by side, then a feed-forward; multipliers on all ways.

A stored layer becomes three: Mamba-2, attention beside it, the feed-forward. So each half has its multiplier, and each
mixer its cache. Source: Zuo et al., arXiv 2507.22448, section 2; absent fields as in transformers' FalconH1Config.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.base.errors import ModelError
from penstock.core.model_spec import Layer, ModelSpec, layer_shapes
from penstock.core.weight_map import Cut, WeightMap
from penstock.families.fields import Fields
from penstock.families.llama_like import LlamaNames, attention, read_ffn, read_norm, start
from penstock.families.mixed import MAMBA2_LAYER, MIXED_HARMLESS, read_expanded, read_mamba2
from penstock.families.naming import LLAMA_LAYER, LLAMA_TOP, named
from penstock.families.positions import read_rope
from penstock.families.reading import MAX_SIZE, WHERE, finish, require

_TOP = LLAMA_TOP | {"final_norm": "model.final_layernorm"}
_FEED_FORWARD = {
    "ffn_norm": "pre_ff_layernorm", "gate": "feed_forward.gate_proj", "up": "feed_forward.up_proj",
    "down": "feed_forward.down_proj",
}  # fmt: skip
_PARTS = (MAMBA2_LAYER | {"attn_norm": "input_layernorm"}, LLAMA_LAYER, _FEED_FORWARD)
"""Names of the weights of the three layers that a stored one is."""


class FalconH1(LlamaNames):
    """The `ModelFamily` of FalconH1ForCausalLM."""

    name = "falcon_h1"
    architectures = ("FalconH1ForCausalLM",)

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields, sizes, heads = start(config, max_position_embeddings=8192, num_key_value_heads=8)
        norm, bias = read_norm(fields, default=1e-5), fields.flag("attention_bias")
        inner = read_expanded(fields, sizes.hidden_size)
        if "mamba_d_ssm" in fields or "mamba_d_ssm" not in config:
            inner = fields.integer("mamba_d_ssm", high=MAX_SIZE, default=1024)
        order = "before" if fields.flag("mamba_norm_before_gate", default=True) else "gated"
        mamba = read_mamba2(
            fields, inner, norm.eps, norm=order if fields.flag("mamba_rms_norm") else "none",
            scales=_numbers(fields, "ssm_multipliers", 5),
        )  # fmt: skip
        require(fields, "projectors_bias", mamba.proj_bias)
        keys = fields.number("key_multiplier", default=1.0)
        full = attention(
            heads, rope=read_rope(fields, heads.head_dim, sizes.max_position), qkv_bias=bias, o_bias=bias,
            scale=keys * heads.head_dim**-0.5,
        )  # fmt: skip
        gate, down = _numbers(fields, "mlp_multipliers", 2)
        ffn = msgspec.structs.replace(read_ffn(fields, bias=fields.flag("mlp_bias")), gate_scale=gate)
        both = {
            name: fields.number(f"{name}_multiplier", default=1.0)
            for name in ("ssm_in", "ssm_out", "attention_in", "attention_out")
        }
        layers = (
            Layer(mixer=mamba, ffn=None, norm=norm, mixer_scale=both["ssm_in"], residual_scale=both["ssm_out"]),
            Layer(
                mixer=full, ffn=None, norm=norm, mixer_scale=both["attention_in"],
                residual_scale=both["attention_out"], beside=True,
            ),
            Layer(mixer=None, ffn=ffn, norm=norm, residual_scale=down),
        )  # fmt: skip
        return finish(
            fields, self.name, sizes, layers * sizes.num_layers, bos=(1,), eos=(2,), final_norm=norm,
            embed_scale=fields.number("embedding_multiplier", default=1.0),
            logit_scale=fields.number("lm_head_multiplier", default=1.0),
            harmless=MIXED_HARMLESS | {"attn_layer_indices", "mamba_use_mlp", "mlp_expansion_factor",
                                       "layers_block_type", "layer_types", "mamba_expand"},
        )  # fmt: skip

    def weight_map(self, spec: ModelSpec) -> WeightMap:
        out = named(spec, _TOP, {})
        for i, layer in enumerate(spec.layers):
            for name, shape in layer_shapes(layer, spec.hidden_size).items():
                base, bias, _ = name.partition(".bias")
                module = f"model.layers.{i // 3}.{_PARTS[i % 3][base]}"
                stored = module[:-1] if module.endswith("!") else module + (bias or ".weight")
                out[f"layers.{i}.{name}"] = Cut(stored, (shape[0], 1, shape[1])) if name == "conv" else stored
        return out


def _numbers(fields: Fields, name: str, count: int) -> tuple[float, ...]:
    """Multipliers, all 1 if absent."""
    if name not in fields:
        return (1.0,) * count
    values = fields.numbers(name)
    if len(values) != count:
        raise ModelError(f"{WHERE} gives {len(values)} {name}; it must give {count}")
    return tuple(values)
