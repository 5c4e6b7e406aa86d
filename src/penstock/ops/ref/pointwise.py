"""Activations, sums and changes of shape."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from penstock.base.bf16 import F32
from penstock.ops.plan import I32

F64 = npt.NDArray[np.float64]


def silu(x: F32) -> F32:
    """x * sigmoid(x). Far below zero exp overflows to infinity and the quotient is rightly -0."""
    with np.errstate(over="ignore"):
        out: F32 = np.divide(x, np.add(np.exp(-x), 1.0))
    return out


def sigmoid(x: F32) -> F32:
    """1 / (1 + exp(-x))."""
    with np.errstate(over="ignore"):
        out: F32 = np.reciprocal(np.add(np.exp(-x), 1.0))
    return out


def gelu(x: F32) -> F32:
    """x * P(Z < x) for a normal Z. Source: Hendrycks & Gimpel, arXiv 1606.08415."""
    wide = x.astype(np.float64)
    return (0.5 * wide * (1.0 + erf(wide * math.sqrt(0.5)))).astype(np.float32)


def gelu_tanh(x: F32) -> F32:
    """The same paper's approximation by tanh."""
    inner = np.multiply(x * x * x, 0.044715) + x
    out: F32 = np.multiply(x, 0.5) * np.add(np.tanh(np.multiply(inner, math.sqrt(2.0 / math.pi))), 1.0)
    return out


def relu(x: F32) -> F32:
    """max(x, 0)."""
    out: F32 = np.maximum(x, 0.0)
    return out


def relu2(x: F32) -> F32:
    """max(x, 0)^2. Source: So et al., Primer, arXiv 2109.08668."""
    positive = relu(x)
    return positive * positive


_KNOTS_PER_UNIT = 64
_ERF_END = 6
_KNOTS = np.arange(_ERF_END * _KNOTS_PER_UNIT + 1) / _KNOTS_PER_UNIT
_ERF_AT = np.array([math.erf(k) for k in _KNOTS])
_SLOPE_AT = 2.0 / math.sqrt(math.pi) * np.exp(-_KNOTS * _KNOTS)


def erf(x: F64) -> F64:
    """The error function to about 1e-9: third-order Taylor from the nearest of 385 knots (numpy has no erf).

    NaN stays NaN; beyond 6 the result is exactly +-1.
    """
    size = np.abs(x)
    inside = np.nan_to_num(np.minimum(size, float(_ERF_END)))
    knot = np.rint(inside * _KNOTS_PER_UNIT).astype(np.intp)
    at, d = _KNOTS[knot], inside - _KNOTS[knot]
    # erf'' = -2x erf', erf''' = (4x^2 - 2) erf'
    series = 1.0 - d * at + d * d * (2.0 * at * at - 1.0) / 3.0
    out = np.copysign(_ERF_AT[knot] + d * _SLOPE_AT[knot] * series, x)
    return np.where(np.isnan(x), x, out)


ACTIVATIONS: dict[str, Callable[[F32], F32]] = {
    "silu": silu, "gelu": gelu, "gelu_tanh": gelu_tanh, "relu": relu, "relu2": relu2,
    "sigmoid": sigmoid, "tanh": lambda x: np.tanh(x),
}  # fmt: skip
SWIGLU_ALPHA = 1.702


def activate(x: F32, activation: str) -> F32:
    """act(x) [T, F]."""
    return ACTIVATIONS[activation](x)


