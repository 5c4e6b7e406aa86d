"""Cohere's Command R and Aya (cohere), Command R7B and Command A (cohere2), and with
experts (cohere2_moe).

Both halves of a layer read one layer norm without bias; neighbours are rotated together. Source: model cards of
Command R (2024) and Cohere, Command A, arXiv 2504.00698; defaults of absent fields as in transformers' CohereConfig,
Cohere2Config and Cohere2MoeConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.base.errors import UnsupportedError
from penstock.core.model_spec import Experts, FeedForward, Layer, ModelSpec, Norm, QkNorm, Router
from penstock.families.fields import Fields
from penstock.families.llama_like import (
    FULL,
    SLIDING,
    LlamaNames,
    attention,
    by_kind,
    every,
    read_ffn,
    read_kinds,
    read_norm,
    read_window,
    stack,
    start,
)
from penstock.families.positions import read_rope
from penstock.families.reading import (
    MAX_EXPERTS,
    MAX_LAYERS,
    WHERE,
    finish,
    read_activation,
    require,
)
from penstock.families.sparse import SPARSE_MLP, read_experts, read_sparse, read_width
from penstock.formats.files import quoted

_HALVES: dict[str, Any] = {"parallel": True, "shared_norm": True}
_ONLY = {
    "position_embedding_type": "rope_gptj", "rotary_pct": 1.0, "use_embedding_sharing": True,
    "use_gated_activation": True, "use_parallel_block": True, "use_parallel_embedding": True, "layer_switch": 4,
    "order_of_interleaved_layers": "local_attn_first",
}  # fmt: skip
"""Fields of released files that transformers does not read: what they say is what there is."""


class Cohere(LlamaNames):
    """The `ModelFamily` of CohereForCausalLM: q and k may be normed, each head by weights of its own."""

    name = "cohere"
    architectures = ("CohereForCausalLM",)

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields, sizes, heads = start(config, max_position_embeddings=8192)
        norm = read_norm(fields, "layer_norm_eps", 1e-5, kind="layer", bias=False)
        rope = read_rope(fields, heads.head_dim, sizes.max_position, theta=5e5, interleaved=True)
        bias = fields.flag("attention_bias")
        qk_norm = QkNorm(kind="layer", over="each", eps=norm.eps) if fields.flag("use_qk_norm") else None
        mixer = attention(heads, rope=rope, qkv_bias=bias, o_bias=bias, qk_norm=qk_norm)
        layers = stack((mixer,) * sizes.num_layers, read_ffn(fields), norm, **_HALVES)
        return finish(
            fields, self.name, sizes, layers, bos=(5,), eos=(255001,), tie=True, final_norm=norm,
            logit_scale=_logit_scale(fields),
        )  # fmt: skip


class Cohere2(LlamaNames):
    """The `ModelFamily` of Cohere2ForCausalLM: layers slide, but every fourth, which has no positions instead."""

    name = "cohere2"
    architectures = ("Cohere2ForCausalLM",)

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields, sizes, heads = start(config, max_position_embeddings=8192, sliding_window=4096)
        require(fields, "use_qk_norm", False)
        for name, value in _ONLY.items():
            require(fields, name, value)
        norm = read_norm(fields, "layer_norm_eps", 1e-5, kind="layer", bias=False)
        rope = read_rope(fields, heads.head_dim, sizes.max_position, interleaved=True)
        bias = fields.flag("attention_bias")
        kinds = read_kinds(fields, sizes.num_layers, every(fields, "sliding_window_pattern", 4))
        mixer = attention(heads, qkv_bias=bias, o_bias=bias)
        mixers = by_kind(mixer, kinds, read_window(fields), {SLIDING: rope, FULL: None})
        layers = stack(mixers, read_ffn(fields), norm, **_HALVES)
        return finish(
            fields, self.name, sizes, layers, bos=(5,), eos=(255001,), tie=True, final_norm=norm,
            logit_scale=_logit_scale(fields), harmless=("cache_implementation",),
        )  # fmt: skip


class Cohere2Moe(LlamaNames):
    """The `ModelFamily` of Cohere2MoeForCausalLM. Layers without experts come first; they may be full and rotate."""

    name = "cohere2_moe"
    architectures = ("Cohere2MoeForCausalLM",)
    names = SPARSE_MLP

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields, sizes, heads = start(config, max_position_embeddings=8192, sliding_window=4096, head_dim=128)
        for name, value in (_ONLY | {"use_qk_norm": False}).items():
            require(fields, name, value)
        norm = _norm(fields)
        rope = read_rope(fields, heads.head_dim, sizes.max_position, interleaved=True)
        bias, sparse = fields.flag("attention_bias"), read_sparse(fields, sizes.num_layers, 0)
        num_dense = fields.integer("first_k_dense_replace", low=0, high=MAX_LAYERS, default=0)
        early = every(fields, "prefix_dense_sliding_window_pattern", 1)
        late = every(fields, "sliding_window_pattern", 4)
        kinds = read_kinds(fields, sizes.num_layers, lambda i: early(i) if i < num_dense else late(i - num_dense))
        rotates = fields.integer("prefix_dense_sliding_window_pattern", high=MAX_LAYERS, default=1) == 1
        mixer = attention(heads, qkv_bias=bias, o_bias=bias)
        mixers = by_kind(mixer, kinds, read_window(fields), {SLIDING: rope, FULL: None})
        turned = by_kind(mixer, kinds, read_window(fields), {SLIDING: rope, FULL: rope})
        dense, ffn = self._feed_forwards(fields, all(sparse))
        layers = [
            Layer(mixer=mixers[i], ffn=ffn, norm=norm, **_HALVES) if wide
            else Layer(mixer=(turned if rotates else mixers)[i], ffn=dense, norm=norm, **_HALVES)
            for i, wide in enumerate(sparse)
        ]  # fmt: skip
        return finish(
            fields, self.name, sizes, layers, bos=(5,), eos=(255001,), tie=True, final_norm=norm,
            logit_scale=_logit_scale(fields), harmless=("cache_implementation",),
        )  # fmt: skip

    def _feed_forwards(self, fields: Fields, all_sparse: bool) -> tuple[FeedForward | None, Experts]:
        """What dense layers have, if there are any, and what the others have."""
        activation, width = read_activation(fields), read_width(fields, "intermediate_size")
        own = read_width(fields, "prefix_dense_intermediate_size", width)
        chosen = fields.string("expert_selection_fn", default="softmax")
        if chosen not in ("softmax", "sigmoid"):
            raise UnsupportedError(f"{WHERE} gives expert_selection_fn {quoted(chosen)}; known ones: softmax, sigmoid")
        normed = fields.flag("norm_topk_prob", default=True)
        num_shared = fields.integer("num_shared_experts", low=0, high=MAX_EXPERTS, default=0)
        how = fields.string("shared_expert_combination_strategy", default="average")
        if how not in ("sum", "average"):
            raise UnsupportedError(
                f"{WHERE} gives shared_expert_combination_strategy {quoted(how)}; known: sum, average"
            )
        part = 0.5 if num_shared and how == "average" else 1.0
        router = (
            Router(chosen_only=True, scale=part) if chosen == "softmax"
            else Router(score="sigmoid", renormalize=normed, scale=part)
        )  # fmt: skip
        ffn = read_experts(
            fields, FeedForward(width=width, activation=activation), router,
            number=("num_experts", "num_local_experts"), default_top_k=2,
            shared=FeedForward(width=num_shared * width, activation=activation) if num_shared else None,
        )  # fmt: skip
        return None if all_sparse else FeedForward(width=own, activation=activation), msgspec.structs.replace(
            ffn, shared_scale=part
        )


def _norm(fields: Fields) -> Norm:
    """An RMS norm where the file gives its epsilon, else Cohere's layer norm."""
    layer = read_norm(fields, "layer_norm_eps", 1e-5, kind="layer", bias=False)
    return read_norm(fields) if "rms_norm_eps" in fields else layer


def _logit_scale(fields: Fields) -> float:
    return fields.number("logit_scale", default=0.0625)
