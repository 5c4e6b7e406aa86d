"""Multiple choice from exams. Source: MMLU (Hendrycks et al., arXiv 2009.03300): its CSV files, or rows as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from penstock.base.errors import InputError
from penstock.eval.tasks.base import Options, Tag, Task
from penstock.eval.tasks.choice import Choice, Question
from penstock.eval.tasks.files import Row, needed, read_csv, read_rows
from penstock.formats.files import quoted

LETTERS = "ABCDEFGHIJ"


class _Item(NamedTuple):
    subject: str
    question: str
    choices: list[str]
    right: int

    def asked(self) -> str:
        listed = "\n".join(f"{LETTERS[i]}. {choice}" for i, choice in enumerate(self.choices))
        return f"{self.question.strip()}\n{listed}"

    def text(self, *, solved: bool) -> str:
        return f"{self.asked()}\nAnswer:{' ' + LETTERS[self.right] if solved else ''}"


def _from_csv(path: Path) -> list[_Item]:
    subject = path.stem.removesuffix("_test").removesuffix("_val").removesuffix("_dev").replace("_", " ")
    out = []
    for row in read_csv(path, 6):
        letter = row.text("5").strip()
        if letter not in "ABCD":
            raise row.wrong(f"the last cell must be A, B, C or D, not {letter!r}")
        out.append(_Item(subject, row.text("0"), [row.text(str(i)) for i in range(1, 5)], "ABCD".index(letter)))
    return out


def _from_row(row: Row) -> _Item:
    choices = row.texts("choices")
    if not 2 <= len(choices) <= len(LETTERS):
        raise row.wrong(f"'choices' must have 2 to {len(LETTERS)} texts, not {len(choices)}")
    answer = row.get("answer")
    if isinstance(answer, str) and answer.strip() in LETTERS[: len(choices)] and answer.strip():
        right = LETTERS.index(answer.strip())
    else:
        right = row.index("answer", len(choices))
    subject = row.values.get("subject", "")
    return _Item(subject if isinstance(subject, str) else "", row.text("question"), choices, right)


def make(path: Path | None, options: Options) -> Task:
    """`shots`: so many questions of each subject come first, solved, in the prompts of the others."""
    path = needed("mmlu", path, "mmlu_test.jsonl")
    shots = options.number("shots", 0, 0, 20)
    items = _from_csv(path) if path.suffix.lower() == ".csv" else [_from_row(row) for row in read_rows(path)]
    by_subject: dict[str, list[_Item]] = {}
    for item in items:
        by_subject.setdefault(item.subject, []).append(item)
    questions = []
    for subject, group in by_subject.items():
        head = f"Multiple choice questions{' about ' + subject.replace('_', ' ') if subject else ''}, with answers."
        solved = "".join(item.text(solved=True) + "\n\n" for item in group[:shots])
        for item in group[shots:]:
            letters = tuple(" " + letter for letter in LETTERS[: len(item.choices)])
            prompt = f"{head}\n\n{solved}{item.text(solved=False)}"
            tags: dict[str, Tag] = {"subject": subject} if subject else {}
            asked = f"{head}\n\n{solved}{item.asked()}" if solved else item.asked()
            questions.append(Question(prompt, letters, item.right, tags, asked, tuple(item.choices)))
    if not questions:
        raise InputError(f"{quoted(path)}: {shots} shots leave no question over; ask for fewer", param="tasks")
    source = f"exam questions, four choices (MMLU, arXiv 2009.03300), {shots} solved ones first"
    return Choice("mmlu", source, questions, options, ("subject",) if len(by_subject) > 1 else ())
