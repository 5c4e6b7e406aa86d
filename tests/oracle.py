"""The naive loop every optimisation is compared with: no cache, no pages, no plan; all is recomputed for every token.

It uses the row primitives of `ops.ref` that have nothing to do with memory (products, norms, rope, activations) and its
own few lines for everything else. Its logits equal those of a Program with backend "ref" bit for bit, for every KV
dtype (the cache rounds what it stores, so the oracle rounds too), and those with "ref-online" to about 1e-4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.base.bf16 import F32
from penstock.core.kv_format import LayerFormat, parse_kv_format
from penstock.core.model_spec import (
    Attention,
    BlockAttention,
    ChannelMix,
    Diagonal,
    EntryAttention,
    Experts,
    FeedForward,
    FeedForwardKind,
    GatedDelta,
    GatedLru,
    Indexer,
    Latent,
    Layer,
    Lightning,
    Mamba,
    Mamba2,
    Mlstm,
    ModelSpec,
    Norm,
    QkNorm,
    Qrwkv6,
    QueryScale,
    Recurrent,
    Rope,
    Rwkv4,
    Rwkv5,
    Rwkv6,
    Rwkv7,
    SharedBlock,
    ShortConv,
)
from penstock.model.hashes import HASHES
from penstock.ops.ref.norm import layer_norm, rms_norm
from penstock.ops.ref.pointwise import ACTIVATIONS, sigmoid
from penstock.ops.ref.product import as_float32, embed, linear
from penstock.ops.ref.rotary import rope, rope_table
from penstock.ops.ref.rotation import hadamard
from tests import naive_blocks, naive_compressed, naive_delta, naive_kv, naive_recurrent, naive_rwkv, naive_streams

Pick = Callable[[F32, Sequence[int]], int]
"""(logits [V] after the newest token, all tokens so far) -> next token."""


class NaiveModel:
    """A model as a function of all its tokens. Shape letters: T tokens, H heads, G kv heads, D head dim, V vocab."""

    def __init__(
        self, spec: ModelSpec, weights: dict[str, npt.NDArray[Any]], kv_dtype: str = "float32",
        max_model_len: int | None = None, block_size: int = 4, rotation: str = "none",
    ) -> None:  # fmt: skip
        """`max_model_len`: what the program was built for; only ropes that depend on it care. `block_size`: only
        formats that encode whole blocks care."""
        self.spec = spec
        self.weights = weights
        self.kv_dtype, self.block_size, self.rotation = kv_dtype, block_size, rotation
        self.kv_format = parse_kv_format(kv_dtype)
        self.max_model_len = max_model_len or spec.max_position
        self._chosen: list[npt.NDArray[Any]] = []  # what the last indexer left for later layers
        self._kept: dict[int, Any] = {}  # keys and values of layers, for those that read them
        self._v_first: F32 | None = None  # what RWKV-7's first layer leaves for the later ones

    def logits(self, token_ids: Sequence[int], *, last_only: bool = False) -> F32:
        """Logits [T, V] after each token ([1, V] with `last_only`, which only skips the other rows of the head)."""
        spec = self.spec
        with np.errstate(all="ignore"):
            x = embed(np.asarray(token_ids, np.int32), self.weights["embed"]) * np.float32(spec.embed_scale)
            if spec.embed_size is not None:
                x = self._linear(x, "embed_in")
            if spec.positions:
                x = x + as_float32(self.weights["positions"])[: len(x)]
            if spec.embed_norm is not None:
                x = self._norm(x, "embed_norm", spec.embed_norm)
            self._embedded = x
            self._token_ids = list(token_ids)
            if spec.per_layer is not None:
                self._given = naive_streams.per_layer_inputs(self, token_ids, x)
            self._kept = {}
            if spec.altup is not None:
                streams = naive_streams.begin(self, x, spec.altup)
                for n, layer in enumerate(spec.layers):
                    streams = naive_streams.layer_of_streams(self, streams, f"layers.{n}.", layer)
                x = naive_streams.end(self, streams, spec.altup)
            if spec.streams is not None:
                x = naive_compressed.streamed(self, x, spec.streams)
            for n, layer in enumerate(spec.layers if spec.altup is None and spec.streams is None else ()):
                read = None if layer.mixer is None else self._read(x, n, layer)
                before, x = x, self._layer(x, f"layers.{n}.", layer, read)
                self._before = before
            x = x[-1:] if last_only else x
            if spec.final_norm is not None:
                x = self._norm(x, "final_norm", spec.final_norm)
            if spec.embed_size is not None:
                x = self._linear(x, "embed_out")
            bias = self._vector("lm_head.bias") if spec.lm_head_bias else None
            x = linear(x, self.weights["embed" if spec.tie_embeddings else "lm_head"], bias)
            x = x * np.float32(spec.logit_scale)
            cap = spec.logit_soft_cap
            return x if cap is None else np.float32(cap) * np.tanh(x / np.float32(cap))

    def _read(self, x: F32, n: int, layer: Layer) -> F32 | None:
        """What the mixer reads, if it is not the normed x: that of the layer before, or a multiple."""
        if not layer.beside and not layer.forgets and layer.mixer_scale == 1.0:
            return None
        assert layer.placement == "pre"
        x, at = (self._before, n - 1) if layer.beside else (x, n)
        return self._norm(x, f"layers.{at}.attn_norm", layer.norm) * np.float32(layer.mixer_scale)

    def _layer(self, x: F32, p: str, layer: Layer, read: F32 | None = None) -> F32:
        if layer.parallel:
            h = self._norm(x, p + "attn_norm", layer.norm)
            other = h if layer.shared_norm else self._norm(x, p + "ffn_norm", layer.norm)
            both = self._feed_forward(other, p, layer.ffn) + self._mixer(h, p, layer)
            return x + both * np.float32(layer.residual_scale)
        if read is not None:
            x = self._before if layer.forgets else x
            x = x + self._mixer(read, p, layer) * np.float32(layer.residual_scale)
        elif layer.mixer is not None:
            x = self._half(x, p + "attn", layer, lambda h: self._mixer(h, p, layer))
        if layer.ffn is not None:
            x = self._half(x, p + "ffn", layer, lambda h: self._feed_forward(h, p, layer.ffn))
        if layer.per_layer is not None:
            x = x + naive_streams.given(self, x, p, layer)
        return x

    def _half(self, x: F32, name: str, layer: Layer, f: Callable[[F32], F32]) -> F32:
        by = np.float32(layer.residual_scale)
        match layer.placement:
            case "pre" if layer.residual_weights:
                w = self._vector(name + "_residual") - np.float32(1.0)
                return x + (x + x - x) * w + f(self._norm(x, name + "_norm", layer.norm)) * by
            case "pre":
                return x + f(self._norm(x, name + "_norm", layer.norm)) * by
            case "post":
                return x + self._norm(f(x), name + "_norm", layer.norm) * by
            case "both":
                inner = f(self._norm(x, name + "_norm", layer.norm))
                return x + self._norm(inner, name + "_post_norm", layer.norm) * by
            case "bare":
                return x + f(x) * by
            case "sum":
                return self._norm(x + f(x) * by, name + "_norm", layer.norm)
            case "normed":
                x = self._norm(x, name + "_norm", layer.norm)
                return x * np.float32(layer.keep) + f(x) * by

    def _mixer(self, h: F32, p: str, layer: Layer) -> F32:
        match layer.mixer:
            case SharedBlock() as m:
                return naive_recurrent.shared_block(self, h, self._embedded, p, m)
            case GatedLru() as m:
                return naive_recurrent.gated_lru(self, h, p, m)
            case Mlstm() as m:
                return naive_recurrent.mlstm(self, h, p, m)
            case Diagonal() as m:
                return naive_recurrent.diagonal(self, h, p, m)
            case Attention() as m:
                return self._attention(h, p, m)
            case BlockAttention() as m:
                return naive_blocks.block_attention(self, h, p, m)
            case Latent() as m:
                return self._latent(h, p, m)
            case EntryAttention() as m:
                return naive_compressed.compressed(self, h, p, m)
            case Recurrent() as m:
                return self._recurrent(h, p, m)
            case Mamba() as m:
                return self._mamba(h, p, m)
            case Mamba2() as m:
                return self._mamba2(h, p, m)
            case Lightning() as m:
                return naive_delta.lightning(self, h, p, m)
            case ShortConv() as m:
                return self._short_conv(h, p, m)
            case GatedDelta() as m:
                return naive_delta.gated_delta(self, h, p, m)
            case Rwkv4() as m:
                return naive_rwkv.time_mix_4(self, h, p, m)
            case Rwkv5() as m:
                return naive_rwkv.time_mix_5(self, h, p, m)
            case Qrwkv6() as m:
                return naive_rwkv.time_mix_q6(self, h, p, m)
            case Rwkv6() as m:
                return naive_rwkv.time_mix_6(self, h, p, m)
            case Rwkv7() as m:
                out, self._v_first = naive_rwkv.time_mix_7(self, h, p, m, None if m.first else self._v_first)
                return out
        raise AssertionError(f"no naive form of {layer.mixer}")

    def greedy(self, prompt: Sequence[int], n: int) -> list[int]:
        """The `n` tokens after `prompt`; ties go to the lowest id. Ends of sequence are not looked at."""
        return naive_generate(self, prompt, lambda row, _: int(np.argmax(row)), n)

    def _vector(self, name: str) -> F32:
        return as_float32(self.weights[name])

    def _norm(self, x: F32, name: str, norm: Norm) -> F32:
        weight = self._vector(name) + np.float32(norm.offset) if norm.weight else None
        if norm.kind == "rms":
            return rms_norm(x, weight, norm.eps)
        return layer_norm(x, weight, self._vector(name + ".bias") if norm.weight and norm.bias else None, norm.eps)

    def _linear(self, x: F32, name: str) -> F32:
        bias = self._vector(name + ".bias") if name + ".bias" in self.weights else None
        return linear(x, self.weights[name], bias)

    def _rope(self, x: F32, how: Rope, first: int = 0) -> F32:
        return rope(x, rope_table(how, self.max_model_len)[:, : len(x)], how.interleaved, first)

    def _rounded(self, x: F32) -> F32:
        """What is left of x after a stay in the cache."""
        return naive_kv.rounded(x if x.ndim == 3 else x[:, None], self.kv_dtype).reshape(x.shape)

    def _attention(self, h: F32, p: str, m: Attention, product: Callable[[F32, str], F32] | None = None) -> F32:
        """`product`: what multiplies with the matrix q, k, v or o, if they are not the layer's own."""
        t = len(h)
        if m.kv_from is not None:
            return self._attention_of_others(h, p, m)
        if product is None:

            def product(x: F32, name: str) -> F32:
                return self._linear(x, p + name)

        q, k = (product(h, name) for name in "qk")
        v = k if m.v_from_k else product(h, "v")
        norm = m.qk_norm
        if norm is not None and norm.over == "all":
            q, k = self._qk_norm(q, p + "q", norm), self._qk_norm(k, p + "k", norm)
        if m.clip is not None:
            q, k, v = (np.clip(x, -np.float32(m.clip), np.float32(m.clip)) for x in (q, k, v))
        v = v * np.float32(m.value_scale)
        q = q.reshape(t, m.num_heads, m.head_dim)
        k, v = k.reshape(t, m.num_kv_heads, -1), v.reshape(t, m.num_kv_heads, -1)
        if m.v_norm is not None:
            v = rms_norm(v, None, m.v_norm)
        per_head = norm is not None and norm.over != "all"
        if norm is not None and per_head and not norm.after_rope:
            q, k = self._qk_norm(q, p + "q", norm), self._qk_norm(k, p + "k", norm)
        if m.rope is not None:
            q, k = self._rope(q, m.rope), self._rope(k, m.rope)
        if norm is not None and per_head and norm.after_rope:
            q, k = self._qk_norm(q, p + "q", norm), self._qk_norm(k, p + "k", norm)
        q = _grown(q, m.query_scale)
        bias = None if not m.key_bias else self._key_bias(v.reshape(t, -1), p)
        turned = self.rotation == "hadamard"
        if turned:
            q, k, v = (hadamard(x) for x in (q, k, v))
        if bias is not None:  # kept as a part of the key, so that it is rounded as keys are
            per = 1.0 / (m.head_dim**-0.5 if m.scale is None else m.scale)
            q, k = _with(q, np.ones(q.shape[:2])), _with(k, bias * np.float32(per))
        attend = partial(
            softmax_attention, scale=m.head_dim**-0.5 if m.scale is None else m.scale, window=m.window,
            soft_cap=m.soft_cap, chunk=m.chunk, slopes=None if m.alibi is None else m.alibi.slopes(m.num_heads),
            sinks=self._vector(p + "sinks") if m.sinks else None,
        )  # fmt: skip
        how = self.kv_format.of(int(p.split(".")[1]))
        if how.recent and m.reach is not None:
            how = LayerFormat(("float16",), ("float16",))
        keys, values = (naive_kv.reader(x, c, how, self.block_size) for x, c in ((k, how.keys), (v, how.values)))
        self._kept[int(p.split(".")[1])] = keys, values, how
        if how.recent:
            out = np.concatenate([attend(q[: i + 1], keys(i), values(i), only=i) for i in range(t)])
        else:
            out = attend(q, keys(t - 1), values(t - 1))
        if turned:
            out = hadamard(out)
        gate = _softplus if m.gate == "softplus" else sigmoid
        if m.head_gate:
            out = out * gate(self._linear(h, p + "o_gate"))[..., None]
        out = out.reshape(t, -1)
        if m.output_gate:
            out = out * gate(self._linear(h, p + "o_gate"))
        if m.o_norm is not None:
            out = rms_norm(out, self._vector(p + "o_norm"), m.o_norm)
        return product(out, "o")

    def _attention_of_others(self, h: F32, p: str, m: Attention) -> F32:
        """Queries of this layer over the keys and values of another."""
        t = len(h)
        q = self._linear(h, p + "q").reshape(t, m.num_heads, m.head_dim)
        if m.qk_norm is not None and not m.qk_norm.after_rope:
            q = self._qk_norm(q, p + "q", m.qk_norm)
        if m.rope is not None:
            q = self._rope(q, m.rope)
        if m.qk_norm is not None and m.qk_norm.after_rope:
            q = self._qk_norm(q, p + "q", m.qk_norm)
        q = hadamard(q) if self.rotation == "hadamard" else q
        keys, values, how = self._kept[m.kv_from]
        scale = m.head_dim**-0.5 if m.scale is None else m.scale
        attend = partial(softmax_attention, scale=scale, window=m.window)
        if how.recent:
            out = np.concatenate([attend(q[: i + 1], keys(i), values(i), only=i) for i in range(t)])
        else:
            out = attend(q, keys(t - 1), values(t - 1))
        out = hadamard(out) if self.rotation == "hadamard" else out
        return self._linear(out.reshape(t, -1), p + "o")

    def _key_bias(self, v: F32, p: str) -> F32:
        return np.exp(_softplus(self._linear(v, p + "bias_dt")) * self._vector(p + "bias_a"))

    def _qk_norm(self, x: F32, name: str, norm: QkNorm) -> F32:
        if norm.kind == "unit":
            return rms_norm(x, None, norm.eps)
        if norm.in_query:
            p = name[:-1]
            by = self._vector(p + "q_norm") * self._vector(p + "k_norm") if name.endswith("q") else None
            return rms_norm(x, by, norm.eps)
        if norm.over == "split":
            heads = [self._vector(f"{name}_norm.{i}") for i in range(x.shape[1])]
            weight = np.stack(heads) + np.float32(norm.offset)
        else:
            weight = self._vector(name + "_norm") + np.float32(norm.offset)
        if norm.kind == "rms":
            return rms_norm(x, weight, norm.eps)
        return layer_norm(x, weight, self._vector(name + "_norm.bias") if norm.bias else None, norm.eps)

    def _latent(self, h: F32, p: str, m: Latent) -> F32:
        t = len(h)
        if m.q_rank is None:
            q = self._linear(h, p + "q")
        else:
            inner = rms_norm(self._linear(h, p + "q_a"), self._vector(p + "q_a_norm"), m.eps)
            q = self._linear(inner, p + "q_b")
            if m.indexer is not None:
                self._chosen = self._choice(h, inner, p, m.indexer)
        q = q.reshape(t, m.num_heads, -1)
        q = _grown(q if m.rope is None else self._rope(q, m.rope, m.nope_dim), m.query_scale)
        kv = self._linear(h, p + "kv_a")
        latent = self._rounded(rms_norm(kv[:, : m.kv_rank], self._vector(p + "kv_a_norm"), m.eps))
        k_rope = kv[:, None, m.kv_rank :]
        k_rope = self._rounded(k_rope if m.rope is None else self._rope(k_rope, m.rope))[:, 0]
        halves = [self.weights[p + name] for name in (("k_b", "v_b") if m.split else ("kv_b",))]
        kv_b = np.concatenate([as_float32(w).reshape(m.num_heads, -1, m.kv_rank) for w in halves], axis=1)
        absorbed = np.stack(
            [[q[i, j, : m.nope_dim] @ kv_b[j, : m.nope_dim] for j in range(m.num_heads)] for i in range(t)]
        )
        q = np.concatenate([absorbed, q[:, :, m.nope_dim :]], axis=-1)
        k = np.concatenate([latent, k_rope], axis=-1)[:, None]
        scale = (m.nope_dim + m.rope_dim) ** -0.5 if m.scale is None else m.scale
        if m.indexer is None and not m.reads_choice:
            out = softmax_attention(q, k, latent[:, None], scale)
        else:
            seen = [(k[at], latent[at, None]) for at in self._chosen]
            own = [softmax_attention(q[i : i + 1].repeat(len(a), 0), a, v, scale, only=len(a) - 1)
                   for i, (a, v) in enumerate(seen)]  # fmt: skip
            out = np.concatenate(own)
        out = np.stack([[kv_b[j, m.nope_dim :] @ out[i, j] for j in range(m.num_heads)] for i in range(t)])
        if m.head_gate:
            out = out * sigmoid(self._linear(h, p + "o_gate"))[..., None]
        return self._linear(out.reshape(t, -1), p + "o")

    def _choice(self, h: F32, inner: F32, p: str, m: Indexer) -> list[npt.NDArray[Any]]:
        """For every token the places of those it reads."""
        t = len(h)
        q = self._rope(self._linear(inner, p + "index_q").reshape(t, m.num_heads, -1), m.rope)
        name = p + "index_k_norm"
        k = layer_norm(self._linear(h, p + "index_k"), self._vector(name), self._vector(name + ".bias"), m.eps)
        k = self._rounded(self._rope(k[:, None], m.rope))[:, 0]
        w = self._linear(h, p + "index_weights") * np.float32(m.num_heads**-0.5)
        out = []
        for i in range(t):
            worth = w[i] @ np.maximum((q[i] @ k[: i + 1].T) * np.float32(m.head_dim**-0.5), np.float32(0))
            best = sorted(range(i + 1), key=lambda at, worth=worth: (-worth[at], at))[: m.top_k]
            out.append(np.array(sorted(best)))
        return out

    def _recurrent(self, h: F32, p: str, m: Recurrent) -> F32:
        t = len(h)
        q = self._linear(h, p + "q").reshape(t, m.num_heads, m.key_dim)
        k = self._linear(h, p + "k").reshape(t, m.num_heads, m.key_dim)
        v = self._linear(h, p + "v").reshape(t, m.num_heads, m.value_dim)
        keep = sigmoid(self._linear(h, p + "decay"))
        out = np.empty((t, m.num_heads, m.value_dim), np.float32)
        for j in range(m.num_heads):
            state = np.zeros((m.key_dim, m.value_dim), np.float32)
            for i in range(t):
                state = keep[i, j] * state + np.outer(k[i, j], v[i, j])
                out[i, j] = q[i, j] @ state
        return self._linear(out.reshape(t, -1), p + "o")

    def _decay(self, p: str, m: Mamba | Mamba2) -> F32:
        stored = self._vector(p + "a_log")
        return -np.exp(stored) if m.decay_is_log else stored

    def _mamba(self, h: F32, p: str, m: Mamba) -> F32:
        a, d = self._decay(p, m), self._vector(p + "d")
        xz = self._linear(h, p + "in")
        x = ACTIVATIONS["silu"](self._convolved(xz[:, : m.inner], p))
        dt, b, c = np.split(self._linear(x, p + "x"), [m.dt_rank, m.dt_rank + m.state], axis=1)
        if m.norm_eps is not None:
            named = ((dt, "dt_norm"), (b, "b_norm"), (c, "c_norm"))
            dt, b, c = (rms_norm(v, self._vector(p + n) if m.norm_weights else None, m.norm_eps) for v, n in named)
        dt = _softplus(self._linear(np.ascontiguousarray(dt), p + "dt"))
        out = np.empty_like(x)
        state = np.zeros((m.inner, m.state), np.float32)
        for i in range(len(h)):
            state = np.exp(np.outer(dt[i], np.ones(m.state, np.float32)) * a) * state + np.outer(dt[i] * x[i], b[i])
            out[i] = state @ c[i] + d * x[i]
        return self._linear(out * ACTIVATIONS["silu"](xz[:, m.inner :]), p + "o")

    def _mamba2(self, h: F32, p: str, m: Mamba2) -> F32:
        a, d, dt_bias = self._decay(p, m), self._vector(p + "d"), self._vector(p + "dt.bias")
        t, inner, per = len(h), m.inner, m.num_heads // m.groups
        gate, xbc, dt = np.split(self._linear(h, p + "in"), [inner, inner + m.conv_dim], axis=1)
        z, *inner_scales, by = (np.float32(scale) for scale in m.scales)
        gate, dt = gate * z, dt * by
        xbc = xbc * np.repeat(np.array(inner_scales), (inner, m.groups * m.state, m.groups * m.state))
        x, b, c = np.split(ACTIVATIONS["silu"](self._convolved(xbc, p)), [inner, inner + m.groups * m.state], axis=1)
        x = x.reshape(t, m.num_heads, m.head_dim)
        b, c = (v.reshape(t, m.groups, m.state) for v in (b, c))
        dt = np.clip(_softplus(dt + dt_bias), np.float32(m.dt_min), np.float32(m.dt_max))
        out = np.empty_like(x)
        for g in range(m.groups):
            states = [np.zeros((m.head_dim, m.state), np.float32) for _ in range(per)]
            for i in range(t):
                for j, n in enumerate(range(g * per, (g + 1) * per)):
                    states[j] = np.exp(dt[i, n] * a[n]) * states[j] + np.outer(dt[i, n] * x[i, n], b[i, g])
                read = np.concatenate(states) @ c[i, g]
                out[i, g * per : (g + 1) * per] = read.reshape(per, -1)
        y, opened = (out + d[:, None] * x).reshape(t, inner), ACTIVATIONS["silu"](gate)
        if m.norm == "none":
            return self._linear(y * opened, p + "o")
        y = y if m.norm == "before" else y * opened
        weight, size = self._vector(p + "gate_norm"), inner // m.groups
        parts = [slice(g * size, (g + 1) * size) for g in range(m.groups)]
        normed = np.concatenate([rms_norm(y[:, i], weight[i], m.eps) for i in parts], axis=1)
        return self._linear(normed * opened if m.norm == "before" else normed, p + "o")

    def _convolved(self, x: F32, p: str) -> F32:
        """Each channel's convolution with its own last inputs."""
        taps = self._vector(p + "conv")
        out = np.empty_like(x)
        for i in range(len(x)):
            total = self._vector(p + "conv.bias") if p + "conv.bias" in self.weights else np.float32(0.0)
            for k in range(taps.shape[1]):
                at = i - taps.shape[1] + 1 + k
                total = total + (x[at] if at >= 0 else np.float32(0.0)) * taps[:, k]
            out[i] = total
        return out

    def _short_conv(self, h: F32, p: str, m: ShortConv) -> F32:
        before, after, x = np.split(self._linear(h, p + "in"), 3, axis=1)
        return self._linear(after * self._convolved(before * x, p), p + "o")

    def _feed_forward(self, h: F32, p: str, f: FeedForwardKind | None) -> F32:
        match f:
            case FeedForward():
                return self._dense(h, p, f)
            case Experts():
                out = self._experts(h, p, f)
                if f.shared is None:
                    return out
                shared = self._dense(h, p + "shared.", f.shared) * np.float32(f.shared_scale)
                return out + (shared * sigmoid(self._linear(h, p + "shared_gate")) if f.shared_gate else shared)
            case ChannelMix():
                return naive_rwkv.channel_mix(self, h, p, f)
        raise AssertionError(f"no naive form of {f}")

    def _dense(self, h: F32, p: str, f: FeedForward) -> F32:
        up = self._linear(h, p + "up")
        if f.activation in ("swiglu_clamped", "silu_clamped"):
            gate = self._linear(h, p + "gate")
            if f.limit is not None:
                gate, up = np.minimum(gate, np.float32(f.limit)), np.clip(up, -np.float32(f.limit), np.float32(f.limit))
            if f.activation == "silu_clamped":
                inner = ACTIVATIONS["silu"](gate) * up
            else:
                inner = gate * sigmoid(np.float32(1.702) * gate) * (up + np.float32(1.0))
        elif f.activation == "xielu":
            positive, negative = (np.logaddexp(np.float32(0), self._vector(p + n)[0]) for n in ("act_p", "act_n"))
            below = (np.expm1(np.minimum(up, np.float32(-1e-6))) - up) * (negative + np.float32(0.5))
            inner = np.where(up > 0, positive * up * up, below) + np.float32(0.5) * up
        else:
            act = ACTIVATIONS[f.activation]
            if f.gated:
                gate = self._linear(h, p + "gate") * np.float32(f.gate_scale)
                up = act(naive_streams.cut_off(gate, f.sparsity) if f.sparsity else gate) * up
            inner = up if f.gated else act(up)
        if f.down_norm is not None:
            inner = rms_norm(inner, self._vector(p + "down_norm"), f.down_norm)
        return self._linear(inner, p + "down")

    def _experts(self, h: F32, p: str, f: Experts) -> F32:
        """Token by token: order the experts by score in plain Python, run the chosen ones in id order."""
        correction = self._vector(p + "router_correction") if f.router.correction else None
        inner = h if f.latent is None else self._linear(h, p + "experts_in")
        out = np.zeros_like(inner)
        for i, logits in enumerate(self._router(h, p, f)):
            listed = None
            if f.router.listed:
                listed = as_float32(self.weights[p + "router_table"])[self._token_ids[i]]
            elif f.router.hash is not None:
                table = HASHES.get(f.router.hash)(
                    self.spec.vocab_size, f.num_experts, f.top_k, int(p.split(".")[1])
                )  # fmt: skip
                listed = table[self._token_ids[i] if len(table) > 1 else 0].astype(np.float32)
            for expert, weight in chosen_experts(logits, f, correction, listed):
                if f.router.expert_scale:
                    weight = weight * self._vector(p + "router_scale")[expert]
                x = inner[i : i + 1] * weight if f.router.scale_input else inner[i : i + 1]
                y = self._dense(x, f"{p}experts.{expert}.", f.expert)
                out[i : i + 1] += y if f.router.scale_input else y * weight
        return out if f.latent is None else self._linear(out, p + "experts_out")

    def _router(self, h: F32, p: str, f: Experts) -> F32:
        """Of every token [T, X]: the product, or the task's row."""
        if f.router.tasks:
            return np.tile(self._vector(p + "router_tasks")[f.router.task], (len(h), 1))
        if f.router.score == "even":
            return np.zeros((len(h), f.num_experts), np.float32)
        return self._linear(h, p + "router")


