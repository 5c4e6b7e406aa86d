"""The last word of a text. Form: LAMBADA (Paperno et al., arXiv 1606.06031)."""

from __future__ import annotations

import math
from pathlib import Path

from penstock.eval.sample import SAMPLE
from penstock.eval.tasks.base import Answer, Example, Kind, Metric, Options, Reader, Task
from penstock.eval.tasks.files import drawn, read_rows


class Cloze(Task):
    """accuracy: every token of the word is the likeliest one, so greedy decoding writes it. perplexity: of words."""

    name = "cloze"
    kind: Kind = "score"
    metrics: tuple[Metric, ...] = (Metric("accuracy"), Metric("perplexity", "perplexity"))
    axes: tuple[str, ...] = ()
    source = "the last word of a text (form: LAMBADA, arXiv 1606.06031)"

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts

    def examples(self, reader: Reader, seed: int, limit: int) -> list[Example]:
        out = []
        for text in drawn(self.texts, seed, limit):
            before, _, word = text.rpartition(" ")
            out.append(Example(word, readings=(reader.reading(before, " " + word),)))
        return out

    def judge(self, example: Example, answer: Answer) -> dict[str, float]:
        return {"accuracy": float(answer.greedy[0]), "perplexity": -math.fsum(answer.logprobs)}


def make(path: Path | None, options: Options) -> Task:
    """From {"text": ...} lines, or from the package's sample: every sentence of it, after those of its paragraph."""
    if path is None:
        return Cloze(_of_sample())
    rows = [(row, row.text("text").strip()) for row in read_rows(path)]
    for row, text in rows:
        if " " not in text:
            raise row.wrong("'text' must have at least two words")
    return Cloze([text for _, text in rows])


def _of_sample() -> list[str]:
    out = []
    for paragraph in SAMPLE.split("\n\n"):
        text = " ".join(paragraph.split())
        parts = text.split(". ")
        for i, part in enumerate(parts):
            if len(part.split()) >= 8 and part.rstrip(".").split()[-1].isalpha():
                out.append(". ".join([*parts[:i], part.rstrip(".")]))
    return out
