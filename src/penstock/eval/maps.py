"""What a model attends to when it reads a text: every weight, by the reference operations.

Shape letters: T tokens, G kv heads, H query heads. A map of T tokens takes T * H * T * 4 bytes per layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from penstock.backends.reference import BlasBackend
from penstock.base.bf16 import F32
from penstock.core.model_spec import Attention, Latent
from penstock.eval.scorer import LoadedModel, ProgramScorer
from penstock.ops.ref.attention.rows import RowBackend, Rule, scores
from penstock.ops.step import Step


class LayerMap(NamedTuple):
    """`weights` [tokens, G, H/G, T]: how much the text's last `tokens` tokens attend to each of its T tokens.

    Zeros behind a token and beyond a window. A row sums to 1, or less where the model has learned sinks.
    """

    layer: int
    weights: F32


class MapReader(ProgramScorer):
    """Reads texts as `ProgramScorer` does, and keeps what attention saw."""

    def __init__(self, model: LoadedModel) -> None:
        self._recorder = _Recorder()
        super().__init__(model, BlasBackend(self._recorder))
        self._layers = [n for n, layer in enumerate(model.spec.layers) if isinstance(layer.mixer, Attention | Latent)]

    def read(self, token_ids: Sequence[int], first: int = 0) -> tuple[F32, list[LayerMap]]:
        """Logits [T, V], and for each attention layer what the tokens from `first` on attended to."""
        self._recorder.begin(first, len(token_ids))
        logits = self.logits(token_ids)
        return logits, [LayerMap(n, found) for n, found in zip(self._layers, self._recorder.maps, strict=True)]


class _Recorder(RowBackend):
    """Attention that writes down its weights for one text. `maps`: one for each layer that attends, in their order."""

    def __init__(self) -> None:
        super().__init__("recorder", False, self._row)
        self.maps: list[F32] = []
        self._new = True
        self._first, self._length = 0, 0

    def begin(self, first: int, length: int) -> None:
        self._first, self._length, self.maps = first, length, []

    def attend(self, q: F32, step: Step, group: int, layer: int, **named: Any) -> F32:
        self._new = True
        return super().attend(q, step, group, layer, **named)

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
        if self._new:
            shape = (self._length - self._first, *q.shape[:2], self._length)
            self.maps.append(np.zeros(shape, np.float32))
            self._new = False
        end = first + len(k)
        if end > self._first:
            self.maps[-1][end - 1 - self._first, :, :, first:end] = weights
        out: F32 = np.matmul(weights, v.transpose(1, 0, 2))
        return out
