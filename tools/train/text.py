"""The prose that models are trained on, and what is held out of it.

Licences: the books are in the public domain; the TinyStories sample is CDLA-Sharing-1.0; Taskmaster-4 is CC BY 4.0;
grade-school-math is MIT. CC BY-SA text is left out, so that the weights carry no share-alike duty.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_BOOKS = (
    "Peter Pan", "Heidi", "The Wonderful Wizard of Oz", "The Happy Prince", "Five Children",
)  # fmt: skip
"""Children's books that no model sees in training: their prose measures bits per byte."""
END = "<|endoftext|>"


@dataclass(frozen=True)
class Source:
    """One kind of prose. `weight`: how often its tokens are drawn, relative to the others'."""

    name: str
    documents: tuple[str, ...]
    weight: float


def held_out(path: Path) -> bool:
    """Whether a book is kept for evaluation, by words of its file name."""
    plain = "".join(c if c.isalnum() else " " for c in path.stem).lower().split()
    return any(all(word.lower() in plain for word in title.split()) for title in HELD_OUT_BOOKS)


def books(folder: Path, *, held: bool) -> tuple[str, ...]:
    return tuple(path.read_text("utf-8") for path in sorted(folder.glob("*.txt")) if held_out(path) == held)


def tinystories(corpus: Path) -> tuple[str, ...]:
    text = (corpus / "tinystories_sample.txt").read_text("utf-8")
    return tuple(story.strip() for story in text.split(END) if story.strip())


def sources(corpus: Path) -> list[Source]:
    """Everything there is to train on, children's prose first."""
    return [
        Source("children", books(corpus / "children", held=False), 2.0),
        Source("tinystories", tinystories(corpus)[:-50], 1.0),
        Source("novels", books(corpus / "novels", held=False), 1.0),
    ]


def held_out_prose(corpus: Path) -> str:
    """The children's books that are not trained on, one after another."""
    return "\n\n".join(books(corpus / "children", held=True))


def orders(corpus: Path) -> Iterator[list[tuple[str, str]]]:
    """Taskmaster-4 as (speaker, words) turns: what the user says and what the assistant answers; tools left out."""
    with (corpus / "dialogue" / "taskmaster4_tools.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            turns = json.loads(line)["turns"]
            yield [(turn[0], turn[1]) for turn in turns if turn[0] in ("user", "assistant")]
