"""What sequences like this one have used says what it will use: MoE-Infinity's matching (catalogue row C74).

How often a sequence used each expert of each layer is its expert activation matrix. Those of sequences that have
ended are kept, as different ones as there is room for. A running sequence's is compared with them (cosine of the
layers' shares); the nearest, and what it used lately itself, say which experts of the next layers it will use. (The
paper takes its own from the beginning; tokens that follow each other choose alike, so what is recent says more.)

Source: Xue et al., MoE-Infinity, arXiv 2401.14361, sections 4 and 5.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.backends.native.experts.predictor import Expected, LayerRun, no_option, sure
from penstock.backends.native.experts.routers import LayerRouter

F64 = npt.NDArray[np.float64]
KEPT = 64
"""Matrices of sequences that have ended."""
_LAYERS_AHEAD = 2
_KEEPS = 0.6
"""Of a use, as each later token passes the layer (`benchmarks.engine.expert_recall` chose this, and `_OWN`)."""
_RECENT = 16
"""Tokens of one step that count lately: of those before them hardly anything is left."""
_OWN = 0.7
"""How much what it used lately says, beside the nearest."""
_LIKELY = 0.5
"""Expected uses by the rows of a step, from which on an expert is fetched however many there are."""


class Trace(NamedTuple):
    """[experts] uses of one sequence: all so far, and lately."""

    counts: F64
    lately: F64


class ActivationMatching:
    """See `ExpertPredictor`."""

    def __init__(self, routers: Sequence[LayerRouter | None], sizes: Sequence[int], option: str = "") -> None:
        no_option("activations", option)
        self._bounds = np.cumsum([0, *sizes])
        self._layers = np.repeat(np.arange(len(sizes)), sizes)
        self._kept = np.zeros((0, self._bounds[-1]))
        self.running: dict[int, Trace] = {}
        """By sequence."""
        self._rows: list[int] = []

    def begin(self, rows: Sequence[int], gone: Collection[int]) -> None:
        for sequence in gone:
            trace = self.running.pop(sequence, None)
            if trace is not None:
                self._keep(self._shares(trace.counts))
        self._rows = list(rows)

    def after(self, run: LayerRun) -> Sequence[Expected]:
        if run.owners is None:
            return ()
        first, top_k = self._bounds[run.layer], run.chosen.shape[1]
        likely = np.zeros(self._bounds[-1])
        here = slice(first, self._bounds[run.layer + 1])
        for row in np.unique(run.owners).tolist():
            trace = self.running.setdefault(self._rows[row], Trace(*np.zeros((2, self._bounds[-1]))))
            tokens = first + run.chosen[run.owners == row]
            np.add.at(trace.counts, tokens.reshape(-1), 1)
            for chosen in tokens[-_RECENT:]:
                trace.lately[here] *= _KEEPS
                trace.lately[chosen] += 1
            likely += top_k * self.expected(trace)
        found: list[Expected] = []
        for layer in range(run.layer + 1, min(run.layer + 1 + _LAYERS_AHEAD, len(self._bounds) - 1)):
            own = likely[self._bounds[layer] : self._bounds[layer + 1]]
            most = max(sure(top_k), int(np.count_nonzero(own >= _LIKELY)))
            best = np.argsort(-own, kind="stable")[:most]
            found.append((layer, best[own[best] > 0].tolist()))
        return found

    def expected(self, trace: Trace) -> F64:
        """Each expert's share of its layer's uses to come, of a sequence with this trace so far."""
        own = self._shares(trace.lately)
        if not len(self._kept):
            return own
        nearest: F64 = self._kept[int(np.argmax(self._likeness(self._shares(trace.counts))))]
        return _OWN * own + (1 - _OWN) * nearest

    def _shares(self, counts: F64) -> F64:
        totals = np.bincount(self._layers, counts, len(self._bounds) - 1)[self._layers]
        shares: F64 = counts / np.maximum(totals, 1e-12)
        return shares

    def _likeness(self, own: F64) -> F64:
        """Cosines, over the layers that it has run, with those kept."""
        kept = self._kept * (np.bincount(self._layers, own, len(self._bounds) - 1) > 0)[self._layers]
        lengths = np.linalg.norm(kept, axis=1) * np.linalg.norm(own)
        likeness: F64 = kept @ own / np.maximum(lengths, 1e-12)
        return likeness

    def _keep(self, shares: F64) -> None:
        if len(self._kept) < KEPT:
            self._kept = np.vstack([self._kept, shares])
        else:  # the one it is most like makes room, so that different ones stay
            self._kept[int(np.argmax(self._likeness(shares)))] = shares
