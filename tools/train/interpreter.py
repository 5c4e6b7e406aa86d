"""A ModelSpec as a torch module, for training: the same weights by the same names, the same results as `ops/ref`.

Whole sequences at once, no cache. Covers what is trained here: attention of every kind that
`core.mixers.attention.Attention` describes, latent attention, the gated recurrence, dense feed-forwards, all norms and
placements. Shape letters: B sequences, T tokens, E hidden, H query heads, G kv heads, D head dim, V vocab.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.core.model_spec import (
    Attention,
    FeedForward,
    Latent,
    Layer,
    ModelSpec,
    Norm,
    QkNorm,
    QueryScale,
    Recurrent,
    Rope,
    weight_shapes,
)
from penstock.ops.ref.rotary import rope_table

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "relu": F.relu,
    "relu2": lambda x: F.relu(x) ** 2,
}  # fmt: skip


class SpecModule(nn.Module):
    """`spec` with trainable weights, one parameter per logical name (dots become slashes)."""

    def __init__(self, spec: ModelSpec, max_len: int) -> None:
        super().__init__()
        self.spec = spec
        self.max_len = max_len
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}
        self.tensors = nn.ParameterDict(
            {_key(name): nn.Parameter(torch.empty(shape)) for name, shape in weight_shapes(spec).items()}
        )
        self.ropes = {r: f"rope{i}" for i, r in enumerate(dict.fromkeys(_ropes(spec)))}
        for rope, name in self.ropes.items():
            table = torch.from_numpy(rope_table(rope, max_len))
            self.register_buffer(name, table, persistent=False)
        self.initialise()

    @torch.no_grad()
    def initialise(self, seed: int = 0) -> None:
        """GPT-2's recipe: normal of 0.02, output projections smaller by sqrt(2L); norms one, biases zero."""
        generator = torch.Generator().manual_seed(seed)
        depth = math.sqrt(2 * len(self.spec.layers))
        for name, p in self.named_weights().items():
            last = name.rsplit(".", 1)[-1]
            if p.ndim == 1:
                p.fill_(1.0 if "norm" in name and last != "bias" else 0.0)
            else:
                std = 0.02 / depth if last in ("o", "down") else 0.02
                p.copy_(torch.empty_like(p, device="cpu").normal_(std=std, generator=generator))

    def named_weights(self) -> dict[str, nn.Parameter]:
        """Logical name -> parameter."""
        return {name: self.tensors[_key(name)] for name in weight_shapes(self.spec)}

    def load(self, weights: Mapping[str, np.ndarray]) -> None:
        """Take weights by logical name (float32)."""
        with torch.no_grad():
            for name, p in self.named_weights().items():
                p.copy_(torch.from_numpy(np.array(weights[name], np.float32)))

    def forward(self, token_ids: Tensor) -> Tensor:
        """token_ids [B, T] -> logits [B, T, V]."""
        return self.head(self.hidden(token_ids))

    def hidden(self, token_ids: Tensor, stop: int | None = None) -> Tensor:
        """The residual [B, T, E] behind the first `stop` layers (None: all), before the final norm."""
        return self.residuals(token_ids, (len(self.spec.layers) if stop is None else stop,))[0]

    def residuals(self, token_ids: Tensor, stops: Sequence[int]) -> list[Tensor]:
        """The residuals [B, T, E] behind the first n layers, for each n of `stops` (rising), in one pass."""
        s = self.spec
        out: list[Tensor] = []
        x = F.embedding(token_ids, self._w("embed")) * s.embed_scale
        if s.positions:
            x = x + self._w("positions")[: x.shape[1]]
        if s.embed_norm is not None:
            x = self._norm(x, "embed_norm", s.embed_norm)
        for i, layer in enumerate(s.layers[: stops[-1]]):
            out += [x] * (i in stops)
            x = self._layer(x, f"layers.{i}.", layer)
        return [*out, x]

    def head(self, x: Tensor) -> Tensor:
        """Final norm and LM head: [B, T, E] -> [B, T, V]."""
        s = self.spec
        if s.final_norm is not None:
            x = self._norm(x, "final_norm", s.final_norm)
        bias = self._w("lm_head.bias") if s.lm_head_bias else None
        logits = F.linear(x, self._w("embed" if s.tie_embeddings else "lm_head"), bias) * s.logit_scale
        cap = s.logit_soft_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    # -- parts ---------------------------------------------------------------------------------------------------

    def _w(self, name: str) -> Tensor:
        return self.tensors[_key(name)]

    def _has(self, name: str) -> bool:
        return _key(name) in self.tensors

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self._w(name), self._w(name + ".bias") if self._has(name + ".bias") else None)

    def _norm(self, x: Tensor, name: str, norm: Norm) -> Tensor:
        weight = self._w(name) + norm.offset if norm.weight else None
        if norm.kind == "rms":
            return F.rms_norm(x, x.shape[-1:], weight, norm.eps)
        bias = self._w(name + ".bias") if self._has(name + ".bias") else None
        return F.layer_norm(x, x.shape[-1:], weight, bias, norm.eps)

    def _layer(self, x: Tensor, p: str, layer: Layer) -> Tensor:
        if (layer.per_layer, layer.altup, layer.laurel) != (None, None, None):
            raise NotImplementedError("no trainable form of residuals of several streams, and of what comes with them")
        if layer.parallel:
            h = self._norm(x, p + "attn_norm", layer.norm)
            other = h if layer.shared_norm else self._norm(x, p + "ffn_norm", layer.norm)
            return x + layer.residual_scale * (self._mixer(h, p, layer) + self._feed_forward(other, p, layer))
        if layer.mixer is not None:
            x = self._half(x, p + "attn", layer, lambda h: self._mixer(h, p, layer))
        if layer.ffn is not None:
            x = self._half(x, p + "ffn", layer, lambda h: self._feed_forward(h, p, layer))
        return x

    def _half(self, x: Tensor, name: str, layer: Layer, f: Callable[[Tensor], Tensor]) -> Tensor:
        by, norm = layer.residual_scale, layer.norm
        match layer.placement:
            case "pre":
                return x + by * f(self._norm(x, name + "_norm", norm))
            case "post":
                return x + by * self._norm(f(x), name + "_norm", norm)
            case "both":
                return x + by * self._norm(f(self._norm(x, name + "_norm", norm)), name + "_post_norm", norm)
            case "sum":
                return self._norm(x + by * f(x), name + "_norm", norm)

    def _mixer(self, h: Tensor, p: str, layer: Layer) -> Tensor:
        match layer.mixer:
            case Attention() as m:
                return self._attention(h, p, m)
            case Latent(indexer=None, reads_choice=False) as m:
                return self._latent(h, p, m)
            case Recurrent() as m:
                return self._recurrent(h, p, m)
        raise NotImplementedError(f"no trainable form of {type(layer.mixer).__name__}")

    def _feed_forward(self, h: Tensor, p: str, layer: Layer) -> Tensor:
        f = layer.ffn
        if not isinstance(f, FeedForward) or f.activation not in ACTIVATIONS:
            raise NotImplementedError(f"no trainable form of {f}")
        act, up = ACTIVATIONS[f.activation], self._linear(h, p + "up")
        inner = act(self._linear(h, p + "gate")) * up if f.gated else act(up)
        if f.down_norm is not None:
            inner = F.rms_norm(inner, inner.shape[-1:], self._w(p + "down_norm"), f.down_norm)
        return self._linear(inner, p + "down")

    def _rope(self, x: Tensor, rope: Rope) -> Tensor:
        """Rotate the first rope.dim components of x [B, T, heads, D]."""
        cos, sin = getattr(self, self.ropes[rope])[:, : x.shape[1], None, :].to(x.dtype)
        half = rope.dim // 2
        turned, rest = x[..., : rope.dim], x[..., rope.dim :]
        if rope.interleaved:
            a, b = turned[..., 0::2], turned[..., 1::2]
            turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
        else:
            a, b = turned[..., :half], turned[..., half:]
            turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
        return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned

    def _qk_norm(self, x: Tensor, name: str, n: QkNorm) -> Tensor:
        weight = None if n.kind == "unit" else self._w(name) + n.offset
        if n.in_query:
            before = name.removesuffix("q_norm").removesuffix("k_norm")
            weight = self._w(name) * self._w(before + "k_norm") if name.endswith("q_norm") else None
        if n.kind == "layer":
            mean = x.mean(-1, keepdim=True)
            out = (x - mean) * torch.rsqrt(((x - mean) ** 2).mean(-1, keepdim=True) + n.eps)
        else:
            out = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + n.eps)
        out = out if weight is None else out * weight
        return out + self._w(name + ".bias") if n.bias else out

    def _attention(self, h: Tensor, p: str, m: Attention) -> Tensor:
        if m.key_bias:
            raise NotImplementedError("no trainable form of scores with a bias of the key")
        b, t, _ = h.shape
        if m.kv_from is not None:
            return self._attention_of_others(h, p, m)
        q, k, v = (self._linear(h, p + name) for name in "qkv")
        n = m.qk_norm
        if n is not None and n.over == "all":
            q, k = self._qk_norm(q, p + "q_norm", n), self._qk_norm(k, p + "k_norm", n)
        if m.clip is not None:
            q, k, v = (x.clamp(-m.clip, m.clip) for x in (q, k, v))
        q = q.view(b, t, m.num_heads, m.head_dim)
        k, v = k.view(b, t, m.num_kv_heads, m.head_dim), v.view(b, t, m.num_kv_heads, m.value_dim)
        if n is not None and n.over != "all" and not n.after_rope:
            q, k = self._qk_norm(q, p + "q_norm", n), self._qk_norm(k, p + "k_norm", n)
        if m.rope is not None:
            q, k = self._rope(q, m.rope), self._rope(k, m.rope)
        if n is not None and n.over != "all" and n.after_rope:
            q, k = self._qk_norm(q, p + "q_norm", n), self._qk_norm(k, p + "k_norm", n)
        q = _grown(q, m.query_scale)
        scale = m.head_dim**-0.5 if m.scale is None else m.scale
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        self._kept[int(p.split(".")[1])] = k, v
        if m.soft_cap is None and not m.sinks and m.alibi is None and m.window is None and m.chunk is None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        else:
            out = self._scored(q, k, v, p, m, scale)
        out = out.transpose(1, 2).reshape(b, t, -1)
        if m.output_gate:
            by = F.softplus if m.gate == "softplus" else torch.sigmoid
            out = out * by(self._linear(h, p + "o_gate"))
        if m.o_norm is not None:
            out = F.rms_norm(out, out.shape[-1:], self._w(p + "o_norm"), m.o_norm)
        return self._linear(out, p + "o")

    def _attention_of_others(self, h: Tensor, p: str, m: Attention) -> Tensor:
        """Queries over the keys and values of an earlier layer."""
        # Only what is trained so.
        plain = msgspec.structs.replace(m, kv_from=None, scale=None, rope=None, o_bias=False, qk_norm=None)
        if plain != Attention(num_heads=m.num_heads, num_kv_heads=m.num_kv_heads, head_dim=m.head_dim):
            raise NotImplementedError(f"no trainable form of {m}")
        b, t, _ = h.shape
        assert m.kv_from is not None
        k, v = self._kept[m.kv_from]
        q = self._linear(h, p + "q").view(b, t, m.num_heads, m.head_dim)
        n = m.qk_norm
        q = q if n is None or n.after_rope else self._qk_norm(q, p + "q_norm", n)
        q = q if m.rope is None else self._rope(q, m.rope)
        q = (self._qk_norm(q, p + "q_norm", n) if n is not None and n.after_rope else q).transpose(1, 2)
        out = self._scored(q, k, v, p, m, m.head_dim**-0.5 if m.scale is None else m.scale)
        return self._linear(out.transpose(1, 2).reshape(b, t, -1), p + "o")

    def _scored(self, q: Tensor, k: Tensor, v: Tensor, p: str, m: Attention, scale: float) -> Tensor:
        """Attention with everything that the fused form cannot do. q [B, H, T, D], k and v [B, G, T, D]."""
        t, per = q.shape[2], m.num_heads // m.num_kv_heads
        k, v = k.repeat_interleave(per, 1), v.repeat_interleave(per, 1)
        scores = (q @ k.transpose(-1, -2)).float() * scale
        if m.soft_cap is not None:
            scores = m.soft_cap * torch.tanh(scores / m.soft_cap)
        at = torch.arange(t, device=q.device)
        distance = at[:, None] - at[None, :]
        if m.alibi is not None:
            slopes = torch.tensor(m.alibi.slopes(m.num_heads), device=q.device)
            scores = scores - slopes[:, None, None] * distance
        hidden = distance < 0
        if m.window is not None:
            hidden = hidden | (distance >= m.window)
        if m.chunk is not None:
            hidden = hidden | (at[None, :] < (at // m.chunk * m.chunk)[:, None])
        scores = scores.masked_fill(hidden, float("-inf"))
        if m.sinks:
            sink = self._w(p + "sinks").float()[None, :, None, None].expand(scores.shape[0], -1, t, 1)
            return torch.softmax(torch.cat([scores, sink], -1), -1)[..., :-1].to(v.dtype) @ v
        return torch.softmax(scores, -1).to(v.dtype) @ v

    def _latent(self, h: Tensor, p: str, m: Latent) -> Tensor:
        """Naive form: keys and values expanded from the latent."""
        b, t, _ = h.shape
        if m.q_rank is None:
            q = self._linear(h, p + "q")
        else:
            inner = F.rms_norm(self._linear(h, p + "q_a"), (m.q_rank,), self._w(p + "q_a_norm"), m.eps)
            q = self._linear(inner, p + "q_b")
        q = q.view(b, t, m.num_heads, m.nope_dim + m.rope_dim)
        if m.rope is not None:
            q = torch.cat([q[..., : m.nope_dim], self._rope(q[..., m.nope_dim :], m.rope)], -1)
        q = _grown(q, m.query_scale)
        kv = self._linear(h, p + "kv_a")
        c = F.rms_norm(kv[..., : m.kv_rank], (m.kv_rank,), self._w(p + "kv_a_norm"), m.eps)
        k_rope = kv[..., None, m.kv_rank :]
        k_rope = (k_rope if m.rope is None else self._rope(k_rope, m.rope)).expand(b, t, m.num_heads, m.rope_dim)
        kv = self._linear(c, p + "kv_b").view(b, t, m.num_heads, m.nope_dim + m.v_dim)
        k = torch.cat([kv[..., : m.nope_dim], k_rope], -1)
        v = kv[..., m.nope_dim :]
        scale = (m.nope_dim + m.rope_dim) ** -0.5 if m.scale is None else m.scale
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale).transpose(1, 2)
        if m.head_gate:
            out = out * torch.sigmoid(self._linear(h, p + "o_gate"))[..., None]
        return self._linear(out.reshape(b, t, -1), p + "o")

    def _recurrent(self, h: Tensor, p: str, m: Recurrent) -> Tensor:
        """Parallel form of the gated recurrence: a causal product whose entries decay with the distance."""
        b, t, _ = h.shape
        q, k = (self._linear(h, p + name).view(b, t, m.num_heads, -1).transpose(1, 2) for name in "qk")
        v = self._linear(h, p + "v").view(b, t, m.num_heads, -1).transpose(1, 2)
        decay = F.logsigmoid(self._linear(h, p + "decay").float()).transpose(1, 2).cumsum(-1)  # [B, H, T]
        weight = (decay[..., :, None] - decay[..., None, :]).tril()
        keep = torch.ones(t, t, device=h.device, dtype=torch.bool).tril()
        scores = (q @ k.transpose(-1, -2)).float() * torch.exp(weight).masked_fill(~keep, 0.0)
        return self._linear((scores.to(v.dtype) @ v).transpose(1, 2).reshape(b, t, -1), p + "o")


def _grown(q: Tensor, s: QueryScale | None) -> Tensor:
    """Queries [B, T, heads, D] that grow with their position."""
    if s is None:
        return q
    turns = torch.div(torch.arange(q.shape[1], device=q.device) + s.shift, s.floor, rounding_mode="floor")
    return q * (1.0 + s.beta * torch.log1p(turns.float())).to(q.dtype)[None, :, None, None]


def _key(name: str) -> str:
    return name.replace(".", "/")


def _ropes(spec: ModelSpec) -> list[Rope]:
    found: list[Any] = [getattr(layer.mixer, "rope", None) for layer in spec.layers]
    return [rope for rope in found if rope is not None]
