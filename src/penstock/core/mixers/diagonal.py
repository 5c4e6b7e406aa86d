"""State spaces whose transition is diagonal and does not look at the token: S4D and LRU, and S4D between the gates of
H3 and of GSS."""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.core.cache_spec import CacheSpec, PlaneSpec
from penstock.core.mixers import Shapes


class Diagonal(msgspec.Struct, frozen=True, kw_only=True, tag="diagonal"):
    """A linear recurrence with complex numbers on its diagonal: state = a * state + what comes in.

    form `s4d`: each of `inner` channels of the product `in` [I, E] drives `state` numbers of its own; its result is the
    real part of (sum of c * state) + d * u, goes through `activation` and the product `o` [E, I]. Weights: `log_dt`
    [I], `a_log` and `a_im` [I, N]: A = -exp(a_log) + i a_im, a = exp(dt A); `c_re`, `c_im` [I, N], multiplied by
    (a - 1) / A and by two, the conjugates being left out (zero-order hold); `d` [I].
    form `lru`: `in` [2 I, E] gives complex numbers, real parts first, each with one number of state (`state` is 1), and
    `o` [E, 2 I] is the matrix that takes the real part of C state. Weights: `nu` and `theta` [I], a = exp(-exp(nu) + i
    exp(theta)); what comes in is multiplied by sqrt(1 - |a|^2); D is left to the residual.
    gates `h3` (of S4D): in place of `in` there are products q, k, v [I, E] of the input; what comes in is v times k
    through a state space that shifts, which is a convolution with `taps` inputs of its own (weight `conv` [I, taps],
    the newest last; its D is part of that one), and what comes out is multiplied by q. Heads of one number.
    gates `gss` (of S4D): `activation` follows `in`; what comes out goes through `mix` [`outer`, I] and is multiplied by
    activation(`out_gate` [`outer`, E] x); `o` is [E, `outer`].
    Source: Gu et al., S4D, arXiv 2206.11893, section 3; Orvieto et al., LRU, arXiv 2303.06349, section 3; Fu et al.,
    H3, arXiv 2212.14052, section 3; Mehta et al., GSS, arXiv 2206.13947, section 3.2.
    """

    form: Literal["s4d", "lru"] = "s4d"
    inner: int
    state: int = 1
    activation: Literal["gelu", "gelu_tanh", "silu"] | None = None
    gates: Literal["none", "h3", "gss"] = "none"
    taps: int = 0
    outer: int = 0

    @property
    def pairs(self) -> bool:
        """Whether the channels are complex."""
        return self.form == "lru"

    def weight_shapes(self, e: int) -> Shapes:
        i, n = self.inner, self.state
        if self.pairs:
            assert n == 1, "an LRU's channel has one number of state"
            assert self.gates == "none", "gates stand around real channels"
            return {"in": (2 * i, e), "nu": (i,), "theta": (i,), "o": (e, 2 * i)}
        out: Shapes
        match self.gates:
            case "none":
                out = {"in": (i, e), "o": (e, i)}
            case "h3":
                assert self.taps >= 2, "what shifts has two inputs at least"
                out = {"q": (i, e), "k": (i, e), "v": (i, e), "conv": (i, self.taps), "o": (e, i)}
            case "gss":
                out = {"in": (i, e), "out_gate": (self.outer, e), "mix": (self.outer, i), "o": (e, self.outer)}
        out |= {"log_dt": (i,), "d": (i,)}
        return out | dict.fromkeys(("a_log", "a_im", "c_re", "c_im"), (i, n))

    def cache(self, kv_dtype: str) -> CacheSpec:
        """Real and imaginary parts, and the last inputs of what shifts. float32: rounding would add up over the whole
        text."""
        planes = [PlaneSpec(name, self.state, self.inner, "float32") for name in ("re", "im")]
        shift = [PlaneSpec("conv", self.taps - 1, self.inner, "float32")] if self.gates == "h3" else []
        return CacheSpec(kind="slot", planes=(*shift, *planes))

    @property
    def pair_flops(self) -> int:
        return 0

    @property
    def token_flops(self) -> int:
        """Per number of state: complex product and sum each, to go on and to read. Per channel: taps and gates."""
        gates = {"none": 0, "h3": self.inner * (2 * self.taps + 2), "gss": self.outer}[self.gates]
        return self.inner * self.state * 16 + gates
