"""Questions that people answer wrongly. Source: TruthfulQA (Lin et al., arXiv 2109.07958), its columns as JSON."""

from __future__ import annotations

from pathlib import Path

from penstock.eval.tasks.base import Options, Task
from penstock.eval.tasks.choice import Choice, Question
from penstock.eval.tasks.files import Row, needed, read_rows


def _question(row: Row) -> Question:
    wrong = [part.strip() for part in row.text("Incorrect Answers").split(";") if part.strip()]
    best = row.text("Best Answer").strip()
    if not wrong:
        raise row.wrong("'Incorrect Answers' names none")
    prompt = f"Q: {row.text('Question').strip()}\nA:"
    return Question(prompt, tuple(" " + text.rstrip(".") + "." for text in (best, *wrong)), 0)


def make(path: Path | None, options: Options) -> Task:
    """The best answer against the wrong ones, by likelihood (the paper's MC1)."""
    path = needed("truthfulqa", path, "truthfulqa.jsonl")
    source = "the best answer or a wrong one, by likelihood (TruthfulQA MC1, arXiv 2109.07958)"
    return Choice("truthfulqa", source, [_question(row) for row in read_rows(path)])
