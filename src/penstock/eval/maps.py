"""What a model attends to when it reads a text: every weight, by the reference operations.

Shape letters: T tokens, G kv heads, H query heads. A map of T tokens takes T * H * T * 4 bytes per layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from penstock.base.bf16 import F32
from penstock.eval.scorer import LoadedModel, ProgramScorer
from penstock.model.program import Program
from penstock.ops.blas import BLAS
from penstock.ops.ref.attention.rows import RowBackend, Rule, scores


class LayerMap(NamedTuple):
    """`weights` [tokens, G, H/G, T]: how much the text's last `tokens` tokens attend to each of its T tokens.

    Zeros behind a token and beyond a window. A row sums to 1, or less where the model has learned sinks.
    """

    layer: int
    weights: F32


class MapReader(ProgramScorer):
    """Reads texts as `ProgramScorer` does, and keeps what attention saw."""

    def __init__(self, model: LoadedModel) -> None:
        super().__init__(model, BLAS)
        program = self._program
        assert isinstance(program, Program), "the reference operations"
        self._layers: list[_Recorder] = []
        code = []
        for call in program.code:
            if call.op == "attention":
                self._layers.append(_Recorder(call.layer))
                call = replace(call, fn=self._layers[-1].attend)
            code.append(call)
        sizes = {"vocab_size": program.vocab_size, "max_model_len": program.max_model_len}
        self._program = Program(code, num_head=program.num_head, **sizes)

    def read(self, token_ids: Sequence[int], first: int = 0) -> tuple[F32, list[LayerMap]]:
        """Logits [T, V], and for each attention layer what the tokens from `first` on attended to."""
        for recorder in self._layers:
            recorder.begin(first, len(token_ids))
        logits = self.logits(token_ids)
        return logits, [LayerMap(recorder.layer, recorder.taken()) for recorder in self._layers]


class _Recorder(RowBackend):
    """The backend of one layer, which writes down the weights of one text."""

    def __init__(self, layer: int) -> None:
        super().__init__("recorder", False, self._row)
        self.layer = layer
        self._first, self._length = 0, 0
        self._map: F32 | None = None

    def begin(self, first: int, length: int) -> None:
        self._first, self._length, self._map = first, length, None

    def taken(self) -> F32:
        assert self._map is not None, "a text has been read"
        out, self._map = self._map, None
        return out

    def _row(self, q: F32, k: F32, v: F32, first: int, rule: Rule) -> F32:
        """As `full.attend_row`."""
        s = scores(q, k, rule, 0)
        m = s.max(axis=-1, keepdims=True)
        if rule.sinks is not None:
            m = np.maximum(m, rule.sinks)
        weights = np.exp(s - m)
        total = weights.sum(axis=-1, keepdims=True)
        if rule.sinks is not None:
            total = total + np.exp(rule.sinks - m)
        weights /= total
        if self._map is None:
            self._map = np.zeros((self._length - self._first, *q.shape[:2], self._length), np.float32)
        end = first + len(k)
        if end > self._first:
            self._map[end - 1 - self._first, :, :, first:end] = weights
        out: F32 = np.matmul(weights, v.transpose(1, 0, 2))
        return out
