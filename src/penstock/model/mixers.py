"""What mixes tokens: the kind in a spec -> the function that emits its operations."""

from __future__ import annotations

from collections.abc import Callable

from penstock.core.model_spec import (
    Attention,
    BlockAttention,
    Diagonal,
    EncoderAttention,
    EntryAttention,
    GatedDelta,
    GatedLru,
    Latent,
    Lightning,
    Mamba,
    Mamba2,
    Mlstm,
    Qrwkv6,
    Recurrent,
    Rwkv4,
    Rwkv5,
    Rwkv6,
    Rwkv7,
    SharedBlock,
    ShortConv,
)
from penstock.model.attention import attention, latent
from penstock.model.blocks import block_attention
from penstock.model.compressed import compressed
from penstock.model.delta import gated_delta
from penstock.model.diagonal import diagonal, gated_lru
from penstock.model.encoder import encoder_attention
from penstock.model.mamba import mamba, mamba2
from penstock.model.mlstm import mlstm
from penstock.model.recurrent import lightning, recurrent
from penstock.model.rwkv import qrwkv6, rwkv4, rwkv5, rwkv6, rwkv7
from penstock.model.shared_block import shared_block
from penstock.model.short_conv import short_conv

MIXERS: dict[type, Callable[..., None]] = {
    Attention: attention, Latent: latent, Recurrent: recurrent, Rwkv4: rwkv4, Rwkv5: rwkv5, Rwkv6: rwkv6,
    Rwkv7: rwkv7, Qrwkv6: qrwkv6, Mamba: mamba, Mamba2: mamba2, GatedDelta: gated_delta, ShortConv: short_conv,
    Lightning: lightning, EntryAttention: compressed, GatedLru: gated_lru, Mlstm: mlstm, Diagonal: diagonal,
    SharedBlock: shared_block, BlockAttention: block_attention, EncoderAttention: encoder_attention,
}  # fmt: skip
"""Each is called with emitter, prefix of the layer's weights, mixer, place, and the registers it reads and fills."""
