"""Softmax attention over cached keys and values."""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.core.cache_spec import CacheSpec, PlaneSpec, head_planes, vector_planes
from penstock.core.kv_format import LayerFormat
from penstock.core.mixers import Shapes
from penstock.core.mixers.rope import Alibi, QueryScale, Rope


class QkNorm(msgspec.Struct, frozen=True, kw_only=True):
    """A norm of q and k between projection and scores (weights `q_norm`, `k_norm`).

    kinds: `rms`; `layer` (bias too if `bias`); `unit` is an RMS norm without weights. over: `head`, each head by itself
    with shared weights [D]; `each`, each head with weights of its own [H, D]; `split`, the same with a weight [D] per
    head, `q_norm.0`, `q_norm.1`, ... (without bias); `all`, all heads of a token jointly, weights [H*D]. `offset` is
    added to the weights. `after_rope`: applied to rotated q and k. `in_query` (with `after_rope` and RMS norms over
    each `head`): the weights of the keys' norm multiply the queries, so that layers with weights of their own can read
    one plane of keys.
    """

    kind: Literal["rms", "layer", "unit"] = "rms"
    over: Literal["head", "each", "split", "all"] = "head"
    eps: float = 1e-5
    offset: float = 0.0
    bias: bool = False
    after_rope: bool = False
    in_query: bool = False

    def weight_shapes(self, name: str, heads: int, dim: int) -> Shapes:
        if self.kind == "unit":
            return {}
        if self.over == "split":
            return {f"{name}.{i}": (dim,) for i in range(heads)}
        shape = {"head": (dim,), "each": (heads, dim), "all": (heads * dim,)}[self.over]
        return {name: shape, name + ".bias": shape} if self.bias else {name: shape}


