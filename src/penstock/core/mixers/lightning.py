"""Linear attention whose heads fade at rates that are fixed."""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.core.cache_spec import CacheSpec, PlaneSpec
from penstock.core.mixers import Shapes
from penstock.core.mixers.rope import Rope


class Lightning(msgspec.Struct, frozen=True, kw_only=True, tag="lightning"):
    """Lightning attention: a state [head_dim, value_dim] per head, multiplied by `decay` of the head at every token.

    Queries, keys and values go through `activation`; the result through the RMS norm `state_norm` over all heads
    together (`norm` "head": over each by itself, with weights [value_dim] that they share), then times sigmoid(z) or
    silu(z) (`gate`). Source: Qin et al., arXiv 2405.17381, equation 3; MiniMax-01, arXiv 2501.08313.

    Retention (RetNet: Sun et al., arXiv 2307.08621, equations 5 to 8) is the same without an activation: `rope` turns
    queries and keys, queries are multiplied by `scale`, norm "head", gate "silu", and `v_dim`, by default head_dim, is
    mostly twice that.
    """

    num_heads: int
    head_dim: int
    decay: tuple[float, ...]
    activation: Literal["silu"] | None = "silu"
    eps: float = 1e-6
    v_dim: int | None = None
    rope: Rope | None = None
    scale: float = 1.0
    norm: Literal["all", "head"] = "all"
    gate: Literal["sigmoid", "silu"] = "sigmoid"

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.v_dim is None else self.v_dim

    def weight_shapes(self, e: int) -> Shapes:
        k, v = self.num_heads * self.head_dim, self.num_heads * self.value_dim
        normed = v if self.norm == "all" else self.value_dim
        return {"q": (k, e), "k": (k, e), "v": (v, e), "z": (v, e), "state_norm": (normed,), "o": (e, v)}

    def cache(self, kv_dtype: str) -> CacheSpec:
        """float32: rounding would add up over the whole text."""
        plane = PlaneSpec("state", self.num_heads, self.head_dim * self.value_dim, "float32")
        return CacheSpec(kind="slot", planes=(plane,))

    @property
    def pair_flops(self) -> int:
        return 0

    @property
    def token_flops(self) -> int:
        """Per element of the state: decay, outer product, sum, and the query's product and sum."""
        return 5 * self.num_heads * self.head_dim * self.value_dim
