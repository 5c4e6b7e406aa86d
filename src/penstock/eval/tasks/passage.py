"""Questions about a short story: exact match and F1, as SQuAD defines them (arXiv 1606.05250, section 6.1)."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from penstock.eval.answers import exact, f1, rests, said
from penstock.eval.exercises import Exercise, passage
from penstock.eval.tasks.base import Answer, Example, Metric, Options, Reader, Task, no_file
from penstock.eval.tasks.exact import Exact, silence


class PassageQA(Exact):
    metrics: tuple[Metric, ...] = (Metric("em"), Metric("f1", "mean"))

    def make(self, rng: random.Random, size: int) -> Exercise:
        return passage(rng, "test", size, silence)

    def _expected(self, made: Exercise, reader: Reader) -> Any:
        """Of a chat with the question: an assistant may say it again before the answer."""
        return [made.answer, made.prompt.rpartition("\n\n")[2]] if reader.chat else made.answer

    def judge(self, example: Example, answer: Answer) -> dict[str, float]:
        expected, question = example.expected, ""
        if not isinstance(expected, str):
            expected, question = expected
        texts = [said(answer.text), *rests(said(answer.text), question)]
        return {"em": max(exact(t, [expected]) for t in texts), "f1": max(f1(t, [expected]) for t in texts)}


def make(path: Path | None, options: Options) -> Task:
    no_file("passage", path)
    return PassageQA("passage", "what, where, when, who of a story of five facts; EM and F1 as in SQuAD")
