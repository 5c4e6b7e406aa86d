"""A sentence to write as JSON: is it valid, and is it right?"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

from penstock.eval.exercises import Exercise, small_json
from penstock.eval.programs import blocks
from penstock.eval.tasks.base import Answer, Example, Metric, Options, Task, no_file
from penstock.eval.tasks.exact import Exact, silence


class Records(Exact):
    metrics: tuple[Metric, ...] = (Metric("right"), Metric("valid"))

    def make(self, rng: random.Random, size: int) -> Exercise:
        return small_json(rng, "test", size, silence)

    def judge(self, example: Example, answer: Answer) -> dict[str, float]:
        """The order of keys does not matter; a name given twice is not valid. What is in a block of code counts."""
        line = _LINE.search(answer.text)
        for text in (*reversed(blocks(answer.text)), answer.text, answer.text[line.start() :] if line else ""):
            found = _decoded(text.strip())
            if found is not None:
                return {"right": float(found[0] == json.loads(example.expected)), "valid": 1.0}
        return {"right": 0.0, "valid": 0.0}


def _decoded(text: str) -> tuple[Any] | None:
    """The value that a text begins with, if nothing but the end of a sentence, a line or a block follows."""
    try:
        value, end = _DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return None
    return (value,) if _BEHIND.match(text, end) else None


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a name stands twice")
    return dict(pairs)


_DECODER = json.JSONDecoder(object_pairs_hook=_once)
_LINE = re.compile(r"^\s*\{", re.MULTILINE)
"""Where an object begins behind lines of prose."""
_BEHIND = re.compile(r"[ \t]*(?:$|[.\n`])")
"""What may stand behind the value: the end of the answer, of the sentence, of the line or of a block of code."""


def make(path: Path | None, options: Options) -> Task:
    no_file("json", path)
    return Records("json", "name, age, liking of a person as a JSON object of one to three members")