def activate_gated(gate: F32, up: F32, activation: str, limit: float | None = None) -> F32:
    """act(gate) * up [T, F]. Source: Shazeer, GLU Variants, arXiv 2002.05202.

    `swiglu_clamped`: gate * sigmoid(1.702 gate) * (up + 1), with gate at most `limit` and up within [-limit, limit].
    Source: gpt-oss model card, arXiv 2508.10925, section 2. `silu_clamped`: silu(gate) * up of what is cut so. With
    others a `limit` cuts act(gate) and up.
    """
    if activation not in ("swiglu_clamped", "silu_clamped"):
        act = ACTIVATIONS[activation](gate)
        if limit is not None:
            act, up = np.minimum(act, np.float32(limit)), np.clip(up, np.float32(-limit), np.float32(limit))
        return act * up
    if limit is not None:
        gate, up = np.minimum(gate, np.float32(limit)), np.clip(up, np.float32(-limit), np.float32(limit))
    if activation == "silu_clamped":
        return silu(gate) * up
    return gate * sigmoid(np.float32(SWIGLU_ALPHA) * gate) * (up + np.float32(1.0))


def xielu(x: F32, positive: float, negative: float) -> F32:
    """positive x^2 + x/2 above 0, else negative (expm1(min(x, -1e-6)) - x) + x/2 [T, F].

    Source: Huang & Schlag, arXiv 2411.13010, section 3, with the constants of Apertus.
    """
    half = np.float32(0.5) * x
    above = np.float32(positive) * x * x + half
    below = np.float32(negative) * (np.expm1(np.minimum(x, np.float32(-1e-6))) - x) + half
    out: F32 = np.where(x > 0, above, below)
    return out


def add(x: F32, y: F32) -> F32:
    """x + y."""
    return x + y


def multiply(x: F32, y: F32) -> F32:
    """x * y."""
    return x * y


def scale(x: F32, factor: float) -> F32:
    """x * factor."""
    return x * np.float32(factor)


def clip(x: F32, limit: float) -> F32:
    """x cut to [-limit, limit]."""
    out: F32 = np.clip(x, np.float32(-limit), np.float32(limit))
    return out


def soft_cap(x: F32, cap: float) -> F32:
    """cap * tanh(x / cap)."""
    out: F32 = np.tanh(x / np.float32(cap)) * np.float32(cap)
    return out


def softplus(x: F32) -> F32:
    """log(1 + e^x), without overflow."""
    out: F32 = np.maximum(x, 0.0) + np.log1p(np.exp(-np.abs(x)))
    return out


def gate_rows(x: F32, gate: F32, by: str = "sigmoid") -> F32:
    """x [T, E] * sigmoid(gate [T, 1 or E]), or softplus of it."""
    return x * (softplus(gate) if by == "softplus" else sigmoid(gate))


def scale_queries(x: F32, positions: I32, beta: float, floor: int, shift: int) -> F32:
    """x [T, H, D] of the token at position p times 1 + beta * log(1 + floor((p + shift) / floor))."""
    turns = (positions.astype(np.int64) + shift) // floor
    factor = (1.0 + beta * np.log1p(turns)).astype(np.float32)
    return x * factor[:, None, None]


def biased_heads(x: F32, dt: F32, a: F32 | None, factor: float) -> F32:
    """x [T, H, D], dt [T, H] if there is an `a` [H] -> [T, H, D + 4]: see `ops.table`."""
    more = np.zeros((*x.shape[:2], 4), np.float32)
    with np.errstate(over="ignore"):  # infinity shows in the logits
        more[:, :, 0] = np.float32(factor) if a is None else np.exp(softplus(dt) * a) * np.float32(factor)
    return np.concatenate([x, more], axis=-1)


def heads(x: F32, num_heads: int) -> F32:
    """View [T, H*D] as [T, H, D]."""
    return x.reshape(x.shape[0], num_heads, x.shape[1] // num_heads)


def flat(x: F32) -> F32:
    """View [T, H, D] as [T, H*D]."""
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2])


def concat(x: F32, y: F32) -> F32:
    """x [T, N], y [T, M] -> [T, N+M]."""
    return np.concatenate([x, y], axis=1)


def columns(x: F32, start: int, stop: int) -> F32:
    """A contiguous copy of columns start ... stop of x [T, N]."""
    return x[:, start:stop].copy()
