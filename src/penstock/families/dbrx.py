"""DBRX: layer norms without bias, q, k and v cut, and experts whose matrices lie one below the other.

Source: Databricks, Introducing DBRX (2024); absent fields as in transformers' DbrxConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.base.errors import ModelError
from penstock.core.model_spec import Experts, FeedForward, Layer, ModelSpec, Norm, Router
from penstock.core.weight_map import Cut, WeightMap
from penstock.families.fields import Fields
from penstock.families.gpt_like import qkv_rows
from penstock.families.llama_like import LlamaNames, attention, read_optional
from penstock.families.naming import fused_rows
from penstock.families.positions import read_rope
from penstock.families.reading import (
    HARMLESS,
    MAX_EXPERTS,
    MAX_SIZE,
    WHERE,
    Heads,
    finish,
    read_activation,
    read_sizes,
    require,
)
from penstock.families.sparse import read_width

_NORM = Norm(kind="layer", eps=1e-5, bias=False)
# Copies of the model's own fields, dropout, and what training is asked for.
_INNER = HARMLESS | {"attn_pdrop", "moe_jitter_eps", "moe_loss_weight", "uniform_expert_assignment"}


class Dbrx(LlamaNames):
    """The `ModelFamily` of DbrxForCausalLM."""

    name = "dbrx"
    architectures = ("DbrxForCausalLM",)
    top: Mapping[str, str] = {
        "embed": "transformer.wte", "final_norm": "transformer.norm_f", "lm_head": "lm_head"
    }  # fmt: skip
    names: Mapping[str, str] = {
        "attn_norm": "norm_attn_norm.norm_1", "ffn_norm": "norm_attn_norm.norm_2", "o": "norm_attn_norm.attn.out_proj",
        "router": "ffn.router.layer",
    }  # fmt: skip
    prefix = "transformer.blocks"

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields = Fields({"d_model": 2048, "n_heads": 16, "n_layers": 24, "max_seq_len": 2048, **config}, WHERE)
        sizes = read_sizes(fields, hidden="d_model", layers="n_layers", positions="max_seq_len")
        inner = fields.section("attn_config") or Fields({}, WHERE)
        heads = _heads(fields, inner, sizes.hidden_size)
        # Published files have theta among the fields of attention.
        theta = inner.number("rope_theta", default=10000.0)
        mixer = attention(
            heads, rope=read_rope(fields, heads.head_dim, sizes.max_position, theta=theta),
            clip=read_optional(inner, "clip_qkv"),
        )  # fmt: skip
        inner.refuse_unread(_INNER)
        layers = (Layer(mixer=mixer, ffn=_experts(fields, sizes.hidden_size), norm=_NORM),) * sizes.num_layers
        harmless = ("emb_pdrop", "num_key_value_heads")
        return finish(fields, self.name, sizes, layers, final_norm=_NORM, harmless=harmless)

    def weight_map(self, spec: ModelSpec) -> WeightMap:
        out: dict[str, str | Cut] = dict(super().weight_map(spec))
        e = spec.hidden_size
        for i, layer in enumerate(spec.layers):
            stored = f"{self.prefix}.{i}"
            out |= fused_rows(spec, i, f"{stored}.norm_attn_norm.attn.Wqkv", qkv_rows(spec), e)
            assert isinstance(layer.ffn, Experts)
            x, f = layer.ffn.num_experts, layer.ffn.expert.width
            for n in range(x):
                for part, name in (("gate", "w1"), ("up", "v1"), ("down", "w2")):
                    axes = (1, 0) if part == "down" else ()
                    cut = Cut(f"{stored}.ffn.experts.mlp.{name}", (x * f, e), ((n * f, (n + 1) * f),), axes=axes)
                    out[f"layers.{i}.experts.{n}.{part}"] = cut
        return out


def _heads(fields: Fields, inner: Fields, hidden_size: int) -> Heads:
    h = fields.integer("n_heads", high=MAX_SIZE)
    g = inner.integer("kv_n_heads", high=h, default=1)
    if hidden_size % (2 * h) or h % g:
        raise ModelError(f"{WHERE}: n_heads {h} must divide d_model {hidden_size} into pairs, and kv_n_heads {g} it")
    require(fields, "num_key_value_heads", g)
    return Heads(h, g, hidden_size // h)


def _experts(fields: Fields, hidden_size: int) -> Experts:
    inner = fields.section("ffn_config") or Fields({}, WHERE)
    act = inner.section("ffn_act_fn") or Fields({}, WHERE)
    activation = read_activation(act, "name")
    act.refuse_unread()
    number = inner.integer("moe_num_experts", high=MAX_EXPERTS, default=4)
    require(inner, "hidden_size", hidden_size)
    if "moe_normalize_expert_weights" in inner:
        require(inner, "moe_normalize_expert_weights", 1)
    divided = "moe_normalize_expert_weights" not in inner.names() or "moe_normalize_expert_weights" in inner
    ffn = Experts(
        num_experts=number, top_k=inner.integer("moe_top_k", high=number, default=1),
        expert=FeedForward(width=read_width(inner, "ffn_hidden_size", 3584), activation=activation),
        router=Router(renormalize=divided),
    )  # fmt: skip
    inner.refuse_unread(_INNER)
    return ffn
