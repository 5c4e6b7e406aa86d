"""The operations of one feed-forward half."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import numpy as np

from penstock.core.model_spec import Experts, FeedForward
from penstock.model.emitter import Emitter
from penstock.model.routes import routes
from penstock.ops.ref.experts import ExpertWeights


def feed_forward(b: Emitter, p: str, f: FeedForward, x: str, y: str) -> None:
    """Register x -> register y; `p`: prefix of its weights."""
    b.linear(x, "up", p + "up")
    if f.gated:
        b.linear(x, "gate", p + "gate")
        b.scale("gate", f.gate_scale)
        if f.sparsity:
            b.emit("cut_off", ("gate",), "gate", bound=(NormalDist().inv_cdf(f.sparsity),))
        b.emit("activate_gated", ("gate", "up"), "up", bound=(f.activation, f.limit))
    elif f.activation == "xielu":
        # Stored is what softplus makes positive; below zero a constant half comes to it.
        positive, negative = (float(np.logaddexp(0.0, b.array(p + name)[0])) for name in ("act_p", "act_n"))
        b.emit("xielu", ("up",), "up", bound=(positive, 0.5 + negative))
    else:
        b.emit("activate", ("up",), "up", bound=(f.activation,))
    if f.down_norm is not None:
        b.raw_norm("up", "up", p + "down_norm", "rms", f.down_norm)
    b.linear("up", y, p + "down")


def experts(b: Emitter, p: str, f: Experts, x: str, y: str) -> None:
    """Router, chosen experts, and the shared one beside them. Experts `apart` find the residual in register x."""
    routed = inner = x
    if f.apart is not None:
        assert f.apart.kind == "rms", "norms of experts apart are RMS norms"
        routed, inner = "routed", "inner"
        weight = b.array(p + "router_norm") * np.float32(b.spec.hidden_size**-0.5)
        b.emit("rms_norm", ("x",), routed, bound=(weight, f.apart.eps))
        b.norm("x", inner, p + "experts_norm", f.apart)
    routes(b, p, f, routed)
    weights = [_expert(b, f"{p}experts.{i}.", f.expert) for i in range(f.num_experts)]
    named: dict[str, Any] = {"activation": f.expert.activation, "limit": f.expert.limit}
    if f.latent is not None:
        b.linear(inner, "latent", p + "experts_in")
        inner = "latent"
    b.emit("experts", (inner, "routes"), y, bound=(weights,), scale_input=f.router.scale_input, **named)
    if f.latent is not None:
        b.linear(y, y, p + "experts_out")
    if f.apart is not None:
        b.norm(y, y, p + "experts_post_norm", f.apart)
    if f.shared is not None:
        feed_forward(b, p + "shared.", f.shared, x, "shared")
        if f.shared_gate:
            b.linear(x, "gate", p + "shared_gate")
            b.emit("gate_rows", ("shared", "gate"), "shared")
        if f.apart is not None:
            b.norm("shared", "shared", p + "shared_post_norm", f.apart)
        b.scale("shared", f.shared_scale)
        b.emit("add", (y, "shared"), y)


def _expert(b: Emitter, p: str, f: FeedForward) -> ExpertWeights:
    gate = b.weights[p + "gate"] if f.gated else None
    gate_bias, up_bias, down_bias = (b.vector(p + name + ".bias") for name in ("gate", "up", "down"))
    return ExpertWeights(gate, b.weights[p + "up"], b.weights[p + "down"], gate_bias, up_bias, down_bias, p)
