"""Position schemes of attention as data; `ops.ref.rotary` and the attention backends compute them."""

from __future__ import annotations

from typing import Literal

import msgspec

RopeKind = Literal["default", "linear", "ntk", "dynamic", "llama3", "yarn", "longrope", "proportional"]


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary positions. Source: Su et al., RoFormer, arXiv 2104.09864.

    `dim` leading components of a head are rotated (the rest pass through). `interleaved` pairs neighbours (0,1),(2,3)
    as llama2.c and GPT-J do; otherwise component i pairs with i + dim/2. `attention_factor` multiplies the rotated
    components of q and k (YaRN, section 3.4). Kinds:

    `default`; `linear` divides positions by `factor` (Chen et al., arXiv 2306.15595); `ntk` enlarges theta so that the
    slowest pair turns `factor` times slower and the fastest as before (NTK-aware; Peng et al., arXiv 2309.00071,
    section 3.1); `dynamic` does so for contexts beyond `original_max_position`, by their length and `factor`; `llama3`
    stretches low frequencies only (Llama 3.1 model card); `yarn` mixes stretched and kept frequencies between
    `beta_slow` and `beta_fast` turns over the original context, bounds rounded outwards if `truncate` (arXiv
    2309.00071); `longrope` divides each frequency by its own entry of `short_factor`, or for contexts beyond
    `original_max_position` of `long_factor`, from position `start_tokens` on (Ding et al., arXiv 2402.13753);
    `proportional` turns the fastest pairs only, `part` of them, and divides by `factor` (Gemma 4). What depends
    on the length of the context is fixed at start by max_model_len.

    `head_factors`: positions of kv head g, and of the query heads that share it, are divided by head_factors[g] besides
    (Ms-PoE: Zhang et al., arXiv 2403.04797); () divides none. `backwards`: by negative angles (nanochat).
    """

    kind: RopeKind = "default"
    theta: float = 10000.0
    dim: int
    interleaved: bool = False
    attention_factor: float = 1.0
    factor: float = 1.0
    original_max_position: int = 8192
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    start_tokens: int = 0
    part: float = 1.0
    head_factors: tuple[float, ...] = ()
    backwards: bool = False


class Alibi(msgspec.Struct, frozen=True, kw_only=True):
    """Linear distance penalty on scores, a slope per head. Source: Press et al., arXiv 2108.12409, section 3.

    Slopes are 2^(-max_bias i / n), i = 1 ... n, for n heads if n is a power of two; otherwise those of the next smaller
    power, followed by every other one of its double. `factor` multiplies them (Falcon scales them with the scores).
    """

    max_bias: float = 8.0
    factor: float = 1.0

    def slopes(self, num_heads: int) -> tuple[float, ...]:
        """One slope per head."""
        low = 1 << (num_heads.bit_length() - 1)
        values = [2.0 ** (-self.max_bias * i / low) for i in range(1, low + 1)]
        values += [2.0 ** (-self.max_bias * i / (2 * low)) for i in range(1, 2 * low, 2)]
        return tuple(self.factor * value for value in values[:num_heads])


class QueryScale(msgspec.Struct, frozen=True, kw_only=True):
    """Queries grow with the position p: q *= 1 + beta * log(1 + floor((p + shift) / floor)).

    Source: Llama 4's attention temperature (shift 1, on layers without rope) and Ministral 3 (shift 0).
    """

    beta: float
    floor: int
    shift: int = 0
