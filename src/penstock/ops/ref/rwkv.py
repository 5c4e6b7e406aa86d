"""RWKV: the token shift that time and channel mixing share, and the recurrences of versions 4 to 7.

A sequence at position 0 starts from zeros whatever its page holds. Each token is computed by itself, with shapes that
are the same for every token, so its bits depend on the tokens before it and on nothing else.
"""

from __future__ import annotations

import math

import numpy as np

from penstock.base.bf16 import F32
from penstock.ops.ref.mamba import turned
from penstock.ops.ref.pointwise import sigmoid
from penstock.ops.step import Step

_DECAY_RATE = np.float32(math.exp(-0.5))
_SMALLEST_NORM = np.float32(1e-12)


def token_shift(x: F32, step: Step, group: int, layer: int, plane: str) -> F32:
    """x [T, E] -> [T, E]: of every token, what x was at the token before it; zeros for the first of a text.

    Mutates: plane `plane` [num_pages, 1, E] of the group, which keeps the last x of each sequence.
    """
    kept = step.planes[group][plane]
    out = np.empty_like(x)
    for page, start, stop, fresh in step.states(group, layer):
        out[start] = 0.0 if fresh else kept[page, 0]
        out[start + 1 : stop] = x[start : stop - 1]
        kept[page, 0] = x[stop - 1]
    return out


def interpolate(x: F32, y: F32, weight: F32) -> F32:
    """x + (y - x) * weight: x [T, E], y [T, E], weight [E] or [T, E] -> [T, E]."""
    return x + (y - x) * weight


def wkv4(k: F32, v: F32, step: Step, decay: F32, first: F32, group: int, layer: int) -> F32:
    """k, v [T, W] -> [T, W]: the mean of the values so far, weighted by exp(key) and fading with age.

    A value n tokens back weighs exp(key + (n - 1) * decay), the newest exp(key + first). decay [W] is below zero.
    Numerator and denominator are kept divided by exp(exponent), so that nothing overflows.
    Mutates: planes `num`, `den` and `exponent` [num_pages, 1, W] of the group.
    Source: Peng et al., arXiv 2305.13048, equation 16 and appendix D.
    """
    planes = [step.planes[group][name] for name in ("num", "den", "exponent")]
    out = np.empty_like(v)
    for page, start, stop, fresh in step.states(group, layer):
        num, den, top = (plane[page, 0] for plane in planes)
        if fresh:
            num, den, top = np.zeros_like(num), np.zeros_like(den), np.full_like(top, -np.inf)
        for t in range(start, stop):
            bonus = k[t] + first
            most = np.maximum(top, bonus)
            old, new = np.exp(top - most), np.exp(bonus - most)
            out[t] = (num * old + v[t] * new) / (den * old + new)
            faded = top + decay
            top = np.maximum(faded, k[t])
            old, new = np.exp(faded - top), np.exp(k[t] - top)
            num, den = num * old + v[t] * new, den * old + new
        for plane, state in zip(planes, (num, den, top), strict=True):
            plane[page, 0] = state
    return out


def wkv5(r: F32, k: F32, v: F32, step: Step, group: int, layer: int, first: F32, decay: F32) -> F32:
    """r, k, v [T, H, D] -> [T, H, D]; first, decay [H, D]; the state [H, D, D] has keys along its first D.

    out = r (state + (first k)^T v); then state = decay state + k^T v. decay is from 0 to 1.
    Mutates: plane `state` [num_pages, H, D*D] of the group.
    Source: Peng et al., arXiv 2404.05892, equations 7 to 9.
    """
    return _fading(r, k, v, np.broadcast_to(decay, k.shape), step, group, layer, first)


def wkv6(r: F32, k: F32, v: F32, w: F32, step: Step, group: int, layer: int, first: F32) -> F32:
    """The same with a decay exp(-exp(w)) per token, w [T, H, D]. Source: the same, equations 18 and 19."""
    with np.errstate(over="ignore"):  # the past is gone at once
        decay = np.exp(-np.exp(w))
    return _fading(r, k, v, decay, step, group, layer, first)


