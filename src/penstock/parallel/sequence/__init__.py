"""The rows of a step shared out over ranks that have all weights each: by method.

Sources: Li et al., Sequence parallelism, arXiv 2105.13120, section 3; Korthikanti et al., arXiv 2205.05198, section 4;
Jacobs et al., DeepSpeed Ulysses, arXiv 2309.14509, section 3; Liu et al., Ring Attention, arXiv 2310.01889, section 3;
Brandon et al., Striped Attention, arXiv 2311.09431, section 3; Sun et al., BurstAttention, arXiv 2403.09347, section 3;
Wu et al., LoongServe, arXiv 2404.09526, section 4; Yang et al., Context parallelism, arXiv 2411.01783, section 3.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.base.registry import Registry
from penstock.parallel.sequence.passing import Passing


class SequenceTraits(NamedTuple):
    """What is known of a method before it is imported.

    `layout`: how it lays out rows unless told otherwise (`shares.LAYOUTS`). `passes_kv`: keys and values come by every
    rank, so one that keeps them need not be the one that makes them. `by_heads`: a rank keeps all tokens of its heads.
    `same_bits`: its numbers are those of one rank, bit for bit.
    """

    layout: str = "contiguous"
    passes_kv: bool = True
    by_heads: bool = False
    same_bits: bool = False


SEQUENCE_METHODS: Registry[type[Passing], SequenceTraits] = Registry("sequence method")
_HERE = "penstock.parallel.sequence"
SEQUENCE_METHODS.add("gather", f"{_HERE}.whole:GatherKv", SequenceTraits(same_bits=True))
SEQUENCE_METHODS.add(
    "ulysses", f"{_HERE}.whole:Ulysses", SequenceTraits(passes_kv=False, by_heads=True, same_bits=True)
)
SEQUENCE_METHODS.add("ring", f"{_HERE}.ring:Ring", SequenceTraits())
SEQUENCE_METHODS.add("striped", f"{_HERE}.ring:Ring", SequenceTraits("striped"))
SEQUENCE_METHODS.add("burst", f"{_HERE}.ring:Burst", SequenceTraits("striped"))
SEQUENCE_METHODS.add("pass_kv", f"{_HERE}.ring:Ring", SequenceTraits("zigzag"))
SEQUENCE_METHODS.add("pass_q", f"{_HERE}.ring:PassQ", SequenceTraits("zigzag", passes_kv=False))
SEQUENCE_METHODS.add("auto", f"{_HERE}.ring:PassFewer", SequenceTraits("zigzag", passes_kv=False))
