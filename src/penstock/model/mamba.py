"""The operations of Mamba and Mamba-2."""

from __future__ import annotations

import numpy as np

from penstock.base.bf16 import F32
from penstock.core.model_spec import Mamba, Mamba2
from penstock.model.emitter import Emitter, Place


def mamba(b: Emitter, p: str, m: Mamba, place: Place, x: str, y: str) -> None:
    """Register x -> register y; `p`: prefix of the layer's weights."""
    inner = m.inner
    b.linear(x, "a", p + "in")
    split(b, "a", {"u": inner, "gate": inner})
    convolve(b, p, place, "u", "silu")
    b.linear("u", "a", p + "x")
    split(b, "a", {"dt": m.dt_rank, "b": m.state, "c": m.state})
    if m.norm_eps is not None:
        for name in ("dt", "b", "c"):
            b.raw_norm(name, name, f"{p}{name}_norm", "rms", m.norm_eps)
    b.linear("dt", "dt", p + "dt")
    skip = b.array(p + "d")
    b.emit("mamba_scan", ("u", "dt", "b", "c", "step"), "a", bound=(*place, decay(b, p, m.decay_is_log), skip))
    b.emit("activate_gated", ("gate", "a"), "a", bound=("silu",))
    b.linear("a", y, p + "o")


def mamba2(b: Emitter, p: str, m: Mamba2, place: Place, x: str, y: str) -> None:
    """Register x -> register y; `p`: prefix of the layer's weights."""
    shared = m.groups * m.state
    b.linear(x, "a", p + "in")
    split(b, "a", {"gate": m.inner, "u": m.conv_dim, "dt": m.num_heads})
    z, *inner, dt = m.scales
    b.scale("gate", z)
    b.scale("dt", dt)
    # Scales of what is convolved are scales of the taps.
    convolve(b, p, place, "u", "silu", np.repeat(np.array(inner, np.float32), (m.inner, shared, shared)))
    split(b, "u", {"a": m.inner, "b": shared, "c": shared})
    for name, heads in (("a", m.num_heads), ("b", m.groups), ("c", m.groups)):
        b.emit("heads", (name,), name, bound=(heads,))
    skip, dt_bias = (b.array(p + name) for name in ("d", "dt.bias"))
    fixed = (decay(b, p, m.decay_is_log), skip, dt_bias, m.dt_min, m.dt_max)
    b.emit("mamba2_scan", ("a", "dt", "b", "c", "step"), "a", bound=(*place, *fixed))
    b.emit("flat", ("a",), "a")
    if m.norm != "before":
        b.emit("activate_gated", ("gate", "a"), "a", bound=("silu",))
    if m.norm != "none":
        _norm_groups(b, p, m)
    if m.norm == "before":
        b.emit("activate_gated", ("gate", "a"), "a", bound=("silu",))
    b.linear("a", y, p + "o")


def _norm_groups(b: Emitter, p: str, m: Mamba2) -> None:
    # The norm runs over the channels of each group by itself.
    b.emit("heads", ("a",), "a", bound=(m.groups,))
    weight = b.array(p + "gate_norm").reshape(m.groups, m.inner // m.groups)
    b.emit("rms_norm", ("a",), "a", bound=(weight, m.eps))
    b.emit("flat", ("a",), "a")


def split(b: Emitter, x: str, widths: dict[str, int]) -> None:
    """The columns of register x, one register after another."""
    start = 0
    for name, width in widths.items():
        b.emit("columns", (x,), name, bound=(start, start + width))
        start += width


def convolve(b: Emitter, p: str, place: Place, x: str, activation: str | None, scales: F32 | None = None) -> None:
    taps = np.ascontiguousarray(b.array(p + "conv").T)
    if scales is not None:
        taps = taps * scales
    b.emit("causal_conv", (x, "step"), x, bound=(*place, taps, b.vector(p + "conv.bias")))
    if activation is not None:
        b.emit("activate", (x,), x, bound=(activation,))


def decay(b: Emitter, p: str, is_log: bool) -> F32:
    """A, always negative: stored is the logarithm of its size, or itself."""
    stored = b.array(p + "a_log")
    out: F32 = -np.exp(stored) if is_log else stored
    return out
