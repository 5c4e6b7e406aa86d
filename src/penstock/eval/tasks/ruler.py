"""RULER's files (Hsieh et al., arXiv 2404.06654): lines with `input`, `outputs`, perhaps `answer_prefix`, `length`."""

from __future__ import annotations

from pathlib import Path

from penstock.eval.tasks.base import Answer, Example, Kind, Metric, Options, Reader, Task
from penstock.eval.tasks.files import Row, drawn, needed, read_rows


class Ruler(Task):
    """score: the share of the expected texts that stand in the answer, in any case of letters (`match=all`); for
    question answering one is enough (`match=part`)."""

    name = "ruler"
    kind: Kind = "generate"
    metrics: tuple[Metric, ...] = (Metric("score", "mean"),)
    ends = False
    source = "retrieval, tracing, counting, questions in long contexts (RULER, arXiv 2404.06654)"

    def __init__(self, rows: list[Row], max_tokens: int, match: str) -> None:
        self.max_tokens, self.match = max_tokens, match
        self.items = []
        for row in rows:
            prefix = row.values.get("answer_prefix", "")
            text = row.text("input") + (prefix if isinstance(prefix, str) else "")
            length = row.values.get("length")
            tags = {"length": length} if isinstance(length, int) and not isinstance(length, bool) else {}
            self.items.append((text, row.texts("outputs", "answer"), tags))
        self.axes: tuple[str, ...] = ("length",) if 1 < len({t.get("length") for _, _, t in self.items}) <= 16 else ()

    def examples(self, reader: Reader, seed: int, limit: int) -> list[Example]:
        made = [(reader.prompt(text), expected, tags) for text, expected, tags in drawn(self.items, seed, limit)]
        return [
            Example(expected, prompt, tags=tags, max_tokens=reader.budget(prompt, self.max_tokens))
            for prompt, expected, tags in made
        ]

    def judge(self, example: Example, answer: Answer) -> dict[str, float]:
        text = answer.text.lower()
        found = [float(value.lower() in text) for value in example.expected]
        return {"score": max(found) if self.match == "part" else sum(found) / len(found)}


def make(path: Path | None, options: Options) -> Task:
    """`match`: part for files below a folder whose name begins with qa, as RULER has them, else all."""
    path = needed("ruler", path, "of RULER")
    usual = "part" if any(part.startswith("qa") for part in (path.parent.name, path.name)) else "all"
    match = options.text("match", usual, ("all", "part"))
    return Ruler(read_rows(path), options.number("tokens", 128, 1, 4096), match)
