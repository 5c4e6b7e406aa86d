"""Transformers whose attention was turned into RWKV: `RWKV6Qwen2ForCausalLM` (QRWKV6), `RwkvHybridForCausalLM` (ARWKV).

Norms and feed-forwards are Qwen2's. Source: Goldstein et al., arXiv 2505.03005 (QRWKV6); Yueyu et al., arXiv 2501.15570
(ARWKV); fields and tensors as github.com/ggml-org/llama.cpp reads them (conversion/rwkv.py). transformers has no class
for them: their parity is llama.cpp's, of GGUF files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.base.errors import ModelError
from penstock.core.mixers.rwkv import MIXED_6
from penstock.core.model_spec import FeedForward, Layer, ModelSpec, Norm, Qrwkv6, Rwkv7
from penstock.core.weight_map import Cut, WeightMap
from penstock.families.fields import Fields
from penstock.families.naming import LLAMA_LAYER, LLAMA_TOP, named
from penstock.families.reading import MAX_LAYERS, MAX_SIZE, UNLIMITED_POSITION, WHERE, Sizes, finish, require

_HARMLESS = frozenset({"max_position_embeddings", "head_size_divisor"})
_FFN = {name: LLAMA_LAYER[name] for name in ("attn_norm", "ffn_norm", "gate", "up", "down")}


class Rwkv6Qwen2:
    """The `ModelFamily` of RWKV6Qwen2ForCausalLM."""

    name = "rwkv6qwen2"
    architectures = ("RWKV6Qwen2ForCausalLM",)

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields = Fields(config, WHERE)
        sizes = _sizes(fields)
        e = sizes.hidden_size
        heads = fields.integer("num_attention_heads", high=e)
        groups = fields.integer("num_key_value_heads", high=heads, default=heads)
        if e % heads or heads % groups:
            raise ModelError(
                f"{WHERE}: {heads} heads with {groups} heads of keys do not fall into the hidden size {e} evenly"
            )
        wide = 2 if e >= 4096 else 1
        mixer = Qrwkv6(
            num_heads=heads, kv_heads=groups, head_dim=e // heads,
            mix_rank=fields.integer("lora_rank_tokenshift", high=MAX_SIZE, default=32 * wide),
            decay_rank=fields.integer("lora_rank_decay", high=MAX_SIZE, default=64 * wide),
        )  # fmt: skip
        return _spec(fields, self.name, sizes, [mixer] * sizes.num_layers)

    def weight_map(self, spec: ModelSpec) -> WeightMap:
        own = {"r": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj"}
        out = named(spec, LLAMA_TOP, _FFN | own | {"g": "self_attn.gate"})
        e = spec.hidden_size
        for i, layer in enumerate(spec.layers):
            m, at, stored = layer.mixer, f"layers.{i}.", f"model.layers.{i}.self_attn."
            assert isinstance(m, Qrwkv6)
            for name in f"x{MIXED_6}":
                out[f"{at}mix_{name}"] = Cut(f"{stored}time_maa_{name}", (1, 1, e))
            out[f"{at}time_decay"] = Cut(f"{stored}time_decay", (1, 1, e))
            out[f"{at}mix_down"] = Cut(f"{stored}time_maa_w1", (e, 5 * m.mix_rank), axes=(1, 0))
            for row, name in enumerate(m.mixed):
                out[f"{at}mix_up_{name}"] = Cut(f"{stored}time_maa_w2", (5, m.mix_rank, e), (row,), axes=(1, 0))
            out[f"{at}w1"] = Cut(f"{stored}time_decay_w1", (e, m.decay_rank), axes=(1, 0))
            out[f"{at}w2"] = Cut(f"{stored}time_decay_w2", (m.decay_rank, e), axes=(1, 0))
        return out

    def ignores(self, name: str, spec: ModelSpec) -> bool:
        return spec.tie_embeddings and name == "lm_head.weight"


class Arwkv7:
    """The `ModelFamily` of RwkvHybridForCausalLM, all of whose layers are RWKV-7's."""

    name = "arwkv7"
    architectures = ("RwkvHybridForCausalLM",)

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields = Fields(config, WHERE)
        require(fields, "wkv_version", 7)
        require(fields, "wkv_layers", "full")
        require(fields, "wkv_has_v_first", True)
        sizes = _sizes(fields)
        e = sizes.hidden_size
        size = fields.integer("head_size", high=e, default=min(64, e))
        if e % size:
            raise ModelError(f"{WHERE}: head_size {size} does not divide the hidden size {e}")
        decay, rate, value, gate = (
            fields.integer(f"{name}_low_rank_dim", high=MAX_SIZE, default=rank)
            for name, rank in (("decay", 64), ("a", 64), ("v", 32), ("gate", 128))
        )
        gated, normed = (fields.flag(f"wkv_has_{name}", default=True) for name in ("gate", "group_norm"))
        mixers = [
            Rwkv7(
                num_heads=e // size, head_dim=size, decay_rank=decay, rate_rank=rate, gate_rank=gate if gated else 0,
                value_rank=value if i else 0, first=i == 0, normed=normed,
            )
            for i in range(sizes.num_layers)
        ]  # fmt: skip
        return _spec(fields, self.name, sizes, mixers)

    def weight_map(self, spec: ModelSpec) -> WeightMap:
        own = {"r": "receptance", "k": "key", "v": "value", "o": "output", "head_norm": "ln_x"}
        out = named(spec, LLAMA_TOP, _FFN | {name: f"self_attn.time_mixer.{to}" for name, to in own.items()})
        e = spec.hidden_size
        for i, layer in enumerate(spec.layers):
            m, at, stored = layer.mixer, f"layers.{i}.", f"model.layers.{i}.self_attn.time_mixer."
            assert isinstance(m, Rwkv7)
            rows = {f"mix_{name}": f"x_{name}" for name in m.mixed} | {name: name for name in ("k_k", "k_a")}
            ranks = {"w": m.decay_rank, "a": m.rate_rank, "v": m.value_rank, "g": m.gate_rank}
            for name, rank in ranks.items():
                if rank:
                    out[f"{at}{name}1"] = Cut(f"{stored}{name}1", (e, rank), axes=(1, 0))
                    out[f"{at}{name}2"] = Cut(f"{stored}{name}2", (rank, e), axes=(1, 0))
                    rows |= {f"{name}0": f"{name}0"} if name != "g" else {}
            out |= {at + name: Cut(stored + to, (1, 1, e)) for name, to in rows.items()}
            out[f"{at}r_k"] = Cut(f"{stored}r_k", (m.num_heads, m.head_dim))
        return out

    def ignores(self, name: str, spec: ModelSpec) -> bool:
        tied = spec.tie_embeddings and name == "lm_head.weight"
        return tied or name.startswith("model.layers.0.self_attn.time_mixer.v")


def _sizes(fields: Fields) -> Sizes:
    return Sizes(
        vocab_size=fields.integer("vocab_size", high=MAX_SIZE),
        hidden_size=fields.integer("hidden_size", high=MAX_SIZE),
        num_layers=fields.integer("num_hidden_layers", high=MAX_LAYERS),
        max_position=UNLIMITED_POSITION,
    )


def _spec(fields: Fields, name: str, sizes: Sizes, mixers: list[Any]) -> ModelSpec:
    require(fields, "hidden_act", "silu")
    norm = Norm(eps=fields.number("rms_norm_eps", default=1e-6))
    ffn = FeedForward(width=fields.integer("intermediate_size", high=MAX_SIZE), gated=True)
    layers = [Layer(mixer=mixer, ffn=ffn, norm=norm) for mixer in mixers]
    return finish(fields, name, sizes, layers, harmless=_HARMLESS, final_norm=norm)
