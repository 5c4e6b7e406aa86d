"""LongBench's files (Bai et al., arXiv 2308.14508): lines with `input`, `context`, `answers`, `dataset`, `all_classes`.

Lengths of answers and the kind of score of every data set are the paper's; prompts are in our own words, so figures
compare configurations of an engine, and only roughly models of the paper. Contexts that are too long are cut in the
middle, as there.
"""

from __future__ import annotations

from pathlib import Path

from penstock.eval import answers as compare
from penstock.eval.tasks.base import Answer, Example, Kind, Metric, Options, Reader, Tag, Task
from penstock.eval.tasks.files import Row, drawn, needed, read_rows

_SETS = {
    "narrativeqa": ("qa", 128), "qasper": ("qa", 128), "multifieldqa_en": ("qa", 64), "multifieldqa_zh": ("qa", 64),
    "hotpotqa": ("qa", 32), "2wikimqa": ("qa", 32), "musique": ("qa", 32), "dureader": ("summary", 128),
    "gov_report": ("summary", 512), "qmsum": ("summary", 512), "multi_news": ("summary", 512),
    "vcsum": ("summary", 512), "trec": ("class", 64), "triviaqa": ("qa", 32), "samsum": ("summary", 128),
    "lsht": ("class", 64), "passage_count": ("number", 32), "passage_retrieval_en": ("number", 32),
    "passage_retrieval_zh": ("number", 32), "lcc": ("code", 64), "repobench-p": ("code", 64),
}  # fmt: skip
"""Data set -> how it is scored, tokens of an answer."""
_ASKS = {
    "qa": "{context}\n\nAnswer from the text above, in as few words as possible.\n\nQuestion: {input}\nAnswer:",
    "summary": "{context}\n\nSum up the text above.{input}\n\nSummary:",
    "class": "{context}\n{input}",
    "number": "{context}\n\n{input}\n\nThe answer is",
    "code": "{context}{input}",
}
"""Behind the context stands what must not be cut."""


class LongBench(Task):
    """score: F1 of words, ROUGE-L, the class named, the number named, or the likeness of the next line, by data set."""

    name = "longbench"
    kind: Kind = "generate"
    metrics: tuple[Metric, ...] = (Metric("score", "mean"),)
    ends = False
    source = "long documents: questions, summaries, classes, counts, code (LongBench, arXiv 2308.14508)"

    def __init__(self, rows: list[Row], context: int) -> None:
        self.rows, self.context = rows, context
        for row in rows:
            _set_of(row), row.text("input", empty=True), row.text("context"), row.texts("answers")
        self.axes: tuple[str, ...] = ("dataset",) if len({row.get("dataset") for row in rows}) > 1 else ()

    def examples(self, reader: Reader, seed: int, limit: int) -> list[Example]:
        return [self._example(reader, row) for row in drawn(self.rows, seed, limit)]

    def _example(self, reader: Reader, row: Row) -> Example:
        kind, max_tokens = _set_of(row)
        room = min(self.context or reader.room, reader.room) - max_tokens
        context, asked = row.text("context"), row.text("input", empty=True)
        asked = f" {asked}" if kind == "summary" and asked else asked
        cut, keep = False, len(context)
        while True:
            part = context if keep >= len(context) else context[: keep // 2] + context[len(context) - keep // 2 :]
            prompt = reader.prompt(_ASKS[kind].format(context=part, input=asked))
            if len(prompt) <= room or keep == 0:
                break
            cut, keep = True, min(keep - 1, keep * room // len(prompt)) if room > 0 else 0
        expected = [kind, row.texts("answers"), row.values.get("all_classes") or []]
        tags: dict[str, Tag] = {"dataset": row.text("dataset"), "cut": int(cut)}
        stop = reader.stops("\n") if kind in ("qa", "class", "number") else ()
        return Example(expected, prompt, tags=tags, max_tokens=reader.budget(prompt, max_tokens), stop=stop)

    def judge(self, example: Example, answer: Answer) -> dict[str, float]:
        kind, accepted, classes = example.expected
        text = answer.text.strip()
        if kind == "qa":
            return {"score": compare.f1(text, accepted)}
        if kind == "summary":
            return {"score": compare.rouge_l(text, accepted)}
        if kind == "class":
            return {"score": max(_class(text, right, classes) for right in accepted)}
        if kind == "number":
            return {"score": max(_number(text, right) for right in accepted)}
        line = next(
            (part for part in text.splitlines() if part.strip() and not part.lstrip().startswith(_NOT_CODE)), ""
        )
        return {"score": max(compare.similarity(line.strip(), right.strip()) for right in accepted)}


_NOT_CODE = ("`", "#", "//")


def _class(text: str, right: str, classes: list[str]) -> float:
    """1 over the number of classes that the answer names, if the right one is among them; a class that is part of the
    right one's name does not count against it."""
    named = [name for name in classes or [right] if name in text and (name == right or name not in right)]
    return 1 / len(named) if right in named else 0.0


def _number(text: str, right: str) -> float:
    """The share of the right number among those that are named."""
    said, wanted = compare.whole_numbers(text), compare.whole_numbers(right)
    return said.count(wanted[0]) / len(said) if said and wanted else 0.0


def _set_of(row: Row) -> tuple[str, int]:
    name = row.text("dataset").removesuffix("_e")
    if name not in _SETS:
        raise row.wrong(f"'dataset' {name!r} is none of LongBench's: {', '.join(_SETS)}")
    return _SETS[name]


def make(path: Path | None, options: Options) -> Task:
    """`context`: tokens of a prompt and its answer at most; by default what the model holds."""
    path = needed("longbench", path, "of LongBench")
    return LongBench(read_rows(path), options.number("context", 0, 256, 1 << 24))
