"""The naive loop every optimisation is compared with: no cache, no pages, no plan; all is recomputed for every token.

It uses the row primitives of `ops.ref` that have nothing to do with memory (products, norms, rope, activations) and its
own few lines for everything else. Its logits equal those of a Program with backend "ref" bit for bit, for every KV
dtype (the cache rounds what it stores, so the oracle rounds too), and those with "ref-online" to about 1e-4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.base.bf16 import F32, narrow, widen
from penstock.core.model_spec import Attention, FeedForward, Latent, ModelSpec, Norm, Recurrent, Rope
from penstock.ops.ref.norm import layer_norm, rms_norm
from penstock.ops.ref.pointwise import ACTIVATIONS, sigmoid
from penstock.ops.ref.product import as_float32, embed, linear
from penstock.ops.ref.rotary import rope, rope_table

Pick = Callable[[F32, Sequence[int]], int]
"""(logits [V] after the newest token, all tokens so far) -> next token."""


class NaiveModel:
    """A model as a function of all its tokens. Shape letters: T tokens, H heads, G kv heads, D head dim, V vocab."""

    def __init__(self, spec: ModelSpec, weights: dict[str, npt.NDArray[Any]], kv_dtype: str = "float32") -> None:
        self.spec = spec
        self.weights = weights
        self.kv_dtype = kv_dtype

    def logits(self, token_ids: Sequence[int], *, last_only: bool = False) -> F32:
        """Logits [T, V] after each token ([1, V] with `last_only`, which only skips the other rows of the head)."""
        with np.errstate(all="ignore"):
            x = embed(np.asarray(token_ids, np.int32), self.weights["embed"])
            for n, layer in enumerate(self.spec.layers):
                p = f"layers.{n}."
                h = self._norm(x, p + "attn_norm", layer.norm)
                match layer.mixer:
                    case Attention() as m:
                        y = self._attention(h, p, m, layer.norm.eps)
                    case Latent() as m:
                        y = self._latent(h, p, m, layer.norm.eps)
                    case Recurrent() as m:
                        y = self._recurrent(h, p, m)
                x = x + y
                x = x + self._feed_forward(self._norm(x, p + "ffn_norm", layer.norm), p, layer.ffn)
            x = self._norm(x[-1:] if last_only else x, "final_norm", self.spec.final_norm)
            return linear(x, self.weights["embed" if self.spec.tie_embeddings else "lm_head"])

    def greedy(self, prompt: Sequence[int], n: int) -> list[int]:
        """The `n` tokens after `prompt`; ties go to the lowest id. Ends of sequence are not looked at."""
        return naive_generate(self, prompt, lambda row, _: int(np.argmax(row)), n)

    def _vector(self, name: str) -> F32:
        return as_float32(self.weights[name])

    def _norm(self, x: F32, name: str, norm: Norm) -> F32:
        if norm.kind == "rms":
            return rms_norm(x, self._vector(name), norm.eps)
        return layer_norm(x, self._vector(name), self._vector(name + ".bias"), norm.eps)

    def _linear(self, x: F32, name: str) -> F32:
        bias = self._vector(name + ".bias") if name + ".bias" in self.weights else None
        return linear(x, self.weights[name], bias)

    def _rope(self, x: F32, how: Rope, first: int = 0) -> F32:
        return rope(x, rope_table(how, len(x)), how.interleaved, first)

    def _rounded(self, x: F32) -> F32:
        """What is left of x after a stay in the cache."""
        if self.kv_dtype == "bfloat16":
            return widen(narrow(x))
        return x.astype(self.kv_dtype).astype(np.float32)

    def _attention(self, h: F32, p: str, m: Attention, eps: float) -> F32:
        t = len(h)
        q = self._linear(h, p + "q").reshape(t, m.num_heads, m.head_dim)
        k = self._linear(h, p + "k").reshape(t, m.num_kv_heads, m.head_dim)
        v = self._linear(h, p + "v").reshape(t, m.num_kv_heads, m.head_dim)
        if m.qk_norm:
            q, k = rms_norm(q, self._vector(p + "q_norm"), eps), rms_norm(k, self._vector(p + "k_norm"), eps)
        if m.rope is not None:
            q, k = self._rope(q, m.rope), self._rope(k, m.rope)
        scale = m.head_dim**-0.5 if m.scale is None else m.scale
        out = softmax_attention(q, self._rounded(k), self._rounded(v), scale, m.window, m.soft_cap)
        return self._linear(out.reshape(t, -1), p + "o")

    def _latent(self, h: F32, p: str, m: Latent, eps: float) -> F32:
        t = len(h)
        if m.q_rank is None:
            q = self._linear(h, p + "q")
        else:
            q = self._linear(rms_norm(self._linear(h, p + "q_a"), self._vector(p + "q_a_norm"), eps), p + "q_b")
        q = self._rope(q.reshape(t, m.num_heads, -1), m.rope, m.nope_dim)
        kv = self._linear(h, p + "kv_a")
        latent = self._rounded(rms_norm(kv[:, : m.kv_rank], self._vector(p + "kv_a_norm"), eps))
        k_rope = self._rounded(self._rope(kv[:, None, m.kv_rank :], m.rope))[:, 0]
        kv_b = as_float32(self.weights[p + "kv_b"]).reshape(m.num_heads, -1, m.kv_rank)
        absorbed = np.stack(
            [[q[i, j, : m.nope_dim] @ kv_b[j, : m.nope_dim] for j in range(m.num_heads)] for i in range(t)]
        )
        q = np.concatenate([absorbed, q[:, :, m.nope_dim :]], axis=-1)
        k = np.concatenate([latent, k_rope], axis=-1)[:, None]
        scale = (m.nope_dim + m.rope_dim) ** -0.5 if m.scale is None else m.scale
        out = softmax_attention(q, k, latent[:, None], scale)
        out = np.stack([[kv_b[j, m.nope_dim :] @ out[i, j] for j in range(m.num_heads)] for i in range(t)])
        return self._linear(out.reshape(t, -1), p + "o")

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

    def _feed_forward(self, h: F32, p: str, f: FeedForward) -> F32:
        act = ACTIVATIONS[f.activation]
        up = self._linear(h, p + "up")
        inner = act(self._linear(h, p + "gate")) * up if f.gated else act(up)
        return self._linear(inner, p + "down")


def softmax_attention(
    q: F32, k: F32, v: F32, scale: float, window: int | None = None, soft_cap: float | None = None
) -> F32:
    """Causal attention by the book: q [T, H, D], k [T, G, D], v [T, G, W] -> [T, H, W]."""
    t, g = len(q), k.shape[1]
    per = q.shape[1] // g
    out = np.empty((t, q.shape[1], v.shape[2]), np.float32)
    for i in range(t):
        first = 0 if window is None else max(0, i - window + 1)
        for j in range(g):
            mine = slice(j * per, (j + 1) * per)
            s = (q[i, mine] @ k[first : i + 1, j].T) * scale
            if soft_cap is not None:
                s = soft_cap * np.tanh(s / soft_cap)
            e = np.exp(s - s.max(axis=-1, keepdims=True))
            out[i, mine] = (e @ v[first : i + 1, j]) / e.sum(axis=-1, keepdims=True)
    return out


def naive_generate(model: NaiveModel, prompt: Sequence[int], pick: Pick, n: int) -> list[int]:
    """The `n` tokens after `prompt`, each chosen by `pick`; the whole model runs again for every one of them."""
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(pick(model.logits(tokens, last_only=True)[0], tokens))
    return tokens[len(prompt) :]
