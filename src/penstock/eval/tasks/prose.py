"""Prose to hide facts in: the package's own sample, or a file; sentences stand on one line."""

from __future__ import annotations

import random
from pathlib import Path

from penstock.base.errors import InputError
from penstock.eval.exercises import Noise
from penstock.eval.sample import SAMPLE
from penstock.formats.files import quoted, read_text

MAX_BYTES = 64 << 20


def prose(path: Path | None) -> str:
    """Paragraphs, each on one line, a line free between them. Raises ModelError or InputError."""
    text = SAMPLE if path is None else read_text(path, MAX_BYTES)
    whole = "\n\n".join(" ".join(part.split()) for part in text.split("\n\n") if part.strip())
    if len(whole) < 200:
        raise InputError(f"{quoted(path)} is too short to hide anything in: {len(whole)} characters, at least 200 are "
                         "needed", param="tasks")  # fmt: skip
    return whole


def noise_of(text: str) -> Noise:
    """Stretches that begin with a word at a random place; where the text ends, it begins again."""

    def noise(rng: random.Random, size: int) -> str:
        start = text.find(" ", rng.randrange(max(1, len(text) - 200))) + 1
        out = text[start : start + size]
        while len(out) < size:
            out += "\n\n" + text[: size - len(out)]
        return out[:size].strip()

    return noise


def sentences(text: str) -> list[str]:
    """Whole sentences of at least five words, in order, each once."""
    found = [part.strip() for line in text.split("\n\n") for part in line.split(". ")]
    kept = [part.rstrip(".") + "." for part in found if len(part.split()) >= 5 and '"' not in part]
    return list(dict.fromkeys(kept))
