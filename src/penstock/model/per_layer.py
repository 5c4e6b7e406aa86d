"""Embeddings for every layer (`core.model_spec.PerLayer`)."""

from __future__ import annotations

from penstock.core.model_spec import Norm, PerLayer
from penstock.model.emitter import Emitter


def prepare(b: Emitter, ple: PerLayer, norm: Norm) -> None:
    """Register x, the embedding, -> "per_layer": what all layers are given of a token, side by side."""
    b.linear("x", "per_layer", "ple_in")
    b.scale("per_layer", b.spec.hidden_size**-0.5)
    b.emit("heads", ("per_layer",), "per_layer", bound=(len(b.spec.layers),))
    b.raw_norm("per_layer", "per_layer", "ple_norm", "rms", norm.eps, norm.offset)
    b.emit("flat", ("per_layer",), "per_layer")
    b.emit("embed", ("token_ids",), "y", "ple_embed")
    b.scale("y", ple.width**0.5)
    b.emit("add", ("per_layer", "y"), "per_layer")
    b.scale("per_layer", 2.0**-0.5)


def given(b: Emitter, p: str, ple: PerLayer, norm: Norm, x: str) -> None:
    """Register x -> register y, what the layer adds for its token."""
    b.linear(x, "gate", p + "ple_gate")
    b.emit("columns", ("per_layer",), "y", bound=(b.layer * ple.width, (b.layer + 1) * ple.width))
    b.emit("activate_gated", ("gate", "y"), "y", bound=(ple.activation, None))
    b.linear("y", "y", p + "ple_out")
    b.norm("y", "y", p + "ple_post_norm", norm)
