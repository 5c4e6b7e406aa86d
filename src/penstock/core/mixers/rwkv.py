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


class Rwkv5(msgspec.Struct, frozen=True, kw_only=True, tag="rwkv5"):
    """RWKV-5 (Eagle) time mixing: a matrix state [head_dim, head_dim] per head, which fades by its rows.

    H * D is E. Weight `time_decay` is w of exp(-exp(w)), `time_first` what a token's own key counts more for its own
    output. `eps`: of the norm over each head. Source: Peng et al., arXiv 2404.05892, section 3.1.
    """

    num_heads: int
    head_dim: int
    eps: float = 64e-5

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim

    def weight_shapes(self, e: int) -> Shapes:
        return {f"mix_{name}": (e,) for name in "kvrg"} | _matrix_weights(self, e)

    def cache(self, kv_dtype: str) -> CacheSpec:
        return _matrix_state(self)

    @property
    def pair_flops(self) -> int:
        return 0

    @property
    def token_flops(self) -> int:
        return _matrix_flops(self)


class Rwkv6(msgspec.Struct, frozen=True, kw_only=True, tag="rwkv6"):
    """RWKV-6 (Finch) time mixing: RWKV-5's, whose decay, and whose share of the last input, depend on the token.

    Weight `mix_down` [5 * mix_rank, E] belongs to all five of what is mixed, in the order w, k, v, r, g.
    Source: Peng et al., arXiv 2404.05892, section 3.2.
    """

    num_heads: int
    head_dim: int
    mix_rank: int
    decay_rank: int
    eps: float = 64e-5

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim

    def weight_shapes(self, e: int) -> Shapes:
        return _low_ranks(self, e) | _matrix_weights(self, e)

    def cache(self, kv_dtype: str) -> CacheSpec:
        return _matrix_state(self)

    @property
    def pair_flops(self) -> int:
        return 0

    @property
    def token_flops(self) -> int:
        """The five mixes besides, and the decay."""
        return _matrix_flops(self) + 18 * self.width


class Qrwkv6(msgspec.Struct, frozen=True, kw_only=True, tag="qrwkv6"):
    """RWKV-6 in the place of attention (QRWKV6): `kv_heads` heads of keys and values, each for as many heads in a row,
    no bonus, and no norm of what is read.

    The state S of a head fades by exp(-exp(w)) and gets k (1 - exp(-exp(w))) v; read is r S / sqrt(head_dim), times
    sigmoid(g). `bias`: on r, k and v. `mixed`: the order of what is mixed in the rows of `mix_down`.
    Source: Goldstein et al., arXiv 2505.03005.
    """

    num_heads: int
    kv_heads: int
    head_dim: int
    mix_rank: int
    decay_rank: int
    bias: bool = True
    mixed: str = "rkvwg"

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim

    def weight_shapes(self, e: int) -> Shapes:
        w, kv = self.width, self.kv_heads * self.head_dim
        assert w == e, "the last input is as wide as the heads together"
        out = _low_ranks(self, e) | {
            "time_decay": (w,), "r": (w, e), "k": (kv, e), "v": (kv, e), "g": (w, e), "o": (e, w),
        }  # fmt: skip
        return out | ({"r.bias": (w,), "k.bias": (kv,), "v.bias": (kv,)} if self.bias else {})

    def cache(self, kv_dtype: str) -> CacheSpec:
        return _matrix_state(self)

    @property
    def pair_flops(self) -> int:
        return 0

    @property
    def token_flops(self) -> int:
        """Of the state and the mixes as RWKV-6; keys and queries by what they are multiplied with."""
        return 5 * self.width * self.head_dim + 21 * self.width


MIXED_6 = "wkvrg"
"""What RWKV-6 mixes with the input before it, in the order of its rows."""


