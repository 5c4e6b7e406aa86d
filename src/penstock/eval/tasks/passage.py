"""Questions about a short story: exact match and F1, as SQuAD defines them (arXiv 1606.05250, section 6.1)."""

from __future__ import annotations

import random
from pathlib import Path

from penstock.eval.answers import exact, f1, said
from penstock.eval.exercises import Exercise, passage
from penstock.eval.tasks.base import Answer, Example, Metric, Options, Task, no_file
from penstock.eval.tasks.exact import Exact, silence


class PassageQA(Exact):
    metrics: tuple[Metric, ...] = (Metric("em"), Metric("f1", "mean"))

    def make(self, rng: random.Random, size: int) -> Exercise:
        return passage(rng, "test", size, silence)

    def judge(self, example: Example, answer: Answer) -> dict[str, float]:
        text, expected = said(answer.text), [example.expected]
        return {"em": exact(text, expected), "f1": f1(text, expected)}


def make(path: Path | None, options: Options) -> Task:
    no_file("passage", path)
    return PassageQA("passage", "what, where, when, who of a story of five facts; EM and F1 as in SQuAD")
