"""One of several answers, by likelihood: no answer has to be parsed, and every model gives one."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.eval.tasks.base import Answer, Example, Kind, Metric, Reader, Tag
from penstock.eval.tasks.files import drawn


@dataclass(frozen=True)
class Question:
    """`choices` as they continue `prompt`; `right` is an index."""

    prompt: str
    choices: tuple[str, ...]
    right: int
    tags: dict[str, Tag] = field(default_factory=dict)


class Choice:
    """The choice whose tokens are likeliest (the sum of their logarithms; of equals the first). Source: Brown et al.,
    arXiv 2005.14165, section 2.4."""

    kind: Kind = "score"
    metrics: tuple[Metric, ...] = (Metric("accuracy"),)

    def __init__(self, name: str, source: str, questions: list[Question], axes: tuple[str, ...] = ()) -> None:
        self.name, self.source, self.questions, self.axes = name, source, questions, axes

    def examples(self, reader: Reader, seed: int, limit: int) -> list[Example]:
        return [
            Example(q.right, readings=tuple(reader.reading(q.prompt, c) for c in q.choices), tags=q.tags)
            for q in drawn(self.questions, seed, limit)
        ]

    def judge(self, example: Example, answer: Answer) -> dict[str, float]:
        best = max(range(len(answer.logprobs)), key=lambda i: (answer.logprobs[i], -i))
        return {"accuracy": float(best == example.expected)}
