"""Step-3.7-Flash, its text part: windows beside full attention, a gate on every head, experts with a shared one.

Norms keep their weights minus one. Layers that predict further tokens, behind the others, are not run, and images are
not read. Source: Step-3.7-Flash's model card; absent fields as in transformers' Step3p7TextConfig, published ones by
its makers' names (`moe_num_experts`, `moe_layers_enum`, `attention_other_setting`, lists with an entry per layer).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.base.errors import ModelError, UnsupportedError
from penstock.core.model_spec import Attention, Experts, FeedForward, Layer, ModelSpec, QkNorm, Router
from penstock.core.weight_map import Cut, WeightMap
from penstock.families.fields import Fields
from penstock.families.llama_like import FULL, SLIDING, LlamaNames, attention, read_norm, read_window, start
from penstock.families.mixtral import beyond
from penstock.families.positions import read_rope
from penstock.families.reading import MAX_LAYERS, MAX_SIZE, WHERE, Sizes, finish, read_activation, require
from penstock.families.sparse import read_experts, read_width

_ALIASES = {
    "num_attention_groups": "num_key_value_heads", "moe_num_experts": "num_experts",
    "n_routed_experts": "num_experts", "num_local_experts": "num_experts", "moe_top_k": "num_experts_per_tok",
    "share_expert_dims": "share_expert_dim",
}  # fmt: skip
_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 128000, "num_experts": 288,
}  # fmt: skip
_OUTSIDE = ("text_config", "vision_config", "image_token_id", "projector_bias", "understand_projector_stride")
# What is about the layers that are not run, and what is derived from other fields.
_HARMLESS = (
    "num_nextn_predict_layers", "num_mtp_layers", "mtp_layer_types", "mtp_mlp_layer_types", "per_layer_config",
    "n_shared_experts", "gating",
)  # fmt: skip
_NAMES = {
    "o_gate": "self_attn.g_proj", "router": "moe.gate", "router_correction": "moe.router_bias!",
    "shared.gate": "share_expert.gate_proj", "shared.up": "share_expert.up_proj",
    "shared.down": "share_expert.down_proj",
}  # fmt: skip


class Step37(LlamaNames):
    """The `ModelFamily` of Step3p7FlashForCausalLM and Step3p7ForConditionalGeneration."""

    name = "step3p7"
    architectures = ("Step3p7FlashForCausalLM", "Step3p7ForConditionalGeneration")
    names = _NAMES

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields, sizes, heads = start(_text(config), **_DEFAULTS)
        norm, bias = read_norm(fields, default=1e-5, offset=1.0), fields.flag("attention_bias")
        num_layers = sizes.num_layers
        for name, value in (
            ("mlp_bias", False), ("use_bidirectional_attention", False), ("scoring_func", "sigmoid"),
            ("norm_topk_prob", True), ("use_moe_router_bias", True), ("use_head_wise_attn_gate", True),
            ("use_qk_norm", True),
        ):  # fmt: skip
            require(fields, name, value)
        scale = fields.number("query_pre_attn_scalar", default=float(heads.head_dim)) ** -0.5
        full = attention(
            heads, scale=scale, qkv_bias=bias, o_bias=bias, head_gate=True, qk_norm=QkNorm(eps=norm.eps, offset=1.0)
        )
        kinds = _list(fields, "layer_types", num_layers) or [FULL] * num_layers
        if unknown := set(kinds) - {FULL, SLIDING}:
            raise UnsupportedError(f"{WHERE} has layers of the kind {min(unknown)}; this family has {FULL}, {SLIDING}")
        mixers = {FULL: full, SLIDING: _sliding(fields, full, slides=SLIDING in kinds)}
        ropes = _ropes(fields, kinds, heads.head_dim, sizes)
        mixers = {kind: msgspec.structs.replace(mixers[kind], rope=rope) for kind, rope in ropes.items()}
        ffns = _feed_forwards(fields, num_layers)
        layers = [Layer(mixer=mixers[k], ffn=ffn, norm=norm) for k, ffn in zip(kinds, ffns, strict=True)]
        return finish(fields, self.name, sizes, layers, final_norm=norm, harmless=_HARMLESS)

    def weight_map(self, spec: ModelSpec) -> WeightMap:
        out = dict(super().weight_map(spec))
        for i, layer in enumerate(spec.layers):
            if isinstance(layer.ffn, Experts):
                out |= _stacks(i, layer.ffn, spec.hidden_size)
        return out

    def ignores(self, name: str, spec: ModelSpec) -> bool:
        sees = name.startswith(("vision_model.", "vit_large_projector."))
        return sees or super().ignores(name, spec) or beyond(name, spec)


def _text(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields about the text, by one name each."""
    inner = config.get("text_config")
    text = {**config, **inner} if isinstance(inner, Mapping) else dict(config)
    out: dict[str, Any] = {}
    for name, value in text.items():
        if name in _OUTSIDE or value is None:
            continue
        known = _ALIASES.get(name, name)
        if out.setdefault(known, value) != value:
            raise ModelError(f"{WHERE} gives {known} twice, as {out[known]} and, under {name}, as {value}")
    return out


