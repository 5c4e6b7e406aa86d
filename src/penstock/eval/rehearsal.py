"""InfiniGen: what a layer will attend to, said one layer before, and a text read with no more keys and values.

What a layer attends to is rehearsed with the layer's own query weights and the input of the layer *before*, which is
much alike (the residual stream changes slowly), and with a few components of the keys alone: queries and keys are
turned by the singular vectors of the queries of a text, head by head, so that few components hold most of a product.
Whoever keeps keys and values elsewhere can so fetch what will matter while the layer before runs.

Here everything is in one memory, and what would be fetched is counted: a measurement, by the reference operations.

Source: InfiniGen, Lee et al., arXiv 2406.19707, sections 4.2 (skewing) and 4.3 (rehearsal). Other than there: the turn
comes behind the rotary positions, since it does not commute with them; the leading components are taken (not those with
the largest sums in the prompt); and the earlier input is rescaled by the gains of both layers' norms.

Shape letters: T tokens, E hidden, H query heads, G kv heads, D head dim, R rehearsed components, n keys in reach.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.backends.reference import BlasBackend
from penstock.base.bf16 import F32
from penstock.base.errors import ConfigError
from penstock.core.model_spec import Attention, ModelSpec
from penstock.eval.scorer import LoadedModel, ProgramScorer
from penstock.ops.blas import BLAS, linear
from penstock.ops.ref.attention.rows import RowBackend, Rule, scores
from penstock.ops.ref.product import as_float32
from penstock.ops.ref.rotary import rope
from penstock.ops.step import Step
from penstock.ops.stored import StoredMatrix
from penstock.weights.load import dense

I64 = npt.NDArray[np.int64]


@dataclass
class Fetched:
    """Sums over tokens, layers and kv heads that were rehearsed.

    Attributes:
        kept, best: attention weights (of all of a kv head's queries) on what was fetched, and on as many tokens as the
            weights themselves would choose.
        num_bytes, all_bytes: of keys and values that were fetched, and of all that there were.
        rehearsed_bytes: of the keys' components that rehearsals read.
    """

    kept: float = 0.0
    best: float = 0.0
    num_bytes: int = 0
    all_bytes: int = 0
    rehearsed_bytes: int = 0

    @property
    def recall(self) -> float:
        return self.kept / self.best

    @property
    def share(self) -> float:
        return self.num_bytes / self.all_bytes


class RehearsingScorer(ProgramScorer):
    """Reads texts as `ProgramScorer` does; tokens from `first` on attend to what was rehearsed, but for layer 0.

    Attributes:
        reach: how far below a query's largest rehearsed score (in nats) a token may be to be fetched; infinity: all
            are, and nothing differs.
        rank: of the components of a head that rehearsals read.
        fetched: what there was to count.
    """

    def __init__(self, model: LoadedModel, reach: float = 4.0, rank: float = 0.3, first: int = 0) -> None:
        """Raises ConfigError for a model whose layers do not all attend alike, to everything, behind a norm."""
        self.reach, self.rank, self.first = reach, rank, first
        self._stage = _Stage(self, model)
        entries: dict[str, Callable[..., Any]] = {"linear": self._stage.linear, "rope": self._stage.rope}
        super().__init__(model, BlasBackend(self._stage, BLAS.replaced("rehearsing", entries, batch_invariant=False)))

    @property
    def fetched(self) -> Fetched:
        return self._stage.fetched

    def count(self, into: Fetched) -> None:
        """From now on, there."""
        self._stage.fetched = into

    def learn(self, token_ids: Sequence[int]) -> None:
        """Turns for the queries of this text. Mutates: what later texts are rehearsed with."""
        self._stage.begin_learning()
        self.logits(token_ids)
        self._stage.end_learning()


@dataclass
class _Layer:
    """What stands by for one layer: weights of its queries, gain of its norm, turns [G, D, D]."""

    q: F32
    bias: F32 | None
    gain: F32
    turns: F32 | None = None
    queries: list[F32] = field(default_factory=list)


class _Stage(RowBackend):
    """Listens to the products and rotations of a step, and attends."""

    def __init__(self, scorer: RehearsingScorer, model: LoadedModel) -> None:
        super().__init__("rehearsal", False, self._row)
        _check(model.spec)
        self.fetched = Fetched()
        self._scorer = scorer
        self._weights = {id(model.weights[f"layers.{n}.q"]): n for n in range(len(model.spec.layers))}
        self._heads = [_attention(layer.mixer).num_kv_heads for layer in model.spec.layers]
        self._layers = [_layer(model, n) for n in range(len(model.spec.layers))]
        self._inputs: list[F32 | None] = [None] * len(self._layers)
        self._turn: tuple[Any, ...] = ()
        self._learning = False
        self._now, self._token = 0, 0
        self._ahead: F32 | None = None

    # -- what a step does ------------------------------------------------------------------------------------------

    def linear(self, x: F32, weight: Any, bias: F32 | None = None) -> F32:
        n = self._weights.get(id(weight))
        if n is not None:
            self._inputs[n] = x
        return linear(x, weight, bias)

    def rope(self, x: F32, angles: F32, interleaved: bool, first: int = 0) -> F32:
        self._turn = angles, interleaved, first
        return rope(x, angles, interleaved, first)

    def attend(self, q: F32, step: Step, group: int, layer: int, **named: Any) -> F32:
        self._now, self._token = layer, 0
        if self._learning:
            self._layers[layer].queries.append(q)
        self._ahead = self._rehearsed(q.shape) if layer and self._layers[layer].turns is not None else None
        return super().attend(q, step, group, layer, **named)

    def _rehearsed(self, shape: tuple[int, ...]) -> F32:
        """The layer's queries [T, H, D], out of the input of the one before."""
        own, before = self._layers[self._now], self._inputs[self._now - 1]
        assert before is not None, "layers run in their order"
        x = before * (own.gain / self._layers[self._now - 1].gain)
        q: F32 = (x @ own.q.T).reshape(shape)
        if own.bias is not None:
            q = q + own.bias.reshape(shape[1:])
        return rope(q, *self._turn) if self._turn else q

    def _row(self, q: F32, k: F32, v: F32, first: int, rule: Rule) -> F32:
        """As `full.attend_row`, over what was rehearsed to matter."""
        t, self._token = self._token, self._token + 1
        s = scores(q, k, rule, 0)
        if self._ahead is not None and first + len(k) > self._scorer.first:
            chosen = self._choose(self._ahead[t].reshape(q.shape), k, rule)
            self._count(_softmax(s).sum(axis=1), chosen, k.shape[-1] + v.shape[-1])
            hidden = np.ones((len(s), len(k)), bool)
            np.put_along_axis(hidden, chosen, False, axis=1)
            s = np.where(hidden[:, None], np.float32(-np.inf), s)
        out: F32 = np.matmul(_softmax(s), v.transpose(1, 0, 2))
        return out

    def _choose(self, q: F32, k: F32, rule: Rule) -> I64:
        """Of each kv head the keys [G, count] that rehearsed queries q [G, H/G, D] look at most; the newest is one.

        As many for all heads of the layer as lie within `reach` of a query's largest score, in the mean.
        """
        turns = self._rehearsing()
        part = scores(q @ turns, np.einsum("ngd,gdr->ngr", k, turns), rule, 0)
        near = (part >= part.max(axis=-1, keepdims=True) - self._scorer.reach).any(axis=1).sum(axis=1)
        count = min(len(k), math.ceil(near.mean()))
        likely = _softmax(part).sum(axis=1)
        likely[:, -1] = np.inf
        return np.argpartition(-likely, count - 1, axis=1)[:, :count]

    def _rehearsing(self) -> F32:
        """The leading turns of the layer: [G, D, R]."""
        turns = self._layers[self._now].turns
        assert turns is not None
        return turns[:, :, : max(1, round(self._scorer.rank * turns.shape[-1]))]

    def _count(self, weights: F32, chosen: I64, width: int) -> None:
        f, (heads, n) = self.fetched, weights.shape
        count = chosen.shape[1]
        f.kept += float(np.take_along_axis(weights, chosen, axis=1).sum())
        f.best += float(np.partition(weights, n - count, axis=1)[:, n - count :].sum())
        f.num_bytes += 2 * heads * count * width
        f.all_bytes += 2 * heads * n * width
        f.rehearsed_bytes += 2 * heads * n * self._rehearsing().shape[-1]

    # -- turns -------------------------------------------------------------------------------------------------------

    def begin_learning(self) -> None:
        self._learning = True
        for layer in self._layers:
            layer.queries, layer.turns = [], None

    def end_learning(self) -> None:
        self._learning = False
        for n, layer in enumerate(self._layers):
            q = np.concatenate(layer.queries)  # [T, H, D]
            heads = self._heads[n]
            by_head = q.reshape(len(q), heads, -1, q.shape[-1]).transpose(1, 0, 2, 3).reshape(heads, -1, q.shape[-1])
            squares = np.einsum("gtd,gte->gde", by_head, by_head)
            layer.turns = np.linalg.eigh(squares)[1][:, :, ::-1].astype(np.float32)  # the right singular vectors
            layer.queries = []
        self.fetched = Fetched()


def _softmax(s: F32) -> F32:
    out: F32 = np.exp(s - s.max(axis=-1, keepdims=True))
    out /= out.sum(axis=-1, keepdims=True)
    return out


def _layer(model: LoadedModel, n: int) -> _Layer:
    def read(name: str) -> F32 | None:
        found = model.weights.get(f"layers.{n}.{name}")
        return (
            None if found is None else as_float32(dense(found, "float32") if isinstance(found, StoredMatrix) else found)
        )

    q, gain = read("q"), read("attn_norm")
    assert q is not None
    assert gain is not None
    return _Layer(q, read("q.bias"), gain)


def _attention(mixer: object) -> Attention:
    assert isinstance(mixer, Attention)
    return mixer


def _check(spec: ModelSpec) -> None:
    for n, layer in enumerate(spec.layers):
        m = layer.mixer
        plain = (
            isinstance(m, Attention) and (m.window, m.chunk, m.qk_norm, m.kv_from, m.clip, m.query_scale) == (None,) * 6
        )
        if not plain or (isinstance(m, Attention) and m.sinks):
            raise ConfigError(
                f"rehearsals are for layers that attend to everything, without norms of heads; layer {n} does not"
            )
