"""The operations of a layer whose residual is several streams: see `core.mixers.streams.Streams`."""

from __future__ import annotations

from collections.abc import Callable

from penstock.core.model_spec import Layer, Streams
from penstock.model.emitter import Emitter, Place

Half = Callable[[Emitter, str, Layer, Place | None, str, str], None]
"""Emits a half of a layer, from one register to another."""


def halves(b: Emitter, p: str, layer: Layer, place: Place | None, mixer: Half, feed_forward: Half) -> None:
    """Register x is the streams: a half reads a mixture of them, and its result goes to each."""
    streams = layer.streams
    assert streams is not None, "the caller has looked"
    assert layer.placement == "pre", "streams have norms in front"
    for name, half in (("attn", mixer), ("ffn", feed_forward)):
        collapse(b, f"{p}{name}_streams", streams, "h")
        b.norm("h", "h", f"{p}{name}_norm", layer.norm)
        half(b, p, layer, place, "h", "y")
        b.emit("blend_streams", ("x", "streams", "y"), "x", bound=(streams.num,))


def collapse(b: Emitter, name: str, streams: Streams, output: str) -> None:
    """What is read of the streams in x, and in register "streams" all that they weigh."""
    b.raw_norm("x", "streams", "", "rms", streams.norm_eps)
    b.emit("linear", ("streams",), "streams", name)
    b.emit(
        "weigh_streams", ("streams",), "streams",
        bound=(b.array(name + ".scale"), b.array(name + ".base"), streams.num, streams.iterations, streams.eps),
    )  # fmt: skip
    b.emit("collapse_streams", ("x", "streams"), output, bound=(streams.num,))
