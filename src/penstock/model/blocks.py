"""The operations of attention over chosen blocks."""

from __future__ import annotations

from penstock.core.mixers.blocks import BlockAttention
from penstock.model.emitter import Emitter, Place


def block_attention(b: Emitter, p: str, m: BlockAttention, place: Place, x: str, y: str) -> None:
    """Register x -> register y; `p`: prefix of the layer's weights."""
    heads = {"q": m.num_heads, "k": m.num_kv_heads, "v": m.num_kv_heads, "index_q": m.num_kv_heads, "index_k": 1}
    for name, number in heads.items():
        b.linear(x, name, p + name)
        b.emit("heads", (name,), name, bound=(number,))
        if name != "v":
            b.raw_norm(name, name, f"{p}{name}_norm", m.norm.kind, m.norm.eps, m.norm.offset)
            b.rope(name, m.rope)
    b.emit("write_kv", ("step", "k", "v"), "", bound=(*place, ("k", "v")))
    # One plane is written where the operation takes two: the same rows twice.
    b.emit("write_kv", ("step", "index_k", "index_k"), "", bound=(*place, ("index", "index")))
    b.emit(
        "attend_blocks", ("q", "index_q", "step"), "a", bound=(*place, m.block, m.top_k, m.local, m.head_dim**-0.5),
        width=m.num_heads * m.head_dim,
    )  # fmt: skip
    b.emit("flat", ("a",), "a")
    b.linear("a", y, p + "o")
