"""AWQ as its GEMM version packs it: words [K, N / 8] of 4-bit codes, neighbours in a word being outputs.

Bits 4i ... 4i+3 of word c are output 8c + [0, 2, 4, 6, 1, 3, 5, 7][i], zero points alike; W[n, k] = (code - zero) *
scales[k // group, n]. Source: `gemm.py` of github.com/casper-hansen/AutoAWQ; Lin et al., arXiv 2306.00978.
"""

from __future__ import annotations

from penstock.ops.stored import Rows
from penstock.weights.stored.grouped import GroupedMatrix
from penstock.weights.stored.words import U8, U32


class AwqMatrix(GroupedMatrix):
    """See the module."""

    places = (0, 4, 1, 5, 2, 6, 3, 7)

    @classmethod
    def laid_out(cls, words: U32, n: int, k: int) -> U32:
        return words.reshape(k, -1)

    def _codes(self, rows: Rows) -> U8:
        return self.along_outputs(self.tensors.words, rows)
