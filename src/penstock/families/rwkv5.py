"""RWKV-5 (Eagle) and RWKV-6 (Finch) as published for transformers: `Rwkv5ForCausalLM` and `Rwkv6ForCausalLM`.

Source: Peng et al., arXiv 2404.05892, section 3; the fields and tensors of the published rwkv-5-world and
rwkv-6-world checkpoints. Their code (`auto_map`) is no part of transformers, so that their parity is that of a form
written from the paper and, in GGUF, llama.cpp's. Files of rwkv-5-world may call their architecture
RwkvForCausalLM, as RWKV-4's do; their `model_type` tells them apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.base.errors import ModelError
from penstock.core.mixers.rwkv import MIXED_6
from penstock.core.model_spec import ChannelMix, Layer, ModelSpec, Norm, Rwkv5, Rwkv6
from penstock.core.weight_map import Cut, WeightMap
from penstock.families.fields import Fields
from penstock.families.naming import named
from penstock.families.reading import MAX_LAYERS, MAX_SIZE, UNLIMITED_POSITION, WHERE, Sizes, finish, require

# See `families.rwkv`. The published code counts its heads by `head_size`, whatever `num_attention_heads` says.
_HARMLESS = frozenset({
    "context_length", "max_context_length", "max_position_embeddings", "rescale_every", "num_attention_heads",
})  # fmt: skip
_TOP = {
    "embed": "rwkv.embeddings", "embed_norm": "rwkv.blocks.0.pre_ln", "final_norm": "rwkv.ln_out", "lm_head": "head",
}  # fmt: skip
_LAYER = {
    "attn_norm": "ln1", "ffn_norm": "ln2", "k": "attention.key", "v": "attention.value", "r": "attention.receptance",
    "g": "attention.gate", "o": "attention.output", "head_norm": "attention.ln_x", "up": "feed_forward.key",
    "down": "feed_forward.value", "ffn_r": "feed_forward.receptance",
}  # fmt: skip
_LONG = {"k": "key", "v": "value", "r": "receptance", "g": "gate"}
_BLOCKS = "rwkv.blocks"


class Rwkv5Family:
    """The `ModelFamily` of Rwkv5ForCausalLM."""

    name = "rwkv5"
    architectures = ("Rwkv5ForCausalLM",)

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields = Fields(config, WHERE)
        require(fields, "model_version", "5_2")
        sizes = _sizes(fields)
        heads, size, eps = _heads(fields, sizes.hidden_size)
        return _spec(fields, self.name, sizes, 4, Rwkv5(num_heads=heads, head_dim=size, eps=eps))

    def weight_map(self, spec: ModelSpec) -> WeightMap:
        out = named(spec, _TOP, _LAYER, _BLOCKS)
        for i, layer in enumerate(spec.layers):
            m, at, stored = layer.mixer, f"layers.{i}.", f"{_BLOCKS}.{i}."
            assert isinstance(m, Rwkv5)
            for name, long in _LONG.items():
                out[f"{at}mix_{name}"] = _row(f"{stored}attention.time_mix_{long}", spec)
            for name in ("k", "r"):
                out[f"{at}ffn_mix_{name}"] = _row(f"{stored}feed_forward.time_mix_{_LONG[name]}", spec)
            for name, own in (("time_decay", "time_decay"), ("time_first", "time_faaaa")):
                out[at + name] = Cut(f"{stored}attention.{own}", (m.num_heads, m.head_dim))
        return out

    def ignores(self, name: str, spec: ModelSpec) -> bool:
        return spec.tie_embeddings and name == "head.weight"


class Rwkv6Family:
    """The `ModelFamily` of Rwkv6ForCausalLM. Published models of 4,096 channels have ranks twice those of others."""

    name = "rwkv6"
    architectures = ("Rwkv6ForCausalLM",)

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields = Fields(config, WHERE)
        sizes = _sizes(fields)
        heads, size, eps = _heads(fields, sizes.hidden_size)
        wide = 2 if sizes.hidden_size == 4096 else 1
        mixer = Rwkv6(
            num_heads=heads, head_dim=size, eps=eps,
            mix_rank=fields.integer("time_mix_extra_dim", high=MAX_SIZE, default=32 * wide),
            decay_rank=fields.integer("time_decay_extra_dim", high=MAX_SIZE, default=64 * wide),
        )  # fmt: skip
        return _spec(fields, self.name, sizes, 6, mixer)

    def weight_map(self, spec: ModelSpec) -> WeightMap:
        out, e = named(spec, _TOP, _LAYER, _BLOCKS), spec.hidden_size
        for i, layer in enumerate(spec.layers):
            m, at, stored = layer.mixer, f"layers.{i}.", f"{_BLOCKS}.{i}."
            assert isinstance(m, Rwkv6)
            for name in f"x{MIXED_6}":
                out[f"{at}mix_{name}"] = _row(f"{stored}attention.time_maa_{name}", spec)
            for name in ("k", "r"):
                out[f"{at}ffn_mix_{name}"] = _row(f"{stored}feed_forward.time_maa_{name}", spec)
            out[f"{at}mix_down"] = Cut(f"{stored}attention.time_maa_w1", (e, len(MIXED_6) * m.mix_rank), axes=(1, 0))
            shape = (len(MIXED_6), m.mix_rank, e)
            for n, name in enumerate(MIXED_6):
                out[f"{at}mix_up_{name}"] = Cut(f"{stored}attention.time_maa_w2", shape, (n,), axes=(1, 0))
            out[f"{at}w1"] = Cut(f"{stored}attention.time_decay_w1", (e, m.decay_rank), axes=(1, 0))
            out[f"{at}w2"] = Cut(f"{stored}attention.time_decay_w2", (m.decay_rank, m.width), axes=(1, 0))
            out[f"{at}time_decay"] = _row(f"{stored}attention.time_decay", spec)
            out[f"{at}time_first"] = Cut(f"{stored}attention.time_faaaa", (m.num_heads, m.head_dim))
        return out

    def ignores(self, name: str, spec: ModelSpec) -> bool:
        return spec.tie_embeddings and name == "head.weight"


def _sizes(fields: Fields) -> Sizes:
    sizes = Sizes(
        vocab_size=fields.integer("vocab_size", high=MAX_SIZE, default=65536),
        hidden_size=fields.integer("hidden_size", high=MAX_SIZE, default=768),
        num_layers=fields.integer("num_hidden_layers", high=MAX_LAYERS, default=24),
        max_position=UNLIMITED_POSITION,
    )
    require(fields, "attention_hidden_size", sizes.hidden_size)
    return sizes


def _heads(fields: Fields, e: int) -> tuple[int, int, float]:
    """Heads, their size, and the epsilon of the norm over each: what is normed was trained divided by a number."""
    size = fields.integer("head_size", high=e, default=min(64, e))
    if e % size:
        raise ModelError(f"{WHERE}: head_size {size} does not divide the hidden size {e}")
    divisor = fields.number("head_size_divisor", default=8)
    return e // size, size, 1e-5 * divisor * divisor


def _spec(fields: Fields, name: str, sizes: Sizes, version: Any, mixer: Rwkv5 | Rwkv6) -> ModelSpec:
    norm = Norm(kind="layer", eps=fields.number("layer_norm_epsilon", default=1e-5))
    width = fields.integer("intermediate_size", high=MAX_SIZE, default=max(32, sizes.hidden_size * 7 // 2 // 32 * 32))
    layers = [Layer(mixer=mixer, ffn=ChannelMix(version=version, width=width), norm=norm)] * sizes.num_layers
    return finish(
        fields, name, sizes, layers, harmless=_HARMLESS, bos=(0,), eos=(0,), embed_norm=norm,
        final_norm=Norm(kind="layer", eps=1e-5),  # whatever the config says of the others
    )  # fmt: skip


def _row(name: str, spec: ModelSpec) -> Cut:
    """A vector that is stored as [1, 1, E]."""
    return Cut(name, (1, 1, spec.hidden_size))
