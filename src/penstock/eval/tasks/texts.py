"""Prompts and reference texts of one's own, scored as papers score summaries, translations and answers.

Lines with `prompt` and `references` (a list, or one text; also called `answers`). What each score is: `text_metrics`.
"""

from __future__ import annotations

from pathlib import Path

from penstock.eval.tasks.base import Answer, Example, Kind, Metric, Options, Reader, Task
from penstock.eval.tasks.files import Row, drawn, needed, read_rows
from penstock.eval.text_metrics import METRICS


class ReferenceTexts(Task):
    """Every score that was asked for, of the whole answer; the first one is the headline."""

    name = "texts"
    kind: Kind = "generate"
    axes: tuple[str, ...] = ()
    source = "prompts and references of your own file, scored by BLEU, ROUGE, edits and the like"

    def __init__(self, rows: list[Row], scores: tuple[str, ...], max_tokens: int) -> None:
        self.metrics: tuple[Metric, ...] = tuple(Metric(name, "mean") for name in scores)
        self.items = [(row.text("prompt"), row.texts("references", "answers")) for row in rows]
        self.max_tokens = max_tokens

    def examples(self, reader: Reader, seed: int, limit: int) -> list[Example]:
        out = []
        for asked, accepted in drawn(self.items, seed, limit):
            prompt = reader.prompt(asked)
            out.append(Example(accepted, prompt, max_tokens=reader.budget(prompt, reader.answer(self.max_tokens))))
        return out

    def judge(self, example: Example, answer: Answer) -> dict[str, float]:
        text = answer.text.strip()
        return {metric.name: METRICS[metric.name](text, example.expected) for metric in self.metrics}


def make(path: Path | None, options: Options) -> Task:
    """`scores`: names of `METRICS`, with + between them; `tokens`: of an answer at most."""
    path = needed("texts", path, "of prompts and references")
    scores = options.names("scores", ("rouge1", "rouge2", "rougeL", "bleu"), tuple(METRICS))
    return ReferenceTexts(read_rows(path), scores, options.number("tokens", 128, 1, 1 << 16))
