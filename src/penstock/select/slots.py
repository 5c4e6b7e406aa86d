"""What selectors share: slots that always stay, the best of the others, and budgets shared out among lines.

Shape letters: n slots of a line.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt

from penstock.config.selection import SelectionOptions
from penstock.core.selection import Drops, KVLine, Selecting, Watches
from penstock.select.bench import SelectionBench

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


class TokenSelector:
    """What a KVSelector that drops tokens is unless it says otherwise; `select` is what it must add."""

    name: str
    drops: Drops = "tokens"
    watches: Watches = "nothing"
    per_head: bool = True
    cache_positions: bool = False
    aside: bool = False
    halves: bool = False

    def __init__(self, bench: SelectionBench) -> None:
        self.options: SelectionOptions = bench.config.options

    def watch(self, line: KVLine, weights: F32, first: int) -> None:
        """See `KVSelector.watch`."""

    def levels(self, at: Selecting, lines: Seq[KVLine]) -> tuple[list[I32], list[I32]]:
        """See `KVSelector.levels`."""
        raise NotImplementedError


def always(line: KVLine, at: Selecting, options: SelectionOptions, recent: int | None = None) -> Mask:
    """[n]: the sinks and the last `recent` tokens (`options.recent` if not said).

    At most `at.budget` slots: where that is too little for all, the newest token comes first, then sinks, then others.
    """
    budget, recent = at.budget, options.recent if recent is None else recent
    out = np.zeros(len(line), np.bool_)
    sinks = np.flatnonzero(line.positions < options.sinks)[: budget - 1]
    new = np.flatnonzero(line.positions >= at.num_tokens - recent)
    out[sinks] = True
    out[new[max(0, len(new) + len(sinks) - budget) :]] = True
    return out


def fill(kept: Mask, scores: F32, count: int, among: Mask | None = None) -> Mask:
    """`kept` [n] and, up to `count` slots in all, those of the others (of `among`) with the best scores; of equals the
    newest."""
    out = kept.copy()
    free = np.flatnonzero(~kept if among is None else among & ~kept)[::-1]
    best = np.argsort(-scores[free], kind="stable")[: max(0, count - int(kept.sum()))]
    out[free[best]] = True
    return out


def slots(kept: Mask) -> I32:
    """A mask as ascending slots."""
    return np.flatnonzero(kept).astype(np.int32)


def best_of_each(
    at: Selecting,
    lines: Seq[KVLine],
    options: SelectionOptions,
    score: Callable[[KVLine], F32],
    recent: int | None = None,
) -> list[I32]:
    """Every line keeps its budget: what `always` stays, and the best by `score` [n]. Lines that fit are not scored."""
    out = []
    for line in lines:
        if len(line) <= at.budget:
            out.append(np.arange(len(line), dtype=np.int32))
        else:
            out.append(slots(fill(always(line, at, options, recent), score(line), at.budget)))
    return out


def number(line: KVLine, name: str) -> F32:
    """A selector's own number about each of the line's tokens, 0 before it is first given."""
    return line.stats.setdefault(name, np.zeros(len(line), np.float32))


def allot(total: int, weights: npt.ArrayLike, most: npt.ArrayLike) -> I64:
    """Whole shares of `total` in proportion to `weights`, none above its `most`: what one cannot take, others get.

    They add up to `total`, or to all of `most` if that is less. What does not divide goes to the first ones.
    """
    limit, w = np.asarray(most, np.int64), np.asarray(weights, np.float64)
    out = np.zeros(len(limit), np.int64)
    left = min(total, int(limit.sum()))
    while left > 0:
        free = out < limit
        part = np.where(free, w, 0.0)
        if part.sum() <= 0:
            part = free.astype(np.float64)
        more = np.minimum(np.floor(left * part / part.sum() + 1e-9).astype(np.int64), limit - out)
        if not more.any():
            more[np.flatnonzero(part > 0)[:left]] = 1
        out += more
        left -= int(more.sum())
    return out
