"""Questions that people answer wrongly. Source: TruthfulQA (Lin et al., arXiv 2109.07958), its columns as JSON."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

from penstock.eval.tasks.base import Example, Options, Reader, Task
from penstock.eval.tasks.choice import Choice, Question
from penstock.eval.tasks.files import Row, needed, read_rows
from penstock.eval.tasks.mmlu import LETTERS


def _question(row: Row) -> Question:
    wrong = [part.strip() for part in row.text("Incorrect Answers").split(";") if part.strip()]
    best = row.text("Best Answer").strip()
    if not wrong:
        raise row.wrong("'Incorrect Answers' names none")
    asked = row.text("Question").strip()
    return Question(f"Q: {asked}\nA:", tuple(" " + text.rstrip(".") + "." for text in (best, *wrong)), 0)


class TruthfulQA(Choice):
    """In a chat the answers are listed under letters, in an order of their own for each question."""

    def _generated(self, reader: Reader, q: Question) -> Example:
        return super()._generated(reader, _listed(q))

    def _decided(self, reader: Reader, q: Question) -> Example:
        return super()._decided(reader, _listed(q))


def _listed(q: Question) -> Question:
    order = list(range(min(len(q.choices), len(LETTERS))))
    Random(q.prompt).shuffle(order)
    texts = tuple(q.choices[i].strip() for i in order)
    listed = "\n".join(f"{letter}. {text}" for letter, text in zip(LETTERS, texts, strict=False))
    asked = f"{q.prompt.removeprefix('Q: ').removesuffix('A:').strip()}\nWhich answer is true?\n{listed}"
    letters = tuple(LETTERS[: len(texts)])
    return replace(q, choices=letters, right=order.index(0), asked=asked, texts=texts)


def make(path: Path | None, options: Options) -> Task:
    """The best answer against the wrong ones (the paper's MC1)."""
    path = needed("truthfulqa", path, "truthfulqa.jsonl")
    source = "the best answer or a wrong one (TruthfulQA MC1, arXiv 2109.07958)"
    return TruthfulQA("truthfulqa", source, [_question(row) for row in read_rows(path)], options)
