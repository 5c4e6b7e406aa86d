"""What formats share that keep numbers of few bits in 32-bit words."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
I64 = npt.NDArray[np.int64]


def picked(words: U32, which: I64, bits: int, dense: bool = True) -> U8:
    """Numbers `which` of each row of `words` [M, W], the first in the lowest bits: [M, len(which)].

    `dense`: a row is one run of bits, so that numbers of 3, 5, 6 and 7 bits may lie in two words; else each word has
    32 // bits of them, and its highest bits may be unused.
    """
    per = 32 // bits
    at = which * bits if dense else which // per * 32 + which % per * bits
    word, shift = at // 32, (at % 32).astype(np.uint32)
    out = words[:, word] >> shift
    over = shift + bits > 32
    if over.any():
        out[:, over] |= words[:, word[over] + 1] << (np.uint32(32) - shift[over])
    return (out & np.uint32((1 << bits) - 1)).astype(np.uint8)


def unpacked(words: U32, count: int, bits: int, dense: bool = True) -> U8:
    """The first `count` numbers of each row: [M, count]."""
    if 32 % bits and dense:
        return picked(words, np.arange(count), bits)
    shifts = np.arange(32 // bits, dtype=np.uint32) * np.uint32(bits)
    numbers = words[:, :, None] >> shifts & np.uint32((1 << bits) - 1)
    return numbers.astype(np.uint8).reshape(len(words), -1)[:, :count]
