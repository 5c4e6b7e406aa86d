"""What of a spec follows from the file and not from the family: how the converter of llama.cpp stores weights.

Norms that keep their weights minus one have the one added; decays are stored as they are, not as logarithms; rows of q
and k may be in an order in which rotary pairs are neighbours; biases are there or not; newer files have the two halves
of latent attention's `kv_b` apart.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from penstock.core.mixers.rwkv import MIXED_6
from penstock.core.model_spec import (
    Attention,
    FeedForward,
    GatedDelta,
    Latent,
    Layer,
    Mamba,
    Mamba2,
    ModelSpec,
    Norm,
    QkNorm,
    Qrwkv6,
    Rwkv6,
)
from penstock.families.checkpoint import LOADABLE_DTYPES
from penstock.families.gguf.header import Header
from penstock.families.reading import MAX_LAYERS

_CODED_DTYPE = "bfloat16"
"""What decoded weights are held in. float16 keeps three bits more of them and reads prompts at half the speed; both
are nearer to the exact values than engines that round rows to 8 bits (docs/guides/models-and-weights.md)."""

_change = msgspec.structs.replace
N = TypeVar("N", Norm, QkNorm)


def as_stored(spec: ModelSpec, h: Header, *, neighbours: bool, in_turn: bool = False) -> ModelSpec:
    """`spec` as the family makes it from the metadata, with what the tensors say; `neighbours`, `in_turn`: how rotary
    pairs and value heads of the delta rule lie.

    What one block has, all have: a file that lacks a bias in one of them is found to be incomplete.
    """
    everywhere = {name.split(".", 2)[-1] for name in h.tensors if name.startswith("blk.")}
    has = {names: not everywhere.isdisjoint(names) for names in _TOLD}
    made = {layer: _layer(layer, has, neighbours, in_turn) for layer in dict.fromkeys(spec.layers)}
    return _change(
        spec,
        layers=_weighed([made[layer] for layer in spec.layers], h),
        final_norm=None if spec.final_norm is None else _plain(spec.final_norm),
        embed_norm=None if spec.embed_norm is None else _plain(spec.embed_norm),
        tie_embeddings=not h.has("output.weight"),
        lm_head_bias=h.has("output.bias"),
        dtype=LOADABLE_DTYPES.get(h.tensors["token_embd.weight"].dtype, _CODED_DTYPE),
    )


_QKV, _O, _FFN, _KEY = ("attn_q.bias", "attn_qkv.bias"), ("attn_output.bias",), ("ffn_up.bias",), ("attn_k_b.weight",)
_CONV, _PROJ, _KEY_BIAS = ("ssm_conv1d.bias",), ("ssm_in.bias",), ("time_mix_key.bias",)
_TOLD: tuple[tuple[str, ...], ...] = (_QKV, _O, _FFN, _KEY, _CONV, _PROJ, _KEY_BIAS)


def _weighed(layers: list[Layer], h: Header) -> tuple[Layer, ...]:
    """RWKV-6: llama.cpp halves the residual behind every so many layers, as float16 once needed, and files have the
    weights that add to it divided by as much. Here nothing is halved: what layers add is multiplied by it again."""
    if not layers or not isinstance(layers[0].mixer, Rwkv6):
        return tuple(layers)
    every = h.fields.integer("rescale_every_n_layers", low=0, high=MAX_LAYERS, default=0) or len(layers)
    return tuple(_change(layer, residual_scale=2.0 ** (i // every)) for i, layer in enumerate(layers))


def _plain(norm: N) -> N:
    return _change(norm, offset=0.0)


def _layer(layer: Layer, has: dict[tuple[str, ...], bool], neighbours: bool, in_turn: bool) -> Layer:
    mixer, ffn = layer.mixer, layer.ffn
    if isinstance(mixer, Attention):
        rope = None if mixer.rope is None else _change(mixer.rope, interleaved=neighbours)
        norm = None if mixer.qk_norm is None else _plain(mixer.qk_norm)
        mixer = _change(mixer, rope=rope, qk_norm=norm, qkv_bias=has[_QKV], o_bias=has[_O])
    elif isinstance(mixer, Latent):
        rope = None if mixer.rope is None else _change(mixer.rope, interleaved=neighbours)
        mixer = _change(mixer, rope=rope, split=has[_KEY])
    elif isinstance(mixer, GatedDelta):
        mixer = _change(mixer, decay_is_log=False, in_turn=in_turn and mixer.value_heads > mixer.key_heads)
    elif isinstance(mixer, Qrwkv6):
        mixer = _change(mixer, mixed=MIXED_6, bias=has[_KEY_BIAS])
    elif isinstance(mixer, Mamba | Mamba2):
        mixer = _change(mixer, decay_is_log=False, conv_bias=has[_CONV], proj_bias=has[_PROJ])
    if isinstance(ffn, FeedForward):
        ffn = _change(ffn, bias=has[_FFN])
    return _change(layer, mixer=mixer, ffn=ffn, norm=_plain(layer.norm))
