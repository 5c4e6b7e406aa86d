"""Prompts of the speed-up table, by kind of text: how much of an answer can be drafted depends on it most of all."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data"
OPENING = 48
"""Tokens of a story or a file that are given; the model goes on."""
_NAMES = ("Lily", "Tom", "Mia", "Ben", "Sara", "Max", "Anna", "Leo")
_PLACES = ("in a small house by the sea", "next to a dark forest", "on a farm with many animals", "in a big town")


class TextSet(NamedTuple):
    """`prompts`: texts, or token ids. `chat`: they are a user's messages. `source`: where they are from."""

    prompts: list[Any]
    chat: bool
    source: str


class Missing(Exception):
    """There is no such text here; the message says why."""


def _rows(path: Path) -> list[dict[str, Any]]:
    """Raises Missing."""
    if not path.exists():
        raise Missing(f"{path.name} is not there")
    return [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]


def spec_bench(tokenizer: Any, room: int, rng: random.Random) -> TextSet:
    """First turns of Spec-Bench that fit."""
    turns = [row["turns"][0] for row in _rows(DATA / "eval" / "spec_bench.jsonl")]
    fit = [text for text in turns if len(tokenizer.encode(text, False)) <= room]
    if not fit:
        raise Missing(f"no prompt of Spec-Bench fits into {room} tokens")
    rng.shuffle(fit)
    return TextSet(fit, True, f"{len(fit)} of {len(turns)} prompts of Spec-Bench, those of at most {room} tokens")


def code(tokenizer: Any, room: int, rng: random.Random) -> TextSet:
    """Beginnings of Python files."""
    try:
        files = [row["text"] for row in _rows(DATA / "corpus" / "code" / "python_stdlib.jsonl")]
        source = "beginnings of Python's standard library"
    except Missing:
        files = [path.read_text("utf-8") for path in sorted((ROOT / "src" / "penstock").rglob("*.py"))]
        source = "beginnings of Penstock's own files"
    return _openings([text for text in files if len(text) > 1000], tokenizer, min(room, 4 * OPENING), rng, source)


def summaries(tokenizer: Any, room: int, rng: random.Random) -> TextSet:
    """A document to be summed up, cut to what fits."""
    try:
        rows = _rows(DATA / "eval" / "spec_bench.jsonl")
        documents = [row["turns"][0] for row in rows if row["category"] == "summarization"]
        source = "summaries of Spec-Bench"
    except Missing:
        documents = [path.read_text("utf-8") for path in sorted((ROOT / "docs" / "concepts").glob("*.md"))]
        source = "pages of Penstock's documentation"
    if room < 64:
        raise Missing(f"a document does not fit into {room} tokens")
    rng.shuffle(documents)
    cut = [tokenizer.decode(tokenizer.encode(text, False)[: room - 16]) for text in documents]
    return TextSet([f"{text}\n\nSum this up." for text in cut], True, f"{source}, cut to {room} tokens")


def stories(tokenizer: Any, room: int, rng: random.Random) -> TextSet:
    """Beginnings of stories, to be gone on with freely."""
    path = DATA / "corpus" / "tinystories_sample.txt"
    if path.exists():
        parts = path.read_text("utf-8").split("<|endoftext|>")
        parts = parts if len(parts) > 8 else path.read_text("utf-8").split("\n\n")
        told = [part.strip() for part in parts if len(part) > 300]
        if told:
            return _openings(told, tokenizer, min(room, OPENING), rng, "beginnings of TinyStories")
    made = [f"Once upon a time, there was a child called {n}. {n} lived {p}. One day," for n in _NAMES for p in _PLACES]
    return _openings(made, tokenizer, min(room, OPENING), rng, "made up beginnings")


def repetition(tokenizer: Any, room: int, rng: random.Random) -> TextSet:
    """A line again and again: whoever copies is right."""
    lines = [f"{n} lived {p} and counted: {', '.join(rng.sample(_NAMES, 5))}.\n" for n in _NAMES for p in _PLACES]
    prompts = [tokenizer.encode(line, False) for line in lines]
    size = min(room, 4 * OPENING)
    return TextSet([(ids * (size // len(ids) + 1))[:size] for ids in prompts], False, f"lines repeated, {size} tokens")


def random_tokens(tokenizer: Any, room: int, rng: random.Random) -> TextSet:
    """No text at all: what a drafter costs when nothing can be drafted from the prompt."""
    size = min(room, OPENING)
    words = sorted({i for text in (_NAMES + _PLACES) for i in tokenizer.encode(text, False)})
    most = max(words) + 1
    return TextSet([[rng.randrange(most) for _ in range(size)] for _ in range(512)], False, f"{size} random ids")


def _openings(texts: list[str], tokenizer: Any, size: int, rng: random.Random, source: str) -> TextSet:
    rng.shuffle(texts)
    return TextSet([tokenizer.encode(text, False)[:size] for text in texts[:512]], False, source)


TEXTS: dict[str, Callable[[Any, int, random.Random], TextSet]] = {
    "spec-bench": spec_bench, "code": code, "summaries": summaries, "stories": stories, "random": random_tokens,
    "repetition": repetition,
}  # fmt: skip
