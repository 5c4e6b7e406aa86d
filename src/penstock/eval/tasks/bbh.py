"""BIG-Bench Hard, as far as its answers can be listed. Source: Suzgun et al., arXiv 2210.09261."""

from __future__ import annotations

import re
from pathlib import Path

from penstock.base.errors import InputError
from penstock.eval.tasks.base import Options, Tag, Task
from penstock.eval.tasks.choice import Choice, Question
from penstock.eval.tasks.files import Row, needed, read_rows
from penstock.formats.files import quoted

_MOST_CHOICES = 20
_LETTER = re.compile(r"^\(([A-Z])\)(.*)", re.MULTILINE)


def _choices(row: Row, target: str, answers: set[str]) -> tuple[str, ...]:
    """The letters that the question lists, or all answers of its kind of task if they are few; none otherwise."""
    if re.fullmatch(r"\([A-Z]\)", target):
        listed = tuple(f"({letter})" for letter, _ in _LETTER.findall(row.text("input")))
        return listed if target in listed else ()
    return tuple(sorted(answers)) if 2 <= len(answers) <= _MOST_CHOICES else ()


def make(path: Path | None, options: Options) -> Task:
    """Rows with `input`, `target` and, in a file of several tasks, `task`. Those whose answers cannot be listed
    (sorted words, brackets, large numbers) are left out."""
    path = needed("bbh", path, "bbh_9tasks.jsonl")
    rows = read_rows(path)
    answers: dict[str, set[str]] = {}
    for row in rows:
        answers.setdefault(str(row.values.get("task", "")), set()).add(row.text("target").strip())
    questions = []
    for row in rows:
        kind, target = str(row.values.get("task", "")), row.text("target").strip()
        choices = _choices(row, target, answers[kind])
        if choices:
            asked = row.text("input").strip()
            listed = tuple(text.strip() for _, text in _LETTER.findall(asked)) if target.startswith("(") else ()
            tags: dict[str, Tag] = {"subject": kind} if kind else {}
            shown = tuple(" " + c for c in choices)
            questions.append(Question(f"Q: {asked}\nA:", shown, choices.index(target), tags, asked, listed))
    if not questions:
        raise InputError(f"{quoted(path)} holds no questions whose answers can be listed", param="tasks")
    source = "BIG-Bench Hard (arXiv 2210.09261), tasks with at most 20 different answers"
    return Choice("bbh", source, questions, options, ("subject",) if len(answers) > 1 else ())
