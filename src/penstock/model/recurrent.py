"""The operations of mixers that keep a state instead of a cache."""

from __future__ import annotations

import numpy as np

from penstock.core.model_spec import Lightning, Recurrent
from penstock.model.emitter import Emitter, Place


def recurrent(b: Emitter, p: str, m: Recurrent, place: Place, x: str, y: str) -> None:
    """Register x -> register y; `p`: prefix of the layer's weights."""
    for name in ("q", "k", "v"):
        b.linear(x, name, p + name)
        b.emit("heads", (name,), name, bound=(m.num_heads,))
    b.linear(x, "decay", p + "decay")
    b.emit("recurrent", ("q", "k", "v", "decay", "step"), "a", bound=place)
    b.emit("flat", ("a",), "a")
    b.linear("a", y, p + "o")


def lightning(b: Emitter, p: str, m: Lightning, place: Place, x: str, y: str) -> None:
    """As `recurrent`."""
    for name in ("q", "k", "v"):
        b.linear(x, name, p + name)
        if m.activation is not None:
            b.emit("activate", (name,), name, bound=(m.activation,))
        b.emit("heads", (name,), name, bound=(m.num_heads,))
        if m.rope is not None and name != "v":
            b.rope(name, m.rope)
    b.scale("q", m.scale)
    b.linear(x, "z", p + "z")
    b.emit("retention", ("q", "k", "v", "step"), "a", bound=(*place, np.array(m.decay, np.float32)))
    if m.norm == "head":
        b.raw_norm("a", "a", p + "state_norm", "rms", m.eps)
    b.emit("flat", ("a",), "a")
    if m.norm == "all":
        b.raw_norm("a", "a", p + "state_norm", "rms", m.eps)
    if m.gate == "silu":
        b.emit("activate_gated", ("z", "a"), "a", bound=("silu",))
    else:
        b.emit("gate_rows", ("a", "z"), "a")
    b.linear("a", y, p + "o")
