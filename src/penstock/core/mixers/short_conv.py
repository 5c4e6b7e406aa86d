"""A gated convolution over the last few tokens, which is all that a layer remembers."""

from __future__ import annotations

import msgspec

from penstock.core.cache_spec import CacheSpec, PlaneSpec
from penstock.core.mixers import Shapes


class ShortConv(msgspec.Struct, frozen=True, kw_only=True, tag="short_conv"):
    """o(c * conv(b * x)) of the three parts b, c, x [E] of one product: each channel with its own `conv` taps.

    `bias`: on both products and on the convolution. Source: Liquid AI, LFM2 technical report, arXiv 2511.23404,
    section 2.
    """

    width: int
    conv: int
    bias: bool = False

    def weight_shapes(self, e: int) -> Shapes:
        w = self.width
        out: Shapes = {"in": (3 * w, e), "conv": (w, self.conv), "o": (e, w)}
        return out | ({"in.bias": (3 * w,), "conv.bias": (w,), "o.bias": (e,)} if self.bias else {})

    def cache(self, kv_dtype: str) -> CacheSpec:
        """The last inputs of the convolution, in float32."""
        return CacheSpec(kind="slot", planes=(PlaneSpec("conv", self.conv - 1, self.width, "float32"),))

    @property
    def pair_flops(self) -> int:
        return 0

    @property
    def token_flops(self) -> int:
        """Per channel: the convolution and two gates."""
        return self.width * (2 * self.conv + 2)
