"""Attention over a window and over entries, each of which several tokens share."""

from __future__ import annotations

import msgspec

from penstock.core.cache_spec import CacheSpec, PlaneSpec, vector_planes
from penstock.core.mixers import Shapes
from penstock.core.mixers.rope import Rope


class EntryIndexer(msgspec.Struct, frozen=True, kw_only=True):
    """Chooses which `top_k` entries a query reads, once it sees more.

    It has entries of its own, pooled as those of the layer are but `head_dim` wide. One is worth the sum over
    `num_heads` of weight * relu(q.entry / sqrt(head_dim)) / sqrt(num_heads), where q comes from the query's normed
    latent (weight `index_q`) and turns as the layer's queries do, and the weights of the heads from the layer's input
    (`index_weights` [H, E]). Ties go to the earlier entry.
    """

    num_heads: int
    head_dim: int
    top_k: int


class EntryAttention(msgspec.Struct, frozen=True, kw_only=True, tag="compressed"):
    """One key-value head for all H query heads, over the last `window` tokens and over entries of `every` tokens.

    The query comes by way of a normed latent (weights `q_a` [q_rank, E], `q_a_norm`, `q_b` [H*D, q_rank]), and each of
    its heads is normed without weights. The value of a token is its key (`kv` [D, E], `kv_norm` [D]): both are rotated
    in their last `rope.dim` components, and what a head gives is turned back by the query's own position. A learned
    score per head (`sinks` [H]) takes part in the softmax and carries no value. Heads go out in `out_groups` equal
    groups, each through a matrix of its own (`o_a` [out_groups * out_rank, H*D / out_groups]), then through `o`
    [E, out_groups * out_rank].

    With `every` = m, tokens wm ... wm+m-1 make entry w, which tokens from wm+m-1 on see beside their window: each of
    them gives a value (`pool_kv`) and a score per component (`pool_gate`, to which `pool.bias` adds one for the token's
    place in the entry), the softmax over the tokens weighs the values, the sum is normed (`pool_norm` [D]) and
    rotated to position wm. `overlap`: a token gives two values and two scores; entry w is made of the second ones of
    its own m tokens and of the first ones of the m tokens before. `indexer`: a query reads the entries it chooses.

    Source: DeepSeek-V4 (2026), sections 2.3.1 and 2.3.2; the names of its two kinds are compressed sparse attention
    (overlapping entries, and an indexer) and heavily compressed attention.
    """

    num_heads: int
    head_dim: int
    q_rank: int
    window: int
    rope: Rope
    out_groups: int
    out_rank: int
    eps: float = 1e-6
    every: int | None = None
    overlap: bool = False
    indexer: EntryIndexer | None = None

    @property
    def series(self) -> int:
        """Values that a token gives to entries."""
        return 2 if self.overlap else 1

    @property
    def reach(self) -> int:
        """Tokens whose own keys a query sees."""
        return self.window

    def weight_shapes(self, e: int) -> Shapes:
        h, d, groups = self.num_heads, self.head_dim, self.out_groups
        out: Shapes = {
            "q_a": (self.q_rank, e), "q_a_norm": (self.q_rank,), "q_b": (h * d, self.q_rank),
            "kv": (d, e), "kv_norm": (d,), "sinks": (h,),
        }  # fmt: skip
        if self.every is not None:
            out |= self._pool_shapes("pool", d, e, self.every)
        if self.every is not None and self.indexer is not None:
            index = self.indexer
            out |= self._pool_shapes("index", index.head_dim, e, self.every)
            out["index_q"] = (index.num_heads * index.head_dim, self.q_rank)
            out["index_weights"] = (index.num_heads, e)
        return out | {"o_a": (groups * self.out_rank, h * d // groups), "o": (e, groups * self.out_rank)}

    def _pool_shapes(self, name: str, dim: int, e: int, every: int) -> Shapes:
        wide = self.series * dim
        return {
            f"{name}_kv": (wide, e), f"{name}_gate": (wide, e), f"{name}.bias": (every, wide), f"{name}_norm": (dim,),
        }  # fmt: skip

    def cache(self, kv_dtype: str) -> CacheSpec:
        """The keys of the window; entries have caches of their own."""
        return CacheSpec("window", vector_planes({"kv": (1, self.head_dim)}, kv_dtype), self.window)

    def caches(self, kv_dtype: str) -> tuple[CacheSpec, ...]:
        """Keys of the window; entries, which stay; values and scores, in float32, of the tokens of which entries are
        still to be made: a window that reaches back over all tokens of the entry that ends with the newest one."""
        if self.every is None:
            return (self.cache(kv_dtype),)
        dims = {"entry": self.head_dim}
        if self.indexer is not None:
            dims["index"] = self.indexer.head_dim
        entries = vector_planes({name: (1, dim) for name, dim in dims.items()}, kv_dtype)
        waiting = tuple(
            PlaneSpec(f"{name}_{part}", 1, self.series * dim, "float32")
            for name, dim in dims.items() for part in ("value", "score")
        )  # fmt: skip
        return (
            self.cache(kv_dtype),
            CacheSpec("paged", (), page_planes=tuple(p._replace(every=self.every) for p in entries)),
            CacheSpec("window", waiting, self.series * self.every),
        )

    @property
    def pair_flops(self) -> int:
        """A head's product with a key, which is the value, too."""
        return 4 * self.num_heads * self.head_dim

    @property
    def entry_flops(self) -> int:
        """Per entry that a token sees: the choice, and attention if there is none."""
        return self.pair_flops if self.indexer is None else 2 * self.indexer.num_heads * self.indexer.head_dim

    @property
    def token_flops(self) -> int:
        """Softmax and sum of pooling, about 6 per value; and attention to the most entries a query may choose."""
        if self.every is None:
            return 0
        dims = self.head_dim + (0 if self.indexer is None else self.indexer.head_dim)
        chosen = 0 if self.indexer is None else self.indexer.top_k * self.pair_flops
        return 6 * self.series * dims + chosen