def shared_wkv6(r: F32, k: F32, v: F32, w: F32, step: Step, group: int, layer: int) -> F32:
    """r, w [T, H, K], k [T, G, K], v [T, G, W] -> [T, H, W]; H/G heads in a row share keys and values.

    state = decay state + (k (1 - decay))^T v with decay exp(-exp(w)); out = r state / sqrt(K).
    Mutates: plane `state` [num_pages, H, K*W] of the group.
    Source: Goldstein et al., arXiv 2505.03005.
    """
    plane = step.planes[group]["state"]
    _, h, n = r.shape
    with np.errstate(over="ignore"):
        decay = np.exp(-np.exp(w))
    k, v = (np.repeat(x, h // x.shape[1], axis=1) for x in (k, v))
    k, r = k - k * decay, r * np.float32(n**-0.5)
    out = np.empty_like(v)
    for page, start, stop, fresh in step.states(group, layer):
        shape = (h, n, v.shape[2])
        state = turned(np.zeros(shape, np.float32) if fresh else plane[page].reshape(shape))
        for t in range(start, stop):
            state = state * decay[t, :, None, :] + v[t, :, :, None] * k[t, :, None, :]
            out[t] = np.matmul(state, r[t, :, :, None])[:, :, 0]
        plane[page] = turned(state).reshape(h, -1)
    return out


def _fading(r: F32, k: F32, v: F32, decay: F32, step: Step, group: int, layer: int, first: F32) -> F32:
    plane = step.planes[group]["state"]
    _, h, d = v.shape
    out = np.empty_like(v)
    own = value_bonus(r, k, v, first)
    for page, start, stop, fresh in step.states(group, layer):
        state = np.zeros((h, d, d), np.float32) if fresh else turned(plane[page].reshape(h, d, d))
        for t in range(start, stop):
            out[t] = np.matmul(state, r[t, :, :, None])[:, :, 0] + own[t]
            state = state * decay[t, :, None, :] + v[t, :, :, None] * k[t, :, None, :]
        plane[page] = turned(state).reshape(h, d * d)
    return out


def removal_key(k: F32, weight: F32, num_heads: int) -> F32:
    """Unit vectors of k * weight, head by head: k [T, H*D], weight [H*D] -> [T, H, D]."""
    scaled = (k * weight).reshape(len(k), num_heads, -1)
    norm: F32 = np.maximum(np.sqrt(np.add.reduce(scaled * scaled, axis=-1, keepdims=True)), _SMALLEST_NORM)
    return scaled / norm


def replacement_key(k: F32, rate: F32, weight: F32) -> F32:
    """k * (1 + (rate - 1) * weight): k, rate [T, W], weight [W] -> [T, W]."""
    return k * ((rate - np.float32(1.0)) * weight + np.float32(1.0))


def wkv7(r: F32, w: F32, k: F32, v: F32, removal: F32, rate: F32, step: Step, group: int, layer: int) -> F32:
    """All [T, H, D] -> [T, H, D]; the state [H, D, D] has keys along its first D and values along its second.

    state = exp(-e^-0.5 sigmoid(w)) state - (removal * rate)^T (removal state) + k^T v; out = r state.
    Mutates: plane `state` [num_pages, H, D*D] of the group.
    Source: Peng et al., arXiv 2503.14456, equations 3, 16 and 17.
    """
    plane = step.planes[group]["state"]
    decay = np.exp(sigmoid(w) * -_DECAY_RATE)
    written = removal * rate
    _, h, d = v.shape
    out = np.empty_like(v)
    for page, start, stop, fresh in step.states(group, layer):
        state = np.zeros((h, d, d), np.float32) if fresh else turned(plane[page].reshape(h, d, d))
        for t in range(start, stop):
            removed = np.matmul(state, removal[t, :, :, None])
            kept = state * decay[t, :, None, :] - removed * written[t, :, None, :]
            state = kept + v[t, :, :, None] * k[t, :, None, :]
            out[t] = np.matmul(state, r[t, :, :, None])[:, :, 0]
        plane[page] = turned(state).reshape(h, d * d)
    return out


def value_bonus(r: F32, k: F32, v: F32, weight: F32) -> F32:
    """The newest value once more, as far as its key fits: (sum of r * k * weight over D) * v; r, k, v [T, H, D],
    weight [H, D] -> [T, H, D]."""
    bonus: F32 = np.add.reduce(r * k * weight, axis=-1, keepdims=True) * v
    return bonus
