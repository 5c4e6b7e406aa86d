"""The part of the naive loop (`tests.oracle`) that gated linear recurrences, diagonals, mLSTM and shared blocks have:
every token from the beginning of the text. Float32 sums are made in the order of the ops, so that bits can be compared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.base.bf16 import F32
from penstock.core.model_spec import Diagonal, GatedLru, Mlstm, SharedBlock
from penstock.ops.ref.norm import layer_norm, rms_norm
from penstock.ops.ref.pointwise import ACTIVATIONS, sigmoid

if TYPE_CHECKING:
    from tests.oracle import NaiveModel


def gated_lru(model: NaiveModel, h: F32, p: str, m: GatedLru) -> F32:
    u = model._linear(h, p + "u")
    taps, bias = model._vector(p + "conv"), model._vector(p + "conv.bias")
    padded = np.concatenate([np.zeros((m.conv - 1, m.width), np.float32), u])
    u = np.tile(bias, (len(h), 1))
    for n in range(m.conv):
        u += padded[n : n + len(h)] * taps[:, n]
    gates = []
    for name in ("input_gate", "state_gate"):
        blocks = u.reshape(len(h), m.blocks, 1, -1)
        product = np.matmul(blocks, model._vector(p + name).transpose(0, 2, 1)).reshape(len(h), -1)
        gates.append(sigmoid(product + model._vector(f"{p}{name}.bias")))
    slow = (-8.0 * np.logaddexp(0.0, model._vector(p + "lambda"))).astype(np.float32) * gates[1]
    given, keep = u * gates[0], np.exp(slow)
    state, out = np.zeros(m.width, np.float32), np.empty_like(u)
    for n in range(len(h)):
        state = keep[n] * state + (given[n] * np.sqrt(-np.expm1(slow[n] + slow[n])) if n else given[n])
        out[n] = state
    return model._linear(ACTIVATIONS[m.activation](model._linear(h, p + "z")) * out, p + "o")


def mlstm(model: NaiveModel, h: F32, p: str, m: Mlstm) -> F32:
    t, scale = len(h), np.float32(m.key_dim**-0.5)
    q, k, v = (model._linear(h, p + name).reshape(t, m.num_heads, -1) for name in "qkv")
    cap = np.float32(m.soft_cap)
    i, f = (cap * np.tanh(model._linear(h, p + name) / cap) for name in "if")
    slow = -(np.maximum(-f, 0) + np.log1p(np.exp(-np.abs(f))))
    out = np.empty_like(v)
    for j in range(m.num_heads):
        state, total = np.zeros((m.key_dim, m.value_dim), np.float32), np.zeros(m.key_dim, np.float32)
        top = np.float32(0.0)
        for n in range(t):
            most = np.maximum(slow[n, j] + top, i[n, j])
            by, new, top = np.exp(slow[n, j] + top - most), np.exp(i[n, j] - most), most
            total = by * total + new * k[n, j]
            state = by * state + np.outer(k[n, j], new * v[n, j])
            found = np.abs(np.matmul(q[n, j][None], total[:, None])[0, 0] * scale)
            out[n, j] = (q[n, j] @ state) * (scale / (np.maximum(found, np.exp(-top)) + np.float32(m.eps)))
    weight = model._vector(p + "head_norm").reshape(m.num_heads, m.value_dim)
    read = layer_norm(out, weight, None, m.norm_eps).reshape(t, -1)
    return model._linear(read * sigmoid(model._linear(h, p + "z")), p + "o")


def diagonal(model: NaiveModel, h: F32, p: str, m: Diagonal) -> F32:
    if m.gates == "h3":
        q, k, v = (model._linear(h, p + name) for name in "qkv")
        u = model._convolved(k, p) * v
    else:
        u = model._linear(h, p + "in")
        if m.gates == "gss" and m.activation is not None:
            u = ACTIVATIONS[m.activation](u)

    def wide(name: str) -> np.ndarray:
        return model._vector(p + name).astype(np.float64)

    if m.pairs:
        size = np.exp(-np.exp(wide("nu")))
        a, c = (size * np.exp(1j * np.exp(wide("theta"))))[:, None], np.sqrt(1 - size**2)[:, None] + 0j
    else:
        rate = -np.exp(wide("a_log")) + 1j * wide("a_im")
        a = np.exp(np.exp(wide("log_dt"))[:, None] * rate)
        c = 2 * (model._vector(p + "c_re") + 1j * model._vector(p + "c_im")) * (a - 1) / rate
    (a_re, a_im), (c_re, c_im) = ((x.real.astype(np.float32), x.imag.astype(np.float32)) for x in (a, c))
    out = np.empty_like(u)
    re, im = np.zeros((2, m.inner, m.state), np.float32)
    for n in range(len(h)):
        x, x_im = (u[n, : m.inner, None], u[n, m.inner :, None]) if m.pairs else (u[n, :, None], np.float32(0.0))
        re, im = a_re * re - a_im * im + x, a_re * im + a_im * re + x_im
        out[n, : m.inner] = np.add.reduce((c_re * re - c_im * im).T, axis=0)
        if m.pairs:
            out[n, m.inner :] = np.add.reduce((c_re * im + c_im * re).T, axis=0)
    if not m.pairs:
        out = out + u * model._vector(p + "d")
    act = (lambda x: x) if m.activation is None else ACTIVATIONS[m.activation]
    if m.gates == "h3":
        return model._linear(q * out, p + "o")
    if m.gates == "gss":
        return model._linear(act(model._linear(h, p + "out_gate")) * model._linear(out, p + "mix"), p + "o")
    return model._linear(act(out), p + "o")


def shared_block(model: NaiveModel, x: F32, embedded: F32, p: str, m: SharedBlock) -> F32:
    both = rms_norm(np.concatenate([x, embedded], axis=1), model._vector(m.shared + "attn_norm"), m.eps)

    def product(read: F32, name: str) -> F32:
        out = model._linear(read, m.shared + name)
        if m.qkv_rank and name in ("q", "k", "v"):
            out = out + model._linear(model._linear(read, f"{p}{name}_low"), f"{p}{name}_high")
        return out

    y = rms_norm(model._attention(both, p, m, product), model._vector(m.shared + "ffn_norm"), m.eps)
    gate, up = (model._linear(y, m.shared + name) for name in ("gate", "up"))
    if m.ffn_rank:
        low = model._linear(y, p + "ffn_low")
        gate, up = (x + model._linear(low, f"{p}{name}_high") for x, name in ((gate, "gate"), (up, "up")))
    return model._linear(model._linear(ACTIVATIONS[m.ffn_activation](gate) * up, m.shared + "down"), p + "out")
