"""The gated delta rule: a matrix state per head that a token's key finds, corrects and fades."""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.core.cache_spec import CacheSpec, PlaneSpec
from penstock.core.mixers import Shapes


class GatedDelta(msgspec.Struct, frozen=True, kw_only=True, tag="delta"):
    """Gated delta net: `value_heads` states [key_dim, value_dim]; as many of them in a row share a key head. `in_turn`:
    value head h has key head h modulo `key_heads` instead, as files of llama.cpp have it.

    Queries, keys and values go through causal convolutions of `conv` taps and silu; queries and keys become unit
    vectors (with `norm_eps` under the root), queries also times key_dim^-0.5. A state fades by exp(A softplus(dt)),
    where dt has its bias: one number per head, or one per head and component of the key (`channel_decay`, Kimi's KDA).
    What the state gives for the key is corrected towards the value by `beta_scale` times sigmoid(beta). Heads of the
    result go through the RMS norm `head_norm`, whose weights they share, then the gate: times silu(z) or sigmoid(z).
    `decay_rank` and `gate_rank`: the products for dt and z are of low rank, by way of `dt_down` and `z_down`.
    `decay_is_log` as in `core.mixers.mamba.Mamba`: weight `a_log` is log(-A). With a `floor` below zero a state fades
    by exp(floor sigmoid(-A dt)) instead, and so never by more than exp(floor) (Ling 3).
    Source: Yang et al., arXiv 2412.06464, section 3; Kimi Team, arXiv 2510.26692, section 3 (decay per channel).
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int
    eps: float = 1e-6
    norm_eps: float = 1e-6
    channel_decay: bool = False
    decay_rank: int | None = None
    gate: Literal["silu", "sigmoid"] = "silu"
    gate_rank: int | None = None
    beta_scale: float = 1.0
    decay_is_log: bool = True
    in_turn: bool = False
    floor: float | None = None

    @property
    def keys(self) -> int:
        """Channels of all keys; queries have as many."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    def weight_shapes(self, e: int) -> Shapes:
        h, k, v = self.value_heads, self.keys, self.values
        decays = h * self.key_dim if self.channel_decay else h
        out: Shapes = {
            "q": (k, e), "k": (k, e), "v": (v, e), "beta": (h, e), "dt": (decays, self.decay_rank or e),
            "dt.bias": (decays,), "a_log": (h,), "z": (v, self.gate_rank or e), "head_norm": (self.value_dim,),
            "o": (e, v), "q.conv": (k, self.conv), "k.conv": (k, self.conv), "v.conv": (v, self.conv),
        }  # fmt: skip
        if self.decay_rank is not None:
            out["dt_down"] = (self.decay_rank, e)
        if self.gate_rank is not None:
            out["z_down"] = (self.gate_rank, e)
        return out

    def cache(self, kv_dtype: str) -> CacheSpec:
        """The last inputs of the convolutions, and the state. float32: rounding would add up over the whole text."""
        channels = {"q_conv": self.keys, "k_conv": self.keys, "v_conv": self.values}
        state = PlaneSpec("state", self.value_heads, self.key_dim * self.value_dim, "float32")
        convs = (PlaneSpec(name, self.conv - 1, n, "float32") for name, n in channels.items())
        return CacheSpec(kind="slot", planes=(*convs, state))

    @property
    def pair_flops(self) -> int:
        return 0

    @property
    def token_flops(self) -> int:
        """Convolutions, and per element of the state: decay; product and sum each to find, to correct and to read."""
        return 2 * self.conv * (2 * self.keys + self.values) + 7 * self.value_heads * self.key_dim * self.value_dim
