"""C: the longest context at which a task is still answered well enough, within a given KV memory.

Every length of a grid is tried that the memory holds (as the planner says, in an engine with just that memory). A
length is kept if the accuracy there, and at all shorter ones, is at least a share of the plain configuration's at the
shortest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.eval.cap.fit import Seat
from penstock.eval.intervals import Interval
from penstock.eval.result import MetricValue, Scored, TaskResult, figure
from penstock.eval.run import Prepared, run
from penstock.eval.tasks.base import Example, Metric
from penstock.launch.llm import LLM

_DRAWS = 2000
GRID_ENDS, MEMORY, MODEL, ACCURACY = "the grid ends", "memory", "context of the model", "accuracy"
"""What may limit C."""
F64 = npt.NDArray[np.float64]


class AtLength(msgspec.Struct, frozen=True, kw_only=True):
    """`value`: None where nothing was asked, because it does not fit."""

    length: int
    value: MetricValue | None


class Context(msgspec.Struct, frozen=True, kw_only=True):
    """`longest`: tokens, 0 if not even the shortest length is kept. `limited_by`: what stops it there. `fits`: tokens
    of one sequence that the memory holds. `asked`: which of the task's examples `task` has, in order."""

    task: TaskResult
    asked: list[int]
    lengths: list[AtLength]
    needed: float
    longest: int
    limited_by: str
    fits: int
    max_model_len: int


def length_of(example: Example, lengths: Sequence[int]) -> int | None:
    """The length of the grid that it belongs to: as it is tagged, else the next longer one; None: longer than all."""
    tagged = example.tags.get("length")
    if isinstance(tagged, int) and tagged in lengths:
        return tagged
    return next((n for n in lengths if example.num_tokens <= n), None)


def ask(llm: LLM, prepared: Prepared, seat: Seat, lengths: Sequence[int], how: Mapping[str, Any]) -> Scores:
    """All examples whose length the memory holds. Raises EngineError."""
    at = [length_of(e, lengths) for e in prepared.examples]
    room = min(seat.fits, llm.engine.limits.context[0])
    kept = [i for i, n in enumerate(at) if n is not None and max(n, prepared.examples[i].num_tokens) <= room]
    if not kept:
        return Scores(None, [], [])
    some = replace(prepared, examples=tuple(prepared.examples[i] for i in kept), left_out=len(at) - len(kept))
    (task,) = run(llm, [some], **how).tasks
    return Scores(task, kept, [n for i in kept if (n := at[i]) is not None])


class Scores(msgspec.Struct, frozen=True):
    """What was answered: the task, which examples, and of which length each is."""

    task: TaskResult | None
    asked: list[int]
    lengths: list[int]

    def of_length(self, length: int) -> list[Scored]:
        if self.task is None:
            return []
        return [e for e, n in zip(self.task.examples, self.lengths, strict=True) if n == length]


def context_of(scores: Scores, plain: Scores, seat: Seat, prepared: Prepared, lengths: Sequence[int],
               threshold: float) -> Context:  # fmt: skip
    """The figures of one configuration; `plain` may be the same."""
    metric = prepared.asked.task.metrics[0]
    first = next((n for n in lengths if plain.of_length(n)), None)
    base = 0.0 if first is None else figure(metric, plain.of_length(first)).value
    needed = threshold * base
    found = [AtLength(length=n, value=_figure(metric, scores.of_length(n))) for n in lengths]
    # A length nobody was asked at, although it would fit, says nothing about longer ones.
    exist = {n for e in prepared.examples if (n := length_of(e, lengths)) is not None}
    longest, why = 0, GRID_ENDS
    for at in found:
        if at.length not in exist:
            continue
        if at.value is None:
            why = MODEL if at.length > seat.max_model_len else MEMORY
            break
        if base == 0 or at.value.value < needed - 1e-12:
            why = ACCURACY
            break
        longest = at.length
    if why == GRID_ENDS and longest >= seat.max_model_len:
        why = MODEL
    task = scores.task or TaskResult(
        name=prepared.asked.spec, task=prepared.asked.task.name, kind="generate", source=prepared.asked.task.source,
        digest=prepared.digest, values=[], examples=[],
    )  # fmt: skip
    return Context(
        task=task, asked=scores.asked, lengths=found, needed=needed, longest=longest, limited_by=why, fits=seat.fits,
        max_model_len=seat.max_model_len,
    )  # fmt: skip


def _figure(metric: Metric, examples: Sequence[Scored]) -> MetricValue | None:
    return figure(metric, examples) if examples else None


def gain_of(own: Scores, plain: Scores, lengths: Sequence[int], metric: str, threshold: float) -> Interval | None:
    """95 % of (longest of own / longest of plain) - 1, over examples drawn in pairs; None if it cannot be told.

    Examples are drawn within each length, the same ones for both where both were asked.
    """
    rng = np.random.default_rng(0)
    there = [n for n in lengths if plain.of_length(n) or own.of_length(n)]
    means: list[list[F64 | None]] = [[], []]
    for length in there:
        columns = [{i: e.scores[metric] for i, e, n in _rows(s) if n == length} for s in (own, plain)]
        ids = sorted(set(columns[0]) | set(columns[1]))
        picks = rng.integers(len(ids), size=(_DRAWS, len(ids)))
        for out, column in zip(means, columns, strict=True):
            out.append(np.array([column[i] for i in ids])[picks].mean(axis=1) if len(column) == len(ids) else None)
    if not there or means[1][0] is None or float(means[1][0].max()) == 0.0:
        return None
    needed = threshold * means[1][0]
    longest = [_longest(found, there, needed) for found in means]
    known = longest[1] > 0
    if known.mean() < 0.975:
        return None
    low, high = np.percentile(longest[0][known] / longest[1][known] - 1, [2.5, 97.5])
    return float(low), float(high)


def _longest(means: Sequence[F64 | None], lengths: Sequence[int], needed: F64) -> F64:
    out, alive = np.zeros(_DRAWS), np.ones(_DRAWS, bool)
    for mean, length in zip(means, lengths, strict=True):
        if mean is None:
            break
        alive &= (mean >= needed - 1e-12) & (needed > 0)
        out[alive] = length
    return out


def _rows(scores: Scores) -> list[tuple[int, Scored, int]]:
    return [] if scores.task is None else list(zip(scores.asked, scores.task.examples, scores.lengths, strict=True))
