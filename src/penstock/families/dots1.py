"""dots.llm1: attention as in Qwen3, experts as in DeepSeek-V3.

Source: rednote-hilab, dots.llm1, arXiv 2506.05767; absent fields as in transformers' Dots1Config.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.base.errors import UnsupportedError
from penstock.core.model_spec import FeedForward, Layer, ModelSpec, QkNorm
from penstock.families.fields import Fields
from penstock.families.llama_like import (
    LlamaNames,
    attention,
    by_kind,
    read_ffn,
    read_kinds,
    read_norm,
    read_window,
    start,
)
from penstock.families.positions import read_rope
from penstock.families.reading import MAX_EXPERTS, MAX_POSITION, WHERE, finish, read_activation, require
from penstock.families.sparse import SPARSE_MLP, grouped_router, read_experts, read_sparse, read_width
from penstock.formats.files import quoted


class Dots1(LlamaNames):
    """The `ModelFamily` of Dots1ForCausalLM."""

    name = "dots1"
    architectures = ("Dots1ForCausalLM",)
    names = SPARSE_MLP

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields, sizes, heads = start(config, max_position_embeddings=2048, norm_topk_prob=False, sliding_window=4096)
        norm, bias = read_norm(fields), fields.flag("attention_bias")
        for name, value in (("topk_method", "noaux_tc"), ("moe_layer_freq", 1)):
            require(fields, name, value)
        # The published file calls sigmoid scores by the name of how they are corrected.
        scored = fields.string("scoring_func", default="sigmoid")
        if scored not in ("sigmoid", "noaux_tc"):
            raise UnsupportedError(f"{WHERE} gives scoring_func {quoted(scored)}; known: sigmoid, noaux_tc")
        mixer = attention(
            heads, rope=read_rope(fields, heads.head_dim, sizes.max_position), qk_norm=QkNorm(eps=norm.eps),
            qkv_bias=bias, o_bias=bias,
        )  # fmt: skip
        mixers = by_kind(mixer, *_kinds(fields, sizes.num_layers))
        dense, activation = read_ffn(fields), read_activation(fields)
        width = read_width(fields, "moe_intermediate_size", 1408)
        num_shared = fields.integer("n_shared_experts", low=0, high=MAX_EXPERTS, default=0)
        ffn = read_experts(
            fields, FeedForward(width=width, activation=activation), grouped_router(fields),
            number=("n_routed_experts", "num_local_experts"),
            shared=FeedForward(width=num_shared * width, activation=activation) if num_shared else None,
        )  # fmt: skip
        layers = [
            Layer(mixer=mixer, ffn=ffn if sparse else dense, norm=norm)
            for mixer, sparse in zip(mixers, read_sparse(fields, sizes.num_layers, 0), strict=True)
        ]
        return finish(fields, self.name, sizes, layers, final_norm=norm)


def _kinds(fields: Fields, num_layers: int) -> tuple[tuple[str, ...], int | None]:
    """Layers from `max_window_layers` on slide if there is a window, whatever `use_sliding_window` says."""
    window = read_window(fields)
    first = fields.integer("max_window_layers", low=0, high=MAX_POSITION, default=62)
    fields.flag("use_sliding_window")
    return read_kinds(fields, num_layers, lambda i: window is not None and i >= first), window