def _with(x: F32, more: npt.NDArray[Any]) -> F32:
    """Heads [T, H, D] with a further component, and three of zeros."""
    return np.concatenate([x, more[..., None].astype(np.float32), np.zeros((*x.shape[:2], 3), np.float32)], axis=-1)


def _grown(q: F32, s: QueryScale | None) -> F32:
    """Queries [T, H, D] that grow with their position."""
    if s is None:
        return q
    return np.stack([x * np.float32(1.0 + s.beta * np.log1p((i + s.shift) // s.floor)) for i, x in enumerate(q)])


def chosen_experts(
    logits: F32, f: Experts, correction: F32 | None, listed: F32 | None = None
) -> list[tuple[int, np.float32]]:
    """(expert, weight) of a token in id order, as `core.model_spec.Router` says; float32 sums as the ops make them."""
    r, n = f.router, f.num_experts
    if r.score == "sparse_mixer":
        return _sparse_mixer(logits, f)
    if r.score == "even":
        scores = np.ones(n, np.float32)
    elif r.score == "sqrtsoftplus":
        scores = np.sqrt(_softplus(logits))
    else:
        scores = sigmoid(logits) if r.score == "sigmoid" else _softmax(logits)
    choice = [float(s) for s in (scores if correction is None else scores + correction)]
    allowed = set(range(n))
    if r.groups > 1:
        size = n // r.groups
        members = [list(range(g * size, (g + 1) * size)) for g in range(r.groups)]
        worth = []
        for group in members:
            best = sorted((np.float32(choice[e]) for e in group), reverse=True)
            worth.append(float(best[0] if r.group_score == "max" else best[1] + best[0]))
        order = sorted(range(r.groups), key=lambda g: (-worth[g], g))[: r.top_groups]
        allowed = {e for g in order for e in members[g]}
    ids = sorted(sorted(allowed, key=lambda e: (-choice[e], e))[: f.top_k])
    if listed is not None:
        ids = sorted(int(e) for e in listed)
    weights = _softmax(logits[ids]) if r.chosen_only else scores[ids]
    if r.renormalize:
        total = np.add.reduce(weights, keepdims=True)
        weights = weights / (total if r.score == "softmax" else total + np.float32(1e-20))
    return list(zip(ids, weights * np.float32(r.scale), strict=True))


def _sparse_mixer(logits: F32, f: Experts) -> list[tuple[int, np.float32]]:
    left, found = list(range(f.num_experts)), {}
    for _ in range(f.top_k):
        best = max(left, key=lambda e: (logits[e], -e))
        z = logits[best]
        near = [e for e in left if (z - logits[e]) / max(abs(logits[e]), z) <= np.float32(2 * f.router.jitter)]
        alone = np.full(f.num_experts, -np.inf, np.float32)
        alone[near] = logits[near]
        found[best] = _softmax(alone)[best] * np.float32(f.router.scale)
        left.remove(best)
    return sorted(found.items())


def _softplus(x: F32) -> F32:
    return np.where(x > 0, x, np.float32(0.0)) + np.log1p(np.exp(-np.abs(x)))


def _softmax(x: F32) -> F32:
    e = np.exp(x - x.max())
    return e / np.add.reduce(e)


def softmax_attention(
    q: F32, k: F32, v: F32, scale: float, window: int | None = None, soft_cap: float | None = None, *,
    chunk: int | None = None, slopes: Sequence[float] | None = None, sinks: F32 | None = None, only: int | None = None,
) -> F32:  # fmt: skip
    """Causal attention by the book: q [T, H, D], k [T, G, D], v [T, G, W] -> [T, H, W], or the row `only` of it."""
    t, g = len(q), k.shape[1]
    per = q.shape[1] // g
    out = np.empty((t, q.shape[1], v.shape[2]), np.float32)
    for i in range(t) if only is None else (only,):
        first = max(0 if window is None else i - window + 1, 0 if chunk is None else i - i % chunk, 0)
        for j in range(g):
            mine = slice(j * per, (j + 1) * per)
            s = (q[i, mine] @ k[first : i + 1, j].T) * scale
            if soft_cap is not None:
                s = soft_cap * np.tanh(s / soft_cap)
            if slopes is not None:
                distance = np.arange(i - first, -1, -1, dtype=np.float32)
                s = s - np.array(slopes, np.float32)[mine, None] * distance
            m = s.max(axis=-1, keepdims=True)
            if sinks is not None:
                m = np.maximum(m, sinks[mine, None])
            e = np.exp(s - m)
            total = e.sum(axis=-1, keepdims=True)
            if sinks is not None:
                total = total + np.exp(sinks[mine, None] - m)
            out[i, mine] = (e @ v[first : i + 1, j]) / total
    return out if only is None else out[only : only + 1]


def naive_generate(model: NaiveModel, prompt: Sequence[int], pick: Pick, n: int) -> list[int]:
    """The `n` tokens after `prompt`, each chosen by `pick`; the whole model runs again for every one of them."""
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(pick(model.logits(tokens, last_only=True)[0], tokens))
    return tokens[len(prompt) :]