class Attention(msgspec.Struct, frozen=True, kw_only=True, tag="attention"):
    """Softmax attention: MHA (G = H), GQA (G divides H), MQA (G = 1).

    `scale` multiplies q.k; None means 1/sqrt(D). `window`: the token at p sees p-window+1 ... p; `chunk`: it sees from
    the last multiple of chunk on. `soft_cap`: scores become cap * tanh(score / cap). `sinks`: a learned score per head
    (weight `sinks` [H]) takes part in the softmax and carries no value. Biases: on q, k, v together (`qkv_bias`) and on
    the output (`o_bias`). `clip`: q, k and v are cut to [-clip, clip] after their projection (and after a
    norm over all heads). `output_gate`: what the heads give is multiplied by the sigmoid of a product of its own with
    the layer's input (weight `o_gate` [H*D, E], its bias with `qkv_bias`; Qiu et al., arXiv 2505.06708);
    `head_gate`: the same with one number per head (weight `o_gate` [H, E], no bias); `gate`: softplus instead of the
    sigmoid. `v_dim`: numbers of a head's
    value, where they are not as many as a key's; values are multiplied by `value_scale`. `v_from_k`: a head's value is
    its key before norm and rotation (no weight `v`). `v_norm`: epsilon of an RMS norm of each head's value, without
    weights. `kv_from`: the layer reads the keys and values that this earlier layer keeps; it has none of its own, nor
    their weights (cross-layer attention; Brandon et al., arXiv 2405.12981, section 2).
    `o_norm`: epsilon of an RMS norm of what all heads give together, in front of the output (weight `o_norm`
    [H*D], D of a value; BitNet). `key_bias`: e^(a softplus(dt)) of the key is added to its scores, one number per kv
    head, where dt is a product of the token's values (weights `bias_dt` [G, G*D], its bias with `qkv_bias`, and
    `bias_a` [G]; Doge). It is kept as a component of the key that meets a 1 in the query, with three of zeros: formats
    of few bits take whole fours.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope | None = None
    alibi: Alibi | None = None
    scale: float | None = None
    query_scale: QueryScale | None = None
    window: int | None = None
    chunk: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: QkNorm | None = None
    clip: float | None = None
    output_gate: bool = False
    head_gate: bool = False
    gate: Literal["sigmoid", "softplus"] = "sigmoid"
    v_dim: int | None = None
    value_scale: float = 1.0
    v_from_k: bool = False
    v_norm: float | None = None
    kv_from: int | None = None
    o_norm: float | None = None
    key_bias: bool = False

    @property
    def value_dim(self) -> int:
        """Numbers of a head's value."""
        return self.head_dim if self.v_dim is None else self.v_dim

    def weight_shapes(self, e: int) -> Shapes:
        q, k, v = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim, self.num_kv_heads * self.value_dim
        out: Shapes = {"q": (q, e), "k": (k, e), "v": (v, e), "o": (e, self.num_heads * self.value_dim)}
        if self.qkv_bias:
            out |= {"q.bias": (q,), "k.bias": (k,), "v.bias": (v,)}
        if self.output_gate:
            gate = self.num_heads * self.value_dim
            out |= {"o_gate": (gate, e), "o_gate.bias": (gate,)} if self.qkv_bias else {"o_gate": (gate, e)}
        if self.v_from_k:
            out = {name: shape for name, shape in out.items() if name not in ("v", "v.bias")}
        if self.head_gate:
            out["o_gate"] = (self.num_heads, e)
        if self.o_bias:
            out["o.bias"] = (e,)
        if self.qk_norm is not None:
            out |= self.qk_norm.weight_shapes("q_norm", self.num_heads, self.head_dim)
            out |= self.qk_norm.weight_shapes("k_norm", self.num_kv_heads, self.head_dim)
        if self.sinks:
            out["sinks"] = (self.num_heads,)
        if self.kv_from is not None:
            in_query = self.qk_norm is not None and self.qk_norm.in_query
            gone = ("k", "v", "k.bias", "v.bias", *(() if in_query else ("k_norm", "k_norm.bias")))
            out = {name: shape for name, shape in out.items() if name not in gone}
        if self.key_bias:
            out |= {"bias_dt": (self.num_kv_heads, v), "bias_a": (self.num_kv_heads,)}
            if self.qkv_bias:
                out["bias_dt.bias"] = (self.num_kv_heads,)
        if self.o_norm is not None:
            out["o_norm"] = (self.num_heads * self.value_dim,)
        return out

    def cache(self, kv_dtype: str) -> CacheSpec:
        """A chunk is never looked at from further away than its own size, so its blocks go like a window's."""
        kind: Literal["paged", "window"] = "paged" if self.reach is None else "window"
        return CacheSpec(kind, vector_planes(self._shapes, kv_dtype), self.reach)

    @property
    def _shapes(self) -> dict[str, tuple[int, int]]:
        key = self.head_dim + (4 if self.key_bias else 0)
        return {"k": (self.num_kv_heads, key), "v": (self.num_kv_heads, self.value_dim)}

    def caches(self, how: LayerFormat) -> tuple[CacheSpec, ...]:
        """What the layer keeps by a format that is not plain: its codes; the newest tokens, float16, in a window; and
        the first ones, as a state of the sequence. What a window bounds anyway stays float16 if there are newest ones.
        """
        if how.recent and self.reach is not None:
            return (self.cache("float16"),)
        codecs = {"k": how.keys, "v": how.values}
        (k, k_pages), (v, v_pages) = (head_planes(n, *shape, codecs[n]) for n, shape in self._shapes.items())
        if not how.recent:
            return (CacheSpec("paged" if self.reach is None else "window", (*k, *v), self.reach),)
        out = [CacheSpec("paged", (*k, *v), page_planes=(*k_pages, *v_pages)), self._recent(how.recent)]
        if how.sinks:
            state = (PlaneSpec(n, how.sinks * heads, dim, "float16") for n, (heads, dim) in self._shapes.items())
            out.append(CacheSpec("slot", tuple(state)))
        return tuple(out)

    def _recent(self, tokens: int) -> CacheSpec:
        return CacheSpec("window", vector_planes(self._shapes, "float16"), tokens)

    @property
    def reach(self) -> int | None:
        """Tokens that a query may see at most, itself included; None: all."""
        return self.window if self.chunk is None else min(self.chunk, self.window or self.chunk)

    @property
    def pair_flops(self) -> int:
        """QK^T and PV, 2HD each (PV with the numbers of a value)."""
        return 2 * self.num_heads * (self.head_dim + self.value_dim)

    @property
    def token_flops(self) -> int:
        return 0