def _list(fields: Fields, name: str, num_layers: int) -> list[Any] | None:
    """A list with an entry per layer; those of layers that are not run may follow."""
    value = fields.raw(name)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) < num_layers:
        raise ModelError(f"{WHERE} does not give {name} for each of the {num_layers} layers")
    return value[:num_layers]


def _sliding(fields: Fields, full: Attention, *, slides: bool) -> Attention:
    window = read_window(fields)
    if slides and window is None:
        raise ModelError(f"{WHERE} has layers of the kind {SLIDING}, but no sliding_window")
    other = fields.section("attention_other_setting") or Fields({}, WHERE)
    default = fields.integer("num_sliding_attention_heads", high=MAX_SIZE, default=full.num_heads)
    num_heads = other.integer("num_attention_heads", high=MAX_SIZE, default=default)
    require(other, "attention_type", SLIDING)
    for name, value in (("num_attention_groups", full.num_kv_heads), ("head_dim", full.head_dim)):
        require(other, name, value)
    other.refuse_unread(("true_head_dim",))
    return msgspec.structs.replace(full, window=window, num_heads=num_heads)


def _ropes(fields: Fields, kinds: list[str], head_dim: int, sizes: Sizes) -> dict[str, Any]:
    """Kind -> rope. Published files give theta and the rotated part of every layer, by kind in truth; and scaling,
    which is about full attention."""
    if "rope_parameters" in fields:
        return {
            kind: read_rope(fields, head_dim, sizes.max_position, partial=1.0, layer_kind=kind) for kind in set(kinds)
        }
    theta, parts, scaling = fields.raw("rope_theta"), fields.raw("partial_rotary_factors"), fields.raw("rope_scaling")
    thetas = [10000.0 if theta is None else theta] * len(kinds) if not isinstance(theta, list) else theta
    fields.strings("yarn_only_types")  # says which kind the scaling is about
    out = {}
    for kind in set(kinds):
        i = kinds.index(kind)
        own = dict(scaling or {}) if kind == FULL else {}
        own |= {"rope_theta": thetas[i]} | ({"partial_rotary_factor": parts[i]} if parts else {})
        out[kind] = read_rope(Fields({"rope_parameters": own}, WHERE), head_dim, sizes.max_position, partial=1.0)
    return out


def _feed_forwards(fields: Fields, num_layers: int) -> list[FeedForward | Experts]:
    activation = read_activation(fields)
    dense = FeedForward(width=read_width(fields, "intermediate_size", 11264), activation=activation)
    shared = FeedForward(width=read_width(fields, "share_expert_dim", 1280), activation=activation)
    router = Router(
        score="sigmoid",
        renormalize=True,
        correction=True,
        scale=fields.number("moe_router_scaling_factor", default=1.0),
    )
    expert = FeedForward(width=read_width(fields, "moe_intermediate_size", 1280), activation=activation)
    ffn = read_experts(fields, expert, router, default_top_k=8, shared=shared)
    cuts, shared_cuts = (_list(fields, n, num_layers) for n in ("swiglu_limits", "swiglu_limits_shared"))
    out: list[FeedForward | Experts] = []
    for i, sparse in enumerate(_sparse(fields, num_layers)):
        cut, beside = ((own[i] or None) if own else None for own in (cuts, shared_cuts))
        if sparse:
            cut_ffn = msgspec.structs.replace(
                ffn,
                expert=msgspec.structs.replace(expert, limit=cut),
                shared=msgspec.structs.replace(shared, limit=beside),
            )
            out.append(cut_ffn)
        else:
            out.append(msgspec.structs.replace(dense, limit=beside))
    return out


def _sparse(fields: Fields, num_layers: int) -> list[bool]:
    """Which layers have experts: named by kind or by number, or all from the third on."""
    kinds, numbers = _list(fields, "mlp_layer_types", num_layers), fields.raw("moe_layers_enum")
    first = fields.integer("first_k_dense_replace", low=0, high=MAX_LAYERS, default=3)
    if kinds is not None:
        return [kind == "sparse" for kind in kinds]
    if numbers is not None:
        items = numbers.split(",") if isinstance(numbers, str) else numbers
        chosen = {int(item) for item in items if str(item).strip()}
        return [i in chosen for i in range(num_layers)]
    return [i >= first for i in range(num_layers)]


def _stacks(i: int, ffn: Experts, e: int) -> dict[str, Cut]:
    """All experts of a layer in one tensor for each of their matrices."""
    x, f = ffn.num_experts, ffn.expert.width
    shapes = {"gate": (x, f, e), "up": (x, f, e), "down": (x, e, f)}
    return {
        f"layers.{i}.experts.{n}.{part}": Cut(f"model.layers.{i}.moe.{part}_proj.weight", shape, (n,))
        for n in range(x)
        for part, shape in shapes.items()
    }
