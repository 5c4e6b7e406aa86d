"""Phi-3.5-MoE and Phi-mini-MoE: layer norms, biases everywhere, two experts that SparseMixer chooses and weighs.

Source: Abdin et al., arXiv 2404.14219 (Phi-3.5-MoE); Li et al., SlimMoE, arXiv 2506.18349 (Phi-mini-MoE); absent fields
as in transformers' PhimoeConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.base.errors import ModelError, UnsupportedError
from penstock.core.model_spec import FeedForward, Layer, ModelSpec, Router
from penstock.families.llama_like import LlamaNames, attention, read_norm, read_window, start
from penstock.families.positions import read_rope
from penstock.families.reading import WHERE, finish, read_activation
from penstock.families.sparse import SPARSE_BLOCK, read_experts, read_width

# Noise and dropout of training; the router's own noise also is the width of what SparseMixer compares.
_TRAINING = ("input_jitter_noise", "expert_dropout")


class PhiMoe(LlamaNames):
    """The `ModelFamily` of PhiMoEForCausalLM, as published, and PhimoeForCausalLM, as transformers calls it."""

    name = "phimoe"
    architectures = ("PhiMoEForCausalLM", "PhimoeForCausalLM")
    names = SPARSE_BLOCK

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields, sizes, heads = start(
            _one_mscale(config), max_position_embeddings=131072, num_key_value_heads=8, num_local_experts=16
        )
        bias = fields.flag("attention_bias")
        mixer = attention(
            heads, window=read_window(fields), qkv_bias=bias, o_bias=bias,
            rope=read_rope(fields, heads.head_dim, sizes.max_position, theta=1e6),
        )  # fmt: skip
        jitter = fields.number("router_jitter_noise", default=0.01, above=-1e-9)
        expert = FeedForward(width=read_width(fields, "intermediate_size", 6400), activation=read_activation(fields))
        ffn = read_experts(
            fields, expert, Router(score="sparse_mixer", jitter=jitter), number=("num_local_experts",), default_top_k=2
        )
        if ffn.top_k != 2:
            raise UnsupportedError(f"{WHERE} sets num_experts_per_tok to {ffn.top_k}; SparseMixer chooses 2 experts")
        norm = read_norm(fields, default=1e-5, kind="layer")
        layers = (Layer(mixer=mixer, ffn=ffn, norm=norm),) * sizes.num_layers
        return finish(
            fields, self.name, sizes, layers, bos=(1,), eos=(2,), final_norm=norm, harmless=_TRAINING,
            lm_head_bias=fields.flag("lm_head_bias"),
        )  # fmt: skip


def _one_mscale(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """LongRoPE's `attention_factor` in place of the two that this family names, for short and for long contexts."""
    for name in ("rope_scaling", "rope_parameters"):
        section = config.get(name)
        if isinstance(section, Mapping) and "long_mscale" in section:
            rest = dict(section)
            long, short = rest.pop("long_mscale"), rest.pop("short_mscale", None)
            if long != short:
                raise UnsupportedError(
                    f"{WHERE} gives short_mscale {short} and long_mscale {long}; only equal ones are computed"
                )
            if rest.setdefault("attention_factor", long) != long:
                raise ModelError(f"{WHERE} gives attention_factor {rest['attention_factor']} beside long_mscale {long}")
            return {**config, name: rest}
    return config
