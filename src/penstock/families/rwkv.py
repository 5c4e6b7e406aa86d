"""RWKV-4 as published for transformers: `RwkvForCausalLM`.

Source: Peng et al., arXiv 2305.13048; defaults of absent fields as in transformers' RwkvConfig. RWKV-7 has a family of
its own (`families.rwkv7`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.core.model_spec import ChannelMix, Layer, ModelSpec, Norm, Rwkv4
from penstock.core.weight_map import Cut, WeightMap
from penstock.families.fields import Fields
from penstock.families.naming import named
from penstock.families.reading import MAX_LAYERS, MAX_SIZE, UNLIMITED_POSITION, WHERE, Sizes, finish, require

# `context_length` is how much text one training step saw; as a recurrence the model reads any length. Halving the
# residual every `rescale_every` layers keeps float16 from overflowing: the norms behind undo it, up to their eps.
_HARMLESS = frozenset({"context_length", "max_position_embeddings", "rescale_every"})

_TOP = {
    "embed": "rwkv.embeddings", "embed_norm": "rwkv.blocks.0.pre_ln", "final_norm": "rwkv.ln_out", "lm_head": "head",
}  # fmt: skip
_LAYER = {
    "attn_norm": "ln1", "time_decay": "attention.time_decay!", "time_first": "attention.time_first!",
    "k": "attention.key", "v": "attention.value", "r": "attention.receptance", "o": "attention.output",
    "ffn_norm": "ln2", "up": "feed_forward.key", "down": "feed_forward.value", "ffn_r": "feed_forward.receptance",
}  # fmt: skip
_MIXES = {
    "mix_k": "attention.time_mix_key", "mix_v": "attention.time_mix_value", "mix_r": "attention.time_mix_receptance",
    "ffn_mix_k": "feed_forward.time_mix_key", "ffn_mix_r": "feed_forward.time_mix_receptance",
}  # fmt: skip
"""Vectors that are stored as [1, 1, E]."""


class RwkvFamily:
    """The `ModelFamily` of RwkvForCausalLM."""

    name = "rwkv"
    architectures = ("RwkvForCausalLM",)

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields = Fields(config, WHERE)
        sizes = Sizes(
            vocab_size=fields.integer("vocab_size", high=MAX_SIZE, default=50277),
            hidden_size=fields.integer("hidden_size", high=MAX_SIZE, default=4096),
            num_layers=fields.integer("num_hidden_layers", high=MAX_LAYERS, default=32),
            max_position=UNLIMITED_POSITION,
        )
        e = sizes.hidden_size
        require(fields, "attention_hidden_size", e)
        norm = Norm(kind="layer", eps=fields.number("layer_norm_epsilon", default=1e-5))
        ffn = ChannelMix(version=4, width=fields.integer("intermediate_size", high=MAX_SIZE, default=4 * e))
        layers = [Layer(mixer=Rwkv4(width=e), ffn=ffn, norm=norm)] * sizes.num_layers
        return finish(
            fields, self.name, sizes, layers, harmless=_HARMLESS, bos=(0,), eos=(0,), embed_norm=norm,
            final_norm=Norm(kind="layer", eps=1e-5),  # whatever the config says of the others
        )  # fmt: skip

    def weight_map(self, spec: ModelSpec) -> WeightMap:
        out = named(spec, _TOP, _LAYER, "rwkv.blocks")
        for i in range(len(spec.layers)):
            for name, stored in _MIXES.items():
                out[f"layers.{i}.{name}"] = Cut(f"rwkv.blocks.{i}.{stored}", (1, 1, spec.hidden_size))
        return out

    def ignores(self, name: str, spec: ModelSpec) -> bool:
        return spec.tie_embeddings and name == "head.weight"
