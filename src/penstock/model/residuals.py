"""What some models do with residuals besides adding to them: several streams, embeddings for every layer, a path beside
the mixer (`core.model_spec.AltUp`, `PerLayer`, `Layer.laurel`). For all other models these functions do nothing."""

from __future__ import annotations

import numpy as np

from penstock.core.model_spec import AltUp, Layer, Norm
from penstock.model import per_layer
from penstock.model.emitter import Emitter
from penstock.model.streams import collapse


def begin(b: Emitter) -> None:
    """Register x, the embedding, -> what the first layer reads."""
    if b.spec.streams is not None:
        b.emit("spread", ("x",), "x", bound=(b.spec.streams.num,))
    if (ple := b.spec.per_layer) is not None:
        per_layer.prepare(b, ple, b.spec.layers[0].norm)
    if (up := b.spec.altup) is not None:
        streams = ["x", *(f"stream{i}" for i in range(1, up.streams))]
        for i, name in enumerate(streams[1:], 1):
            b.linear("x", name, f"altup_in_{i}")
            b.emit("match_magnitude", (name, "x"), name)
        b.emit("stack_streams", tuple(streams), "x")


def enter(b: Emitter, p: str, layer: Layer) -> None:
    """Register x, what a layer is given, -> what its halves work on."""
    if layer.altup is not None:
        _predict(b, p, layer.altup, layer.norm)


def beside(b: Emitter, p: str, layer: Layer, x: str) -> None:
    """Register "laurel": what the mixer reads, `x`, and a path of low rank beside it."""
    if layer.laurel is not None:
        b.linear(x, "laurel", p + "laurel_in")
        b.linear("laurel", "laurel", p + "laurel_out")
        b.norm("laurel", "laurel", p + "laurel_norm", layer.norm)
        b.emit("add", (x, "laurel"), "laurel")


def joined(b: Emitter, layer: Layer) -> None:
    """Register x, behind the mixer's half, with what runs beside it."""
    if layer.laurel is not None:
        b.emit("add", ("x", "laurel"), "x")
        b.scale("x", 2.0**-0.5)


def leave(b: Emitter, p: str, layer: Layer) -> None:
    """Register x, behind both halves, -> what the next layer is given."""
    if layer.altup is not None:
        _correct(b, p, layer.altup, layer.norm)
    if layer.per_layer is not None:
        per_layer.given(b, p, layer.per_layer, layer.norm, "x" if layer.altup is None else "active")
        b.emit("add" if layer.altup is None else "add_streams", ("x", "y"), "x")


def end(b: Emitter) -> None:
    """Register x, behind all layers, -> one row of E numbers: the mean of all streams, each as large as the first; or
    their sum by learned weights (`core.mixers.streams`)."""
    if b.spec.streams is not None:
        collapse(b, "head_streams", b.spec.streams, "x")
    up, e = b.spec.altup, b.spec.hidden_size
    if up is None:
        return
    b.values["streams"] = b.values["x"]
    b.emit("columns", ("streams",), "first", bound=(0, e))
    b.values["x"] = b.values["first"]
    for i in range(1, up.streams):
        b.emit("columns", ("streams",), "y", bound=(i * e, (i + 1) * e))
        b.linear("y", "y", f"altup_out_{i}")
        b.emit("match_magnitude", ("y", "first"), "y")
        b.emit("add", ("x", "y"), "x")
    b.scale("x", 1.0 / up.streams)


def _predict(b: Emitter, p: str, up: AltUp, norm: Norm) -> None:
    """Register x, all streams, -> "streams", what they are predicted to be, and x, the active one of these."""
    _active(b, up, "x", "active")
    _router(b, p, norm, "active")
    b.linear("routed", "routed", p + "altup_predict")
    b.emit("mix_streams", ("x", "routed"), "streams")
    _active(b, up, "streams", "x")


def _correct(b: Emitter, p: str, up: AltUp, norm: Norm) -> None:
    """Register x, what the layer made of the active stream, -> all streams; "active" is what a `PerLayer` reads."""
    _router(b, p, norm, "x")
    b.linear("routed", "routed", p + "altup_correct")
    b.emit("correct_streams", ("streams", "x", "routed"), "x", bound=(up.active,))
    _active(b, up, "x", "active")
    if up.scale:
        b.emit("scale_columns", ("active",), "active", bound=(b.array(p + "altup_scale"),))


def _active(b: Emitter, up: AltUp, streams: str, output: str) -> None:
    e = b.spec.hidden_size
    b.emit("columns", (streams,), output, bound=(up.active * e, (up.active + 1) * e))


def _router(b: Emitter, p: str, norm: Norm, x: str) -> None:
    weight = b.array(p + "altup_norm") * np.float32(1.0 / b.spec.hidden_size)
    b.emit("rms_norm", (x,), "routed", bound=(weight, norm.eps))
    b.linear("routed", "routed", p + "altup_router")
    b.emit("soft_cap", ("routed",), "routed", bound=(1.0,))  # tanh
