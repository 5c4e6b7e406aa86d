"""Key-value retrieval on published records: lost in the middle. Source: Liu et al., arXiv 2307.03172, section 3: files
with `ordered_kv_records`, `key`, `value`."""

from __future__ import annotations

import json
from pathlib import Path

from penstock.eval.answers import stands
from penstock.eval.tasks.base import Answer, Example, Kind, Metric, Options, Reader, Task
from penstock.eval.tasks.files import Row, drawn, needed, read_rows

_MAX_TOKENS = 100
_HEAD = "Say the value that belongs to the key, out of the JSON object below."


class Records(Task):
    """accuracy: the value stands in the answer, as in the paper."""

    name = "kv"
    kind: Kind = "generate"
    metrics: tuple[Metric, ...] = (Metric("accuracy"),)
    axes: tuple[str, ...] = ("position",)
    source = "random identifiers, one asked for (arXiv 2307.03172, section 3), moved to each position"

    def __init__(self, rows: list[Row], keep: int, positions: int) -> None:
        self.positions, self.keep = positions, keep
        self.items = [(_records(row), row.text("key"), row.text("value")) for row in rows]

    def examples(self, reader: Reader, seed: int, limit: int) -> list[Example]:
        """The asked record goes to the positions in turn; the others keep their order."""
        out = []
        for i, (records, key, value) in enumerate(drawn(self.items, seed, limit)):
            others = [record for record in records if record[0] != key]
            num = min(self.keep or len(records), len(records))
            place = (i % self.positions) / (self.positions - 1)
            at = round(place * (num - 1))
            shown = [*others[:at], (key, value), *others[at : num - 1]]
            listed = ",\n ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in shown)
            prompt = reader.prompt(f'{_HEAD}\n\n{{{listed}}}\n\nKey: "{key}"\nValue:')
            most, stop = reader.budget(prompt, reader.answer(_MAX_TOKENS)), reader.stops("\n")
            out.append(Example(value, prompt, tags={"position": place}, max_tokens=most, stop=stop))
        return out

    def judge(self, example: Example, answer: Answer) -> dict[str, float]:
        return {"accuracy": stands(answer.text, example.expected)}


def _records(row: Row) -> list[tuple[str, str]]:
    found = row.get("ordered_kv_records")
    if not isinstance(found, list) or len(found) < 2:
        raise row.wrong("'ordered_kv_records' must be a list of at least two pairs")
    for pair in found:
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise row.wrong("'ordered_kv_records' must hold pairs of texts")
    if row.text("key") not in {key for key, _ in found}:
        raise row.wrong("'key' is not among the records")
    return [(key, value) for key, value in found]


def make(path: Path | None, options: Options) -> Task:
    """`pairs`: keep so many records of each (0: all), for short contexts."""
    path = needed("kv", path, "lost_in_middle_kv75.jsonl")
    return Records(read_rows(path), options.number("pairs", 0, 0, 10000), options.number("positions", 5, 2, 100))
