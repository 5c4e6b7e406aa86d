"""One fact hidden in prose, by how deep and in how much: the needle grid.

Source: Kamradt, Needle in a haystack (2023); pass keys: Mohtashami and Jaggi, arXiv 2305.16300, section 4.2.
"""

from __future__ import annotations

import random
from pathlib import Path

from penstock.eval.answers import said, stands, told
from penstock.eval.exercises import hidden
from penstock.eval.tasks.base import Answer, Example, Kind, Metric, Options, Reader, Task
from penstock.eval.tasks.exact import STOP
from penstock.eval.tasks.prose import noise_of, prose

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
_MOST = 4096  # longer only if asked for: reading takes time
_MAX_TOKENS = 16
_SPARE = 16


class Needle(Task):
    """accuracy: the answer is the number, or a sentence that ends with it (`answers.told`).

    found: the number stands in the answer.
    """

    name = "needle"
    kind: Kind = "generate"
    metrics: tuple[Metric, ...] = (Metric("accuracy"), Metric("found"))
    axes: tuple[str, ...] = ("depth", "length")
    source = "a number told once in prose (Kamradt 2023; pass keys: arXiv 2305.16300), depth by length in tokens"

    def __init__(self, text: str, depths: tuple[float, ...], lengths: tuple[int, ...]) -> None:
        self.noise, self.depths, self.lengths = noise_of(text), depths, lengths

    def examples(self, reader: Reader, seed: int, limit: int) -> list[Example]:
        """Every cell of the grid gets the same number, at least one."""
        rng = random.Random(f"needle {seed}")
        lengths = self.lengths or usual_lengths(reader.room)
        each = max(1, limit // (len(self.depths) * len(lengths)))
        sample = self.noise(random.Random(0), 4000)
        per_token = len(sample) / reader.count(sample)
        return [
            self._example(reader, rng, depth, length, per_token)
            for depth in self.depths for length in lengths for _ in range(each)
        ]  # fmt: skip

    def _example(self, reader: Reader, rng: random.Random, depth: float, length: int, per_token: float) -> Example:
        """A prompt of at most `length` tokens, its answer included, and not much less."""
        size, max_tokens = int((length - 60) * per_token), reader.answer(_MAX_TOKENS)
        while True:
            made = hidden(rng, "test", max(size, 0), self.noise, depth)
            prompt = reader.prompt(made.prompt)
            over = len(prompt) + max_tokens + _SPARE - length
            if over <= 0 or size <= 0:
                tags = {"depth": depth, "length": length}
                most = reader.budget(prompt, max_tokens)
                return Example(made.answer, prompt, tags=tags, max_tokens=most, stop=reader.stops(*STOP))
            size -= int((over + 2) * per_token) + 1

    def judge(self, example: Example, answer: Answer) -> dict[str, float]:
        value = said(example.expected)
        return {"accuracy": told(answer.text, value), "found": stands(answer.text, value)}


def usual_lengths(room: int) -> tuple[int, ...]:
    """256, 512, ... up to the context, at most 4096; the context itself if it is smaller."""
    return tuple(n for n in (256, 512, 1024, 2048, _MOST) if n <= room) or (room,)


def make(path: Path | None, options: Options) -> Task:
    depths = options.shares("depths", DEPTHS)
    lengths = options.numbers("lengths", (), 64, 1 << 24)
    return Needle(prose(path), depths, lengths)
