"""Llama 1, 2, 3.x and everything published in their shape: `LlamaForCausalLM`.

Source: Touvron et al., arXiv 2302.13971 and 2307.09288; Grattafiori et al., arXiv 2407.21783; defaults of absent fields
as in transformers' LlamaConfig.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from penstock.core.model_spec import Attention, FeedForward, Layer, ModelSpec, Norm
from penstock.core.weight_map import WeightMap
from penstock.families.fields import Fields
from penstock.families.naming import LLAMA_LAYER, LLAMA_TOP, named
from penstock.families.positions import read_rope
from penstock.families.reading import MAX_SIZE, WHERE, finish, read_activation, read_heads, read_sizes

_INV_FREQ = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


class Llama:
    """The `ModelFamily` of LlamaForCausalLM."""

    name = "llama"
    architectures = ("LlamaForCausalLM", "IQuestCoderForCausalLM")

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields = Fields(config, WHERE)
        sizes = read_sizes(fields, default_positions=2048)
        heads = read_heads(fields, sizes.hidden_size)
        bias = fields.flag("attention_bias")
        layer = Layer(
            mixer=Attention(
                num_heads=heads.num_heads, num_kv_heads=heads.num_kv_heads, head_dim=heads.head_dim,
                rope=read_rope(fields, heads.head_dim, sizes.max_position), qkv_bias=bias, o_bias=bias,
            ),
            ffn=FeedForward(
                width=fields.integer("intermediate_size", high=MAX_SIZE),
                activation=read_activation(fields),
                bias=fields.flag("mlp_bias"),
            ),
            norm=Norm(eps=fields.number("rms_norm_eps", default=1e-6)),
        )  # fmt: skip
        layers = (layer,) * sizes.num_layers
        return finish(fields, self.name, sizes, layers, bos=(1,), eos=(2,), final_norm=layer.norm)

    def weight_map(self, spec: ModelSpec) -> WeightMap:
        return named(spec, LLAMA_TOP, LLAMA_LAYER)

    def ignores(self, name: str, spec: ModelSpec) -> bool:
        return ignored(name, spec)


def ignored(name: str, spec: ModelSpec) -> bool:
    """Old checkpoints carry the rope frequencies that follow from the config. A tied model's copy of the embedding is
    not looked at by transformers either."""
    return bool(_INV_FREQ.fullmatch(name)) or (spec.tie_embeddings and name == "lm_head.weight")
