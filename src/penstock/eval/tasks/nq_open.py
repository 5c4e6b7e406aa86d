"""Open questions with the passage that answers them, alone or among others, by where it stands.

Source: Liu et al., Lost in the Middle, arXiv 2307.03172, section 2 (multi-document question answering on
NaturalQuestions-Open): right if an answer stands in what the model says. There the other passages were retrieved; here
they are those of other questions, which is easier.
"""

from __future__ import annotations

import random
from pathlib import Path

from penstock.base.errors import InputError
from penstock.eval.answers import f1, holds, said
from penstock.eval.tasks.base import Answer, Example, Kind, Metric, Options, Reader, Task
from penstock.eval.tasks.files import Row, drawn, needed, read_rows
from penstock.formats.files import quoted

_HEAD = "Answer the question with the help of the passages below, in a few words."
_MAX_TOKENS = 32


class OpenQA(Task):
    """accuracy: an accepted answer stands in the text. f1: of the text up to its first full stop."""

    name = "nq-open"
    kind: Kind = "generate"
    metrics: tuple[Metric, ...] = (Metric("accuracy"), Metric("f1", "mean"))
    source = "a question and passages, one of which answers it (arXiv 2307.03172, section 2), by its position"

    def __init__(self, rows: list[Row], docs: int, positions: int) -> None:
        self.docs, self.positions = docs, positions
        self.axes: tuple[str, ...] = ("position",) if docs > 1 else ()
        self.items = [(row.text("question").strip(), row.texts("answers"), _passage(row)) for row in rows]

    def examples(self, reader: Reader, seed: int, limit: int) -> list[Example]:
        rng = random.Random(f"nq-open {seed}")
        out = []
        for i, (question, answers, gold) in enumerate(drawn(self.items, seed, limit)):
            at = round((i % self.positions) / max(1, self.positions - 1) * (self.docs - 1))
            others = [p for _, _, p in rng.sample(self.items, min(len(self.items), 2 * self.docs)) if p != gold]
            shown = [*others[:at], gold, *others[at : self.docs - 1]]
            listed = "\n".join(f"[{n}] {text}" for n, text in enumerate(shown, 1))
            prompt = reader.prompt(f"{_HEAD}\n\n{listed}\n\nQuestion: {question}\nAnswer:")
            tags = {"position": round(at / max(1, self.docs - 1), 2)}
            most, stop = reader.budget(prompt, reader.answer(_MAX_TOKENS)), reader.stops("\n")
            out.append(Example(answers, prompt, tags=tags, max_tokens=most, stop=stop))
        return out

    def judge(self, example: Example, answer: Answer) -> dict[str, float]:
        accepted = example.expected
        return {"accuracy": holds(answer.text, accepted), "f1": f1(said(answer.text), accepted)}


def _passage(row: Row) -> str:
    passages = row.get("ctxs")
    if not isinstance(passages, list) or not passages or not all(isinstance(p, dict) for p in passages):
        raise row.wrong("'ctxs' must be a list of objects with title and text")
    gold = next((p for p in passages if p.get("isgold") or p.get("hasanswer")), passages[0])
    read = Row(gold, row.where)
    return f"{read.text('title', empty=True)}: {read.text('text')}"


def make(path: Path | None, options: Options) -> Task:
    """`docs`: passages in a prompt; `positions`: places of the right one, from the first to the last."""
    path = needed("nq-open", path, "nq_open_oracle.jsonl")
    rows, docs = read_rows(path), options.number("docs", 1, 1, 100)
    if docs > len(rows):
        raise InputError(f"{quoted(path)} has {len(rows)} questions: too few for {docs} passages", param="tasks")
    return OpenQA(rows, docs, 1 if docs == 1 else options.number("positions", min(5, docs), 2, docs))
