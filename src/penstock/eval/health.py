"""Whether a result measures the model, or a mistake of the measurement: answers that were cut, stopped early, empty, or
in which nothing could be judged, and tasks that are near zero where their like is not."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.eval.result import Answers, HealthWarning, MetricValue, Result, Scored, TaskResult

MOST = 0.5
"""Above this share of the answers something is wrong with how they were asked, cut or read."""
_NEAR_ZERO, _FAR = 0.05, 0.2
_LIKE = (("humaneval", "mbpp"), ("needle", "lookup", "lines", "kv"), ("passage", "nq-open"))
"""Tasks of one skill: a model that can do one can do a part of the others."""


def answers_of(examples: Sequence[Scored]) -> Answers | None:
    """None if none of them was generated."""
    known = [e for e in examples if e.end]
    if not known:
        return None

    def share(which: Sequence[bool]) -> float:
        return sum(which) / len(known)

    return Answers(
        n=len(known), cut=share([e.end == "length" for e in known]),
        stopped=share([e.end == "stop_string" for e in known]), empty=share([not e.said.strip() for e in known]),
        unfound=share([not e.answered for e in known]), thinking=share([e.thinks for e in known]),
    )  # fmt: skip


def health(result: Result, other: Result | None = None) -> list[HealthWarning]:
    """What speaks against the figures, in the order of the tasks. `other`: of the same model in the other form."""
    out: list[HealthWarning] = []
    for task in result.tasks:
        out += [HealthWarning(task=task.name, why=why) for why in _of_answers(task, result.chat)]
        if (low := _near_zero(task)) is not None:
            out += [HealthWarning(task=task.name, why=why) for why in _beside(task, low, result, other)]
    return out


def _of_answers(task: TaskResult, chat: bool) -> list[str]:
    found, out = task.answers, []
    if found is None:
        return []
    of = f"of {found.n} answers"
    if found.cut > MOST and task.ends:
        out.append(f"{found.cut:.0%} {of} were cut at the limit of tokens")
    if found.stopped > MOST and chat:
        out.append(f"{found.stopped:.0%} {of} were stopped by a stop string, in a chat")
    if found.thinking > MOST:
        out.append(f"{found.thinking:.0%} {of} are a thought that did not end")
    elif found.unfound > MOST:
        form = "in a chat" if chat else "as plain text (for chat models: --chat)"
        out.append(f"in {found.unfound:.0%} {of} nothing was found that could be right or wrong, asked {form}")
    return out


def _near_zero(task: TaskResult) -> MetricValue | None:
    head = task.values[0]
    return head if head.kind in ("rate", "mean") and head.value < _NEAR_ZERO and head.interval is not None else None


def _beside(task: TaskResult, low: MetricValue, result: Result, other: Result | None) -> list[str]:
    """Tasks that say that the model can do it."""
    form = "plain text" if result.chat else "a chat"
    near = [(f"in {form}", t) for t in (other.tasks if other is not None else ()) if t.task == task.task]
    kin = next((group for group in _LIKE if task.task in group), ())
    near += [(t.name, t) for t in result.tasks if t.task in kin and t.task != task.task]
    return [
        f"{low.name} is {low.value:.1%}, {where} {high.value:.1%}: read some of its answers before you believe it"
        for where, found in near
        if (high := found.values[0]).value > _FAR and low.interval is not None and high.interval is not None
        and high.interval[0] > low.interval[1]
    ]  # fmt: skip
