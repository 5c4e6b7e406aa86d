"""The real-gated linear recurrent unit of Griffin, with its convolution and its gate."""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.core.cache_spec import CacheSpec, PlaneSpec
from penstock.core.mixers import Shapes


class GatedLru(msgspec.Struct, frozen=True, kw_only=True, tag="gated_lru"):
    """o(act(z) * state): one number of state per channel, which fades as the token says.

    Of u, the causal convolution (`conv` taps, with bias) of a product with the input: state = f * state + sqrt(1 - f^2)
    * sigmoid(gate of the input) * u, with f = exp(-8 softplus(lambda) sigmoid(gate of the state)); the root is left out
    at the first token. Both gates are products of u by blocks: weights `input_gate` and `state_gate` [blocks, W/blocks,
    W/blocks], each with a bias [W]; `lambda` [W]. All products have biases.
    Source: De et al., Griffin, arXiv 2402.19427, section 2.4; RecurrentGemma, arXiv 2404.07839 (the square root at the
    first token, as in the released code).
    """

    width: int
    blocks: int
    conv: int
    activation: Literal["gelu_tanh", "gelu", "silu", "relu"] = "gelu_tanh"

    def weight_shapes(self, e: int) -> Shapes:
        w, block = self.width, self.width // self.blocks
        out: Shapes = {"u": (w, e), "u.bias": (w,), "z": (w, e), "z.bias": (w,), "conv": (w, self.conv)}
        out |= {"conv.bias": (w,), "lambda": (w,)}
        for gate in ("input_gate", "state_gate"):
            out |= {gate: (self.blocks, block, block), gate + ".bias": (w,)}
        return out | {"o": (e, w), "o.bias": (e,)}

    def cache(self, kv_dtype: str) -> CacheSpec:
        """The last inputs of the convolution, and the state. float32: rounding would add up over the whole text."""
        planes = (
            PlaneSpec("conv", self.conv - 1, self.width, "float32"), PlaneSpec("state", 1, self.width, "float32")
        )  # fmt: skip
        return CacheSpec(kind="slot", planes=planes)

    @property
    def pair_flops(self) -> int:
        return 0

    @property
    def token_flops(self) -> int:
        """Convolution, the two gates' blocks, and per channel: gates, root and the state after them."""
        return self.width * (2 * self.conv + 4 * (self.width // self.blocks) + 16)
