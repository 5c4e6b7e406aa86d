"""Rows of logits that the library samples from, or takes log-probabilities of: `pst_sample` and `pst_logprobs`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.base.bf16 import F32
from penstock.base.errors import EngineError
from penstock.ops.draws import Ranked
from penstock.ops.native.abi import LogprobRow, SampleRow
from penstock.ops.native.program import Pool

_SEED_MASK = (1 << 64) - 1


class Kernel:
    """Memory for rows of `vocab_size` logits on the threads of a pool. Raises: EngineError if there is none."""

    def __init__(self, pool: Pool, vocab_size: int) -> None:
        self._pool, self._library = pool, pool.library
        self.vocab_size = vocab_size
        self.handle = self._library.pst_sampler_new(vocab_size, pool.num_threads)
        if not self.handle:
            raise EngineError(f"there is no memory to sample from {vocab_size} tokens")

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self._library.pst_sampler_free(self.handle)
            self.handle = None

    def rows(self) -> SampleRows:
        """See `ops.draws.DrawKernel`."""
        return SampleRows(self)

    def sample(self, address: int, count: int) -> None:
        """Run `count` rows, SampleRow structs at `address`."""
        failed = self._library.pst_sample(self.handle, self._pool.handle, address, count)
        assert failed == 0, "the sampler was made for this pool"

    def logprobs(self, jobs: Sequence[tuple[F32, Sequence[int], int]]) -> list[Ranked]:
        """One row each: (healthy logits [V], tokens whose ranks are wanted, how many of the likeliest)."""
        rows = (LogprobRow * len(jobs))()
        keep: list[Any] = []
        for row, (logits, tokens, num_top) in zip(rows, jobs, strict=True):
            assert logits.flags.c_contiguous
            wanted, ranks = np.array(tokens, np.int32), np.empty(len(tokens), np.int32)
            top_ids = np.empty(max(0, min(num_top, self.vocab_size)), np.int32)
            keep.append((wanted, ranks, top_ids))
            row.logits, row.tokens = logits.ctypes.data, wanted.ctypes.data
            row.num_tokens, row.num_top = len(tokens), len(top_ids)
            row.ranks, row.top_ids = ranks.ctypes.data, top_ids.ctypes.data
        failed = self._library.pst_logprobs(self.handle, self._pool.handle, ctypes.addressof(rows), len(jobs))
        assert failed == 0, "the tokens are in the vocabulary"
        return [
            Ranked(row.peak, row.total, ranks.tolist(), top_ids.tolist())
            for row, (_, ranks, top_ids) in zip(rows, keep, strict=True)
        ]


class SampleRows:
    """The rows of a step. `point`, then `ask` for those that draw, then `run`; results are valid until the next."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._source: tuple[int, int] = (0, 0)
        self._asked: list[tuple[Any, int, int]] = []
        self._reserve(64)
        self._reserve_tokens(64)

    def _reserve(self, num_rows: int) -> None:
        self._structs: Any = (SampleRow * num_rows)()
        self._rows = list(self._structs)  # an element made once costs nothing to find again
        self._array: npt.NDArray[Any] = np.frombuffer(self._structs, np.dtype(SampleRow))  # type: ignore[call-overload]
        self._array["top_p"] = 1.0
        self._address = ctypes.addressof(self._structs)
        self._source = (0, 0)

    def _reserve_tokens(self, count: int) -> None:
        self._tokens = np.empty(count, np.int32)
        self._tokens_address = self._tokens.ctypes.data
        self._num_tokens = 0

    def point(self, logits: F32) -> None:
        """Rows of the next run: [R, V], each contiguous, alive until then."""
        if len(logits) > len(self._rows):
            self._reserve(2 * len(logits))
        address, stride = logits.__array_interface__["data"][0], logits.strides[0]
        if self._source != (address, stride):
            self._source = (address, stride)
            self._array["logits"] = address + stride * np.arange(len(self._rows))
        for row, _, _ in self._asked:
            row.num_tokens = 0  # of a run that never was: nothing may be drawn into memory that is gone
        self._asked.clear()
        self._num_tokens = 0

    def ask(
        self, r: int, scale: float, min_p: float, top_k: int, top_p: float, seed: int, sample_index: int, position: int,
        num_tokens: int,
    ) -> None:  # fmt: skip
        """Row `r` draws. `scale`: log2(e) / temperature."""
        row = self._rows[r]
        row.scale, row.min_p, row.top_k, row.top_p = scale, min_p, top_k, top_p
        row.seed, row.sample_index, row.position = seed & _SEED_MASK, sample_index, position
        row.num_tokens = num_tokens
        self._asked.append((row, self._num_tokens, num_tokens))
        self._num_tokens += num_tokens

    def run(self, num_rows: int) -> tuple[list[int], list[int]]:
        """(the first largest of each row, 1 for each healthy row)."""
        if self._num_tokens > len(self._tokens):
            self._reserve_tokens(2 * self._num_tokens)
        for row, at, _ in self._asked:
            row.tokens = self._tokens_address + 4 * at
        self._kernel.sample(self._address, num_rows)
        array = self._array[:num_rows]
        return array["best"].tolist(), array["healthy"].tolist()

    def tokens(self) -> list[list[int]]:
        """What was drawn, in the order of `ask`."""
        drawn = self._tokens
        return [drawn[at : at + count].tolist() for _, at, count in self._asked]

    def peak(self, r: int) -> float:
        """The largest logit of row `r`."""
        return float(self._rows[r].peak)
