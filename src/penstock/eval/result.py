"""What an evaluation found: every example's scores, the figures of them, and what they were measured under. Plain data,
written as JSON and read back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from penstock.base.errors import InputError
from penstock.eval.calibration import calibration_error
from penstock.eval.intervals import Interval, bootstrap, wilson
from penstock.eval.tasks.base import Metric, MetricKind, Tag
from penstock.formats.files import quoted, read_whole

FORMAT = 1
_MAX_BYTES = 1 << 30


class Scored(msgspec.Struct, frozen=True, kw_only=True):
    """One example. `scores`: as its judge gave them (nats for perplexity and bits). `said` (thoughts included) and
    `expected`: cut to 16,000 characters. `output`: a digest of the `tokens` generated ids; two equal ones are equal
    answers. `end`: "stop" (the model's own end), "stop_string" or "length"; "" for what was not generated. `answered`:
    an answer was found in it, right or wrong; `thinks`: a thought did not end."""

    scores: dict[str, float]
    tags: dict[str, Tag] = {}
    weights: dict[str, float] = {}
    said: str = ""
    expected: str = ""
    output: str = ""
    end: str = ""
    answered: bool = True
    thinks: bool = False
    tokens: int = 0


class MetricValue(msgspec.Struct, frozen=True, kw_only=True):
    """A figure of a metric over `n` examples, with its interval of 95 % (None for one example)."""

    name: str
    kind: MetricKind
    value: float
    n: int
    low: float | None = None
    high: float | None = None

    @property
    def interval(self) -> Interval | None:
        return None if self.low is None or self.high is None else (self.low, self.high)

    @property
    def lower_is_better(self) -> bool:
        return Metric(self.name, self.kind).lower_is_better


class Answers(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of `n` generated answers. `cut`: at the limit of tokens; `stopped`: by a stop string; `empty`: no text;
    `unfound`: nothing in it could be right or wrong, empty ones included; `thinking`: of these, within a thought."""

    n: int
    cut: float
    stopped: float
    empty: float
    unfound: float
    thinking: float


class HealthWarning(msgspec.Struct, frozen=True, kw_only=True):
    """What speaks against a task's figures (`eval.health`). `task`: as the result calls it; `why`: one sentence."""

    task: str
    why: str


class TaskResult(msgspec.Struct, frozen=True, kw_only=True):
    """One task. `name`: as it was asked for. `digest`: of its prompts, of what is expected and of how answers are
    decoded; results may be compared if it is equal. `left_out`: examples that do not fit the context. `ends`: answers
    end by themselves (`eval.tasks.base`); `answers`: None if none were generated, or not counted by that version."""

    name: str
    task: str
    kind: str
    source: str
    digest: str
    values: list[MetricValue]
    examples: list[Scored]
    axes: list[str] = []
    left_out: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    seconds: float = 0.0
    ends: bool = True
    answers: Answers | None = None

    def value(self, metric: str) -> MetricValue:
        """Raises KeyError."""
        for found in self.values:
            if found.name == metric:
                return found
        raise KeyError(metric)


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A whole evaluation. `settings`: those of the engine that are not its defaults."""

    penstock_eval: int
    version: str
    model: str
    seed: int
    limit: int
    chat: bool
    bos: bool
    settings: dict[str, Any]
    tasks: list[TaskResult]
    warnings: list[HealthWarning] = []

    def task(self, name: str) -> TaskResult:
        """Raises KeyError."""
        for found in self.tasks:
            if found.name == name:
                return found
        raise KeyError(name)


def figure(metric: Metric, examples: Sequence[Scored]) -> MetricValue:
    """The metric over these examples, at least one."""
    scores = [e.scores[metric.name] for e in examples]
    n = len(scores)
    if metric.kind == "rate":
        low, high = wilson(round(sum(scores)), n)
        return MetricValue(name=metric.name, kind=metric.kind, value=sum(scores) / n, n=n, low=low, high=high)
    if metric.kind == "calibration":
        value, interval = calibration_error(scores)
        return MetricValue(name=metric.name, kind=metric.kind, value=value, n=n, **_ends(interval))
    weights = weights_of(metric.name, examples)
    interval = bootstrap(lambda s, w: of_means(metric.kind, s, w), scores, weights)
    value = float(of_means(metric.kind, sum(scores) / n, sum(weights) / n))
    return MetricValue(name=metric.name, kind=metric.kind, value=value, n=n, **_ends(interval))


def _ends(interval: Interval | None) -> dict[str, float]:
    return {} if interval is None else {"low": interval[0], "high": interval[1]}


def weights_of(metric: str, examples: Iterable[Scored]) -> list[float]:
    return [e.weights.get(metric, 1.0) for e in examples]


def of_means(kind: MetricKind, scores: Any, weights: Any) -> Any:
    """A figure from mean score and mean weight, of one sample or of many (arrays)."""
    share = scores / weights
    if kind == "perplexity":
        return np.exp(np.minimum(share, 700.0))  # the largest number of all, not infinity: JSON has none
    return share / math.log(2) if kind == "bits" else share


def grouped(task: TaskResult, metric: str, axes: Sequence[str]) -> dict[tuple[Tag, ...], MetricValue]:
    """The figure by values of tags, in order; examples without one of the tags are left out."""
    kind = task.value(metric).kind
    cells: dict[tuple[Tag, ...], list[Scored]] = {}
    for example in task.examples:
        if all(axis in example.tags for axis in axes):
            cells.setdefault(tuple(example.tags[axis] for axis in axes), []).append(example)
    ordered = sorted(cells, key=lambda key: [(isinstance(tag, str), tag) for tag in key])
    return {key: figure(Metric(metric, kind), cells[key]) for key in ordered}


def encode(result: Result) -> dict[str, Any]:
    """As plain data for JSON."""
    plain: dict[str, Any] = msgspec.to_builtins(result)
    return plain


def load(path: Path) -> Result:
    """Read back what was written. Raises ModelError or InputError."""
    try:
        result = msgspec.json.decode(read_whole(path, _MAX_BYTES), type=Result)
    except msgspec.DecodeError as error:
        raise InputError(
            f"{quoted(path)} is not a result of `penstock eval --json`: {error}", param="baseline"
        ) from None
    if result.penstock_eval != FORMAT:
        raise InputError(
            f"{quoted(path)} is a result of another form ({result.penstock_eval}); this is {FORMAT}: measure it again",
            param="baseline",
        )
    return result
