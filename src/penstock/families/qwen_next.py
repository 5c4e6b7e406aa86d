"""Qwen3-Next and Qwen3.5 (3.6): three layers of the gated delta rule to one of gated softmax attention.

Norms keep their weights minus one, but for that of the delta rule. Attention has a gate beside each query, which closes
what its head gives. Layers that predict further tokens
may draft (`families.mtp`).
Source: Qwen3-Next's and Qwen3.5's model cards; Qiu et al., Gated Attention, arXiv 2505.06708; layouts and absent fields
as in transformers' Qwen3NextConfig, Qwen3_5TextConfig and Qwen3_5MoeTextConfig.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.base.errors import ModelError
from penstock.core.model_spec import (
    Attention,
    Experts,
    FeedForward,
    FeedForwardKind,
    GatedDelta,
    Layer,
    ModelSpec,
    QkNorm,
    Router,
)
from penstock.core.weight_map import Cut, WeightMap
from penstock.families.fields import Fields
from penstock.families.llama_like import FULL, LlamaNames, Start, attention, read_ffn, read_norm, start
from penstock.families.mamba import MAX_TAPS
from penstock.families.mtp import MTP_MODULE
from penstock.families.positions import one_axis, read_rope
from penstock.families.qwen_moe import sparse_layers
from penstock.families.reading import (
    MAX_LAYERS,
    MAX_SIZE,
    WHERE,
    finish,
    read_activation,
    read_layer_types,
    require,
)
from penstock.families.sparse import SHARED_ONE, SPARSE_MLP, read_experts, read_width, stacked_rows

LINEAR = "linear_attention"
_EPS = 1e-6
"""Under the root where queries and keys become unit vectors; no field says it."""
# The state is float32 here whatever the config says.
_HARMLESS = (
    "mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "num_nextn_predict_layers",
    "full_attention_interval",
)  # fmt: skip
_DEFAULTS: dict[str, Any] = {"max_position_embeddings": 32768, "head_dim": 256}


class Qwen3Next(LlamaNames):
    """The `ModelFamily` of Qwen3NextForCausalLM."""

    name = "qwen3_next"
    architectures = ("Qwen3NextForCausalLM",)
    mtp = MTP_MODULE
    names = SPARSE_MLP | SHARED_ONE

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        begun = start(one_axis(config), num_key_value_heads=2, **_DEFAULTS)
        fields, num_layers = begun.fields, begun.sizes.num_layers
        ffn = _experts(fields, default_top_k=10, renormalize=fields.flag("norm_topk_prob", default=True))
        dense = FeedForward(width=read_width(fields, "intermediate_size", 5632), activation=read_activation(fields))
        ffns = [ffn if sparse else dense for sparse in sparse_layers(fields, num_layers)]
        return _spec(self.name, begun, ffns)

    def weight_map(self, spec: ModelSpec) -> WeightMap:
        return dict(super().weight_map(spec)) | _mixers(spec, _by_key_head)

    def ignores(self, name: str, spec: ModelSpec) -> bool:
        return super().ignores(name, spec) or name.startswith("mtp.")


class Qwen35(LlamaNames):
    """The `ModelFamily` of Qwen3_5ForCausalLM."""

    name = "qwen3_5_text"
    architectures = ("Qwen3_5ForCausalLM",)
    mtp = MTP_MODULE

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        begun = start(one_axis(config), num_key_value_heads=4, **_DEFAULTS)
        return _spec(self.name, begun, [read_ffn(begun.fields)] * begun.sizes.num_layers)

    def weight_map(self, spec: ModelSpec) -> WeightMap:
        return dict(super().weight_map(spec)) | _mixers(spec, _one_by_one)

    def ignores(self, name: str, spec: ModelSpec) -> bool:
        return super().ignores(name, spec) or name.startswith("mtp.")


class Qwen35Moe(LlamaNames):
    """The `ModelFamily` of Qwen3_5MoeForCausalLM: all experts of a layer in one tensor."""

    name = "qwen3_5_moe_text"
    architectures = ("Qwen3_5MoeForCausalLM",)
    mtp = MTP_MODULE
    names = SPARSE_MLP | SHARED_ONE

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        begun = start(one_axis(config), num_key_value_heads=2, **_DEFAULTS)
        require(begun.fields, "norm_topk_prob", True)
        ffn = _experts(begun.fields, default_top_k=8, renormalize=True)
        return _spec(self.name, begun, [ffn] * begun.sizes.num_layers)

    def weight_map(self, spec: ModelSpec) -> WeightMap:
        out = dict(super().weight_map(spec)) | _mixers(spec, _one_by_one)
        for i, layer in enumerate(spec.layers):
            assert isinstance(layer.ffn, Experts)
            out |= stacked_rows(f"layers.{i}.experts", f"model.layers.{i}.mlp.experts", layer.ffn, spec.hidden_size)
        return out

    def ignores(self, name: str, spec: ModelSpec) -> bool:
        return super().ignores(name, spec) or name.startswith("mtp.")


def _spec(family: str, begun: Start, ffns: Sequence[FeedForwardKind]) -> ModelSpec:
    fields, sizes, heads = begun
    norm, bias = read_norm(fields, offset=1.0), fields.flag("attention_bias")
    require(fields, "attn_output_gate", True)
    mixer = attention(
        heads, rope=read_rope(fields, heads.head_dim, sizes.max_position, partial=0.25), qkv_bias=bias, o_bias=bias,
        qk_norm=QkNorm(eps=norm.eps, offset=1.0), output_gate=True,
    )  # fmt: skip
    kinds = read_layer_types(fields, sizes.num_layers, (LINEAR, FULL))
    if kinds is None:
        interval = fields.integer("full_attention_interval", high=MAX_LAYERS, default=4)
        kinds = tuple(LINEAR if (i + 1) % interval else FULL for i in range(sizes.num_layers))
    delta = _delta(fields, norm.eps)
    layers = [
        Layer(mixer=mixer if kind == FULL else delta, ffn=ffn, norm=norm)
        for kind, ffn in zip(kinds, ffns, strict=True)
    ]  # fmt: skip
    return finish(fields, family, sizes, layers, final_norm=norm, harmless=_HARMLESS)


def _delta(fields: Fields, eps: float) -> GatedDelta:
    require(fields, "hidden_act", "silu")  # it follows the convolutions, too
    key_heads = fields.integer("linear_num_key_heads", high=MAX_SIZE, default=16)
    value_heads = fields.integer("linear_num_value_heads", high=MAX_SIZE, default=32)
    if value_heads % key_heads:
        raise ModelError(
            f"{WHERE}: linear_num_key_heads {key_heads} does not divide linear_num_value_heads {value_heads}"
        )
    return GatedDelta(
        key_heads=key_heads, value_heads=value_heads,
        key_dim=fields.integer("linear_key_head_dim", high=MAX_SIZE, default=128),
        value_dim=fields.integer("linear_value_head_dim", high=MAX_SIZE, default=128),
        conv=fields.integer("linear_conv_kernel_dim", low=2, high=MAX_TAPS, default=4), eps=eps, norm_eps=_EPS,
    )  # fmt: skip


def _experts(fields: Fields, *, default_top_k: int, renormalize: bool) -> Experts:
    activation = read_activation(fields)
    expert = FeedForward(width=read_width(fields, "moe_intermediate_size", 512), activation=activation)
    shared = FeedForward(width=read_width(fields, "shared_expert_intermediate_size", 512), activation=activation)
    return read_experts(
        fields, expert, Router(renormalize=renormalize), number=("num_experts", "num_local_experts"),
        default_top_k=default_top_k, shared=shared, shared_gate=True,
    )  # fmt: skip


def _mixers(spec: ModelSpec, products: Any) -> dict[str, str | Cut]:
    """Weights of the mixers; `products`: where those that are multiplied with a layer's input are, by the layout."""
    out: dict[str, str | Cut] = {}
    for i, layer in enumerate(spec.layers):
        at, stored, e = f"layers.{i}.", f"model.layers.{i}.", spec.hidden_size
        if isinstance(m := layer.mixer, GatedDelta):
            out |= {at + name: place for name, place in products(stored + "linear_attn.", m, e).items()}
            out |= {at + name: place for name, place in _others(stored + "linear_attn.", m).items()}
        else:
            assert isinstance(m, Attention)
            out |= {at + name: place for name, place in _gated_queries(stored + "self_attn.", m, e).items()}
    return out


