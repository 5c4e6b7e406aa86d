"""Which of several answers a text gives: by its letter, or by the answer itself. Only what is said once is said."""

from __future__ import annotations

import re
from collections.abc import Sequence

from penstock.eval.numbers import boxed

_SAYS = re.compile(r"\b(?:answer|option|choice)\b(?:\s+\w+){0,3}?\s*(?:\bis\b|\bwould be\b|:)[\s:]*", re.IGNORECASE)
_DECORATION = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}|[*_`$\"]+|\\[()\[\]]")


def chosen(text: str, choices: Sequence[str], texts: Sequence[str] = ()) -> int | None:
    """The index of the answer, or None if none is given. `choices`: letters such as `(A)` or `A`, or the answers
    themselves; `texts`: what letters stand for.

    Looked at in turn: the last `\\boxed{}`, what stands behind the last "the answer is", the last sentence that names
    one. A place that names several gives none.
    """
    for part in _places(text):
        found = _named(part, choices, texts)
        if len(found) == 1:
            return found.pop()
        if found:
            return None
    return None


def _places(text: str) -> list[str]:
    inner = boxed(text)
    plain = _DECORATION.sub(lambda m: m[1] or "", text).strip()
    out = [] if inner is None else [_DECORATION.sub(lambda m: m[1] or "", inner)]
    said = list(_SAYS.finditer(plain))
    if said:
        out.append(re.split(r"\n|\.(?=\s|$)|;", plain[said[-1].end() :].lstrip(), maxsplit=1)[0])
    sentences = [part.strip() for part in re.split(r"\n|(?<=[a-z0-9)])\.(?=\s|$)", plain) if part.strip()]
    return [*out, *reversed(sentences)]


def _named(part: str, choices: Sequence[str], texts: Sequence[str]) -> set[int]:
    """Letters first: an answer's text may name another's letter, not the other way round."""
    if all(re.fullmatch(r"\(?[A-Z]\)?", choice) for choice in choices):
        found = {i for i, choice in enumerate(choices) if _letter(choice.strip("()"), part)}
        return found or _words(part, texts)
    return _words(part, choices)


def _letter(letter: str, part: str) -> bool:
    """In brackets or with a mark behind it anywhere; alone where nothing else is said."""
    marked = rf"\({letter}\)|(?<![\w']){letter}(?:\)|[.:](?:\s|$))|\b[Oo]ption\s+{letter}\b"
    return re.search(marked, part) is not None or re.fullmatch(rf"{letter}[.)]?", part.strip()) is not None


def _words(part: str, answers: Sequence[str]) -> set[int]:
    """As whole words, in any case of letters; one that is part of another one named does not count."""
    spans: dict[int, tuple[int, int]] = {}
    for i, answer in enumerate(answers):
        words = answer.strip().rstrip(".")
        matches = list(re.finditer(rf"(?<![\w.-]){re.escape(words)}(?!\w)", part, re.IGNORECASE)) if words else []
        if matches:
            spans[i] = matches[-1].span()
    return {
        i for i, (a, b) in spans.items()
        if not any(j != i and c <= a and b <= d and d - c > b - a for j, (c, d) in spans.items())
    }  # fmt: skip
