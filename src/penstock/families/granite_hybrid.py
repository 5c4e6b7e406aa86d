"""Granite 4 and Bamba: Mamba-2 in most layers, attention in some.

Source: IBM, Granite 4.0 (2025) and Bamba-9B (2024); absent fields as in transformers' GraniteMoeHybridConfig and
BambaConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.base.errors import UnsupportedError
from penstock.core.model_spec import FeedForward, Layer, Mixer, ModelSpec
from penstock.core.weight_map import WeightMap
from penstock.families.fields import Fields
from penstock.families.granite_moe import GraniteMoeShared, granite_experts, granite_scales, granite_stacks
from penstock.families.llama_like import LlamaNames, attention, read_ffn, read_norm, start
from penstock.families.mixed import MAMBA2_LAYER, MIXED_HARMLESS, known_kinds, read_expanded, read_mamba2, with_mixers
from penstock.families.naming import LLAMA_TOP, fused_rows
from penstock.families.positions import read_rope
from penstock.families.reading import MAX_EXPERTS, MAX_LAYERS, MAX_SIZE, WHERE, finish, read_activation
from penstock.formats.files import quoted


class GraniteHybrid(LlamaNames):
    """The `ModelFamily` of GraniteMoeHybridForCausalLM. Attention mostly has no positions; experts may be missing."""

    name = "granitemoehybrid"
    architectures = ("GraniteMoeHybridForCausalLM",)
    names = GraniteMoeShared.names

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields, sizes, heads = start(config, max_position_embeddings=2048)
        norm, bias = read_norm(fields), fields.flag("attention_bias")
        positions = fields.string("position_embedding_type", default="nope")
        if positions not in ("nope", "rope"):
            raise UnsupportedError(f"{WHERE} gives position_embedding_type {quoted(positions)}; known: nope, rope")
        rope = read_rope(fields, heads.head_dim, sizes.max_position)
        mixers: dict[str, Mixer] = {
            "full_attention": attention(
                heads, rope=rope if positions == "rope" else None, qkv_bias=bias, o_bias=bias,
                scale=fields.number("attention_multiplier", default=1.0),
            ),
            "linear_attention": read_mamba2(fields, read_expanded(fields, sizes.hidden_size), norm.eps),
        }  # fmt: skip
        names = fields.strings("layer_types") or fields.strings("layers_block_type") or ["mamba"] * sizes.num_layers
        fields.strings("layers_block_type")
        ffn = self._feed_forward(fields)
        scale = fields.number("residual_multiplier", default=1.0)
        layers = [
            Layer(mixer=mixers[kind], ffn=ffn, norm=norm, residual_scale=scale)
            for kind in known_kinds(names, sizes.num_layers)
        ]
        return finish(
            fields, self.name, sizes, layers, bos=(1,), eos=(2,), final_norm=norm, **granite_scales(fields),
            # How released files name what is computed, and sizes of experts where there are none.
            harmless=MIXED_HARMLESS | {"normalization_function", "init_method", "intermediate_size",
                                       "num_experts_per_tok", "embedding_multiplier", "shared_intermediate_size"},
        )  # fmt: skip

    def _feed_forward(self, fields: Fields) -> Any:
        width = fields.integer("shared_intermediate_size", high=MAX_SIZE, default=1024)
        if not fields.integer("num_local_experts", low=0, high=MAX_EXPERTS, default=8):
            return FeedForward(width=width, activation=read_activation(fields))
        return granite_experts(fields, width)

    def weight_map(self, spec: ModelSpec) -> WeightMap:
        out = with_mixers(spec, super().weight_map(spec), MAMBA2_LAYER) | granite_stacks(spec)
        for i, layer in enumerate(spec.layers):
            if isinstance(layer.ffn, FeedForward):
                stored, width = f"model.layers.{i}.shared_mlp", layer.ffn.width
                out |= fused_rows(spec, i, f"{stored}.input_linear", {"gate": width, "up": width}, spec.hidden_size)
                out[f"layers.{i}.down"] = f"{stored}.output_linear.weight"
        return out


class Bamba(LlamaNames):
    """The `ModelFamily` of BambaForCausalLM: attention rotates half of each head."""

    name = "bamba"
    architectures = ("BambaForCausalLM",)
    top = LLAMA_TOP | {"final_norm": "model.final_layernorm"}
    names: Mapping[str, str] = {
        "ffn_norm": "pre_ff_layernorm", "gate": "feed_forward.gate_proj", "up": "feed_forward.up_proj",
        "down": "feed_forward.down_proj",
    }  # fmt: skip

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields, sizes, heads = start(config, max_position_embeddings=262144, num_key_value_heads=8)
        norm, bias = read_norm(fields, default=1e-5), fields.flag("attention_bias")
        rope = read_rope(fields, heads.head_dim, sizes.max_position, partial=0.5)
        mamba = read_mamba2(fields, read_expanded(fields, sizes.hidden_size), norm.eps)
        full = attention(heads, rope=rope, qkv_bias=bias, o_bias=bias)
        attends = fields.integers("attn_layer_indices", low=0, high=MAX_LAYERS) or []
        ffn = read_ffn(fields, bias=fields.flag("mlp_bias"))
        layers = [Layer(mixer=full if i in attends else mamba, ffn=ffn, norm=norm) for i in range(sizes.num_layers)]
        return finish(
            fields, self.name, sizes, layers, bos=(1,), eos=(2,), final_norm=norm,
            harmless=MIXED_HARMLESS | {"z_loss_coefficient", "attn_rotary_emb", "layers_block_type", "layer_types"},
        )  # fmt: skip

    def weight_map(self, spec: ModelSpec) -> WeightMap:
        return with_mixers(spec, super().weight_map(spec), MAMBA2_LAYER)
