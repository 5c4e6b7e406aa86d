"""RecurrentGemma: two layers of a gated linear recurrence to one of attention over a window.

Source: De et al., Griffin, arXiv 2402.19427; Botev et al., RecurrentGemma, arXiv 2404.07839; absent fields as in
transformers' RecurrentGemmaConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from penstock.base.bf16 import narrow, widen
from penstock.base.errors import ModelError, UnsupportedError
from penstock.core.mixers.gated_lru import GatedLru
from penstock.core.model_spec import Layer, ModelSpec
from penstock.core.weight_map import Cut, WeightMap
from penstock.families.fields import Fields
from penstock.families.llama_like import LlamaNames, attention, read_ffn, read_norm, start
from penstock.families.mamba import MAX_TAPS
from penstock.families.naming import LLAMA_TOP
from penstock.families.positions import read_rope
from penstock.families.reading import MAX_POSITION, MAX_SIZE, WHERE, finish, require
from penstock.formats.files import quoted

_TRAINED = 8192
"""Tokens of a text in training. No field says it; what is kept does not grow, but the table of turns does."""
_TANH = "gelu_pytorch_tanh"
_KINDS = {"recurrent": True, "linear_attention": True, "attention": False, "sliding_attention": False}
"""Names of kinds of layers, old and new -> whether they recur."""
_HARMLESS = ("w_init_variance_scale", "final_w_init_variance_scale", "attention_dropout")
_NAMES = {
    "attn_norm": "temporal_pre_norm", "ffn_norm": "channel_pre_norm", "q": "temporal_block.q_proj",
    "k": "temporal_block.k_proj", "v": "temporal_block.v_proj", "o": "temporal_block.o_proj",
    "gate": "mlp_block.gate_proj", "up": "mlp_block.up_proj", "down": "mlp_block.down_proj",
}  # fmt: skip
_RECURRENT = {"u": "linear_x", "z": "linear_y", "o": "linear_out", "conv": "conv_1d"}
_GATES = {"input_gate": "input_gate", "state_gate": "recurrent_gate"}


class RecurrentGemma(LlamaNames):
    """The `ModelFamily` of RecurrentGemmaForCausalLM."""

    name = "recurrent_gemma"
    architectures = ("RecurrentGemmaForCausalLM",)
    top = LLAMA_TOP | {"final_norm": "model.final_norm"}
    names = _NAMES

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields, sizes, heads = start(config, max_position_embeddings=_TRAINED)
        norm, act = read_norm(fields, offset=1.0), "hidden_activation"
        require(fields, "embeddings_scale_by_sqrt_dim", True)
        window = fields.integer("attention_window_size", high=MAX_POSITION, default=2048)
        require(fields, "sliding_window", window)
        mixer = msgspec.structs.replace(
            attention(heads, rope=read_rope(fields, heads.head_dim, sizes.max_position, partial=0.5), window=window),
            qkv_bias=fields.flag("attention_bias"), o_bias=True,
        )  # fmt: skip
        ffn = read_ffn(fields, act=act, default=_TANH, bias=True)
        if ffn.width % 2:
            raise ModelError(f"{WHERE}: intermediate_size {ffn.width} counts gate and up together, so it must be even")
        ffn = msgspec.structs.replace(ffn, width=ffn.width // 2)
        if ffn.activation not in ("gelu_tanh", "gelu", "silu", "relu"):
            raise UnsupportedError(f"{WHERE}: no RecurrentGemma is gated by {ffn.activation}")
        width = fields.integer("lru_width", high=MAX_SIZE, default=sizes.hidden_size)
        if width % heads.num_heads:
            raise ModelError(f"{WHERE}: num_attention_heads {heads.num_heads} does not divide lru_width {width}")
        lru = GatedLru(
            width=width, blocks=heads.num_heads, conv=fields.integer("conv1d_width", low=2, high=MAX_TAPS, default=4),
            activation=ffn.activation,
        )  # fmt: skip
        layers = [
            Layer(mixer=lru if recurs else mixer, ffn=ffn, norm=norm) for recurs in _kinds(fields, sizes.num_layers)
        ]
        # What embeddings are multiplied by is kept in bfloat16, whatever type the weights have.
        scale = float(widen(narrow(np.array([sizes.hidden_size**0.5])))[0])
        return finish(
            fields, self.name, sizes, layers, bos=(2,), eos=(1,), tie=True, final_norm=norm, harmless=_HARMLESS,
            embed_scale=scale, logit_soft_cap=fields.number("logits_soft_cap", default=30.0),
        )  # fmt: skip

    def weight_map(self, spec: ModelSpec) -> WeightMap:
        out = dict(super().weight_map(spec))
        for i, layer in enumerate(spec.layers):
            if isinstance(layer.mixer, GatedLru):
                block = f"model.layers.{i}.temporal_block."
                out |= {f"layers.{i}.{name}": place for name, place in _recurrent(layer.mixer, block).items()}
        return out


def _kinds(fields: Fields, num_layers: int) -> list[bool]:
    """Whether each layer recurs: `block_types`, again and again."""
    pattern = fields.strings("block_types") or fields.strings("_block_types") or ["recurrent"] * 2 + ["attention"]
    whole = fields.strings("layers_block_type") or fields.strings("layer_types")
    fields.strings("_block_types"), fields.strings("layer_types")
    names = whole or [pattern[i % len(pattern)] for i in range(num_layers)]
    if len(names) != num_layers:
        raise ModelError(f"{WHERE} gives the kinds of {len(names)} layers, but the model has {num_layers}")
    if unknown := [name for name in names if name not in _KINDS]:
        raise UnsupportedError(f"{WHERE} has layers of the kind {quoted(unknown[0])}; known: recurrent, attention")
    return [_KINDS[name] for name in names]


def _recurrent(m: GatedLru, block: str) -> dict[str, str | Cut]:
    """Blocks of the gates lie with their inputs first, and heads have their biases."""
    size = m.width // m.blocks
    out: dict[str, str | Cut] = {}
    for name, module in _RECURRENT.items():
        out |= {name: f"{block}{module}.weight", name + ".bias": f"{block}{module}.bias"}
    out["conv"] = Cut(f"{block}conv_1d.weight", (m.width, 1, m.conv))
    out["lambda"] = f"{block}rg_lru.recurrent_param"
    for name, stored in _GATES.items():
        out[name] = Cut(f"{block}rg_lru.{stored}_weight", (m.blocks, size, size), axes=(0, 2, 1))
        out[name + ".bias"] = Cut(f"{block}rg_lru.{stored}_bias", (m.blocks, size))
    return out
