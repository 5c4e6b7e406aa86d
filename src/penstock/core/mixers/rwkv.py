"""RWKV: time mixing by a linear recurrence, channel mixing that looks one token back."""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.core.cache_spec import CacheSpec, PlaneSpec
from penstock.core.mixers import Shapes


class Rwkv4(msgspec.Struct, frozen=True, kw_only=True, tag="rwkv4"):
    """RWKV-4 time mixing; `width` is E, because the last input is kept beside as many channels of state.

    `decay_is_log`: weight `time_decay` is w of the paper's exp(-exp(w)), as the training code has it, not -exp(w).
    Source: Peng et al., arXiv 2305.13048, section 3.
    """

    width: int
    decay_is_log: bool = True

    def weight_shapes(self, e: int) -> Shapes:
        w = self.width
        assert w == e, "the last input is as wide as the state"
        return {
            "mix_k": (e,), "mix_v": (e,), "mix_r": (e,), "time_decay": (w,), "time_first": (w,),
            "k": (w, e), "v": (w, e), "r": (w, e), "o": (e, w),
        }  # fmt: skip

    def cache(self, kv_dtype: str) -> CacheSpec:
        """Numerator, denominator and exponent of the weighted mean, and the last input. float32: errors add up."""
        planes = [PlaneSpec(name, 1, self.width, "float32") for name in ("num", "den", "exponent", "shift")]
        return CacheSpec(kind="slot", planes=tuple(planes))

    @property
    def pair_flops(self) -> int:
        return 0

    @property
    def token_flops(self) -> int:
        """Per channel: the mean (key and bonus, exponents, two sums, quotient) and the state after it."""
        return 23 * self.width


class Rwkv7(msgspec.Struct, frozen=True, kw_only=True, tag="rwkv7"):
    """RWKV-7 time mixing: a matrix state [head_dim, head_dim] per head under a generalised delta rule.

    The four low-rank parts (decay w, in-context learning rate a, value residual v, gate g) have ranks of their own.
    H * D is E. `first`: the first layer, whose values the later ones mix in; it has no value residual itself.
    Source: Peng et al., arXiv 2503.14456, section 4.
    """

    num_heads: int
    head_dim: int
    decay_rank: int
    rate_rank: int
    gate_rank: int
    value_rank: int = 0
    eps: float = 64e-5
    first: bool = False

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim

    def weight_shapes(self, e: int) -> Shapes:
        w = self.width
        assert w == e, "the last input is as wide as the heads together"
        out: Shapes = {f"mix_{name}": (e,) for name in "rwkvag"}
        ranks = {"w": self.decay_rank, "a": self.rate_rank} | ({} if self.first else {"v": self.value_rank})
        for name, rank in ranks.items():
            out |= {f"{name}0": (w,), f"{name}1": (rank, e), f"{name}2": (w, rank)}
        out |= {"g1": (self.gate_rank, e), "g2": (w, self.gate_rank)}
        out |= {"k_k": (w,), "k_a": (w,), "r_k": (w,)}
        out |= {"r": (w, e), "k": (w, e), "v": (w, e), "o": (e, w)}
        return out | {"head_norm": (w,), "head_norm.bias": (w,)}

    def cache(self, kv_dtype: str) -> CacheSpec:
        """The state and the last input. float32: rounding would add up over the whole text."""
        state = PlaneSpec("state", self.num_heads, self.head_dim * self.head_dim, "float32")
        return CacheSpec(kind="slot", planes=(state, PlaneSpec("shift", 1, self.width, "float32")))

    @property
    def pair_flops(self) -> int:
        return 0

    @property
    def token_flops(self) -> int:
        """Per element of the state: decay; product and sum each to find the old, remove it, write and read."""
        return 9 * self.width * self.head_dim


class ChannelMix(msgspec.Struct, frozen=True, kw_only=True, tag="channel_mix"):
    """RWKV's feed-forward: down(relu(up(mix of this token and the last))^2), in version 4 times sigmoid(r(...)).

    Its last input is a plane `ffn_shift` of the layer's slot, besides what the mixer keeps.
    """

    version: Literal[4, 7]
    width: int

    def weight_shapes(self, e: int) -> Shapes:
        out: Shapes = {"ffn_mix_k": (e,), "up": (self.width, e), "down": (e, self.width)}
        return out | ({"ffn_mix_r": (e,), "ffn_r": (e, e)} if self.version == 4 else {})
