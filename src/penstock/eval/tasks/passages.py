"""Passages of which some stand twice: how many different ones, and which one says this?

Source: forms of LongBench's PassageCount and PassageRetrieval (Bai et al., arXiv 2308.14508, section 3), made here from
prose. The answer needs the whole context.
"""

from __future__ import annotations

import random
from pathlib import Path

from penstock.base.errors import InputError
from penstock.eval.answers import whole_numbers
from penstock.eval.tasks.base import Answer, Example, Kind, Metric, Options, Reader, Task
from penstock.eval.tasks.prose import prose, sentences
from penstock.formats.files import quoted

_MAX_TOKENS = 12


class Passages(Task):
    """One sentence is a passage. `counts`: how many stand in a prompt."""

    kind: Kind = "generate"
    metrics: tuple[Metric, ...] = (Metric("accuracy"),)

    def __init__(self, name: str, source: str, text: str, counts: tuple[int, ...], axis: str) -> None:
        self.name, self.source, self.counts = name, source, counts
        self.axes: tuple[str, ...] = (axis,)
        self.sentences = sentences(text)

    def examples(self, reader: Reader, seed: int, limit: int) -> list[Example]:
        """Every number of passages equally often, at least once."""
        rng = random.Random(f"{self.name} {seed}")
        each = max(1, limit // len(self.counts))
        return [self._example(reader, rng, n, i / max(1, each - 1)) for n in self.counts for i in range(each)]

    def _example(self, reader: Reader, rng: random.Random, n: int, place: float) -> Example:
        if self.name == "count":
            different = rng.randint(max(1, n // 2), n)
            kept = rng.sample(self.sentences, different)
            shown = [*kept, *(rng.choice(kept) for _ in range(n - different))]
            rng.shuffle(shown)
            question = "How many different passages are there? The number of different passages is"
            tags: dict[str, float] = {"passages": n}
            expected = different
        else:
            shown = rng.sample(self.sentences, n)
            at = round(place * (n - 1))
            words = shown[at].rstrip(".").split()
            part = " ".join(words[-max(3, len(words) // 2) :])
            question = f'Which passage ends with "{part}"? It is passage'
            tags, expected = {"position": round(at / max(1, n - 1), 1), "passages": n}, at + 1
        context = "\n".join(f"Passage {i}: {text}" for i, text in enumerate(shown, 1))
        prompt = reader.prompt(f"{context}\n\n{question}")
        most = reader.budget(prompt, reader.answer(_MAX_TOKENS))
        return Example(str(expected), prompt, tags=tags, max_tokens=most, stop=reader.stops(".", "\n"))

    def judge(self, example: Example, answer: Answer) -> dict[str, float]:
        """The first number of the answer."""
        return {"accuracy": float(whole_numbers(answer.text)[:1] == [example.expected])}


def make_count(path: Path | None, options: Options) -> Task:
    return _make("count", "how many different passages there are (form: PassageCount, arXiv 2308.14508)", path, options)


def make_find(path: Path | None, options: Options) -> Task:
    return _make("find", "the number of the passage with these words (form: PassageRetrieval, arXiv 2308.14508)", path,
                 options)  # fmt: skip


def _make(name: str, source: str, path: Path | None, options: Options) -> Task:
    counts = options.numbers("passages", (5, 10, 20), 2, 1000)
    task = Passages(name, source, prose(path), counts, "passages" if name == "count" else "position")
    if len(task.sentences) < max(counts):
        where = "the built-in prose" if path is None else quoted(path)
        raise InputError(
            f"task {name!r}: {where} has {len(task.sentences)} sentences that can be passages, fewer than the "
            f"{max(counts)} asked for",
            param="tasks",
        )
    return task
