"""OLMo 2, OLMo 3 and FlexOlmo: norms behind the halves, q and k normed over all heads together.

Source: OLMo Team, arXiv 2501.00656; OLMo 3 (2025); defaults of absent fields as in transformers' Olmo2Config,
Olmo3Config and FlexOlmoConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.base.errors import UnsupportedError
from penstock.core.model_spec import FeedForward, Layer, ModelSpec, QkNorm, Router
from penstock.families.llama_like import (
    FULL,
    POST_NORMS,
    SLIDING,
    LlamaNames,
    attention,
    by_kind,
    read_ffn,
    read_kinds,
    read_norm,
    read_window,
    stack,
    start,
)
from penstock.families.positions import read_rope, read_ropes
from penstock.families.reading import WHERE, finish, read_activation
from penstock.families.sparse import SPARSE_MLP, read_experts, read_width

_THETA_3 = 5e5


class Olmo2(LlamaNames):
    """The `ModelFamily` of Olmo2ForCausalLM."""

    name = "olmo2"
    architectures = ("Olmo2ForCausalLM",)
    names = POST_NORMS

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields, sizes, heads = start(config, max_position_embeddings=2048)
        norm, bias = read_norm(fields, default=1e-5), fields.flag("attention_bias")
        mixer = attention(
            heads, rope=read_rope(fields, heads.head_dim, sizes.max_position), qkv_bias=bias, o_bias=bias,
            qk_norm=QkNorm(over="all", eps=norm.eps),
        )  # fmt: skip
        layers = stack((mixer,) * sizes.num_layers, read_ffn(fields), norm, placement="post")
        return finish(fields, self.name, sizes, layers, eos=(50279,), final_norm=norm)


class Olmo3(LlamaNames):
    """The `ModelFamily` of Olmo3ForCausalLM: three layers of four slide, and only the fourth has its rope scaled."""

    name = "olmo3"
    architectures = ("Olmo3ForCausalLM",)
    names = POST_NORMS

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields, sizes, heads = start(config, max_position_embeddings=2048, sliding_window=4096)
        if fields.number("rope_theta", default=_THETA_3) != _THETA_3:
            # One version of transformers takes it for all layers, another for those of full attention only.
            raise UnsupportedError(
                f"{WHERE} sets rope_theta for all layers; say it per kind of layer in rope_parameters"
            )
        norm, bias, window = read_norm(fields, default=1e-5), fields.flag("attention_bias"), read_window(fields)
        kinds = read_kinds(fields, sizes.num_layers, lambda i: (i + 1) % 4 != 0)
        thetas = {FULL: ("rope_theta", _THETA_3), SLIDING: ("rope_theta", _THETA_3)}
        ropes = read_ropes(fields, heads.head_dim, sizes.max_position, thetas)
        mixer = attention(heads, qkv_bias=bias, o_bias=bias, qk_norm=QkNorm(over="all", eps=norm.eps))
        layers = stack(by_kind(mixer, kinds, window, ropes), read_ffn(fields), norm, placement="post")
        return finish(fields, self.name, sizes, layers, eos=(50279,), final_norm=norm)


class FlexOlmo(LlamaNames):
    """The `ModelFamily` of FlexOlmoForCausalLM: OLMo 2 with experts. Source: Shi et al., arXiv 2507.07024."""

    name = "flex_olmo"
    architectures = ("FlexOlmoForCausalLM",)
    names = POST_NORMS | SPARSE_MLP

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields, sizes, heads = start(config, max_position_embeddings=4096)
        norm, bias = read_norm(fields), fields.flag("attention_bias")
        mixer = attention(
            heads, rope=read_rope(fields, heads.head_dim, sizes.max_position, theta=5e5), qkv_bias=bias, o_bias=bias,
            qk_norm=QkNorm(over="all", eps=norm.eps),
        )  # fmt: skip
        expert = FeedForward(width=read_width(fields, "intermediate_size"), activation=read_activation(fields))
        router = Router(renormalize=fields.flag("norm_topk_prob"))
        ffn = read_experts(fields, expert, router, number=("num_experts", "num_local_experts"), default_top_k=5)
        layers = (Layer(mixer=mixer, ffn=ffn, norm=norm, placement="post"),) * sizes.num_layers
        return finish(fields, self.name, sizes, layers, eos=(100257,), final_norm=norm)