def _low_ranks(m: Rwkv6 | Qrwkv6, e: int) -> Shapes:
    """What leads to the shares of the last input, and to the decay."""
    out: Shapes = {f"mix_{name}": (e,) for name in f"x{MIXED_6}"}
    out["mix_down"] = (len(MIXED_6) * m.mix_rank, e)
    out |= {f"mix_up_{name}": (e, m.mix_rank) for name in MIXED_6}
    return out | {"w1": (m.decay_rank, e), "w2": (m.width, m.decay_rank)}


def _matrix_weights(m: Rwkv5 | Rwkv6, e: int) -> Shapes:
    w = m.width
    assert w == e, "the last input is as wide as the heads together"
    return {
        "time_decay": (w,), "time_first": (w,), "r": (w, e), "k": (w, e), "v": (w, e), "g": (w, e), "o": (e, w),
        "head_norm": (w,), "head_norm.bias": (w,),
    }  # fmt: skip


def _matrix_state(m: Rwkv5 | Rwkv6 | Qrwkv6 | Rwkv7) -> CacheSpec:
    """The state and the last input. float32: rounding would add up over the whole text."""
    state = PlaneSpec("state", m.num_heads, m.head_dim * m.head_dim, "float32")
    return CacheSpec(kind="slot", planes=(state, PlaneSpec("shift", 1, m.width, "float32")))


def _matrix_flops(m: Rwkv5 | Rwkv6) -> int:
    """Per element of the state: product and sum each to read it and to write it, and the decay; then the bonus."""
    return 5 * m.width * m.head_dim + 5 * m.width


class Rwkv7(msgspec.Struct, frozen=True, kw_only=True, tag="rwkv7"):
    """RWKV-7 time mixing: a matrix state [head_dim, head_dim] per head under a generalised delta rule.

    The four low-rank parts (decay w, in-context learning rate a, value residual v, gate g) have ranks of their own;
    a `gate_rank` of 0 is no gate. H * D is E. `first`: the first layer, whose values the later ones mix in; it has no
    value residual itself. `normed`: what is read of the states is normed head by head.
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
    normed: bool = True

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def mixed(self) -> str:
        """What is mixed with the input before it, in the order of the rows of files."""
        return "rwkvag" if self.gate_rank else "rwkva"

    def weight_shapes(self, e: int) -> Shapes:
        w = self.width
        assert w == e, "the last input is as wide as the heads together"
        out: Shapes = {f"mix_{name}": (e,) for name in self.mixed}
        ranks = {"w": self.decay_rank, "a": self.rate_rank} | ({} if self.first else {"v": self.value_rank})
        for name, rank in ranks.items():
            out |= {f"{name}0": (w,), f"{name}1": (rank, e), f"{name}2": (w, rank)}
        out |= {"g1": (self.gate_rank, e), "g2": (w, self.gate_rank)} if self.gate_rank else {}
        out |= {"k_k": (w,), "k_a": (w,), "r_k": (w,)}
        out |= {"r": (w, e), "k": (w, e), "v": (w, e), "o": (e, w)}
        return out | ({"head_norm": (w,), "head_norm.bias": (w,)} if self.normed else {})

    def cache(self, kv_dtype: str) -> CacheSpec:
        return _matrix_state(self)

    @property
    def pair_flops(self) -> int:
        return 0

    @property
    def token_flops(self) -> int:
        """Per element of the state: decay; product and sum each to find the old, remove it, write and read."""
        return 9 * self.width * self.head_dim


class ChannelMix(msgspec.Struct, frozen=True, kw_only=True, tag="channel_mix"):
    """RWKV's feed-forward: down(relu(up(mix of this token and the last))^2), in versions 4 and 6 times sigmoid(r(...)).

    Version 4, which is RWKV-5's too, weighs this token by its mix; 6 and 7 weigh the last one.

    Its last input is a plane `ffn_shift` of the layer's slot, besides what the mixer keeps.
    """

    version: Literal[4, 6, 7]
    width: int

    def weight_shapes(self, e: int) -> Shapes:
        out: Shapes = {"ffn_mix_k": (e,), "up": (self.width, e), "down": (e, self.width)}
        return out | ({"ffn_mix_r": (e,), "ffn_r": (e, e)} if self.version != 7 else {})
