"""What a profile of heads' turns is made of, and how much attention falls on what was chosen a layer ahead.

Source: InfiniGen, arXiv 2406.19707, section 4.2: queries and keys of a head are turned by the right singular vectors of
the queries of a text, so that few components hold most of their products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.backends.backend import Backend
from penstock.backends.reference import BlasBackend
from penstock.base.bf16 import F32
from penstock.core.selection import TokenReads
from penstock.eval.scorer import LoadedModel, ProgramScorer
from penstock.model.emitter import Reading
from penstock.model.forward import ObservedForward
from penstock.ops.blas import BLAS
from penstock.ops.ref.attention.full import attend_row
from penstock.ops.ref.attention.rows import RowBackend, Rule, scores
from penstock.ops.ref.storage import read_kv
from penstock.ops.step import Step


def turns_of_text(model: LoadedModel, backend: Backend, token_ids: Sequence[int]) -> list[F32]:
    """[G, D, D] of each layer, the leading directions of its rotated queries first, over the kv head's query heads."""
    scorer = ProgramScorer(model, backend, reading=Reading(observe=True))
    scorer.logits(token_ids)
    assert isinstance(scorer.forward, ObservedForward), "attention's queries are shown"
    out = []
    for layer, q in zip(model.spec.layers, scorer.forward.queries(len(token_ids)), strict=True):
        heads = layer.mixer.num_kv_heads  # type: ignore[union-attr]
        own = q.reshape(len(q), heads, -1, q.shape[-1]).transpose(1, 0, 2, 3).reshape(heads, -1, q.shape[-1])
        squares = np.einsum("gtd,gte->gde", own, own)
        out.append(np.ascontiguousarray(np.linalg.eigh(squares)[1][:, :, ::-1].astype(np.float32)))
    return out


@dataclass
class Fetched:
    """Sums over tokens that chose, layers and kv heads.

    Attributes:
        kept, best: attention weights (of all of a kv head's queries) on what was chosen, and on as many tokens as the
            weights themselves would choose.
        chosen, all: tokens.
    """

    kept: float = 0.0
    best: float = 0.0
    chosen: int = 0
    all: int = 0

    @property
    def recall(self) -> float:
        return self.kept / self.best

    @property
    def share(self) -> float:
        return self.chosen / self.all


class CountedAttention(RowBackend):
    """Attention of the reference operations that says what its choices were worth."""

    def __init__(self) -> None:
        super().__init__("counted", False, attend_row)
        self.fetched = Fetched()

    def attend(self, q: F32, step: Step, group: int, layer: int, **named: object) -> F32:
        if isinstance(named.get("chosen"), TokenReads):
            for b in range(step.num_sequences):
                self._count(q, step, group, layer, b, float(named["scale"]))  # type: ignore[arg-type]
        return super().attend(q, step, group, layer, **named)  # type: ignore[arg-type]

    def _count(self, q: F32, step: Step, group: int, layer: int, b: int, scale: float) -> None:
        f = self.fetched
        lo, hi = step.bounds[b], step.bounds[b + 1]
        end = int(step.plan.positions[hi - 1]) + 1
        k = read_kv(step.planes[group], "k", step.plan.groups[group].pages(b, layer), 0, end)
        for t in range(lo, hi):
            chosen = step.memo.get(("rehearse", group, layer, t))
            if chosen is None:
                continue
            seen = k[: int(step.plan.positions[t]) + 1]
            s = scores(q[t].reshape(k.shape[1], -1, k.shape[2]), seen, Rule(scale, None, None, None), 0)
            w = np.exp(s - s.max(axis=-1, keepdims=True))
            for own, weights in zip(chosen, (w / w.sum(axis=-1, keepdims=True)).sum(axis=1), strict=True):
                f.kept += float(weights[own].sum())
                f.best += float(np.sort(weights)[len(weights) - len(own) :].sum())
                f.chosen += len(own)
                f.all += len(weights)


def counting_scorer(model: LoadedModel, reading: Reading, first: int) -> tuple[ProgramScorer, CountedAttention]:
    """The model by the reference operations: tokens from `first` on read what was rehearsed."""
    attention = CountedAttention()
    return ProgramScorer(model, BlasBackend(attention, BLAS), reading=reading, first=first), attention
