"""Nested operations on lists of digits. Source: Nangia and Bowman, ListOps, arXiv 1804.06028; generated here."""

from __future__ import annotations

import random
from pathlib import Path

from penstock.eval.answers import told
from penstock.eval.tasks.base import Answer, Example, Kind, Metric, Options, Reader, Task, no_file

_INTRODUCTION = """\
Work out each list. MAX is the largest number, MIN the smallest, MED the one in the middle (of an even count the lower \
of the two, ordered by size), SM the last digit of the sum.

[MAX 2 9 4 ] = 9
[SM 8 7 ] = 5
[MIN 6 [MED 3 1 8 ] 5 ] = 3
"""
_MAX_TOKENS = 6


def value_of(words: list[str]) -> int:
    """What an expression of blank-separated words comes to; the last `]` closes the first bracket."""
    stack: list[tuple[str, list[int]]] = []
    for word in words:
        if word.startswith("["):
            stack.append((word[1:], []))
            continue
        if word != "]":
            stack[-1][1].append(int(word))
            continue
        operation, numbers = stack.pop()
        done = _apply(operation, numbers)
        if not stack:
            return done
        stack[-1][1].append(done)
    raise ValueError("a bracket is not closed")


def _apply(operation: str, numbers: list[int]) -> int:
    ordered = sorted(numbers)
    return {
        "MAX": ordered[-1], "MIN": ordered[0], "MED": ordered[(len(ordered) - 1) // 2], "SM": sum(ordered) % 10,
    }[operation]  # fmt: skip


def expression(rng: random.Random, depth: int, most: int) -> list[str]:
    """Of exactly this depth, 2 to `most` parts in a list."""
    parts = [[str(rng.randrange(10))] for _ in range(rng.randint(2, most))]
    if depth > 1:
        parts[rng.randrange(len(parts))] = expression(rng, depth - 1, most)
        for i, part in enumerate(parts):
            if len(part) == 1 and rng.random() < 0.25:
                parts[i] = expression(rng, rng.randint(1, depth - 1), most)
    return ["[" + rng.choice(("MAX", "MIN", "MED", "SM")), *(word for part in parts for word in part), "]"]


class ListOps(Task):
    name = "listops"
    kind: Kind = "generate"
    metrics: tuple[Metric, ...] = (Metric("accuracy"),)
    axes: tuple[str, ...] = ("depth",)
    source = "nested MAX, MIN, MED, SM of digits (ListOps, arXiv 1804.06028), by depth, after three worked examples"

    def __init__(self, depths: tuple[int, ...], parts: int) -> None:
        self.depths, self.parts = depths, parts

    def examples(self, reader: Reader, seed: int, limit: int) -> list[Example]:
        """Every depth equally often, at least once."""
        rng = random.Random(f"listops {seed}")
        out, max_tokens = [], reader.answer(_MAX_TOKENS)
        for depth in self.depths:
            for _ in range(max(1, limit // len(self.depths))):
                words = expression(rng, depth, self.parts)
                prompt = reader.prompt(f"{_INTRODUCTION}{' '.join(words)} =")
                most, stop = reader.budget(prompt, max_tokens), reader.stops("\n")
                out.append(Example(str(value_of(words)), prompt, tags={"depth": depth}, max_tokens=most, stop=stop))
        return out

    def judge(self, example: Example, answer: Answer) -> dict[str, float]:
        return {"accuracy": told(answer.text, example.expected)}


def make(path: Path | None, options: Options) -> Task:
    no_file("listops", path)
    return ListOps(options.numbers("depths", (1, 2, 3, 4), 1, 12), options.number("parts", 5, 2, 20))
