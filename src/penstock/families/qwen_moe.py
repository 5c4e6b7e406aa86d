"""Sparse Qwen and its relatives: Qwen2-MoE, Qwen3-MoE, OLMoE, GLM-4-MoE.

Sources: Qwen2, arXiv 2407.10671, section 2.2.2; Qwen3, arXiv 2505.09388, section 2; OLMoE, arXiv 2409.02060, section 2;
GLM-4.5, arXiv 2508.06471, section 2.1; absent fields as in transformers' config classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.core.model_spec import Experts, FeedForward, Layer, ModelSpec, QkNorm, Router
from penstock.core.weight_map import WeightMap
from penstock.families.fields import Fields
from penstock.families.llama_like import (
    LlamaNames,
    attention,
    by_kind,
    check_use,
    read_kinds,
    read_norm,
    read_optional,
    start,
)
from penstock.families.mixtral import beyond
from penstock.families.mtp import NEXTN
from penstock.families.positions import read_rope
from penstock.families.reading import (
    MAX_LAYERS,
    MAX_POSITION,
    WHERE,
    finish,
    read_activation,
    require,
)
from penstock.families.sparse import SHARED_ONE, SPARSE_MLP, grouped_router, read_experts, read_width, stacked


class Qwen2Moe(LlamaNames):
    """The `ModelFamily` of Qwen2MoeForCausalLM."""

    name = "qwen2_moe"
    architectures = ("Qwen2MoeForCausalLM",)
    names = SPARSE_MLP | SHARED_ONE

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields, sizes, heads = start(config, max_position_embeddings=32768, num_key_value_heads=16)
        rope = read_rope(fields, heads.head_dim, sizes.max_position)
        bias, norm = fields.flag("qkv_bias", default=True), read_norm(fields)
        activation = read_activation(fields)
        dense = FeedForward(width=read_width(fields, "intermediate_size", 5632), activation=activation)
        expert = FeedForward(width=read_width(fields, "moe_intermediate_size", 1408), activation=activation)
        shared = FeedForward(width=read_width(fields, "shared_expert_intermediate_size", 5632), activation=activation)
        router = Router(renormalize=fields.flag("norm_topk_prob"))
        ffn = read_experts(
            fields, expert, router, number=("num_experts", "num_local_experts"), default_top_k=4, shared=shared,
            shared_gate=True,
        )  # fmt: skip
        mixer = attention(heads, rope=rope, qkv_bias=bias)
        mixers = by_kind(mixer, *_alternating(fields, sizes.num_layers))
        layers = [
            Layer(mixer=mixer, ffn=ffn if sparse else dense, norm=norm)
            for mixer, sparse in zip(mixers, sparse_layers(fields, sizes.num_layers), strict=True)
        ]
        return finish(fields, self.name, sizes, layers, final_norm=norm)


class Qwen3Moe(LlamaNames):
    """The `ModelFamily` of Qwen3MoeForCausalLM."""

    name = "qwen3_moe"
    architectures = ("Qwen3MoeForCausalLM",)
    names = SPARSE_MLP

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields, sizes, heads = start(config, max_position_embeddings=32768, num_key_value_heads=4)
        bias, norm = fields.flag("attention_bias"), read_norm(fields)
        window = fields.integer("sliding_window", low=0, high=MAX_POSITION, default=4096)
        fields.integer("max_window_layers", low=0, high=MAX_LAYERS, default=0)  # transformers reads it nowhere
        require(fields, "shared_expert_intermediate_size", 0)  # Qwen3-Coder says that it has none
        require(fields, "use_qk_norm", True)
        require(fields, "qkv_bias", bias)
        mixer = attention(
            heads, rope=read_rope(fields, heads.head_dim, sizes.max_position), qk_norm=QkNorm(eps=norm.eps),
            qkv_bias=bias, o_bias=bias, window=(window or None) if fields.flag("use_sliding_window") else None,
        )  # fmt: skip
        activation = read_activation(fields)
        dense = FeedForward(width=read_width(fields, "intermediate_size", 6144), activation=activation)
        expert = FeedForward(width=read_width(fields, "moe_intermediate_size", 768), activation=activation)
        router = Router(renormalize=fields.flag("norm_topk_prob"))
        ffn = read_experts(fields, expert, router, number=("num_experts", "num_local_experts"), default_top_k=8)
        layers = [
            Layer(mixer=mixer, ffn=ffn if sparse else dense, norm=norm)
            for sparse in sparse_layers(fields, sizes.num_layers)
        ]
        return finish(fields, self.name, sizes, layers, final_norm=norm)


class Qwen3VLMoeText(Qwen3Moe):
    """The text of Qwen3VLMoeForConditionalGeneration: Qwen3-MoE, all experts of a layer in one tensor."""

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        require(Fields(config, WHERE), "norm_topk_prob", True)  # transformers reads it nowhere and always does it
        return super().spec({**config, "norm_topk_prob": True})

    def weight_map(self, spec: ModelSpec) -> WeightMap:
        out = dict(super().weight_map(spec))
        for i, layer in enumerate(spec.layers):
            if isinstance(layer.ffn, Experts):
                stored = f"model.layers.{i}.mlp.experts"
                out |= stacked(f"layers.{i}.experts", stored, layer.ffn, spec.hidden_size, turns=False)
        return out


class Olmoe(LlamaNames):
    """The `ModelFamily` of OlmoeForCausalLM."""

    name = "olmoe"
    architectures = ("OlmoeForCausalLM",)
    names = SPARSE_MLP

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields, sizes, heads = start(config, max_position_embeddings=4096)
        bias, norm = fields.flag("attention_bias"), read_norm(fields, default=1e-5)
        mixer = attention(
            heads, rope=read_rope(fields, heads.head_dim, sizes.max_position), qkv_bias=bias, o_bias=bias,
            qk_norm=QkNorm(over="all", eps=norm.eps),
            clip=read_optional(fields, "clip_qkv"),
        )  # fmt: skip
        expert = FeedForward(width=read_width(fields, "intermediate_size"), activation=read_activation(fields))
        router = Router(renormalize=fields.flag("norm_topk_prob"))
        ffn = read_experts(fields, expert, router, number=("num_experts", "num_local_experts"), default_top_k=8)
        layers = (Layer(mixer=mixer, ffn=ffn, norm=norm),) * sizes.num_layers
        return finish(fields, self.name, sizes, layers, eos=(50279,), final_norm=norm)


class Glm4Moe(LlamaNames):
    """The `ModelFamily` of Glm4MoeForCausalLM: GLM-4.5 and 4.6."""

    name = "glm4_moe"
    architectures = ("Glm4MoeForCausalLM",)
    names = SPARSE_MLP
    mtp = NEXTN

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields, sizes, heads = start(config, max_position_embeddings=131072, num_key_value_heads=8)
        norm = read_norm(fields, default=1e-5)
        mixer = attention(
            heads, rope=read_rope(fields, heads.head_dim, sizes.max_position, partial=0.5),
            qkv_bias=fields.flag("attention_bias"),
            qk_norm=QkNorm(eps=norm.eps) if fields.flag("use_qk_norm") else None,
        )  # fmt: skip
        activation = read_activation(fields)
        dense = FeedForward(width=read_width(fields, "intermediate_size", 10944), activation=activation)
        width = read_width(fields, "moe_intermediate_size", 1408)
        shared = FeedForward(width=width * read_width(fields, "n_shared_experts", 1), activation=activation)
        ffn = read_experts(
            fields, FeedForward(width=width, activation=activation), grouped_router(fields),
            number=("n_routed_experts", "num_local_experts"), default_top_k=8, shared=shared,
        )  # fmt: skip
        num_dense = fields.integer("first_k_dense_replace", low=0, high=MAX_LAYERS, default=1)
        layers = [Layer(mixer=mixer, ffn=dense if i < num_dense else ffn, norm=norm) for i in range(sizes.num_layers)]
        return finish(
            fields, self.name, sizes, layers, final_norm=norm,
            harmless=("num_nextn_predict_layers", "num_mtp_layers"),  # they may draft: `families.mtp`
        )  # fmt: skip

    def ignores(self, name: str, spec: ModelSpec) -> bool:
        return super().ignores(name, spec) or beyond(name, spec)


def sparse_layers(fields: Fields, num_layers: int) -> list[bool]:
    """Which layers have experts: every `decoder_sparse_step`-th, but none of `mlp_only_layers`."""
    step = fields.integer("decoder_sparse_step", high=MAX_LAYERS, default=1)
    dense = fields.integers("mlp_only_layers", low=0, high=MAX_LAYERS) or []
    return [i not in dense and (i + 1) % step == 0 for i in range(num_layers)]


def _alternating(fields: Fields, num_layers: int) -> tuple[tuple[str, ...], int | None]:
    """Qwen2-MoE's kinds of layers and its window; without `layer_types` even layers below `max_window_layers` slide."""
    used = fields.flag("use_sliding_window")
    limit = fields.integer("max_window_layers", low=0, high=MAX_LAYERS, default=28)
    window = fields.integer("sliding_window", low=0, high=MAX_POSITION, default=4096)
    kinds = read_kinds(fields, num_layers, lambda i: used and i % 2 == 0 and i < limit)
    check_use(fields, kinds)
    return kinds, window or None
