"""Grade-school maths in steps. Source: GSM8K (Cobbe et al., arXiv 2110.14168): `question`, `answer` with `#### 42`.

A chat is asked without examples, step by step, as the makers of Qwen2.5-Math ask (arXiv 2409.12122, section 4); solved
ones stand before it as turns.
"""

from __future__ import annotations

import re
from pathlib import Path

from penstock.base.errors import InputError
from penstock.eval.numbers import answered
from penstock.eval.tasks.base import Answer, Example, Kind, Metric, Options, Reader, Task
from penstock.eval.tasks.files import Row, drawn, needed, read_rows
from penstock.formats.files import quoted

_CALCULATOR = re.compile(r"<<[^<>]*>>")
_STEPS = "Please reason step by step, and put your final answer within \\boxed{}."
_PLAIN_SHOTS, _PLAIN_TOKENS, _CHAT_TOKENS = 4, 256, 1024
_BY_FORM = -1


class GSM8K(Task):
    """Right if the number that the answer comes to (`eval.numbers`) equals the expected one."""

    name = "gsm8k"
    kind: Kind = "generate"
    metrics: tuple[Metric, ...] = (Metric("accuracy"),)
    axes: tuple[str, ...] = ()

    def __init__(self, rows: list[Row], shots: int, max_tokens: int) -> None:
        self.shots = _PLAIN_SHOTS if shots == _BY_FORM else shots
        self.chat_shots = max(0, shots)
        self.source = f"maths in words, {self.shots} solved ones first, in a chat {self.chat_shots} (GSM8K, " \
            "arXiv 2110.14168)"  # fmt: skip
        self.max_tokens = max_tokens
        self.solved = [(row.text("question").strip(), _solution(row)) for row in rows[: self.shots]]
        self.items = [(row.text("question").strip(), str(_expected(row))) for row in rows][self.shots :]

    def examples(self, reader: Reader, seed: int, limit: int) -> list[Example]:
        return [self._example(reader, asked, expected) for asked, expected in drawn(self.items, seed, limit)]

    def _example(self, reader: Reader, asked: str, expected: str) -> Example:
        if not reader.chat:
            head = "".join(f"Question: {q}\nAnswer: {a}\n\n" for q, a in self.solved)
            prompt = reader.prompt(f"{head}Question: {asked}\nAnswer:")
            return Example(expected, prompt, max_tokens=self.max_tokens or _PLAIN_TOKENS, stop=("\nQuestion:",))
        solved = [(f"{q}\n{_STEPS}", _boxed(a)) for q, a in self.solved[: self.chat_shots]]
        prompt = reader.prompt(f"{asked}\n{_STEPS}", solved=solved)
        return Example(expected, prompt, max_tokens=self.max_tokens or reader.budget(prompt, _CHAT_TOKENS))

    def judge(self, example: Example, answer: Answer) -> dict[str, float]:
        found = answered(answer.text)
        return {"accuracy": float(found is not None and found == answered(example.expected))}

    def found(self, example: Example, answer: Answer) -> bool:
        return answered(answer.text) is not None


def _solution(row: Row) -> str:
    """Without the marks for a calculator."""
    return _CALCULATOR.sub("", row.text("answer")).strip()


def _boxed(solution: str) -> str:
    """As a chat is asked to end."""
    steps, _, number = solution.rpartition("####")
    return f"{steps.strip()}\nThe answer is \\boxed{{{number.strip()}}}."


def _expected(row: Row) -> object:
    text = row.text("answer")
    number = answered(text.rpartition("####")[2]) if "####" in text else None
    if number is None:
        raise row.wrong("'answer' must end with #### and a number")
    return number


def make(path: Path | None, options: Options) -> Task:
    """The first `shots` rows of the file are shown solved and not asked."""
    path = needed("gsm8k", path, "gsm8k_test.jsonl")
    shots, rows = options.number("shots", _BY_FORM, 0, 64), read_rows(path)
    task = GSM8K(rows, shots, options.number("tokens", 0, 16, 65536))
    if not task.items:
        raise InputError(f"{quoted(path)} has {len(rows)} rows: {task.shots} shots leave none to ask", param="tasks")
    return task
