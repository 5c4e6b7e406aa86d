"""The operations of xLSTM's matrix memory."""

from __future__ import annotations

from penstock.core.model_spec import Mlstm
from penstock.model.emitter import Emitter, Place


def mlstm(b: Emitter, p: str, m: Mlstm, place: Place, x: str, y: str) -> None:
    """Register x -> register y; `p`: prefix of the layer's weights."""
    for name in "qkv":
        b.linear(x, name, p + name)
        b.emit("heads", (name,), name, bound=(m.num_heads,))
    b.linear(x, "z", p + "z")
    for name in "if":
        b.linear(x, name, p + name)
        b.emit("soft_cap", (name,), name, bound=(m.soft_cap,))
    b.emit("mlstm_gates", ("i", "f", "q", "k", "step"), "gates", bound=(*place, m.eps))
    b.emit("mlstm", ("q", "k", "v", "gates", "step"), "a", bound=place)
    weight = b.array(p + "head_norm").reshape(m.num_heads, m.value_dim)
    b.emit("layer_norm", ("a",), "a", bound=(weight, None, m.norm_eps))
    b.emit("flat", ("a",), "a")
    b.emit("gate_rows", ("a", "z"), "a")
    b.linear("a", y, p + "o")