class Indexer(msgspec.Struct, frozen=True, kw_only=True):
    """Chooses which `top_k` tokens a query of latent attention reads, once it sees more.

    A token is worth the sum over `num_heads` of weight * relu(q.k / sqrt(head_dim)) / sqrt(num_heads), where q comes
    from the query's normed latent (weight `index_q` [H * head_dim, q_rank]), k, one for all heads and kept in a plane
    of its own, from the layer's input (`index_k` [head_dim, E], then a layer norm `index_k_norm`), and so do the
    weights of the heads (`index_weights` [H, E]). `rope` turns the first numbers of q and k. Ties go to the lower
    position. Source: DeepSeek-V3.2, arXiv 2512.02556, section 2.1.
    """

    num_heads: int
    head_dim: int
    top_k: int
    rope: Rope
    eps: float = 1e-6

    def weight_shapes(self, e: int, q_rank: int) -> Shapes:
        return {
            "index_q": (self.num_heads * self.head_dim, q_rank), "index_k": (self.head_dim, e),
            "index_k_norm": (self.head_dim,), "index_k_norm.bias": (self.head_dim,),
            "index_weights": (self.num_heads, e),
        }  # fmt: skip


class Latent(msgspec.Struct, frozen=True, kw_only=True, tag="latent"):
    """Multi-head latent attention: caches one latent [kv_rank] and one rotary key [rope_dim] per token.

    Computed in absorbed form for prefill and decode alike, so that no switch can change a token. `bias`: on the two
    projections down (`q_a`, `kv_a`) and on the output. `split`: weights `k_b` [H * nope_dim, kv_rank] and `v_b`
    [H * v_dim, kv_rank] take the place of `kv_b`, in which every head has its part of both. Without `rope` (Kimi
    Linear) what would be rotated is left as it is. `indexer`: a query reads the tokens that it chooses (needs
    `q_rank`); `reads_choice`: those that the last layer with an indexer chose. `query_scale` and `head_gate` as in
    `Attention`.
    Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.
    """

    num_heads: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    rope: Rope | None
    q_rank: int | None = None
    scale: float | None = None
    eps: float = 1e-6
    bias: bool = False
    split: bool = False
    indexer: Indexer | None = None
    reads_choice: bool = False
    query_scale: QueryScale | None = None
    head_gate: bool = False

    def weight_shapes(self, e: int) -> Shapes:
        q = self.num_heads * (self.nope_dim + self.rope_dim)
        if self.q_rank is None:
            out: Shapes = {"q": (q, e)}
        else:
            out = {"q_a": (self.q_rank, e), "q_a_norm": (self.q_rank,), "q_b": (q, self.q_rank)}
            if self.bias:
                out["q_a.bias"] = (self.q_rank,)
            if self.indexer is not None:
                out |= self.indexer.weight_shapes(e, self.q_rank)
        out |= {
            "kv_a": (self.kv_rank + self.rope_dim, e),
            "kv_a_norm": (self.kv_rank,),
        }
        halves = {"k_b": self.nope_dim, "v_b": self.v_dim} if self.split else {"kv_b": self.nope_dim + self.v_dim}
        out |= {name: (self.num_heads * dim, self.kv_rank) for name, dim in halves.items()}
        out["o"] = (e, self.num_heads * self.v_dim)
        if self.head_gate:
            out["o_gate"] = (self.num_heads, e)
        if self.bias:
            out |= {"kv_a.bias": (self.kv_rank + self.rope_dim,), "o.bias": (e,)}
        return out

    def cache(self, kv_dtype: str) -> CacheSpec:
        shapes = {"latent": (1, self.kv_rank), "k_rope": (1, self.rope_dim)}
        if self.indexer is not None:
            shapes["index"] = (1, self.indexer.head_dim)
        return CacheSpec(kind="paged", planes=vector_planes(shapes, kv_dtype))

    @property
    def reach(self) -> int | None:
        return None

    @property
    def pair_flops(self) -> int:
        """Absorbed form: a head's query meets latent and rotary key, its result is a latent. The projections from and
        to the latent are the halves of `kv_b`, so they are among the linear weights already. With an indexer this
        is the most it can be: attention itself stays at `top_k` tokens."""
        index = 0 if self.indexer is None else 2 * self.indexer.num_heads * self.indexer.head_dim
        return 2 * self.num_heads * (2 * self.kv_rank + self.rope_dim) + index

    @property
    def token_flops(self) -> int:
        return 0
