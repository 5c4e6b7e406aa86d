"""Softmax attention of every token of a text over all of it: what encoders mix tokens with. Nothing is kept."""

from __future__ import annotations

import msgspec

from penstock.core.mixers import Shapes
from penstock.core.mixers.rope import Rope


class EncoderAttention(msgspec.Struct, frozen=True, kw_only=True, tag="encoder_attention"):
    """Attention in both directions, over the tokens of one text, which runs as a whole in one step.

    `reach`: a token sees those at most so many places before and behind it; None: all. Biases as those of `Attention`.
    Source: Devlin et al., BERT, arXiv 1810.04805, section 3; local layers: Warner et al., ModernBERT, arXiv 2412.13663,
    section 2.1.
    """

    num_heads: int
    head_dim: int
    rope: Rope | None = None
    reach: int | None = None
    qkv_bias: bool = True
    o_bias: bool = True

    def weight_shapes(self, e: int) -> Shapes:
        width = self.num_heads * self.head_dim
        out: Shapes = {}
        for name in ("q", "k", "v"):
            out |= {name: (width, e), f"{name}.bias": (width,)} if self.qkv_bias else {name: (width, e)}
        return out | ({"o": (e, width), "o.bias": (e,)} if self.o_bias else {"o": (e, width)})

    def cache(self, kv_dtype: str) -> None:
        """Nothing: a text is in one step, whole."""

    @property
    def pair_flops(self) -> int:
        """Of two pairs: where others see a pair, these see it from both sides."""
        return 8 * self.num_heads * self.head_dim

    @property
    def token_flops(self) -> int:
        return 0
