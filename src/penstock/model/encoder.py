"""The operations of an encoder: attention over a whole text, and what becomes of a pooled vector."""

from __future__ import annotations

from penstock.core.model_spec import EncoderAttention
from penstock.core.pooler import PoolingSpec
from penstock.model.emitter import Emitter, Place


def encoder_attention(b: Emitter, p: str, m: EncoderAttention, place: Place | None, x: str, y: str) -> None:
    """Register x -> register y; `p`: prefix of the layer's weights. Nothing is kept, so it has no place."""
    for name in ("q", "k", "v"):
        b.linear(x, name, p + name)
        b.emit("heads", (name,), name, bound=(m.num_heads,))
        if m.rope is not None and name != "v":
            b.rope(name, m.rope)
    b.emit("attend_text", ("q", "k", "v", "step"), "a", bound=(m.head_dim**-0.5, m.reach))
    b.emit("flat", ("a",), "a")
    b.linear("a", y, p + "o")


def pooled_head(b: Emitter, pooler: PoolingSpec | None) -> None:
    """Register x, a pooled vector, -> register logits: the model's vector, or a number for each label."""
    for i, layer in enumerate(pooler.head if pooler is not None else ()):
        b.linear("x", "x", f"head.{i}")
        if layer.activation != "none":
            b.emit("activate", ("x",), "x", bound=(layer.activation,))
        if layer.norm_eps is not None:
            b.raw_norm("x", "x", f"head.{i}.norm", "layer", layer.norm_eps)
    b.emit("scale", ("x",), "logits", bound=(1.0,))
