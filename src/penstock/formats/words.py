"""Numbers of few bits in 32-bit words."""

from __future__ import annotations


def num_words(count: int, bits: int, dense: bool = True) -> int:
    """Words that so many numbers of a row take: as one run of bits, or (not `dense`) 32 // bits to a word."""
    return -(-count * bits // 32) if dense else -(-count // (32 // bits))
