"""State spaces whose transition is diagonal and does not look at the token: S4D and LRU."""

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
    Source: Gu et al., S4D, arXiv 2206.11893, section 3; Orvieto et al., LRU, arXiv 2303.06349, section 3.
    """

    form: Literal["s4d", "lru"] = "s4d"
    inner: int
    state: int = 1
    activation: Literal["gelu", "gelu_tanh", "silu"] | None = None

    @property
    def pairs(self) -> bool:
        """Whether the channels are complex."""
        return self.form == "lru"

    def weight_shapes(self, e: int) -> Shapes:
        i, n = self.inner, self.state
        if self.pairs:
            assert n == 1, "an LRU's channel has one number of state"
            return {"in": (2 * i, e), "nu": (i,), "theta": (i,), "o": (e, 2 * i)}
        out: Shapes = {"in": (i, e), "log_dt": (i,), "d": (i,), "o": (e, i)}
        return out | dict.fromkeys(("a_log", "a_im", "c_re", "c_im"), (i, n))

    def cache(self, kv_dtype: str) -> CacheSpec:
        """Real and imaginary parts. float32: rounding would add up over the whole text."""
        planes = (PlaneSpec(name, self.state, self.inner, "float32") for name in ("re", "im"))
        return CacheSpec(kind="slot", planes=tuple(planes))

    @property
    def pair_flops(self) -> int:
        return 0

    @property
    def token_flops(self) -> int:
        """Per number of state: complex product and sum each, to go on and to read."""
        return self.inner * self.state * 16
