"""How free text is compared with what was expected; every rule in one place, with its source.

`normal`, `exact` and `f1` are SQuAD's (Rajpurkar et al., arXiv 1606.05250, section 6.1): lower case, without
punctuation, without the words a, an and the, words one space apart; F1 counts common words with their multiplicity.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_MARKS = r"[\"'`*]*"
_SENTENCE = re.compile(r"\.(?!\d)|\n|(?<=[A-Za-z])!(?=\s|$)")
_OPENING = re.compile(r"(?:sure|certainly|of course|absolutely|okay|ok|great)(?: thing)?,?|[^\n]*:\W*", re.IGNORECASE)
_BEFORE_ANSWERS = frozenset(
    ("is", "was", "are", "were", "on", "in", "at", "to", "by", "with", "from", "found", "called", "named")
)
_CJK = re.compile(r"([\u3400-\u9fff])")


def said(text: str) -> str:
    """A short answer: up to its first full stop or end of line, without spaces around it. What assistants open with
    ("Sure!", "Here is the answer:") is no answer, if another line follows."""
    parts = [part.strip() for part in _SENTENCE.split(text.strip())]
    return next((part for part in parts if part and not _OPENING.fullmatch(part)), parts[0])


def told(text: str, value: str) -> float:
    """1 if the short answer is `value`, or a sentence that ends with it behind is, are, was, were, `=` or `:`.

    Assistants answer in sentences. Quotes and asterisks around the value do not count.
    """
    ending = rf"(?:^|(?:\b(?:is|are|was|were)|=|:)\s*){_MARKS}{re.escape(value)}{_MARKS}$"
    return float(re.search(ending, said(text)) is not None)


def normal(text: str) -> str:
    """As SQuAD compares it."""
    plain = re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION))
    return " ".join(plain.split())


def exact(text: str, accepted: Iterable[str]) -> float:
    """1 if the whole text is one of the answers, normalised."""
    return float(normal(text) in {normal(answer) for answer in accepted})


def holds(text: str, accepted: Iterable[str]) -> float:
    """1 if one of the answers stands in the text, both normalised, as whole words."""
    whole = f" {normal(text)} "
    return float(any(f" {normal(answer)} " in whole for answer in accepted))


def stands(text: str, value: str) -> float:
    """1 if `value` itself stands in the text, not as a part of a longer word or number."""
    return float(re.search(rf"(?<!\w){re.escape(value)}(?!\w)", text) is not None)


def f1(text: str, accepted: Iterable[str]) -> float:
    """The best F1 of words over the answers. Chinese characters count as a word each."""
    return max(_f1(_words(text), _words(answer)) for answer in accepted)


def rests(text: str, question: str) -> list[str]:
    """What of a sentence may be the answer: what stands behind first words that are all of the question ("Tom found"),
    and behind its last *is*, *on*, *to* and their like; nothing of a sentence that names several or denies."""
    words, known = normal(text).split(), set(normal(question).split())
    if not question or {"or", "not", "nor"} & set(words):
        return []
    most = next((i for i, word in enumerate(words) if word not in known), len(words))
    last = max((i for i, word in enumerate(words) if word in _BEFORE_ANSWERS), default=-1) + 1
    return [" ".join(words[i:]) for i in {*range(1, most + 1), last} - {0} if i < len(words)]


def rouge_l(text: str, accepted: Iterable[str]) -> float:
    """The best F1 of the longest common subsequence of words (Lin, ROUGE, 2004, with equal weights)."""
    return max(_rouge(_words(text), _words(answer)) for answer in accepted)


def similarity(text: str, other: str) -> float:
    """2 M / T: characters in matching blocks over all of both (Ratcliff and Obershelp, 1988); 1 for equal texts."""
    return SequenceMatcher(None, text, other, autojunk=False).ratio()


def whole_numbers(text: str) -> list[str]:
    return re.findall(r"\d+", text)


def _words(text: str) -> list[str]:
    return normal(_CJK.sub(r" \1 ", text)).split()


def _f1(words: list[str], expected: list[str]) -> float:
    if not words or not expected:
        return float(words == expected)
    common = sum((Counter(words) & Counter(expected)).values())
    return 2 * common / (len(words) + len(expected))


def _rouge(words: list[str], expected: list[str]) -> float:
    if not words or not expected:
        return float(words == expected)
    return 2 * num_in_order(words, expected) / (len(words) + len(expected))


def num_in_order(words: Sequence[str], others: Sequence[str]) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(others) + 1)
    for word in words:
        diagonal = 0
        for i, other in enumerate(others, 1):
            diagonal, row[i] = row[i], diagonal + 1 if word == other else max(row[i], row[i - 1])
    return row[-1]
