"""RWKV's part of the naive loop (`tests.oracle`): every token from the beginning of the text, head by head.

Float32 sums are made in the order of the ops, so that bits can be compared; the formulas are the papers'.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.base.bf16 import F32
from penstock.core.model_spec import ChannelMix, Qrwkv6, Rwkv4, Rwkv5, Rwkv6, Rwkv7
from penstock.ops.ref.norm import layer_norm
from penstock.ops.ref.pointwise import ACTIVATIONS, sigmoid

if TYPE_CHECKING:
    from tests.oracle import NaiveModel

ONE = np.float32(1.0)


def before(h: F32) -> F32:
    """What each token's predecessor was; zeros before the first."""
    return np.concatenate([np.zeros_like(h[:1]), h[:-1]])


def time_mix_4(model: NaiveModel, h: F32, p: str, m: Rwkv4) -> F32:
    past = before(h)
    mixed = {name: past + (h - past) * model._vector(p + "mix_" + name) for name in "kvr"}
    k, v, r = (model._linear(mixed[name], p + name) for name in "kvr")
    decay, first = model._vector(p + "time_decay"), model._vector(p + "time_first")
    if m.decay_is_log:
        decay = -np.exp(decay)
    out = np.empty_like(v)
    num, den, top = np.zeros_like(decay), np.zeros_like(decay), np.full_like(decay, -np.inf)
    for t in range(len(h)):
        most = np.maximum(top, k[t] + first)
        old, new = np.exp(top - most), np.exp(k[t] + first - most)
        out[t] = (num * old + v[t] * new) / (den * old + new)
        most = np.maximum(top + decay, k[t])
        old, new = np.exp(top + decay - most), np.exp(k[t] - most)
        num, den, top = num * old + v[t] * new, den * old + new, most
    return model._linear(out * sigmoid(r), p + "o")


def time_mix_5(model: NaiveModel, h: F32, p: str, m: Rwkv5) -> F32:
    past = before(h)
    r, k, v, g = (model._linear(past + (h - past) * model._vector(f"{p}mix_{n}"), p + n) for n in "rkvg")
    decay = np.broadcast_to(np.exp(-np.exp(model._vector(p + "time_decay"))), k.shape)
    return read_states(model, r, k, v, g, decay, p, m)


def mixed_6(model: NaiveModel, h: F32, p: str, order: str) -> dict[str, F32]:
    """r, k, v, g, and the decay as w."""
    past = before(h)
    low = np.tanh(model._linear(h + (past - h) * model._vector(p + "mix_x"), p + "mix_down"))
    x = {}
    for name, own in zip(order, np.split(low, 5, axis=1), strict=True):
        share = model._linear(np.ascontiguousarray(own), f"{p}mix_up_{name}") + model._vector(f"{p}mix_{name}")
        x[name] = h + (past - h) * share
    w = model._linear(np.tanh(model._linear(x["w"], p + "w1")), p + "w2") + model._vector(p + "time_decay")
    return {n: model._linear(x[n], p + n) for n in "rkvg"} | {"w": np.exp(-np.exp(w))}


def time_mix_6(model: NaiveModel, h: F32, p: str, m: Rwkv6) -> F32:
    x = mixed_6(model, h, p, "wkvrg")
    return read_states(model, x["r"], x["k"], x["v"], x["g"], x["w"], p, m)


def time_mix_q6(model: NaiveModel, h: F32, p: str, m: Qrwkv6) -> F32:
    x, d = mixed_6(model, h, p, m.mixed), m.head_dim
    out = np.empty_like(x["r"])
    for j in range(m.num_heads):
        own, kv = slice(j * d, (j + 1) * d), j // (m.num_heads // m.kv_heads)
        k, v = (x[n][:, kv * d : (kv + 1) * d] for n in "kv")
        r = x["r"][:, own] * np.float32(d**-0.5)
        state = np.zeros((d, d), np.float32)
        for t in range(len(h)):
            decay = x["w"][t, own]
            state = state * decay + np.outer(v[t], k[t] - k[t] * decay)
            out[t, own] = state @ r[t]
    return model._linear(out * sigmoid(x["g"]), p + "o")


def read_states(model: NaiveModel, r: F32, k: F32, v: F32, g: F32, decay: F32, p: str, m: Rwkv5 | Rwkv6) -> F32:
    weight, bias, first = (model._vector(p + name) for name in ("head_norm", "head_norm.bias", "time_first"))
    out = np.empty_like(v)
    for j in range(m.num_heads):
        own = slice(j * m.head_dim, (j + 1) * m.head_dim)
        state = np.zeros((m.head_dim, m.head_dim), np.float32)
        for t in range(len(v)):
            read = state @ r[t, own] + np.add.reduce(r[t, own] * k[t, own] * first[own]) * v[t, own]
            state = state * decay[t, own] + np.outer(v[t, own], k[t, own])
            out[t, own] = layer_norm(read, weight[own], bias[own], m.eps)
    return model._linear(out * ACTIVATIONS["silu"](g), p + "o")


def time_mix_7(model: NaiveModel, h: F32, p: str, m: Rwkv7, v_first: F32 | None) -> tuple[F32, F32]:
    """Also gives the first layer's values, which the later layers need."""
    past = before(h)
    x = {name: h + (past - h) * model._vector(p + "mix_" + name) for name in m.mixed}
    r, k, v = (model._linear(x[name], p + name) for name in "rkv")

    def low_rank(name: str, inner: F32) -> F32:
        return model._linear(inner, p + name + "2") + model._vector(p + name + "0")

    w = low_rank("w", np.tanh(model._linear(x["w"], p + "w1")))
    a = sigmoid(low_rank("a", model._linear(x["a"], p + "a1")))
    g = model._linear(sigmoid(model._linear(x["g"], p + "g1")), p + "g2") if m.gate_rank else ONE
    if v_first is None:
        v_first = v
    else:
        v = v + (v_first - v) * sigmoid(low_rank("v", model._linear(x["v"], p + "v1")))
    erase = k * model._vector(p + "k_k")
    k = k * ((a - ONE) * model._vector(p + "k_a") + ONE)
    decay = np.exp(sigmoid(w) * np.float32(-np.exp(-0.5)))
    bonus = model._vector(p + "r_k")
    out = np.empty_like(v)
    for j in range(m.num_heads):
        own = slice(j * m.head_dim, (j + 1) * m.head_dim)
        state = np.zeros((m.head_dim, m.head_dim), np.float32)
        for t in range(len(h)):
            unit = erase[t, own] / max(np.sqrt(np.add.reduce(erase[t, own] ** 2)), np.float32(1e-12))
            state = state * decay[t, own] - np.outer(state @ unit, unit * a[t, own]) + np.outer(v[t, own], k[t, own])
            read = state @ r[t, own]
            if m.normed:
                weight, bias = (model._vector(p + name)[own] for name in ("head_norm", "head_norm.bias"))
                read = layer_norm(read, weight, bias, m.eps)
            out[t, own] = read + np.add.reduce(r[t, own] * k[t, own] * bonus[own]) * v[t, own]
    return model._linear(out * g, p + "o"), v_first


def channel_mix(model: NaiveModel, h: F32, p: str, f: ChannelMix) -> F32:
    past = before(h)

    def mixed(name: str) -> F32:
        mix = model._vector(f"{p}ffn_mix_{name}")
        return past + (h - past) * mix if f.version == 4 else h + (past - h) * mix

    k = np.maximum(model._linear(mixed("k"), p + "up"), 0)
    y = model._linear(k * k, p + "down")
    return y if f.version == 7 else y * sigmoid(model._linear(mixed("r"), p + "ffn_r"))
