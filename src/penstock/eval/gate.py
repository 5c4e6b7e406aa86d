"""A release gate: bounds that an evaluation must keep.

The file is a JSON object, `"TASK.METRIC": RULE`; TASK is the task as it stands in --tasks (a file without its folder).
A RULE is a number, the worst value that passes (the least, for perplexity and bits the most), or an object of:

    min, max      bounds of the value
    baseline      a result of `penstock eval --json`, relative to the gate's folder, of the same examples
    max_drop      how much worse than the baseline it may be (absolute; 0.02 is two points of a rate)
    significant   true: a drop counts only as far as it is sure (the paired interval of 95 %), for few examples
    warnings      "pass": the rule may hold although the result warns of this task (`eval.health`); else it does not
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.base.errors import InputError
from penstock.eval.paired import check_aligned, difference
from penstock.eval.result import Result, load
from penstock.eval.run import Prepared
from penstock.eval.tasks import Asked
from penstock.eval.tasks.base import Metric
from penstock.formats.files import quoted, read_text

_MAX_BYTES = 1 << 20
_NUMBERS = ("min", "max", "max_drop")


@dataclass(frozen=True)
class Rule:
    """Of one metric of one task."""

    task: str
    metric: str
    min: float | None = None
    max: float | None = None
    baseline: Result | None = None
    max_drop: float | None = None
    significant: bool = False
    despite_warnings: bool = False


@dataclass(frozen=True)
class Verdict:
    """`why` is one line, with the numbers."""

    rule: Rule
    passed: bool
    why: str


def read_gate(path: Path, tasks: Sequence[Asked]) -> list[Rule]:
    """Checked against the tasks that will run. Raises ModelError or InputError: one sentence with the file."""
    try:
        entries = json.loads(read_text(path, _MAX_BYTES))
    except (ValueError, RecursionError) as error:
        what = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deep"
        raise _wrong(path, f"is not JSON: {what}") from None
    if not isinstance(entries, dict) or not entries:
        raise _wrong(path, 'must be an object such as {"needle.accuracy": 0.9}')
    metrics = {(asked.spec, m.name): m for asked in tasks for m in asked.task.metrics}
    return [_rule(path, key, rule, metrics) for key, rule in entries.items()]


def _rule(path: Path, key: str, rule: Any, metrics: Mapping[tuple[str, str], Metric]) -> Rule:
    task, _, name = key.rpartition(".")
    metric = metrics.get((task, name))
    if metric is None:
        known = ", ".join(f"{t}.{m}" for t, m in metrics)
        raise _wrong(path, f"names {key!r}, which these tasks do not give; they give: {known}")
    if _is_number(rule):
        rule = {"max" if metric.lower_is_better else "min": rule}
    if not isinstance(rule, dict) or not rule:
        raise _wrong(path, f"{key!r} must be a number or an object with min, max or baseline and max_drop")
    unknown = sorted(set(rule) - {*_NUMBERS, "baseline", "significant", "warnings"})
    if unknown:
        raise _wrong(path, f"{key!r} has no {unknown[0]!r}; it may have min, max, baseline, max_drop, significant, "
                     "warnings")  # fmt: skip
    for bound in _NUMBERS:
        if bound in rule and not _is_number(rule[bound]):
            raise _wrong(path, f"{key!r}: {bound} must be a number, not {json.dumps(rule[bound])[:40]}")
    if rule.get("max_drop", 0) < 0:
        raise _wrong(path, f"{key!r}: max_drop must be at least 0, not {rule['max_drop']}")
    if not isinstance(rule.get("significant", False), bool):
        raise _wrong(path, f"{key!r}: significant must be true or false")
    if rule.get("warnings", "pass") != "pass":
        raise _wrong(path, f'{key!r}: warnings may be "pass", or be left away')
    if ("baseline" in rule) != ("max_drop" in rule):
        raise _wrong(path, f"{key!r}: baseline and max_drop belong together")
    if "significant" in rule and "baseline" not in rule:
        raise _wrong(path, f"{key!r}: significant belongs to baseline and max_drop")
    rest = {bound: float(rule[bound]) for bound in _NUMBERS if bound in rule}
    return Rule(
        task, name, baseline=_baseline(path, key, rule, task, name), significant=rule.get("significant", False),
        despite_warnings="warnings" in rule, **rest,
    )  # fmt: skip


def _baseline(path: Path, key: str, rule: Mapping[str, Any], task: str, metric: str) -> Result | None:
    named = rule.get("baseline")
    if named is None:
        return None
    if not isinstance(named, str) or not named:
        raise _wrong(path, f"{key!r}: baseline must be the name of a file")
    result = load(path.parent / named)
    try:
        result.task(task).value(metric)
    except KeyError:
        raise _wrong(path, f"{key!r}: the baseline {quoted(named)} has no {task}.{metric}") from None
    return result


def check_gate(rules: Sequence[Rule], prepared: Sequence[Prepared]) -> None:
    """Before anything runs: baselines must be of the same examples. Raises InputError."""
    for rule in rules:
        if rule.baseline is not None:
            check_aligned([p for p in prepared if p.asked.spec == rule.task], rule.baseline)


def verdicts(rules: Sequence[Rule], result: Result) -> list[Verdict]:
    """One for every rule, in order."""
    return [_verdict(rule, result) for rule in rules]


def _verdict(rule: Rule, result: Result) -> Verdict:
    task = result.task(rule.task)
    value = task.value(rule.metric)
    name = f"{rule.task}.{rule.metric}"
    warned = _warned(rule, result)
    if warned and not rule.despite_warnings:
        return Verdict(rule, False, f"{name} is {value.value:.4f}, but {warned}")
    if rule.min is not None and not value.value >= rule.min:
        return Verdict(rule, False, f"{name} is {value.value:.4f}, below its least, {rule.min:g}")
    if rule.max is not None and not value.value <= rule.max:
        return Verdict(rule, False, f"{name} is {value.value:.4f}, above its most, {rule.max:g}")
    if rule.baseline is not None and rule.max_drop is not None:
        found = difference(task, rule.baseline.task(rule.task), rule.metric)
        worse = found.surely_worse_by if rule.significant else found.worse_by
        if not worse <= rule.max_drop + 1e-12:  # 0.9 - 0.88 is a little more than 0.02
            sure = " at least" if rule.significant else ""
            return Verdict(
                rule, False, f"{name} is {value.value:.4f}, the baseline's {found.before.value:.4f}: worse by{sure} "
                f"{worse:.4f}, more than {rule.max_drop:g}",
            )  # fmt: skip
    return Verdict(rule, True, f"{name} is {value.value:.4f}")


def _warned(rule: Rule, result: Result) -> str:
    """A figure that a mistake of the measurement may have made keeps no rule, and is no baseline."""
    own = [f"{found.why}" for found in result.warnings if found.task == rule.task]
    before = rule.baseline.warnings if rule.baseline is not None else []
    return "; ".join([*own, *(f"in the baseline {found.why}" for found in before if found.task == rule.task)])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _wrong(path: Path, why: str) -> InputError:
    return InputError(f"--gate {quoted(path)} {why}", param="gate")
