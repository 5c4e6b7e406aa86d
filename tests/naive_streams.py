"""What the naive loop (`tests.oracle`) does with residuals of several streams and with embeddings for every layer.

Written from the description in `core.model_spec.AltUp` and `PerLayer`, one stream at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.base.bf16 import F32
from penstock.core.model_spec import AltUp, Layer
from penstock.ops.ref.norm import rms_norm
from penstock.ops.ref.pointwise import ACTIVATIONS
from penstock.ops.ref.product import as_float32


def per_layer_inputs(model: Any, token_ids: Sequence[int], x: F32) -> F32:
    """[T, L, width]: what each layer is given."""
    spec = model.spec
    ple, num_layers = spec.per_layer, len(spec.layers)
    table = as_float32(model.weights["ple_embed"])
    rows = np.stack([table[i if i < ple.rows else 0] for i in token_ids]) * np.float32(ple.width**0.5)
    projected = model._linear(x, "ple_in") * np.float32(spec.hidden_size**-0.5)
    shape = (len(x), num_layers, ple.width)
    normed = rms_norm(projected.reshape(shape), model._vector("ple_norm"), spec.layers[0].norm.eps)
    return (normed + rows.reshape(shape)) * np.float32(2.0**-0.5)


def given(model: Any, x: F32, p: str, layer: Layer) -> F32:
    """What a layer adds for its tokens."""
    assert layer.per_layer is not None
    own = model._given[:, int(p.split(".")[1])]
    inner = ACTIVATIONS[layer.per_layer.activation](model._linear(x, p + "ple_gate")) * own
    out: F32 = model._norm(model._linear(inner, p + "ple_out"), p + "ple_post_norm", layer.norm)
    return out


def as_large(x: F32, like: F32) -> F32:
    n = np.float32(x.shape[-1])
    size = np.sqrt(np.add.reduce(like * like, axis=-1, keepdims=True) / n)
    square = np.add.reduce(x * x, axis=-1, keepdims=True) / n
    out: F32 = x * (size / np.sqrt(np.maximum(square, np.float32(1e-5))))
    return out


def begin(model: Any, x: F32, up: AltUp) -> list[F32]:
    return [x, *(as_large(model._linear(x, f"altup_in_{i}"), x) for i in range(1, up.streams))]


def end(model: Any, streams: list[F32], up: AltUp) -> F32:
    out = streams[0]
    for i in range(1, up.streams):
        out = out + as_large(model._linear(streams[i], f"altup_out_{i}"), streams[0])
    return out * np.float32(1.0 / up.streams)


def _routed(model: Any, x: F32, p: str, layer: Layer) -> F32:
    weight = model._vector(p + "altup_norm") * np.float32(1.0 / model.spec.hidden_size)
    out: F32 = np.tanh(model._linear(rms_norm(x, weight, layer.norm.eps), p + "altup_router"))
    return out


def layer_of_streams(model: Any, streams: list[F32], p: str, layer: Layer) -> list[F32]:
    up = layer.altup
    assert up is not None
    weights = model._linear(_routed(model, streams[up.active], p, layer), p + "altup_predict")
    predicted = []
    for i, s in enumerate(streams):
        for j, other in enumerate(streams):
            s = s + weights[:, up.streams * i + j, None] * other
        predicted.append(s)
    x = halves(model, predicted[up.active], p, layer)
    weights = model._linear(_routed(model, x, p, layer), p + "altup_correct")
    news = x - predicted[up.active]
    out = [s + news * (np.float32(1.0) + weights[:, i, None]) for i, s in enumerate(predicted)]
    read = out[up.active]
    if up.scale:
        read = read * model._vector(p + "altup_scale")
    if layer.per_layer is not None:
        added = given(model, read, p, layer)
        out = [out[0], *(s + added for s in out[1:])]
    return out


def halves(model: Any, x: F32, p: str, layer: Layer) -> F32:
    """A layer with norms on both sides of its halves, and maybe a path beside its mixer."""
    h = model._norm(x, p + "attn_norm", layer.norm)
    x = x + model._norm(model._mixer(h, p, layer), p + "attn_post_norm", layer.norm)
    if layer.laurel is not None:
        beside = model._linear(model._linear(h, p + "laurel_in"), p + "laurel_out")
        x = (x + (h + model._norm(beside, p + "laurel_norm", layer.norm))) * np.float32(2.0**-0.5)
    inner = model._feed_forward(model._norm(x, p + "ffn_norm", layer.norm), p, layer.ffn)
    out: F32 = x + model._norm(inner, p + "ffn_post_norm", layer.norm)
    return out


def cut_off(gate: F32, share: float) -> F32:
    """What is left of gates of which a share is idle, if they are normally distributed."""
    from scipy.stats import norm

    n = np.float32(gate.shape[-1])
    rest = gate - np.add.reduce(gate, axis=-1, keepdims=True) / n
    deviation = np.sqrt(np.add.reduce(rest * rest, axis=-1, keepdims=True) / n)
    out: F32 = np.maximum(rest - deviation * np.float32(norm.ppf(share)), np.float32(0))
    return out
