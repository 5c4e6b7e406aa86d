"""Ling and Ring (Bailing MoE), versions 1 and 2: Llama with fused projections, small experts and shared ones.

Version 1 weighs experts by a softmax; version 2 norms q and k, rotates a part of each head and takes its router from
DeepSeek-V3. Source: Ling Team, Every FLOP counts, arXiv 2503.05139; Ling 2.0, arXiv 2510.22115; the published
config.json and modeling files, whose names these are (transformers has no class of either).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.core.model_spec import FeedForward, Layer, ModelSpec, QkNorm, Router
from penstock.core.weight_map import WeightMap
from penstock.families.fields import Fields
from penstock.families.gpt_like import qkv_rows
from penstock.families.llama_like import LlamaNames, attention, read_ffn, read_norm, start
from penstock.families.mixtral import beyond
from penstock.families.mtp import NEXTN
from penstock.families.naming import LLAMA_TOP, fused_rows
from penstock.families.positions import read_rope
from penstock.families.reading import MAX_EXPERTS, MAX_SIZE, Heads, finish, read_activation, require
from penstock.families.sparse import SPARSE_MLP, grouped_router, read_experts, read_sparse, read_width

_NAMES = SPARSE_MLP | {
    "o": "attention.dense", "q_norm": "attention.query_layernorm", "k_norm": "attention.key_layernorm",
    "router_correction": "mlp.gate.expert_bias!",
}  # fmt: skip
# Dropout and losses of training, and how the published code chooses types and kernels.
_HARMLESS = (
    "embedding_dropout", "output_dropout", "router_dtype", "mtp_loss_scaling_factor", "num_nextn_predict_layers",
    "max_window_layers", "use_cache", "ep_size",
)  # fmt: skip
_ONLY = {
    "use_bias": False, "use_sliding_window": False, "sliding_window": None, "norm_softmax": False, "multi_gate": False,
    "use_rmsnorm": True, "moe_layer_freq": 1,
    "norm_head": False,  # rows of the output matrix are not brought to length 1
}  # fmt: skip


class _Bailing(LlamaNames):
    top = LLAMA_TOP | {"embed": "model.word_embeddings"}
    names = _NAMES

    def weight_map(self, spec: ModelSpec) -> WeightMap:
        out = dict(super().weight_map(spec))
        for i in range(len(spec.layers)):
            stored = f"{self.prefix}.{i}.attention.query_key_value"
            out |= fused_rows(spec, i, stored, qkv_rows(spec), spec.hidden_size)
        return out

    def ignores(self, name: str, spec: ModelSpec) -> bool:
        return super().ignores(name, spec) or beyond(name, spec) or name.endswith(".rotary_emb.inv_freq")


class BailingMoe(_Bailing):
    """The `ModelFamily` of BailingMoeForCausalLM."""

    name = "bailing_moe"
    architectures = ("BailingMoeForCausalLM",)

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields, sizes, heads = start(config, max_position_embeddings=16384, norm_topk_prob=True)
        norm = read_norm(fields)
        mixer = attention(
            heads, rope=read_rope(fields, heads.head_dim, sizes.max_position), qkv_bias=fields.flag("use_qkv_bias")
        )
        router = Router(renormalize=fields.flag("norm_topk_prob"))
        ffns = _feed_forwards(fields, sizes.num_layers, router)
        layers = [Layer(mixer=mixer, ffn=ffn, norm=norm) for ffn in ffns]
        return finish(fields, self.name, sizes, layers, final_norm=norm, harmless=_HARMLESS)


class BailingMoeV2(_Bailing):
    """The `ModelFamily` of BailingMoeV2ForCausalLM; its layers of multi-token prediction may draft (`families.mtp`)."""

    name = "bailing_moe_v2"
    architectures = ("BailingMoeV2ForCausalLM",)
    mtp = NEXTN

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields, sizes, heads = start(config, max_position_embeddings=32768)
        norm = read_norm(fields)
        for name, value in (("score_function", "sigmoid"), ("moe_router_enable_expert_bias", True)):
            require(fields, name, value)
        qk_norm = QkNorm(eps=norm.eps) if fields.flag("use_qk_norm", default=True) else None
        rope = read_rope(fields, heads.head_dim, sizes.max_position, partial=_rotated(fields, heads))
        mixer = attention(heads, rope=rope, qkv_bias=fields.flag("use_qkv_bias"), qk_norm=qk_norm)
        ffns = _feed_forwards(fields, sizes.num_layers, grouped_router(fields))
        layers = [Layer(mixer=mixer, ffn=ffn, norm=norm) for ffn in ffns]
        return finish(fields, self.name, sizes, layers, final_norm=norm, harmless=_HARMLESS)


def _rotated(fields: Fields, heads: Heads) -> float:
    """The part of a head that is rotated; files say it twice, as a part and as a number."""
    part = fields.number("partial_rotary_factor", default=1.0)
    if "rotary_dim" in fields:
        require(fields, "rotary_dim", int(heads.head_dim * part))
    return part


def _feed_forwards(fields: Fields, num_layers: int, router: Router) -> list[Any]:
    for name, value in _ONLY.items():
        require(fields, name, value)
    activation, dense = read_activation(fields), read_ffn(fields)
    width = read_width(fields, "moe_intermediate_size")
    number = fields.integer("num_shared_experts", low=0, high=MAX_EXPERTS, default=0)
    wide = number * fields.integer("moe_shared_expert_intermediate_size", high=MAX_SIZE, default=width)
    ffn = read_experts(
        fields, FeedForward(width=width, activation=activation), router,
        shared=FeedForward(width=wide, activation=activation) if wide else None,
    )  # fmt: skip
    return [ffn if sparse else dense for sparse in read_sparse(fields, num_layers, 0)]
