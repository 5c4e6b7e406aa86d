"""A sentence to write as JSON: is it valid, and is it right?"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

from penstock.eval.exercises import Exercise, small_json
from penstock.eval.tasks.base import Answer, Example, Metric, Options, Reader, Task, no_file
from penstock.eval.tasks.exact import STOP, Exact, silence


class Records(Exact):
    metrics: tuple[Metric, ...] = (Metric("right"), Metric("valid"))

    def make(self, rng: random.Random, size: int) -> Exercise:
        return small_json(rng, "test", size, silence)

    def _stop(self, reader: Reader) -> tuple[str, ...]:
        """In a chat it may take several lines."""
        return STOP if reader.template is None else ()

    def judge(self, example: Example, answer: Answer) -> dict[str, float]:
        """The order of keys does not matter; a name given twice is not valid. What is in a block of code counts."""
        text = _FENCE.sub("", answer.text.strip(), count=1)
        try:
            value, end = _DECODER.raw_decode(text)
            if not _BEHIND.match(text, end):
                raise ValueError("the answer goes on")
        except (ValueError, RecursionError):
            return {"right": 0.0, "valid": 0.0}
        return {"right": float(value == json.loads(example.expected)), "valid": 1.0}


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a name stands twice")
    return dict(pairs)


_DECODER = json.JSONDecoder(object_pairs_hook=_once)
_FENCE = re.compile(r"^```(?:json)?\s*")
_BEHIND = re.compile(r"[ \t]*(?:$|[.\n`])")
"""What may stand behind the value: the end of the answer, of the sentence, of the line or of a block of code."""


def make(path: Path | None, options: Options) -> Task:
    no_file("json", path)
    return Records("json", "name, age, liking of a person as a JSON object of one to three members")
