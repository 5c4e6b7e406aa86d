"""Linear attention whose heads fade at rates that are fixed."""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.core.cache_spec import CacheSpec, PlaneSpec
from penstock.core.mixers import Shapes


class Lightning(msgspec.Struct, frozen=True, kw_only=True, tag="lightning"):
    """Lightning attention: a state [head_dim, head_dim] per head, multiplied by `decay` of the head at every token.

    Queries, keys and values go through `activation`; the result through the RMS norm `state_norm` over all heads
    together, then times sigmoid(z). Source: Qin et al., arXiv 2405.17381, equation 3; MiniMax-01, arXiv 2501.08313.
    """

    num_heads: int
    head_dim: int
    decay: tuple[float, ...]
    activation: Literal["silu"] = "silu"
    eps: float = 1e-6

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim

    def weight_shapes(self, e: int) -> Shapes:
        w = self.width
        return {"q": (w, e), "k": (w, e), "v": (w, e), "z": (w, e), "state_norm": (w,), "o": (e, w)}

    def cache(self, kv_dtype: str) -> CacheSpec:
        """float32: rounding would add up over the whole text."""
        plane = PlaneSpec("state", self.num_heads, self.head_dim * self.head_dim, "float32")
        return CacheSpec(kind="slot", planes=(plane,))

    @property
    def pair_flops(self) -> int:
        return 0

    @property
    def token_flops(self) -> int:
        """Per element of the state: decay, outer product, sum, and the query's product and sum."""
        return 5 * self.width * self.head_dim
