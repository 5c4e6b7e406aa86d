"""Selective state spaces: Mamba and Mamba-2."""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.core.cache_spec import CacheSpec, PlaneSpec
from penstock.core.mixers import Shapes


class Mamba(msgspec.Struct, frozen=True, kw_only=True, tag="mamba"):
    """Mamba-1: a causal convolution of `conv` taps and a diagonal state of `state` numbers per inner channel.

    `proj_bias`: on the projections in and out. `decay_is_log`: weight `a_log` is log(-A), as the training code has it,
    not A. `norm_eps`: dt, B and C are normed (RMS) before they are used, with weights `dt_norm`, `b_norm` and `c_norm`
    unless `norm_weights` is off. Source: Gu & Dao, arXiv 2312.00752, section 3 and algorithm 2; norms: Jamba, arXiv
    2403.19887, section 6.4, and Falcon Mamba, arXiv 2410.05355, section 2.
    """

    inner: int
    state: int
    conv: int
    dt_rank: int
    conv_bias: bool = True
    proj_bias: bool = False
    decay_is_log: bool = True
    norm_eps: float | None = None
    norm_weights: bool = True

    def weight_shapes(self, e: int) -> Shapes:
        i = self.inner
        out: Shapes = {
            "in": (2 * i, e), "conv": (i, self.conv), "x": (self.dt_rank + 2 * self.state, i), "dt": (i, self.dt_rank),
            "dt.bias": (i,), "a_log": (i, self.state), "d": (i,), "o": (e, i),
        }  # fmt: skip
        if self.conv_bias:
            out["conv.bias"] = (i,)
        if self.proj_bias:
            out |= {"in.bias": (2 * i,), "o.bias": (e,)}
        if self.norm_eps is not None and self.norm_weights:
            out |= {"dt_norm": (self.dt_rank,), "b_norm": (self.state,), "c_norm": (self.state,)}
        return out

    def cache(self, kv_dtype: str) -> CacheSpec:
        """`conv`: the last inputs of the convolution; `state`. float32: rounding would add up over the whole text."""
        planes = (
            PlaneSpec("conv", self.conv - 1, self.inner, "float32"),
            PlaneSpec("state", self.state, self.inner, "float32"),
        )
        return CacheSpec(kind="slot", planes=planes)

    @property
    def pair_flops(self) -> int:
        return 0

    @property
    def token_flops(self) -> int:
        """Convolution, and per element of the state: discretisation, decay, input, sum, output and its sum."""
        return self.inner * (2 * self.conv + 7 * self.state)


class Mamba2(msgspec.Struct, frozen=True, kw_only=True, tag="mamba2"):
    """Mamba-2: heads with one scalar decay each, B and C shared by the heads of a group.

    In front of `o`, the RMS norm `gate_norm` of what the gate let through, over the channels of each group by itself.
    `norm`: "none" leaves it out; "before" norms first and gates then. `dt_min`, `dt_max` cut the time step;
    `decay_is_log` as in `Mamba`. `scales`: what gate, x, B, C and dt are multiplied by when they come out of `in`.
    Source: Dao & Gu, arXiv 2405.21060, sections 6 and 7; the scales: Falcon-H1, arXiv 2507.22448, section 3.2.
    """

    num_heads: int
    head_dim: int
    state: int
    groups: int
    conv: int
    eps: float = 1e-5
    dt_min: float = 0.0
    dt_max: float = float("inf")
    conv_bias: bool = True
    proj_bias: bool = False
    decay_is_log: bool = True
    norm: Literal["gated", "before", "none"] = "gated"
    scales: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)

    @property
    def inner(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.inner + 2 * self.groups * self.state

    def weight_shapes(self, e: int) -> Shapes:
        i, h = self.inner, self.num_heads
        width = i + self.conv_dim + h
        out: Shapes = {
            "in": (width, e), "conv": (self.conv_dim, self.conv), "dt.bias": (h,), "a_log": (h,), "d": (h,),
        }  # fmt: skip
        out |= {"o": (e, i)} if self.norm == "none" else {"gate_norm": (i,), "o": (e, i)}
        if self.conv_bias:
            out["conv.bias"] = (self.conv_dim,)
        if self.proj_bias:
            out |= {"in.bias": (width,), "o.bias": (e,)}
        return out

    def cache(self, kv_dtype: str) -> CacheSpec:
        """See `Mamba.cache`."""
        planes = (
            PlaneSpec("conv", self.conv - 1, self.conv_dim, "float32"),
            PlaneSpec("state", self.num_heads, self.state * self.head_dim, "float32"),
        )
        return CacheSpec(kind="slot", planes=planes)

    @property
    def pair_flops(self) -> int:
        return 0

    @property
    def token_flops(self) -> int:
        """As `Mamba.token_flops`."""
        return 2 * self.conv_dim * self.conv + 7 * self.inner * self.state
