"""A sentence to write as JSON: is it valid, and is it right?"""

from __future__ import annotations

import json
import random
from pathlib import Path

from penstock.eval.answers import said
from penstock.eval.exercises import Exercise, small_json
from penstock.eval.tasks.base import Answer, Example, Metric, Options, Task, no_file
from penstock.eval.tasks.exact import Exact, silence


class Records(Exact):
    metrics: tuple[Metric, ...] = (Metric("right"), Metric("valid"))

    def make(self, rng: random.Random, size: int) -> Exercise:
        return small_json(rng, "test", size, silence)

    def judge(self, example: Example, answer: Answer) -> dict[str, float]:
        """The order of keys does not matter; a name given twice is not valid here."""
        try:
            value = json.loads(said(answer.text), object_pairs_hook=_once)
        except (ValueError, RecursionError):
            return {"right": 0.0, "valid": 0.0}
        return {"right": float(value == json.loads(example.expected)), "valid": 1.0}


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a name stands twice")
    return dict(pairs)


def make(path: Path | None, options: Options) -> Task:
    no_file("json", path)
    return Records("json", "name, age, liking of a person as a JSON object of one to three members")
