"""Residuals of several streams: what is done before, around and behind the layers (`core.model_spec.AltUp`)."""

from __future__ import annotations

import numpy as np

from penstock.core.model_spec import AltUp, Norm
from penstock.model.emitter import Emitter


def begin(b: Emitter, up: AltUp) -> None:
    """Register x, the embedding, -> all streams."""
    streams = ["x"]
    for i in range(1, up.streams):
        streams.append(f"stream{i}")
        b.linear("x", streams[i], f"altup_in_{i}")
        b.emit("match_magnitude", (streams[i], "x"), streams[i])
    b.emit("stack_streams", tuple(streams), "x")


def predict(b: Emitter, p: str, up: AltUp, norm: Norm) -> None:
    """Register x, all streams, -> "streams", what they are predicted to be, and x, the active one of these."""
    _active(b, up, "x", "active")
    _router(b, p, norm, "active")
    b.linear("routed", "routed", p + "altup_predict")
    b.emit("mix_streams", ("x", "routed"), "streams")
    _active(b, up, "streams", "x")


def correct(b: Emitter, p: str, up: AltUp, norm: Norm) -> None:
    """Register x, what the layer made of the active stream, -> all streams; "active" is what a `PerLayer` reads."""
    _router(b, p, norm, "x")
    b.linear("routed", "routed", p + "altup_correct")
    b.emit("correct_streams", ("streams", "x", "routed"), "x", bound=(up.active,))
    _active(b, up, "x", "active")
    if up.scale:
        b.emit("scale_columns", ("active",), "active", bound=(b.array(p + "altup_scale"),))


def end(b: Emitter, up: AltUp) -> None:
    """Register x, all streams, -> their mean, each as large as the first."""
    e = b.spec.hidden_size
    b.values["streams"] = b.values["x"]
    b.emit("columns", ("streams",), "first", bound=(0, e))
    b.values["x"] = b.values["first"]
    for i in range(1, up.streams):
        b.emit("columns", ("streams",), "y", bound=(i * e, (i + 1) * e))
        b.linear("y", "y", f"altup_out_{i}")
        b.emit("match_magnitude", ("y", "first"), "y")
        b.emit("add", ("x", "y"), "x")
    b.scale("x", 1.0 / up.streams)


def _active(b: Emitter, up: AltUp, streams: str, output: str) -> None:
    e = b.spec.hidden_size
    b.emit("columns", (streams,), output, bound=(up.active * e, (up.active + 1) * e))


def _router(b: Emitter, p: str, norm: Norm, x: str) -> None:
    weight = b.array(p + "altup_norm") * np.float32(1.0 / b.spec.hidden_size)
    b.emit("rms_norm", (x,), "routed", bound=(weight, norm.eps))
    b.linear("routed", "routed", p + "altup_router")
    b.emit("soft_cap", ("routed",), "routed", bound=(1.0,))  # tanh
