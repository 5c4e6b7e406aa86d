"""xLSTM's matrix memory with exponential gates."""

from __future__ import annotations

import msgspec

from penstock.core.cache_spec import CacheSpec, PlaneSpec
from penstock.core.mixers import Shapes


class Mlstm(msgspec.Struct, frozen=True, kw_only=True, tag="mlstm"):
    """mLSTM: per head a matrix [key_dim, value_dim], a sum of keys [key_dim] and the largest exponent so far.

    Products `i` and `f` [H, E] (with biases) give the gates, cut softly at `soft_cap`; `q`, `k`, `v`, and `z` of what
    the state gives: o(sigmoid(z) * layer norm of each head, weights `head_norm` [H * value_dim]).
    What is found is divided by max(|q n|, exp(-m)) + `eps`.
    Source: Beck et al., xLSTM, arXiv 2405.04517, equations 19 to 27; xLSTM 7B, arXiv 2503.13427, section 3.
    """

    num_heads: int
    key_dim: int
    value_dim: int
    soft_cap: float = 15.0
    eps: float = 1e-6
    norm_eps: float = 1e-6

    def weight_shapes(self, e: int) -> Shapes:
        h, k, v = self.num_heads, self.num_heads * self.key_dim, self.num_heads * self.value_dim
        out: Shapes = {"q": (k, e), "k": (k, e), "v": (v, e), "z": (v, e), "o": (e, v), "head_norm": (v,)}
        return out | {"i": (h, e), "i.bias": (h,), "f": (h, e), "f.bias": (h,)}

    def cache(self, kv_dtype: str) -> CacheSpec:
        """Matrix, sum of keys and largest exponent. float32: rounding would add up over the whole text."""
        planes = (
            PlaneSpec("state", self.num_heads, self.key_dim * self.value_dim, "float32"),
            PlaneSpec("norm", self.num_heads, self.key_dim, "float32"),
            PlaneSpec("max", self.num_heads, 1, "float32"),
        )
        return CacheSpec(kind="slot", planes=planes)

    @property
    def pair_flops(self) -> int:
        return 0

    @property
    def token_flops(self) -> int:
        """Per element of the state and of the sum of keys: decay, product, sum, and the query's product and sum."""
        return 5 * self.num_heads * self.key_dim * (self.value_dim + 1)
