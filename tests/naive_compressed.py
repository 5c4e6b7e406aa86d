"""DeepSeek-V4's part of the naive loop (`tests.oracle`): streams, and entries made of the whole text at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from penstock.base.bf16 import F32
from penstock.core.model_spec import EntryAttention, Streams
from penstock.ops.ref.norm import rms_norm
from penstock.ops.ref.pointwise import sigmoid
from penstock.ops.ref.product import as_float32
from penstock.ops.ref.rotary import rope, rope_table

if TYPE_CHECKING:
    from tests.oracle import NaiveModel


def streamed(model: NaiveModel, x: F32, s: Streams) -> F32:
    """All layers, and the sum of the streams for the head: x [T, E] -> [T, E]."""
    streams = np.repeat(x[:, None], s.num, axis=1)
    for i, layer in enumerate(model.spec.layers):
        p = f"layers.{i}."
        for half in ("attn", "ffn"):
            read, write, mix = weights_of(model, streams, f"{p}{half}_streams", s)
            h = model._norm(np.einsum("tn,tne->te", read, streams), f"{p}{half}_norm", layer.norm)
            y = model._mixer(h, p, layer) if half == "attn" else model._feed_forward(h, p, layer.ffn)
            mixed = np.stack([sum(mix[:, j, k, None] * streams[:, j] for j in range(s.num)) for k in range(s.num)], 1)
            streams = (mixed + write[:, :, None] * y[:, None]).astype(np.float32)
    read, _, _ = weights_of(model, streams, "head_streams", s)
    return np.einsum("tn,tne->te", read, streams)


def weights_of(model: NaiveModel, streams: F32, name: str, s: Streams) -> tuple[F32, F32, F32]:
    t, n = len(streams), s.num
    raw = model._linear(rms_norm(streams.reshape(t, -1), None, s.norm_eps), name)
    scale, base = model._vector(name + ".scale"), model._vector(name + ".base")
    read = sigmoid(raw[:, :n] * scale[0] + base[:n]) + np.float32(s.eps)
    if name == "head_streams":
        return read, read, read
    write = np.float32(2) * sigmoid(raw[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    mix = raw[:, 2 * n :] * scale[2] + base[2 * n :]
    mix = np.exp(mix.reshape(t, n, n))
    mix = mix / mix.sum(axis=2, keepdims=True) + np.float32(s.eps)
    for i in range(2 * s.iterations - 1):  # columns first, then rows and columns in turns
        mix = mix / (mix.sum(axis=1 + i % 2, keepdims=True) + np.float32(s.eps))
    return read, write, mix.astype(np.float32)


def compressed(model: NaiveModel, h: F32, p: str, m: EntryAttention) -> F32:
    t, first = len(h), m.head_dim - m.rope.dim
    latent = rms_norm(model._linear(h, p + "q_a"), model._vector(p + "q_a_norm"), m.eps)
    q = rms_norm(model._linear(latent, p + "q_b").reshape(t, m.num_heads, -1), None, m.eps)
    q = model._rope(q, m.rope, first)
    kv = rms_norm(model._linear(h, p + "kv"), model._vector(p + "kv_norm"), m.eps)
    kv = model._rounded(model._rope(kv[:, None], m.rope, first))[:, 0]
    entries, chosen = np.zeros((0, m.head_dim), np.float32), None
    if m.every is not None:
        entries = made(model, h, p + "pool", m, m.every)
    if m.every is not None and m.indexer is not None:
        index = m.indexer
        keys = made(model, h, p + "index", m, m.every)
        index_q = model._linear(latent, p + "index_q").reshape(t, index.num_heads, -1)
        index_q = model._rope(index_q, m.rope, index.head_dim - m.rope.dim)
        w = model._linear(h, p + "index_weights") * np.float32(index.num_heads**-0.5)
        chosen = []
        for i in range(t):
            seen = (i + 1) // m.every
            worth = w[i] @ np.maximum((index_q[i] @ keys[:seen].T) * np.float32(index.head_dim**-0.5), np.float32(0))
            chosen.append(sorted(sorted(range(seen), key=lambda e, worth=worth: (-worth[e], e))[: index.top_k]))
    sinks = model._vector(p + "sinks")
    out = np.empty_like(q)
    for i in range(t):
        seen = [] if m.every is None else list(range((i + 1) // m.every)) if chosen is None else chosen[i]
        own = np.concatenate([kv[max(0, i + 1 - m.window) : i + 1], entries[seen]])
        for j in range(m.num_heads):
            s = (own @ q[i, j]) * np.float32(m.head_dim**-0.5)
            most = max(s.max(), sinks[j])
            e = np.exp(s - most)
            out[i, j] = (e @ own) / (e.sum() + np.exp(sinks[j] - most))
    out = model._rope(out, msgspec.structs.replace(m.rope, backwards=True), first).reshape(t, m.out_groups, -1)
    o_a = as_float32(model.weights[p + "o_a"]).reshape(m.out_groups, m.out_rank, -1)
    return model._linear(np.einsum("tgc,grc->tgr", out, o_a).reshape(t, -1).astype(np.float32), p + "o")


def made(model: NaiveModel, h: F32, name: str, m: EntryAttention, every: int) -> F32:
    """All entries of the text."""
    value, score = model._linear(h, name + "_kv"), model._linear(h, name + "_gate")
    bias, num = model._vector(name + ".bias"), len(h) // every
    dim = value.shape[1] // m.series
    out = np.zeros((num, dim), np.float32)
    for e in range(num):
        own = slice(e * every, (e + 1) * every)
        v, g = value[own, -dim:], score[own, -dim:] + bias[:, -dim:]
        if m.overlap and e:
            before = slice((e - 1) * every, e * every)
            v = np.concatenate([value[before, :dim], v])
            g = np.concatenate([score[before, :dim] + bias[:, :dim], g])
        share = np.exp(g - g.max(axis=0))
        out[e] = (v * (share / share.sum(axis=0))).sum(axis=0)
    out = rms_norm(out, model._vector(name + "_norm"), m.eps)
    table = rope_table(m.rope, model.max_model_len)[:, : num * every : every]
    return model._rounded(rope(out[:, None], table, m.rope.interleaved, dim - m.rope.dim))[:, 0]
