"""The next line of a program. Form: LCC (Guo et al., LongCoder, arXiv 2306.14893), from source files of one's own."""

from __future__ import annotations

import random
from pathlib import Path

from penstock.base.errors import InputError
from penstock.eval.answers import similarity
from penstock.eval.tasks.base import Answer, Example, Kind, Metric, Options, Reader, Task
from penstock.formats.files import quoted, read_text

_MAX_FILES, _MAX_FILE_BYTES = 2000, 1 << 20
_MAX_TOKENS = 64
_LEAST_BEFORE = 8


class NextLine(Task):
    """exact: the line itself; similarity: of characters, 0 to 1. Blanks at both ends do not count."""

    name = "next-line"
    kind: Kind = "generate"
    metrics: tuple[Metric, ...] = (Metric("similarity", "mean"), Metric("exact"))
    axes: tuple[str, ...] = ()
    ends = False
    source = "a line of a program after those before it (form: LCC, arXiv 2306.14893)"

    def __init__(self, files: list[str], context: int) -> None:
        self.context = context
        self.places = [
            (lines, at)
            for lines in (text.splitlines() for text in files)
            for at in range(_LEAST_BEFORE, len(lines))
            if 10 <= len(lines[at].strip()) <= 120
        ]

    def examples(self, reader: Reader, seed: int, limit: int) -> list[Example]:
        rng = random.Random(f"next-line {seed}")
        out = []
        for lines, at in rng.sample(self.places, min(limit, len(self.places))):
            room = min(self.context, reader.room - _MAX_TOKENS)
            before = lines[max(0, at - max(2, room // 4)) : at]  # few lines have less than four tokens
            while len(before) > 1 and len(reader.prompt("\n".join(before) + "\n")) > room:
                before = before[max(1, len(before) // 8) :]
            prompt = reader.prompt("\n".join(before) + "\n")
            out.append(Example(lines[at].strip(), prompt, max_tokens=_MAX_TOKENS))
        return out

    def judge(self, example: Example, answer: Answer) -> dict[str, float]:
        """The first line of the answer that is not empty: no stop string, because models begin with blank lines."""
        line = next((line.strip() for line in answer.text.splitlines() if line.strip()), "")
        return {"similarity": similarity(line, example.expected), "exact": float(line == example.expected)}


def make(path: Path | None, options: Options) -> Task:
    """Of one file, or of all .py files below a folder; without a path of the package's own."""
    root = Path(__file__).resolve().parents[2] if path is None else path
    files = sorted(root.rglob("*.py"))[:_MAX_FILES] if root.is_dir() else [root]
    texts = [read_text(file, _MAX_FILE_BYTES) for file in files]
    task = NextLine(texts, options.number("context", 1024, 64, 1 << 24))
    if not task.places:
        raise InputError(f"{quoted(root)} holds no lines of 10 to 120 characters to ask for (files end with .py)",
                         param="tasks")  # fmt: skip
    return task