def _gated_queries(stored: str, m: Attention, e: int) -> dict[str, Cut]:
    """A head's rows: its query, then its gate."""
    h, d = m.num_heads, m.head_dim
    out: dict[str, Cut] = {}
    for n, name in enumerate(("q", "o_gate")):
        out[name] = Cut(f"{stored}q_proj.weight", (2 * h * d, e), ((0, h), n), (h, 2, d, e))
        if m.qkv_bias:
            out[f"{name}.bias"] = Cut(f"{stored}q_proj.bias", (2 * h * d,), ((0, h), n), (h, 2, d))
    return out


def _by_key_head(stored: str, m: GatedDelta, e: int) -> dict[str, str | Cut]:
    """One product for q, k, v and z, one for beta and dt: the parts of a key head together, one key head after another
    (Qwen3-Next)."""
    g, share = m.key_heads, m.value_heads // m.key_heads
    out: dict[str, str | Cut] = {}
    for module, parts in (
        ("in_proj_qkvz", {"q": m.key_dim, "k": m.key_dim, "v": share * m.value_dim, "z": share * m.value_dim}),
        ("in_proj_ba", {"beta": share, "dt": share}),
    ):
        own, first = sum(parts.values()), 0
        for name, rows in parts.items():
            take = ((0, g), (first, first + rows))
            out[name] = Cut(f"{stored}{module}.weight", (g * own, e), take, (g, own, e))
            first += rows
    return out


def _one_by_one(stored: str, m: GatedDelta, e: int) -> dict[str, str | Cut]:
    """q, k and v below each other, the rest each by itself (Qwen3.5)."""
    total = 2 * m.keys + m.values
    rows = {"q": (0, m.keys), "k": (m.keys, 2 * m.keys), "v": (2 * m.keys, total)}
    out: dict[str, str | Cut] = {
        name: Cut(f"{stored}in_proj_qkv.weight", (total, e), (take,)) for name, take in rows.items()
    }
    return out | {name: f"{stored}in_proj_{own}.weight" for name, own in (("z", "z"), ("beta", "b"), ("dt", "a"))}


def _others(stored: str, m: GatedDelta) -> dict[str, str | Cut]:
    total = 2 * m.keys + m.values
    rows = {"q": (0, m.keys), "k": (m.keys, 2 * m.keys), "v": (2 * m.keys, total)}
    out: dict[str, str | Cut] = {
        f"{name}.conv": Cut(f"{stored}conv1d.weight", (total, 1, m.conv), (take, 0)) for name, take in rows.items()
    }
    return out | {
        "dt.bias": f"{stored}dt_bias", "a_log": f"{stored}A_log", "head_norm": f"{stored}norm.weight",
        "o": f"{stored}out_proj.weight",
    }  # fmt: skip
