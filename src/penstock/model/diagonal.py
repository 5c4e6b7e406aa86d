"""The operations of mixers whose state is a number, real or complex, of each channel by itself."""

from __future__ import annotations

import numpy as np

from penstock.base.bf16 import F32
from penstock.core.model_spec import Diagonal, GatedLru
from penstock.model.emitter import Emitter, Place
from penstock.model.mamba import convolve

_SHARPNESS = -8.0
"""The paper's c: how much faster than softplus(lambda) says a state fades at most."""


def gated_lru(b: Emitter, p: str, m: GatedLru, place: Place, x: str, y: str) -> None:
    """Register x -> register y; `p`: prefix of the layer's weights."""
    b.linear(x, "z", p + "z")
    b.linear(x, "u", p + "u")
    convolve(b, p, place, "u", None)
    b.emit("heads", ("u",), "blocks", bound=(m.blocks,))
    for name in ("input_gate", "state_gate"):
        b.emit("latent_output", ("blocks",), name, p + name)
        b.emit("flat", (name,), name)
    fixed = (_SHARPNESS * np.logaddexp(0.0, b.array(p + "lambda"))).astype(np.float32)
    biases = (b.array(f"{p}{name}.bias") for name in ("input_gate", "state_gate"))
    b.emit("rg_lru", ("u", "input_gate", "state_gate", "step"), "u", bound=(*place, fixed, *biases))
    b.emit("activate_gated", ("z", "u"), "u", bound=(m.activation,))
    b.linear("u", y, p + "o")


def diagonal(b: Emitter, p: str, m: Diagonal, place: Place, x: str, y: str) -> None:
    """As `gated_lru`."""
    if m.gates == "h3":
        for name in ("q", "k", "v"):
            b.linear(x, name, p + name)
        convolve(b, p, place, "k", None)
        b.emit("multiply", ("k", "v"), "u")
    else:
        b.linear(x, "u", p + "in")
        if m.gates == "gss" and m.activation is not None:
            b.emit("activate", ("u",), "u", bound=(m.activation,))
    a, c, skip = _lru(b, p) if m.pairs else _s4d(b, p)
    b.emit("diagonal_scan", ("u", "step"), "u", bound=(*place, _parts(a), _parts(c), skip))
    if m.gates == "h3":
        b.emit("multiply", ("q", "u"), "u")
    elif m.gates == "gss":
        b.linear(x, "gate", p + "out_gate")
        b.linear("u", "u", p + "mix")
        if m.activation is None:
            b.emit("multiply", ("gate", "u"), "u")
        else:
            b.emit("activate_gated", ("gate", "u"), "u", bound=(m.activation,))
    elif m.activation is not None:
        b.emit("activate", ("u",), "u", bound=(m.activation,))
    b.linear("u", y, p + "o")


def _s4d(b: Emitter, p: str) -> tuple[np.ndarray, np.ndarray, F32]:
    rate = -np.exp(b.array(p + "a_log").astype(np.float64)) + 1j * b.array(p + "a_im")
    a = np.exp(np.exp(b.array(p + "log_dt").astype(np.float64))[:, None] * rate)
    return a, 2 * (b.array(p + "c_re") + 1j * b.array(p + "c_im")) * (a - 1) / rate, b.array(p + "d")


def _lru(b: Emitter, p: str) -> tuple[np.ndarray, np.ndarray, None]:
    """What comes in is multiplied by a number; the state being linear in it, what is read is instead."""
    size = np.exp(-np.exp(b.array(p + "nu").astype(np.float64)))
    a = size * np.exp(1j * np.exp(b.array(p + "theta").astype(np.float64)))
    return a[:, None], np.sqrt(1 - size**2)[:, None] + 0j, None


def _parts(x: np.ndarray) -> F32:
    """Complex [I, N] -> [2, I, N]: real parts first."""
    return np.stack([x.real, x.imag]).astype(np.float32)
