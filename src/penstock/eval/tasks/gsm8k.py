"""Grade-school maths in steps. Source: GSM8K (Cobbe et al., arXiv 2110.14168): `question`, `answer` with `#### 42`."""

from __future__ import annotations

import re
from pathlib import Path

from penstock.base.errors import InputError
from penstock.eval.answers import last_number
from penstock.eval.tasks.base import Answer, Example, Kind, Metric, Options, Reader, Task
from penstock.eval.tasks.files import Row, drawn, needed, read_rows
from penstock.formats.files import quoted

_CALCULATOR = re.compile(r"<<[^<>]*>>")


class GSM8K:
    """Right if the number behind `####`, or else the last number, equals the expected one as a number."""

    name = "gsm8k"
    kind: Kind = "generate"
    metrics: tuple[Metric, ...] = (Metric("accuracy"),)
    axes: tuple[str, ...] = ()

    def __init__(self, rows: list[Row], shots: int, max_tokens: int) -> None:
        self.source = f"maths in words, {shots} solved ones first (GSM8K, arXiv 2110.14168)"
        self.max_tokens = max_tokens
        self.head = "".join(f"{_asked(row)} {_solution(row)}\n\n" for row in rows[:shots])
        self.items = [(_asked(row), str(_expected(row))) for row in rows][shots:]

    def examples(self, reader: Reader, seed: int, limit: int) -> list[Example]:
        return [
            Example(expected, reader.prompt(self.head + asked), max_tokens=self.max_tokens, stop=("\nQuestion:",))
            for asked, expected in drawn(self.items, seed, limit)
        ]

    def judge(self, example: Example, answer: Answer) -> dict[str, float]:
        found = last_number(answer.text)
        return {"accuracy": float(found is not None and found == last_number(example.expected))}


def _asked(row: Row) -> str:
    return f"Question: {row.text('question').strip()}\nAnswer:"


def _solution(row: Row) -> str:
    """Without the marks for a calculator."""
    return _CALCULATOR.sub("", row.text("answer")).strip()


def _expected(row: Row) -> object:
    text = row.text("answer")
    number = last_number(text) if "####" in text else None
    if number is None:
        raise row.wrong("'answer' must end with #### and a number")
    return number


def make(path: Path | None, options: Options) -> Task:
    """The first `shots` rows of the file are shown solved and not asked."""
    path = needed("gsm8k", path, "gsm8k_test.jsonl")
    shots, rows = options.number("shots", 4, 0, 64), read_rows(path)
    task = GSM8K(rows, shots, options.number("tokens", 256, 16, 4096))
    if not task.items:
        raise InputError(f"{quoted(path)} has {len(rows)} rows: {shots} shots leave none to ask", param="tasks")
    return task
