"""The operations of a block that several layers share."""

from __future__ import annotations

from penstock.core.model_spec import SharedBlock
from penstock.model.attention import attention
from penstock.model.emitter import Emitter, Place


def shared_block(b: Emitter, p: str, m: SharedBlock, place: Place, x: str, y: str) -> None:
    """Register x -> register y; `p`: prefix of the layer's own weights. Register `embedded` holds the embeddings."""

    def product(read: str, output: str, name: str) -> None:
        b.linear(read, output, m.shared + name)
        if m.qkv_rank and name in ("q", "k", "v"):
            b.linear(read, "low", f"{p}{name}_low")
            b.linear("low", "low", f"{p}{name}_high")
            b.emit("add", (output, "low"), output)

    b.emit("concat", (x, "embedded"), "both")
    b.raw_norm("both", "both", m.shared + "attn_norm", "rms", m.eps)
    attention(b, p, m, place, "both", y, product)
    b.raw_norm(y, "h", m.shared + "ffn_norm", "rms", m.eps)
    if m.ffn_rank:
        b.linear("h", "low", p + "ffn_low")
    for name in ("gate", "up"):
        b.linear("h", name, m.shared + name)
        if m.ffn_rank:
            b.linear("low", "high", f"{p}{name}_high")
            b.emit("add", (name, "high"), name)
    b.emit("activate_gated", ("gate", "up"), "up", bound=(m.ffn_activation, None))
    b.linear("up", y, m.shared + "down")
    b.linear(y, y, p + "out")
