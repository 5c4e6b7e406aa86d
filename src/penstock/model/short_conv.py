"""The operations of a short convolution."""

from __future__ import annotations

from penstock.core.model_spec import ShortConv
from penstock.model.emitter import Emitter, Place
from penstock.model.mamba import convolve, split


def short_conv(b: Emitter, p: str, m: ShortConv, place: Place, x: str, y: str) -> None:
    """Register x -> register y; `p`: prefix of the layer's weights."""
    b.linear(x, "a", p + "in")
    split(b, "a", {"before": m.width, "after": m.width, "u": m.width})
    b.emit("multiply", ("before", "u"), "u")
    convolve(b, p, place, "u", None)
    b.emit("multiply", ("after", "u"), "u")
    b.linear("u", y, p + "o")
