"""LFM2 and its mixture of experts: short convolutions between gates, and attention in some layers. LFM3: norms behind
the halves, too, a gate on every head, and windows in some layers.

Source: Liquid AI, LFM2, arXiv 2511.23404; absent fields as in transformers' Lfm2Config, Lfm2MoeConfig and Lfm3Config.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.core.model_spec import FeedForward, FeedForwardKind, Layer, Mixer, ModelSpec, QkNorm, Router, ShortConv
from penstock.core.weight_map import WeightMap
from penstock.families.fields import Fields
from penstock.families.llama_like import (
    FULL,
    SLIDING,
    LlamaNames,
    attention,
    by_kind,
    read_ffn,
    read_norm,
    read_window,
    start,
)
from penstock.families.mamba import MAX_TAPS
from penstock.families.mixed import with_mixers
from penstock.families.naming import LLAMA_TOP
from penstock.families.positions import read_rope, read_ropes
from penstock.families.reading import MAX_LAYERS, MAX_SIZE, finish, read_layer_types, require
from penstock.families.sparse import read_experts, read_width

_CONV = {"in": "conv.in_proj", "conv": "conv.conv", "o": "conv.out_proj"}
_PARTS = {"gate": "w1", "up": "w3", "down": "w2"}
_NAMES = {
    "attn_norm": "operator_norm", "ffn_norm": "ffn_norm", "o": "self_attn.out_proj",
    "q_norm": "self_attn.q_layernorm", "k_norm": "self_attn.k_layernorm", "router": "feed_forward.gate",
    "router_correction": "feed_forward.expert_bias!",
    **{name: f"feed_forward.{stored}" for name, stored in _PARTS.items()},
    **{f"experts.*.{name}": f"feed_forward.experts.*.{stored}" for name, stored in _PARTS.items()},
}  # fmt: skip
# Sizes of the convolution that say the same again, and how weights were made.
_HARMLESS = (
    "conv_dim", "conv_dim_out", "conv_use_xavier_init", "block_dim", "block_ff_dim", "block_mlp_init_scale",
    "block_norm_eps", "block_out_init_scale", "block_use_swiglu", "block_use_xavier_init", "use_pos_enc", "num_heads",
    "theta", "full_attn_idxs", "tie_embedding",
)  # fmt: skip

_LFM3: dict[str, Any] = {
    "max_position_embeddings": 128000, "num_key_value_heads": 4, "head_dim": 128, "sliding_window": 256,
    "intermediate_size": 7680,
}  # fmt: skip
_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.5},
}


class Lfm2(LlamaNames):
    """The `ModelFamily` of Lfm2ForCausalLM."""

    name = "lfm2"
    architectures = ("Lfm2ForCausalLM",)
    top = LLAMA_TOP | {"final_norm": "model.embedding_norm"}
    names = _NAMES

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields, sizes, heads = start(config, max_position_embeddings=128000, num_key_value_heads=8)
        norm = read_norm(fields, "norm_eps", 1e-5)
        rope = read_rope(fields, heads.head_dim, sizes.max_position, theta=1e6)
        conv = ShortConv(
            width=sizes.hidden_size, conv=fields.integer("conv_L_cache", low=2, high=MAX_TAPS, default=3),
            bias=fields.flag("conv_bias"),
        )  # fmt: skip
        for name in ("conv_dim", "conv_dim_out", "block_dim"):
            require(fields, name, sizes.hidden_size)
        mixers: dict[str, Mixer] = {
            "conv": conv,
            "full_attention": attention(heads, rope=rope, qk_norm=QkNorm(eps=norm.eps)),
        }
        kinds = _kinds(fields, sizes.num_layers)
        feed_forwards = self._feed_forwards(fields, sizes.num_layers)
        layers = [Layer(mixer=mixers[kind], ffn=ffn, norm=norm) for kind, ffn in zip(kinds, feed_forwards, strict=True)]
        return finish(
            fields, self.name, sizes, layers, bos=(1,), eos=(2,), tie=fields.flag("tie_embedding", default=True),
            final_norm=norm, harmless=_HARMLESS,
        )  # fmt: skip

    def _feed_forwards(self, fields: Fields, num_layers: int) -> list[FeedForwardKind]:
        width = fields.integer("block_ff_dim", high=MAX_SIZE, default=0) if "block_ff_dim" in fields else 0
        width = width or read_width(fields, "intermediate_size", 12288)
        fields.raw("intermediate_size")
        by, unit = fields.number("block_ffn_dim_multiplier", default=1.0), read_width(fields, "block_multiple_of", 256)
        if fields.flag("block_auto_adjust_ff_dim", default=True):
            width = int(2 * width / 3)
            if "block_ffn_dim_multiplier" in fields or fields.raw("block_ffn_dim_multiplier") is None:
                width = -(-int(by * width) // unit) * unit
        return [FeedForward(width=width)] * num_layers

    def weight_map(self, spec: ModelSpec) -> WeightMap:
        return with_mixers(spec, super().weight_map(spec), _CONV)


class Lfm2Moe(Lfm2):
    """The `ModelFamily` of Lfm2MoeForCausalLM: experts by sigmoid scores, corrected for the choice."""

    name = "lfm2_moe"
    architectures = ("Lfm2MoeForCausalLM",)

    def _feed_forwards(self, fields: Fields, num_layers: int) -> list[FeedForwardKind]:
        dense = FeedForward(width=read_width(fields, "intermediate_size", 7168))
        router = Router(
            score="sigmoid", renormalize=fields.flag("norm_topk_prob", default=True),
            correction=fields.flag("use_expert_bias", default=True),
            scale=fields.number("routed_scaling_factor", default=1.0),
        )  # fmt: skip
        expert = FeedForward(width=read_width(fields, "moe_intermediate_size", 1792))
        ffn = read_experts(fields, expert, router, default_top_k=4)
        num_dense = fields.integer("num_dense_layers", low=0, high=MAX_LAYERS, default=2)
        return [dense if i < num_dense else ffn for i in range(num_layers)]


class Lfm3(LlamaNames):
    """The `ModelFamily` of Lfm3ForCausalLM."""

    name = "lfm3"
    architectures = ("Lfm3ForCausalLM",)
    top = Lfm2.top
    names: Mapping[str, str] = {
        **{name: stored for name, stored in _NAMES.items() if name not in ("o", "q_norm", "k_norm")},
        "attn_post_norm": "post_operator_norm", "ffn_post_norm": "post_ffn_norm", "o_gate": "self_attn.gate_proj",
    }  # fmt: skip

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        rope = {} if config.get("rope_parameters") else {"rope_parameters": _ROPES}
        fields, sizes, heads = start({**config, **rope}, **_LFM3)
        norm, bias = read_norm(fields, "norm_eps", 1e-5), fields.flag("attention_bias")
        conv = ShortConv(
            width=sizes.hidden_size, conv=fields.integer("conv_L_cache", low=2, high=MAX_TAPS, default=7),
            bias=fields.flag("conv_bias"),
        )  # fmt: skip
        kinds = read_layer_types(fields, sizes.num_layers, ("conv", FULL, SLIDING)) or tuple(
            FULL if i % 4 == 2 else SLIDING if i % 4 == 0 and i > 0 else "conv" for i in range(sizes.num_layers)
        )
        thetas = {FULL: ("rope_theta", 1e6), SLIDING: ("rope_local_base_freq", 1e4)}
        ropes = read_ropes(fields, heads.head_dim, sizes.max_position, thetas)
        mixer = attention(
            heads, qk_norm=QkNorm(eps=norm.eps), qkv_bias=bias, o_bias=bias,
            head_gate=fields.flag("use_attention_gate", default=True),
        )  # fmt: skip
        attending = tuple(kind for kind in kinds if kind != "conv")
        found = iter(by_kind(mixer, attending, read_window(fields), ropes))
        mixers: list[Mixer] = [conv if kind == "conv" else next(found) for kind in kinds]
        placement: Any = "both" if fields.flag("use_sandwich_norm", default=True) else "pre"
        ffn = read_ffn(fields)
        layers = [Layer(mixer=m, ffn=ffn, norm=norm, placement=placement) for m in mixers]
        return finish(fields, self.name, sizes, layers, bos=(124894,), eos=(124900,), tie=True, final_norm=norm)

    def weight_map(self, spec: ModelSpec) -> WeightMap:
        return with_mixers(spec, super().weight_map(spec), _CONV)


def _kinds(fields: Fields, num_layers: int) -> tuple[str, ...]:
    kinds = read_layer_types(fields, num_layers, ("conv", "full_attention"))
    if kinds is not None:
        return kinds
    attends = fields.integers("full_attn_idxs", low=0, high=MAX_LAYERS)
    return tuple("full_attention" if attends is None or i in attends else "conv" for i in range(num_layers))
