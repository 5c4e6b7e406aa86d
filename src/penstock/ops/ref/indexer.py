"""Sparse latent attention: an indexer scores every token that a query may see, attention reads the best of them.

Tokens of a sequence are scored together, by chunks of keys of one size, so that a score's products have the same shape
in any step; so have those of attention over equally many tokens.

Source: DeepSeek-V3.2, arXiv 2512.02556, section 2.1 (the lightning indexer and fine-grained token selection). Shape
letters: T tokens, H heads, D head dim, n tokens in a token's reach, R some of the tokens, K chosen ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.base.bf16 import F32
from penstock.ops.ref.storage import read_kv
from penstock.ops.step import Step

Chosen = list[npt.NDArray[np.int64]]
"""For every token of a step the places of the tokens it reads among those it may see, ascending."""
_CHUNK = 256
_MOST_NUMBERS = 1 << 22
"""Products with keys, or numbers of chosen keys, that exist at once."""


def choose_tokens(
    q: F32, weights: F32, step: Step, group: int, layer: int, plane: str, top_k: int, scale: float
) -> Chosen:
    """The `top_k` tokens with the best sums over heads of weight * relu(scale q.k); ties go to the lower position.

    Shapes: q [T, H, D], weights [T, H]; keys [n, 1, D] in plane `plane`.
    """
    out: Chosen = [np.zeros(0, np.int64)] * len(q)
    for own in contexts(step, group, layer, (plane,)):
        for t, seen in own.seen.items():
            if seen.size <= top_k:
                out[t] = np.arange(seen.size)
        left = [t for t, seen in own.seen.items() if seen.size > top_k]
        (keys,) = own.held
        at_once = max(1, _MOST_NUMBERS // (len(keys) * q.shape[1]))
        for first in range(0, len(left), at_once):
            rows = left[first : first + at_once]
            scores = index_scores(q[rows], weights[rows], keys[:, 0], scale)
            for t, found in zip(rows, best_of(scores, [own.seen[t] for t in rows], top_k), strict=True):
                out[t] = found
    return out


def index_scores(q: F32, weights: F32, keys: F32, scale: float) -> F32:
    """q [R, H, D], weights [R, H], keys [n, D] -> [R, n]."""
    n, dim = keys.shape
    padded = np.zeros((-(-n // _CHUNK), _CHUNK, dim), np.float32)
    padded.reshape(-1, dim)[:n] = keys
    products = np.matmul(q[:, None], padded.transpose(0, 2, 1)) * np.float32(scale)
    out: F32 = np.matmul(weights[:, None, None], np.maximum(products, np.float32(0.0)))
    return out.reshape(len(q), -1)[:, :n]


def best_of(scores: F32, seen: Sequence[npt.NDArray[np.int64]], top_k: int) -> Chosen:
    """Of each row of scores [R, n] places, ascending, of the `top_k` best of those `seen`; of equal ones the first.

    NaN come last. Every row sees `top_k` at least.
    """
    if len(seen) == 1 or not all(len(s) == s[-1] + 1 for s in seen):  # one row, or paths of a tree
        return [np.sort(np.argsort(-x[s], kind="stable")[:top_k]) for x, s in zip(scores, seen, strict=True)]
    counts = np.array([len(s) for s in seen])[:, None]
    # What is not seen is no number, and stands behind all that is seen and none.
    worth = np.where(np.arange(scores.shape[1]) < counts, -scores, np.float32(np.nan))
    last, none = np.partition(worth, top_k - 1, axis=1)[:, top_k - 1, None], np.isnan(worth)
    better = (worth < last) | (np.isnan(last) & ~none)
    equal = (worth == last) | (np.isnan(last) & none)
    left = top_k - np.count_nonzero(better, axis=1)[:, None]
    chosen = better | (equal & (np.cumsum(equal, axis=1) <= left))
    return list(np.nonzero(chosen)[1].reshape(len(scores), top_k))


def attend_chosen(
    q: F32, chosen: Sequence[npt.NDArray[np.int64]], step: Step, group: int, layer: int, *, keys: tuple[str, ...],
    value: str, scale: float,
) -> F32:  # fmt: skip
    """Softmax attention of every token over those it has chosen: q [T, H, D] -> [T, H, W]."""
    width = step.planes[group][value].shape[-1]
    out = np.zeros((*q.shape[:2], width), np.float32)
    for own in contexts(step, group, layer, (*keys, value)):
        *parts, v = own.held
        k = np.concatenate(parts, axis=-1)
        counts: dict[int, list[int]] = {}
        for t in own.seen:
            counts.setdefault(len(chosen[t]), []).append(t)
        for count, tokens in counts.items():
            at_once = max(1, _MOST_NUMBERS // (count * k.shape[-1]))
            for first in range(0, len(tokens), at_once):
                rows = tokens[first : first + at_once]
                read = np.stack([own.seen[t][chosen[t]] for t in rows])
                out[rows] = _attend(q[rows], k[read, 0], v[read, 0], scale)
    return out


def _attend(q: F32, k: F32, v: F32, scale: float) -> F32:
    """q [R, H, D], k [R, K, D], v [R, K, W] -> [R, H, W], as `attention.full` does it for one."""
    scores = np.matmul(q, k.transpose(0, 2, 1)) * scale
    weights = np.exp(scores - np.maximum.reduce(scores, axis=-1, keepdims=True))
    out: F32 = np.matmul(weights, v) / np.add.reduce(weights, axis=-1, keepdims=True)
    return out


class _Context(NamedTuple):
    """What the planes hold of a sequence, [n, 1, W] each, and which of these each of its tokens in the step sees."""

    held: list[F32]
    seen: dict[int, npt.NDArray[np.int64]]


def contexts(step: Step, group: int, layer: int, names: Sequence[str]) -> Iterator[_Context]:
    """Of every sequence that has tokens in the step."""
    plan, where = step.plan, step.plan.groups[group]
    for b in range(step.num_sequences):
        lo, hi = step.bounds[b], step.bounds[b + 1]
        if lo == hi:
            continue
        gone = where.num_dropped(b, layer, 0)
        start = int(plan.positions[lo]) - gone
        pages, paths = where.pages(b, layer, 0), step.trees(b)
        held = [read_kv(step.planes[group], name, pages, 0, start + hi - lo) for name in names]
        slots = np.arange(start + hi - lo)
        if paths is None:
            seen = {t: slots[: int(plan.positions[t]) - gone + 1] for t in range(lo, hi)}
        else:
            seen = {t: np.array([*range(start), *(n + start - lo for n in paths[t - lo])]) for t in range(lo, hi)}
        yield _Context(held, seen)
