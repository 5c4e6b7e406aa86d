"""One of several answers. Plain text: by likelihood, so that no answer has to be parsed and every model gives one. In a
chat the model reasons and answers, as assistants are evaluated; `by=likelihood` compares likelihoods there, too."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.eval.choices import chosen
from penstock.eval.tasks.base import Answer, Example, Kind, Metric, Options, Reader, Tag, Task
from penstock.eval.tasks.files import drawn

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


class Choice(Task):
    """The choice whose tokens are likeliest (the sum of their logarithms; of equals the first; source: Brown et al.,
    arXiv 2005.14165, section 2.4), or the one that the answer gives (`eval.choices`)."""

    kind: Kind = "score"
    metrics: tuple[Metric, ...] = (Metric("accuracy"),)

    def __init__(
        self, name: str, source: str, questions: list[Question], options: Options, axes: tuple[str, ...] = ()
    ) -> None:
        self.name, self.source, self.questions, self.axes = name, source, questions, axes
        self.by = options.text("by", "form", ("form", "likelihood"))
        self.max_tokens = options.number("tokens", 0, 16, 65536)

    def examples(self, reader: Reader, seed: int, limit: int) -> list[Example]:
        make = self._generated if reader.chat and self.by == "form" else self._scored
        return [make(reader, q) for q in drawn(self.questions, seed, limit)]

    def _scored(self, reader: Reader, q: Question) -> Example:
        return Example(q.right, readings=tuple(reader.reading(q.prompt, c) for c in q.choices), tags=q.tags)

    def _generated(self, reader: Reader, q: Question) -> Example:
        choices = [choice.strip() for choice in q.choices]
        what = "the letter of your choice" if q.texts else f"your answer, one of: {', '.join(choices)}"
        prompt = reader.prompt(f"{q.asked or q.prompt}\n\n{_STEPS.format(what=what)}")
        most = self.max_tokens or reader.budget(prompt, _TOKENS)
        return Example([q.right, choices, list(q.texts)], prompt, tags=q.tags, max_tokens=most)

    def judge(self, example: Example, answer: Answer) -> dict[str, float]:
        if not answer.logprobs:
            right, choices, texts = example.expected
            return {"accuracy": float(chosen(answer.text, choices, texts) == right)}
        best = max(range(len(answer.logprobs)), key=lambda i: (answer.logprobs[i], -i))
        return {"accuracy": float(best == example.expected)}

    def found(self, example: Example, answer: Answer) -> bool:
        return chosen(answer.text, *example.expected[1:]) is not None
