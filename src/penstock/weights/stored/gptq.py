"""GPTQ: words [K b / 32, N] of codes, neighbours in a word being inputs; a zero point less one is stored (version 1).

W[n, k] = scales[g, n] * (code[k, n] - (zeros[g, n] + 1)), g = g_idx[k]; version 2 stores zero points as they are. The
sum may exceed the largest code. The words of one output are one run of bits: of 3-bit codes two in each 32 lie in two
words. Source: `qlinear_cuda.py` of github.com/AutoGPTQ/AutoGPTQ; Frantar et al., arXiv 2210.17323 (groups, and inputs
in the order of their activations: act-order, in the files `desc_act`).
"""

from __future__ import annotations

from penstock.ops.stored import Rows
from penstock.weights.stored.grouped import GroupedMatrix
from penstock.weights.stored.words import U8, U32, unpacked


class GptqMatrix(GroupedMatrix):
    """See the module."""

    @classmethod
    def laid_out(cls, words: U32, n: int, k: int) -> U32:
        return words.reshape(-1, n)

    def _codes(self, rows: Rows) -> U8:
        return unpacked(self.tensors.words[:, rows].T, self.shape[1], self.format.bits)
