"""The operations of the gated delta rule."""

from __future__ import annotations

import numpy as np

from penstock.core.model_spec import GatedDelta
from penstock.model.emitter import Emitter, Place
from penstock.model.mamba import decay


def gated_delta(b: Emitter, p: str, m: GatedDelta, place: Place, x: str, y: str) -> None:
    """Register x -> register y; `p`: prefix of the layer's weights."""
    for name in "qkv":
        b.linear(x, name, p + name)
    for name, rank in (("dt", m.decay_rank), ("z", m.gate_rank)):
        if rank is not None:
            b.linear(x, name, p + name + "_down")
        b.linear(name if rank is not None else x, name, p + name)
    b.linear(x, "beta", p + "beta")
    for name, heads in (("q", m.key_heads), ("k", m.key_heads), ("v", m.value_heads)):
        taps = np.ascontiguousarray(b.array(f"{p}{name}.conv").T)
        b.emit("causal_conv", (name, "step"), name, bound=(*place, taps, None, name + "_conv"))
        b.emit("activate", (name,), name, bound=("silu",))
        b.emit("heads", (name,), name, bound=(heads,))
    a = decay(b, p, m.decay_is_log)
    more = () if m.floor is None else (m.floor,)
    fixed = (-a if more else a, m.norm_eps, m.beta_scale, m.in_turn, *more)
    b.emit("gated_delta", ("q", "k", "v", "dt", "beta", "step"), "a", bound=(*place, *fixed))
    b.raw_norm("a", "a", p + "head_norm", "rms", m.eps)
    b.emit("flat", ("a",), "a")
    if m.gate == "silu":
        b.emit("activate_gated", ("z", "a"), "a", bound=("silu",))
    else:
        b.emit("gate_rows", ("a", "z"), "a")
    b.linear("a", y, p + "o")
