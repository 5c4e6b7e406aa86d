"""The exercises that models are trained on. They live in the package, because `penstock eval` asks their test half."""

from __future__ import annotations

from penstock.eval.exercises import (
    SKILLS,
    WEIGHTS,
    Exercise,
    Noise,
    Piece,
    Split,
    Words,
    arithmetic,
    code,
    copying,
    exercise,
    hidden,
    lookup,
    needle,
    number,
    passage,
    small_json,
    two_hop,
    words,
)

__all__ = [
    "SKILLS", "WEIGHTS", "Exercise", "Noise", "Piece", "Split", "Words", "arithmetic", "code", "copying", "exercise",
    "hidden", "lookup", "needle", "number", "passage", "small_json", "two_hop", "words",
]  # fmt: skip
