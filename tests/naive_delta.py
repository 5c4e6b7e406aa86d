"""The gated delta rule's and lightning attention's part of the naive loop (`tests.oracle`): every token from the
beginning of the text, head by head. Float32 sums are made in the order of the ops, so that bits can be compared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.base.bf16 import F32
from penstock.core.model_spec import GatedDelta, Lightning
from penstock.ops.ref.norm import rms_norm
from penstock.ops.ref.pointwise import sigmoid, silu

if TYPE_CHECKING:
    from tests.oracle import NaiveModel

ONE = np.float32(1.0)


def gated_delta(model: NaiveModel, h: F32, p: str, m: GatedDelta) -> F32:
    t = len(h)
    q, k, v = (convolved(model._linear(h, p + n), model._vector(f"{p}{n}.conv")) for n in "qkv")
    q, k = (x.reshape(t, m.key_heads, m.key_dim) for x in (q, k))
    q, k = (x / np.sqrt(np.add.reduce(x * x, -1, keepdims=True) + np.float32(m.norm_eps)) for x in (q, k))
    q = q * np.float32(m.key_dim**-0.5)
    v = v.reshape(t, m.value_heads, m.value_dim)
    down, z = (h if rank is None else model._linear(h, p + name + "_down")
               for name, rank in (("dt", m.decay_rank), ("z", m.gate_rank)))  # fmt: skip
    dt, z = model._linear(down, p + "dt").reshape(t, m.value_heads, -1), model._linear(z, p + "z")
    stored = model._vector(p + "a_log")
    a = -np.exp(stored) if m.decay_is_log else stored
    if m.floor is None:
        fade = np.exp((np.maximum(dt, 0) + np.log1p(np.exp(-np.abs(dt)))) * a[:, None])
    else:
        fade = np.exp(sigmoid(dt * -a[:, None]) * np.float32(m.floor))
    share = sigmoid(model._linear(h, p + "beta")) * np.float32(m.beta_scale)
    out = np.empty_like(v)
    for j in range(m.value_heads):
        i = j % m.key_heads if m.in_turn else j * m.key_heads // m.value_heads
        state = np.zeros((m.key_dim, m.value_dim), np.float32)
        for n in range(t):
            state = fade[n, j][:, None] * state
            state = state + np.outer(k[n, i], (v[n, j] - k[n, i] @ state) * share[n, j])
            out[n, j] = q[n, i] @ state
    read = rms_norm(out, model._vector(p + "head_norm"), m.eps).reshape(t, -1)
    return model._linear(read * (silu(z) if m.gate == "silu" else sigmoid(z)), p + "o")


def lightning(model: NaiveModel, h: F32, p: str, m: Lightning) -> F32:
    t = len(h)
    q, k, v = (model._linear(h, p + name) for name in "qkv")
    if m.activation == "silu":
        q, k, v = silu(q), silu(k), silu(v)
    q, k, v = (x.reshape(t, m.num_heads, -1) for x in (q, k, v))
    if m.rope is not None:
        q, k = model._rope(q, m.rope), model._rope(k, m.rope)
    q = q * np.float32(m.scale)
    out = np.empty_like(v)
    for j, keep in enumerate(np.array(m.decay, np.float32)):
        state = np.zeros((m.head_dim, m.value_dim), np.float32)
        for n in range(t):
            state = keep * state + np.outer(k[n, j], v[n, j])
            out[n, j] = q[n, j] @ state
    whole = out.reshape(t, -1) if m.norm == "all" else out
    read = rms_norm(whole, model._vector(p + "state_norm"), m.eps).reshape(t, -1)
    gate = model._linear(h, p + "z")
    return model._linear(read * sigmoid(gate) if m.gate == "sigmoid" else silu(gate) * read, p + "o")


def convolved(x: F32, weight: F32) -> F32:
    """silu of the causal convolution of x [T, C] with `weight` [C, K]."""
    taps = weight.shape[1]
    padded = np.concatenate([np.zeros((taps - 1, x.shape[1]), np.float32), x])
    out = np.zeros_like(x)
    for n in range(taps):
        out += padded[n : n + len(x)] * weight[:, n]
    return silu(out)
