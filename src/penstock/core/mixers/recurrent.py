"""A recurrent mixer that exists for the engine's tests: the smallest layer with a state instead of a cache."""

from __future__ import annotations

import msgspec

from penstock.core.cache_spec import CacheSpec, PlaneSpec
from penstock.core.mixers import Shapes


class Recurrent(msgspec.Struct, frozen=True, kw_only=True, tag="recurrent"):
    """Gated linear attention with a fixed state [H, key_dim, value_dim] per sequence (a test-only slot mixer).

    For each token and head: state = decay * state + k^T v; out = q state, where decay = sigmoid(W_decay x) per head.
    Source: the common form of Yang et al., Gated Linear Attention, arXiv 2312.06635, section 3 (scalar gate).
    """

    num_heads: int
    key_dim: int
    value_dim: int

    def weight_shapes(self, e: int) -> Shapes:
        h, k, v = self.num_heads, self.num_heads * self.key_dim, self.num_heads * self.value_dim
        return {"q": (k, e), "k": (k, e), "v": (v, e), "decay": (h, e), "o": (e, v)}

    def cache(self, kv_dtype: str) -> CacheSpec:
        """The state is float32 whatever the KV dtype: its rounding errors would add up over the whole text."""
        plane = PlaneSpec("state", self.num_heads, self.key_dim * self.value_dim, "float32")
        return CacheSpec(kind="slot", planes=(plane,))

    @property
    def pair_flops(self) -> int:
        return 0

    @property
    def token_flops(self) -> int:
        """Per element of the state: decay, outer product, sum, and the query's product and sum."""
        return 5 * self.num_heads * self.key_dim * self.value_dim
