"""ModelSpec -> Graph: the only place that knows how the parts of a decoder follow each other."""

from __future__ import annotations

import numpy as np

from penstock.core.cache_spec import CacheGroup
from penstock.core.model_spec import ChannelMix, Experts, FeedForward, Layer, ModelSpec
from penstock.model import residuals
from penstock.model.checks import check_weights
from penstock.model.emitter import PLAIN, Emitter, Place, Reading, Weights
from penstock.model.ends import embedding, head, last
from penstock.model.feed_forward import experts, feed_forward
from penstock.model.graph import NO_LAYER, Graph
from penstock.model.mixers import MIXERS
from penstock.model.places import places_of
from penstock.model.rwkv import channel_mix
from penstock.model.streams import halves


def build(
    spec: ModelSpec, weights: Weights, groups: tuple[CacheGroup, ...], *, max_model_len: int, rotation: str = "none",
    reading: Reading = PLAIN,
) -> Graph:  # fmt: skip
    """The operations of `spec`, with its weights.

    `weights` maps every name of `core.model_spec.weight_shapes` to float32, float16 or bfloat16 bits (uint16); matrices
    are kept as they are (no copy), vectors are widened. `groups` says where each layer caches: in one of them, or with
    its newest and first tokens in further ones (`core.model_spec.cache_groups`). Rope tables hold `max_model_len`
    positions. `rotation`: "hadamard" turns the heads of softmax attention before they are cached. `reading`: how
    attention uses the cache, if a KV selector wants it otherwise.

    Raises: ModelError for weights that are missing, unknown or of wrong shape or type.
    """
    check_weights(spec, weights)
    places, kept, further = places_of(spec, groups)
    b = Emitter(spec, weights, max_model_len, kept, rotation, reading, further)
    embedding(b)
    between = [b.values["x"]]
    for n, layer in enumerate(spec.layers):
        b.layer = n
        if layer.beside or layer.forgets:
            assert n, "there is a layer before"
            assert spec.layers[n - 1].ffn is None, "a mixer stands beside a mixer, or reads what one added"
            b.values["before"] = between[n - 1]
        _layer(b, f"layers.{n}.", layer, places.get(n))
        between.append(b.values["x"])
    b.layer = NO_LAYER
    last(b)
    at, hidden = len(b.nodes), b.values["x"]
    head(b)
    return Graph(b.nodes, at, hidden, b.values["logits"], tuple(between), spec.vocab_size, max_model_len)


def _layer(b: Emitter, p: str, layer: Layer, place: Place | None) -> None:
    """Registers: x the residual; h what a half reads; y what it adds."""
    if layer.streams is not None:
        halves(b, p, layer, place, _mixer, _feed_forward)
        return
    if layer.parallel:
        _parallel(b, p, layer, place)
        return
    residuals.enter(b, p, layer)
    if layer.mixer is not None:
        x = _read(b, p, layer)
        residuals.beside(b, p, layer, x)
        _mixer(b, p, layer, place, x, "y")
        _after(b, p + "attn", layer)
        residuals.joined(b, layer)
    if layer.ffn is not None:
        _feed_forward(b, p, layer, place, _before(b, p + "ffn_norm", layer), "y")
        _after(b, p + "ffn", layer)
    residuals.leave(b, p, layer)
    if layer.output_scale:
        b.scale("x", float(b.array(p + "layer_scale")[0]))


def _read(b: Emitter, p: str, layer: Layer) -> str:
    """The register that a mixer reads."""
    if layer.beside:
        # Worked out once more, from values that are there if the layer before is left out (early exits).
        b.norm("before", "h", f"layers.{b.layer - 1}.attn_norm", layer.norm)
        x = "h"
    else:
        x = _before(b, p + "attn_norm", layer)
    if layer.mixer_scale != 1.0:
        b.emit("scale", (x,), "h", bound=(layer.mixer_scale,))
        x = "h"
    return x


def _before(b: Emitter, name: str, layer: Layer) -> str:
    """The register that a half reads."""
    if layer.placement not in ("pre", "both", "normed") or (layer.raw_mixer and name.endswith("attn_norm")):
        return "x"
    h = "x" if layer.placement == "normed" else "h"
    b.norm("x", h, name, layer.norm)
    return h


def _after(b: Emitter, half: str, layer: Layer) -> None:
    """Add y to the residual, with the norms that come behind the half."""
    if layer.placement == "post":
        b.norm("y", "y", half + "_norm", layer.norm)
    elif layer.placement == "both":
        b.norm("y", "y", half + "_post_norm", layer.norm)
    b.scale("y", layer.residual_scale)
    b.scale("x", layer.keep)
    if layer.residual_weights:  # x + (2x - x) (w - 1)
        b.emit("scale", ("x",), "twice", bound=(2.0,))
        b.emit("interpolate", ("x", "twice"), "x", bound=(b.array(half + "_residual") - np.float32(1.0),))
    b.emit("add", ("before" if layer.forgets else "x", "y"), "x")
    if layer.placement == "sum":
        b.norm("x", "x", half + "_norm", layer.norm)


def _parallel(b: Emitter, p: str, layer: Layer, place: Place | None) -> None:
    """Both halves read the same residual. Source: GPT-J (Wang & Komatsuzaki, 2021)."""
    assert layer.placement == "pre", "parallel halves have their norms in front"
    b.norm("x", "h", p + "attn_norm", layer.norm)
    _mixer(b, p, layer, place, "h", "mixed")
    if not layer.shared_norm:
        b.norm("x", "h", p + "ffn_norm", layer.norm)
    _feed_forward(b, p, layer, place, "h", "y")
    b.emit("add", ("y", "mixed"), "y")
    b.scale("y", layer.residual_scale)
    b.emit("add", ("x", "y"), "x")


def _mixer(b: Emitter, p: str, layer: Layer, place: Place | None, x: str, y: str) -> None:
    MIXERS[type(layer.mixer)](b, p, layer.mixer, place, x, y)


def _feed_forward(b: Emitter, p: str, layer: Layer, place: Place | None, x: str, y: str) -> None:
    match layer.ffn:
        case FeedForward() as f:
            feed_forward(b, p, f, x, y)
        case Experts() as f:
            experts(b, p, f, x, y)
        case ChannelMix() as f:
            assert place is not None, "channel mixing keeps something"
            channel_mix(b, p, f, place, x, y)
        case other:
            raise AssertionError(f"no builder for {type(other).__name__}")
