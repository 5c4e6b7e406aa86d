"""Two results on the same examples: what changed, and whether more than chance would change it.

Strict alignment: figures of different prompts, or of answers that were decoded differently, are not compared. Speeds
are compared only where the answers are the same tokens, unless the caller says that losses are meant (`lossy`); then
the differences in quality stand beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.base.errors import InputError
from penstock.eval.calibration import NUM_BINS, columns, error_of
from penstock.eval.intervals import Interval, bootstrap, mcnemar
from penstock.eval.result import MetricValue, Result, TaskResult, of_means, weights_of
from penstock.eval.run import Prepared


@dataclass(frozen=True)
class Difference:
    """`value` is this result's figure minus the baseline's, `interval` its 95 % over examples drawn in pairs; `p`: for
    rates, of McNemar's exact test."""

    task: str
    metric: MetricValue
    before: MetricValue
    interval: Interval | None
    p: float | None

    @property
    def value(self) -> float:
        return self.metric.value - self.before.value

    @property
    def worse_by(self) -> float:
        """How much worse, whichever direction is worse; negative if it is better."""
        return self.value if self.metric.lower_is_better else -self.value

    @property
    def surely_worse_by(self) -> float:
        """The least that it is worse by, by the interval; as `worse_by` where there is none."""
        if self.interval is None:
            return self.worse_by
        return self.interval[0] if self.metric.lower_is_better else -self.interval[1]


@dataclass(frozen=True)
class Speed:
    """Of a task that generates: `same` of `n` answers are the same tokens. `ratio`: the baseline's time over this
    one's; None, and `refused` says why, where it may not be told."""

    task: str
    same: int
    n: int
    ratio: float | None
    refused: str = ""


def check_aligned(prepared: Sequence[Prepared], baseline: Result) -> None:
    """Before anything runs: all tasks that both have must be the same. Raises InputError."""
    digests = {found.name: found.digest for found in baseline.tasks}
    shared = [p for p in prepared if p.asked.spec in digests]
    if not shared:
        raise InputError(
            f"the baseline has none of these tasks; it has {', '.join(digests) or 'none'}", param="baseline"
        )
    for p in shared:
        _same(p.asked.spec, p.digest, digests[p.asked.spec])


def differences(result: Result, baseline: Result) -> list[Difference]:
    """Of every metric of every task that both have. Raises InputError if a task's examples are not the same."""
    out: list[Difference] = []
    for task, before in _shared(result, baseline):
        out += [difference(task, before, value.name) for value in task.values]
    return out


def difference(task: TaskResult, before: TaskResult, metric: str) -> Difference:
    """Raises InputError if the two are of different examples."""
    _same(task.name, task.digest, before.digest)
    value, was = task.value(metric), before.value(metric)
    new, old = ([e.scores[metric] for e in found.examples] for found in (task, before))
    weights = weights_of(metric, task.examples)
    kind = value.kind
    if kind == "calibration":
        each = (*columns(new), *columns(old))
        interval = bootstrap(lambda *m: error_of(*m[:NUM_BINS]) - error_of(*m[NUM_BINS:]), *each)
    else:
        interval = bootstrap(lambda a, b, w: of_means(kind, a, w) - of_means(kind, b, w), new, old, weights)
    p = None
    if kind == "rate":
        p = mcnemar(
            sum(a > b for a, b in zip(new, old, strict=True)), sum(a < b for a, b in zip(new, old, strict=True))
        )
    return Difference(task.name, value, was, interval, p)


def speeds(result: Result, baseline: Result, *, lossy: bool = False) -> list[Speed]:
    """Of the tasks that generate. Raises InputError as `differences`."""
    out = []
    for task, before in _shared(result, baseline):
        if task.kind != "generate":
            continue
        same = sum(a.output == b.output for a, b in zip(task.examples, before.examples, strict=True))
        n = len(task.examples)
        if same == n or lossy:
            out.append(Speed(task.name, same, n, before.seconds / max(task.seconds, 1e-9)))
        else:
            why = f"no speed is compared: {n - same} of {n} answers are other tokens (--lossy says that this is meant)"
            out.append(Speed(task.name, same, n, None, why))
    return out


def _shared(result: Result, baseline: Result) -> list[tuple[TaskResult, TaskResult]]:
    by_name = {found.name: found for found in baseline.tasks}
    pairs = [(task, by_name[task.name]) for task in result.tasks if task.name in by_name]
    for task, before in pairs:
        _same(task.name, task.digest, before.digest)
    return pairs


def _same(name: str, digest: str, other: str) -> None:
    if digest != other:
        raise InputError(
            f"task {name!r}: these are not the examples of the baseline (digest {digest[:12]}, there {other[:12]}): "
            "compare only runs with the same seed, limit, options, tokenizer, context and prompt form",
            param="baseline",
        )
