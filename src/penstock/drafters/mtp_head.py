"""One head for multi-token prediction: it reads pairs of a hidden state and the embedding of the token behind it.

Source: DeepSeek-V3, arXiv 2412.19437, section 2.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.core.model_spec import Norm
from penstock.drafters.bench import DraftBench, DraftModel, Target
from penstock.drafters.choose import F32
from penstock.drafters.forward import Ahead, DraftForward
from penstock.model.forward import TableForward
from penstock.ops.plan import I32
from penstock.ops.ref.product import as_float32


class HeadPairs(NamedTuple):
    """Pairs of one sequence to be run: of tokens start, start + 1, ... and the hidden states before them [n, E]."""

    seq_id: int
    start: int
    tokens: I32
    before: F32


class PairHead:
    """A decoder layer over a table of pairs, which is written here before every run.

    `every`: whether the states behind all pairs are wanted, as by a head that follows; otherwise behind the last.
    """

    def __init__(self, model: DraftModel, target: Target, bench: DraftBench, *, every: bool) -> None:
        assert model.spec is not None, "the launch says what its models compute"
        assert model.spec.pair is not None, "a head reads pairs"
        self._pair, self._table, self._every = model.spec.pair, model.weights["embed"], every
        self._device = model.forward if isinstance(model.forward, TableForward) else None
        self._norms = tuple(_vectors(model, name) for name in ("token_norm", "hidden_norm"))
        self._embeddings, self._scale = target.embeddings, np.float32(target.spec.embed_scale)
        self._block = DraftForward(model.forward, bench.rows, bench.storage)

    def run(self, work: Sequence[HeadPairs]) -> list[F32]:
        """The states behind the pairs of each [n, E], or behind the last [1, E]; as many at once as the table holds."""
        parts: list[list[F32]] = [[] for _ in work]
        batch: list[Ahead] = []
        owners: list[int] = []
        filled = 0

        def flush() -> None:
            nonlocal filled
            counts = [item.num_wanted for item in batch]
            for j, states in zip(owners, np.split(self._block.states(batch), np.cumsum(counts)[:-1]), strict=True):
                parts[j].append(states)
            batch.clear()
            owners.clear()
            filled = 0

        for j, run in enumerate(work):
            at = 0
            while at < len(run.tokens):
                if filled == len(self._table) or j in owners:
                    flush()
                count = min(len(run.tokens) - at, len(self._table) - filled)
                part = slice(at, at + count)
                self._write(filled, run.tokens[part], run.before[part])
                rows = np.arange(filled, filled + count, dtype=np.int32)
                batch.append(Ahead(run.seq_id, run.start + at, rows, num_wanted=count if self._every else 1))
                owners.append(j)
                filled, at = filled + count, at + count
        if batch:
            flush()
        return [np.concatenate(found) if self._every else found[-1] for found in parts]

    def _write(self, first: int, tokens: I32, before: F32) -> None:
        """Put pairs into the table, from row `first` on."""
        parts = [
            _normed(x, self._pair.norm, weight)
            for x, weight in zip(
                (self._embeddings(tokens.astype(np.int64)) * self._scale, before), self._norms, strict=True
            )
        ]
        rows = self._table[first : first + len(tokens)]
        np.concatenate(parts[::-1] if self._pair.hidden_first else parts, axis=1, out=rows)
        if self._device is not None:
            self._device.put_rows(first, rows)


def _vectors(model: DraftModel, name: str) -> tuple[F32, F32]:
    """A norm's weights and bias."""
    bias = model.weights.get(f"{name}.bias")
    weight = as_float32(model.weights[name])
    return weight, np.zeros_like(weight) if bias is None else as_float32(bias)


def _normed(x: F32, norm: Norm, weight: tuple[F32, F32]) -> F32:
    if norm.kind == "layer":
        x = x - x.mean(axis=1, keepdims=True)
    out: F32 = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + np.float32(norm.eps))
    return out * (weight[0] + np.float32(norm.offset)) + weight[1]
