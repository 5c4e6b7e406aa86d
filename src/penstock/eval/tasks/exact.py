"""Exercises with one right answer: facts in two steps, copying, sums. Source: `eval.exercises`, test half."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from penstock.eval.answers import said, told
from penstock.eval.exercises import Exercise, arithmetic, copying, two_hop
from penstock.eval.tasks.base import Answer, Example, Kind, Metric, Options, Reader, Task, no_file

STOP = (".", "\n")
_SHORTEST, _LONGEST = 60, 2400  # characters of context, growing from example to example


class Exact(Task):
    """Test exercises of one skill; right is the answer, up to a full stop or the end of the line (`answers.told`)."""

    kind: Kind = "generate"
    metrics: tuple[Metric, ...] = (Metric("accuracy"),)
    axes: tuple[str, ...] = ()
    room = 4
    """Tokens that an answer may have more than the right one."""

    def __init__(self, name: str, source: str) -> None:
        self.name, self.source = name, source

    def make(self, rng: random.Random, size: int) -> Exercise:
        makers = {"two-hop": two_hop, "copy": copying, "arithmetic": arithmetic}
        return makers[self.name](rng, "test", size, silence)

    def examples(self, reader: Reader, seed: int, limit: int) -> list[Example]:
        rng = random.Random(f"{self.name} {seed}")
        out = []
        for i in range(limit):
            size = int(_SHORTEST * (_LONGEST / _SHORTEST) ** (i / max(1, limit - 1)))
            made = self.make(rng, size)
            while size > 20 and not reader.fits(made.prompt, self._max_tokens(reader, made) + 16):
                size //= 2
                made = self.make(rng, size)
            prompt = reader.prompt(made.prompt)
            tokens = reader.budget(prompt, self._max_tokens(reader, made))
            out.append(Example(self._expected(made, reader), prompt, max_tokens=tokens, stop=reader.stops(*STOP)))
        return out

    def _expected(self, made: Exercise, reader: Reader) -> Any:
        return made.answer

    def _max_tokens(self, reader: Reader, made: Exercise) -> int:
        return reader.answer(reader.count(" " + made.answer) + self.room)

    def judge(self, example: Example, answer: Answer) -> dict[str, float]:
        return {"accuracy": told(answer.text, said(example.expected))}


def silence(rng: random.Random, size: int) -> str:
    """For exercises without prose around them."""
    return ""


def make_two_hop(path: Path | None, options: Options) -> Task:
    no_file("two-hop", path)
    return Exact("two-hop", "who has the thing, and where is that person: two facts among others, shuffled")


def make_copy(path: Path | None, options: Options) -> Task:
    no_file("copy", path)
    return Exact("copy", "3 to 40 made-up words to repeat")


def make_arithmetic(path: Path | None, options: Options) -> Task:
    no_file("arithmetic", path)
    return Exact("arithmetic", "sums and differences of numbers below 100")
