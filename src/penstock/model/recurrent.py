"""The operations of mixers that keep a state instead of a cache."""

from __future__ import annotations

from penstock.core.model_spec import Recurrent
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
