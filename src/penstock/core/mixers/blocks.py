"""Softmax attention over blocks of tokens that an indexer chooses."""

from __future__ import annotations

import msgspec

from penstock.core.cache_spec import CacheSpec, vector_planes
from penstock.core.mixers import Shapes
from penstock.core.mixers.attention import QkNorm
from penstock.core.mixers.rope import Rope


class BlockAttention(msgspec.Struct, frozen=True, kw_only=True, tag="blocks"):
    """Grouped-query attention in which the queries of each kv head read the `top_k` best of all blocks of `block`
    tokens, and of the best always the `local` newest, their own first.

    A block is worth the best product of its tokens that the query's token sees: of a query of the kv head (weight
    `index_q` [G * index_dim, E], norm `index_q_norm`) with a key that all kv heads share (`index_k` [index_dim, E],
    `index_k_norm`), kept in a plane of its own; both are turned by `rope` as the heads are. Ties go to the earlier
    block. Weights besides: those of attention, with norms of each head before the rotation (`q_norm`, `k_norm`).
    Source: MiniMax, MiniMax-M3 (2026), and transformers' MiniMaxM3VLIndexer.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    index_dim: int
    rope: Rope
    norm: QkNorm
    block: int = 128
    top_k: int = 16
    local: int = 1

    def weight_shapes(self, e: int) -> Shapes:
        q, k = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        out: Shapes = {"q": (q, e), "k": (k, e), "v": (k, e), "q_norm": (self.head_dim,), "k_norm": (self.head_dim,)}
        out |= {"index_q": (self.num_kv_heads * self.index_dim, e), "index_k": (self.index_dim, e)}
        return out | {"index_q_norm": (self.index_dim,), "index_k_norm": (self.index_dim,), "o": (e, q)}

    def cache(self, kv_dtype: str) -> CacheSpec:
        heads = (self.num_kv_heads, self.head_dim)
        return CacheSpec("paged", vector_planes({"k": heads, "v": heads, "index": (1, self.index_dim)}, kv_dtype))

    @property
    def reach(self) -> int | None:
        return None

    @property
    def pair_flops(self) -> int:
        """The most it can be: attention itself stays at `top_k` blocks."""
        return 4 * self.num_heads * self.head_dim + 2 * self.num_kv_heads * self.index_dim

    @property
    def token_flops(self) -> int:
        return 0
