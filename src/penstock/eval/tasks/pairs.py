"""Keys and values, one asked for, by where it stands: lost in the middle, as a curve.

Source: Liu et al., Lost in the Middle, arXiv 2307.03172, section 3 (key-value retrieval). `lines` has the form of
LongEval's line retrieval (Li et al., How Long Can Open-Source LLMs Truly Promise on Context Length?, 2023).
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from penstock.base.errors import InputError
from penstock.eval.answers import stands, told
from penstock.eval.exercises import code, number, pairs
from penstock.eval.tasks.base import Answer, Example, Kind, Metric, Options, Reader, Task, no_file
from penstock.eval.tasks.exact import STOP

PAIRS = (10, 40, 120)
_MAX_TOKENS = 12


@dataclass(frozen=True)
class Form:
    """How a pair and the question are written; `{k}` and `{v}` are key and value."""

    name: str
    source: str
    pair: str
    question: str
    two_words: bool


_LOOKUP = Form(
    "lookup", "made-up words and numbers, one asked for (arXiv 2307.03172, section 3), by position in the list",
    "{k}: {v}", "The value of {k} is", two_words=False,
)  # fmt: skip
_LINES = Form(
    "lines", "numbered facts under names of two words, one asked for (form: LongEval, 2023), by position",
    "line {k}: the register content is {v}.",
    "What is the register content in line {k}? The register content in line {k} is", two_words=True,
)  # fmt: skip


class Pairs(Task):
    """accuracy: the answer is the value, or a sentence that ends with it (`answers.told`).

    found: the value stands in the answer.
    """

    kind: Kind = "generate"
    metrics: tuple[Metric, ...] = (Metric("accuracy"), Metric("found"))
    axes: tuple[str, ...] = ("position",)

    def __init__(self, form: Form, counts: tuple[int, ...], positions: int) -> None:
        self.name, self.source, self.form = form.name, form.source, form
        self.counts, self.positions = counts, positions

    def examples(self, reader: Reader, seed: int, limit: int) -> list[Example]:
        """Every number of pairs that fits has every position equally often, at least once."""
        counts = [count for count in self.counts or PAIRS if self._fits(reader, count)]
        if not counts:
            least = min(self.counts or PAIRS)
            raise InputError(
                f"task {self.name!r}: {least} pairs do not fit a context of {reader.room} tokens; ask for fewer with "
                f"{self.name}?pairs=N",
                param="tasks",
            )
        rng = random.Random(f"{self.name} {seed}")
        each = max(1, limit // (len(counts) * self.positions))
        return [
            self._example(reader, rng, count, place / (self.positions - 1))
            for count in counts for place in range(self.positions) for _ in range(each)
        ]  # fmt: skip

    def _fits(self, reader: Reader, count: int) -> bool:
        prompt = self._example(reader, random.Random(0), count, 0.0).prompt
        return len(prompt) + reader.answer(_MAX_TOKENS) + 16 <= reader.room

    def _example(self, reader: Reader, rng: random.Random, count: int, position: float) -> Example:
        made = self._two_words(rng, count) if self.form.two_words else pairs(rng, "test", count)
        key = list(made)[round(position * (count - 1))]
        context = "\n".join(self.form.pair.format(k=k, v=v) for k, v in made.items())
        prompt = reader.prompt(f"{context}\n\n{self.form.question.format(k=key)}")
        tags = {"position": position, "pairs": count}
        most = reader.budget(prompt, reader.answer(_MAX_TOKENS))
        return Example(made[key], prompt, tags=tags, max_tokens=most, stop=reader.stops(*STOP))

    @staticmethod
    def _two_words(rng: random.Random, count: int) -> dict[str, str]:
        out: dict[str, str] = {}
        while len(out) < count:
            out[f"{code(rng, 'test')}-{code(rng, 'test')}"] = number(rng, 5, "test")
        return out

    def judge(self, example: Example, answer: Answer) -> dict[str, float]:
        value: str = example.expected
        return {"accuracy": told(answer.text, value), "found": stands(answer.text, value)}


def make_lookup(path: Path | None, options: Options) -> Task:
    return _make(_LOOKUP, path, options)


def make_lines(path: Path | None, options: Options) -> Task:
    return _make(_LINES, path, options)


def _make(form: Form, path: Path | None, options: Options) -> Task:
    no_file(form.name, path)
    # There are some two thousand made-up words of four letters in the test half: more than a few hundred take long.
    counts = options.numbers("pairs", (), 2, 1000 if form.two_words else 400)
    return Pairs(form, counts, options.number("positions", 5, 2, 50))
