"""One of several answers. Plain text: by likelihood, so that no answer has to be parsed and every model gives one. In a
chat the model reasons and answers, as assistants are evaluated; `by=likelihood` compares likelihoods there, too, and
`by=decision` reads probabilities of labels as `/v1/decisions` does, and tells how well they are calibrated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.eval.choices import chosen
from penstock.eval.tasks.base import Answer, Example, Kind, Metric, Options, Reader, Tag, Task
from penstock.eval.tasks.files import drawn
from penstock.text.decisions import MAX_TEMPERATURE, DecisionOption, DecisionQuestion, judge

_TOKENS = 512
_STEPS = 'Think step by step, and finish with "The answer is" and {what}.'


@dataclass(frozen=True)
class Question:
    """`choices` as they continue `prompt`; `right` is an index. In a chat: `asked` instead of the prompt, with the
    choices listed, and `texts`, what choices that are letters stand for."""

    prompt: str
    choices: tuple[str, ...]
    right: int
    tags: dict[str, Tag] = field(default_factory=dict)
    asked: str = ""
    texts: tuple[str, ...] = ()


DECISION_METRICS = (
    Metric("accuracy"), Metric("brier", "loss"), Metric("ece", "calibration"), Metric("label mass", "mean"),
)  # fmt: skip
"""Brier: half the sum of the squares of what each probability is off by (Brier 1950; for two answers (p - y)^2)."""


def _of_decision(logprobs: Sequence[float], right: int, temperature: float) -> dict[str, float]:
    found = judge(logprobs, temperature=temperature, min_label_mass=0.0)
    sure, p = max(found.probabilities), found.probabilities
    brier = sum((share - (i == right)) ** 2 for i, share in enumerate(p)) / 2
    ece = sure if found.best == right else -sure
    return {"accuracy": float(found.best == right), "brier": brier, "ece": ece, "label mass": found.label_mass}


def _without_list(asked: str, choices: Sequence[str]) -> str:
    """The question without the lines that list its choices at its end: a decision lists them itself."""
    lines = asked.split("\n")
    ends = [line.strip() for line in lines[-len(choices) :]]
    listed = len(ends) == len(choices) and all(a.endswith(b.strip()) for a, b in zip(ends, choices, strict=True))
    return "\n".join(lines[: -len(choices)]) if listed and len(lines) > len(choices) else asked


class Choice(Task):
    """The choice whose tokens are likeliest (the sum of their logarithms; of equals the first; source: Brown et al.,
    arXiv 2005.14165, section 2.4), or the one that the answer gives (`eval.choices`)."""

    kind: Kind = "score"
    metrics: tuple[Metric, ...] = (Metric("accuracy"),)

    def __init__(
        self, name: str, source: str, questions: list[Question], options: Options, axes: tuple[str, ...] = ()
    ) -> None:
        self.name, self.source, self.questions, self.axes = name, source, questions, axes
        self.by = options.text("by", "form", ("form", "likelihood", "decision"))
        if self.by == "decision":
            self.kind, self.metrics = "decide", DECISION_METRICS
            self.temperature = options.real("temperature", 1.0, 0.01, MAX_TEMPERATURE)
        self.max_tokens = options.number("tokens", 0, 16, 65536)

    def examples(self, reader: Reader, seed: int, limit: int) -> list[Example]:
        make = self._generated if reader.chat and self.by == "form" else self._scored
        if self.by == "decision":
            make = self._decided
        return [make(reader, q) for q in drawn(self.questions, seed, limit)]

    def _scored(self, reader: Reader, q: Question) -> Example:
        return Example(q.right, readings=tuple(reader.reading(q.prompt, c) for c in q.choices), tags=q.tags)

    def _generated(self, reader: Reader, q: Question) -> Example:
        choices = [choice.strip() for choice in q.choices]
        what = "the letter of your choice" if q.texts else f"your answer, one of: {', '.join(choices)}"
        prompt = reader.prompt(f"{q.asked or q.prompt}\n\n{_STEPS.format(what=what)}")
        most = self.max_tokens or reader.budget(prompt, _TOKENS)
        return Example([q.right, choices, list(q.texts)], prompt, tags=q.tags, max_tokens=most)

    def _decided(self, reader: Reader, q: Question) -> Example:
        """Yes or no where these are the answers, else a letter for each."""
        choices = q.texts or tuple(choice.strip() for choice in q.choices)
        asked = (q.asked or q.prompt).strip()
        if {choice.lower() for choice in choices} in ({"yes", "no"}, {"true", "false"}):
            yes = next(i for i, choice in enumerate(choices) if choice.lower() in ("yes", "true"))
            question = DecisionQuestion("predicate", f"Is the answer {choices[yes]}?")
            right = int(q.right != yes)
        else:
            options = tuple(DecisionOption(choice) for choice in choices)
            question, right = DecisionQuestion("choice", "Which answer is right?", options), q.right
            asked = _without_list(asked, choices)
        prompt, labels = reader.decision(asked, question)
        return Example([right, self.temperature], prompt, tags=q.tags, labels=labels, max_tokens=8)

    def judge(self, example: Example, answer: Answer) -> dict[str, float]:
        if not answer.logprobs:
            right, choices, texts = example.expected
            return {"accuracy": float(chosen(answer.text, choices, texts) == right)}
        if self.by == "decision":
            return _of_decision(answer.logprobs, *example.expected)
        best = max(range(len(answer.logprobs)), key=lambda i: (answer.logprobs[i], -i))
        return {"accuracy": float(best == example.expected)}

    def found(self, example: Example, answer: Answer) -> bool:
        return chosen(answer.text, *example.expected[1:]) is not None
