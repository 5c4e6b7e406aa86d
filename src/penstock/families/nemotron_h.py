"""Nemotron-H and Nemotron 3: Mamba-2, a few attention layers without positions, plain MLPs or experts.

Source: NVIDIA, arXiv 2504.03624 (Nemotron-H); defaults of absent fields as in transformers' NemotronHConfig.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from penstock.base.errors import ModelError, UnsupportedError
from penstock.core.model_spec import (
    Attention,
    Experts,
    FeedForward,
    FeedForwardKind,
    Layer,
    Mamba2,
    Mixer,
    ModelSpec,
    Norm,
    layer_shapes,
)  # fmt: skip
from penstock.core.weight_map import Cut, WeightMap
from penstock.families import mamba
from penstock.families.fields import Fields
from penstock.families.mamba2 import read_groups, read_time_step_limit
from penstock.families.naming import named
from penstock.families.reading import (
    MAX_LAYERS,
    MAX_POSITION,
    MAX_SIZE,
    WHERE,
    Sizes,
    finish,
    read_activation,
    read_heads,
    require,
)  # fmt: skip
from penstock.families.sparse import grouped_router, read_experts, read_width
from penstock.formats.files import quoted

_LETTERS = {
    "linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*", "mlp": "-", "moe": "E",
}  # fmt: skip
# The state space's width follows from its heads, not from `expand`. Its state is float32 here whatever the config says.
# Attention has no positions, whatever the rope fields say. Layers that predict further tokens are not run.
_HARMLESS = mamba.HARMLESS | {
    "expand", "time_step_rank", "mamba_ssm_cache_dtype", "num_logits_to_keep", "rope_theta", "partial_rotary_factor",
    "moe_shared_expert_overlap", "num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern",
}  # fmt: skip
_EXPERT_FIELDS = frozenset({
    "n_routed_experts", "num_experts_per_tok", "n_shared_experts", "moe_intermediate_size", "n_group", "topk_group",
    "moe_shared_expert_intermediate_size", "norm_topk_prob", "routed_scaling_factor", "moe_latent_size",
})  # fmt: skip

_MAMBA = {**mamba.LAYER, "dt": "mixer.dt_bias!", "gate_norm": "mixer.norm"}
_ATTENTION = {"attn_norm": "norm", **{name: f"mixer.{name}_proj" for name in "qkvo"}}
_FEED_FORWARD = {
    "ffn_norm": "norm", "up": "mixer.up_proj", "down": "mixer.down_proj", "router": "mixer.gate",
    "router_correction": "mixer.gate.e_score_correction_bias!", "experts_in": "mixer.fc1_latent_proj",
    "experts_out": "mixer.fc2_latent_proj", "experts.*.up": "mixer.experts.*.up_proj",
    "experts.*.down": "mixer.experts.*.down_proj", "shared.up": "mixer.shared_experts.up_proj",
    "shared.down": "mixer.shared_experts.down_proj",
}  # fmt: skip


class NemotronH:
    """The `ModelFamily` of NemotronHForCausalLM."""

    name = "nemotron_h"
    architectures = ("NemotronHForCausalLM",)

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields = Fields(config, WHERE)
        pattern = _pattern(fields)
        hidden_size = fields.integer("hidden_size", high=MAX_SIZE)
        norm = Norm(eps=fields.number("layer_norm_epsilon", default=1e-5))
        for name in ("norm_eps", "rms_norm_eps"):
            require(fields, name, norm.eps)
        mixers: dict[str, Mixer] = {"M": _mamba(fields, norm.eps), "*": _attention(fields, hidden_size)}
        feed_forwards: dict[str, FeedForwardKind] = {"-": _dense(fields, "intermediate_size", 21504)}
        if "E" in pattern:
            feed_forwards["E"] = _experts(fields)
        layers: list[Layer] = []
        for letter in pattern:
            if letter in mixers:
                layers.append(Layer(mixer=mixers[letter], ffn=None, norm=norm))
            elif layers and layers[-1].ffn is None:
                layers[-1] = msgspec.structs.replace(layers[-1], ffn=feed_forwards[letter])
            else:
                layers.append(Layer(mixer=None, ffn=feed_forwards[letter], norm=norm))
        sizes = Sizes(
            vocab_size=fields.integer("vocab_size", high=MAX_SIZE),
            hidden_size=hidden_size,
            num_layers=len(layers),
            max_position=fields.integer("max_position_embeddings", high=MAX_POSITION, default=4096),
        )
        harmless = _HARMLESS if "E" in pattern else _HARMLESS | _EXPERT_FIELDS
        return finish(fields, self.name, sizes, layers, harmless=harmless, bos=(1,), eos=(2,), final_norm=norm)

    def weight_map(self, spec: ModelSpec) -> WeightMap:
        out = named(spec, mamba.TOP, {})
        out.update(_blocks(spec))
        return out

    def ignores(self, name: str, spec: ModelSpec) -> bool:
        return name.startswith("mtp.") or (spec.tie_embeddings and name == "lm_head.weight")


def _pattern(fields: Fields) -> str:
    """A letter per block: M Mamba-2, * attention, - MLP, E experts."""
    kinds = fields.strings("layers_block_type") or fields.strings("layer_types")
    letters = fields.string("hybrid_override_pattern", default="")
    blocks = list(letters) if kinds is None else [_LETTERS.get(kind, kind) for kind in kinds]
    if letters and blocks != list(letters):
        raise ModelError(f"{WHERE} gives its layers twice, and hybrid_override_pattern differs")
    if unknown := set(blocks) - set(_LETTERS.values()):
        raise UnsupportedError(f"{WHERE} has layers of the kind {quoted(min(unknown))}; known ones: M, *, -, E")
    count = fields.integer("num_hidden_layers", high=MAX_LAYERS, default=max(1, len(blocks)))
    if count != len(blocks):
        raise ModelError(f"{WHERE} gives num_hidden_layers as {count}, but names the kinds of {len(blocks)} layers")
    return "".join(blocks)


def _mamba(fields: Fields, eps: float) -> Mamba2:
    require(fields, "mamba_hidden_act", "silu")
    heads = fields.integer("mamba_num_heads", high=MAX_SIZE, default=128)
    low, high = read_time_step_limit(fields)
    return Mamba2(
        num_heads=heads,
        head_dim=fields.integer("mamba_head_dim", high=MAX_SIZE, default=64),
        state=fields.integer("ssm_state_size", high=MAX_SIZE, default=128),
        groups=read_groups(fields, heads),
        conv=fields.integer("conv_kernel", low=2, high=mamba.MAX_TAPS, default=4),
        eps=eps,
        dt_min=low,
        dt_max=high,
        conv_bias=fields.flag("use_conv_bias", default=True),
        proj_bias=fields.flag("use_bias"),
    )


def _attention(fields: Fields, hidden_size: int) -> Attention:
    require(fields, "attention_bias", False)
    name = "attention_head_dim" if "attention_head_dim" in fields else "head_dim"
    head_dim = fields.integer(name, high=MAX_SIZE, default=128)
    require(fields, "head_dim", head_dim)
    heads = read_heads(fields, hidden_size, head_dim=name, rotary=False)
    return Attention(num_heads=heads.num_heads, num_kv_heads=heads.num_kv_heads, head_dim=head_dim, rope=None)


def _dense(fields: Fields, width: str, default: int) -> FeedForward:
    return FeedForward(
        width=read_width(fields, width, default),
        activation=read_activation(fields, "mlp_hidden_act", "relu2"),
        gated=False,
        bias=fields.flag("mlp_bias"),
    )


def _experts(fields: Fields) -> Experts:
    require(fields, "n_shared_experts", 1)
    expert = msgspec.structs.replace(_dense(fields, "moe_intermediate_size", 7688), bias=False)
    shared = _dense(fields, "moe_shared_expert_intermediate_size", 7688)
    latent = fields.integer("moe_latent_size", high=MAX_SIZE) if "moe_latent_size" in fields else None
    if latent is not None:
        require(fields, "mlp_bias", False)  # the products around the experts would have biases of their own
    found = read_experts(
        fields, expert, grouped_router(fields), number=("n_routed_experts",), default_top_k=2, shared=shared
    )
    return msgspec.structs.replace(found, latent=latent)


def _blocks(spec: ModelSpec) -> Iterator[tuple[str, str | Cut]]:
    """Names of the layers' weights. A stored block is half a layer: a mixer or a feed-forward."""
    block = 0
    for i, layer in enumerate(spec.layers):
        mixer = _MAMBA if isinstance(layer.mixer, Mamba2) else _ATTENTION
        second = block + (layer.mixer is not None)
        for name, shape in layer_shapes(layer, spec.hidden_size).items():
            base, bias, _ = name.partition(".bias")
            parts = base.split(".")
            if parts[0] == "experts":
                base = f"experts.*.{parts[2]}"
            at, module = (second, _FEED_FORWARD[base]) if base in _FEED_FORWARD else (block, mixer[base])
            stored = f"backbone.layers.{at}.{module.replace('*', parts[1] if len(parts) > 1 else '')}"
            stored = stored[:-1] if stored.endswith("!") else stored + (bias or ".weight")
            yield f"layers.{i}.{name}", Cut(stored, (shape[0], 1, shape[1])) if name == "conv" else stored
        block = second + (layer.ffn is not None)
