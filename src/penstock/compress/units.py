"""Where words, phrases, sentences and paragraphs begin, seen from the text of tokens. Nothing is parsed.

A word begins at a token with white space before it. A phrase is a run of words that ends at punctuation, or where a
stop word follows a word that is none ("in the old house | was found | by Ann"): it stands for the noun phrases of
Selective Context, whose chunker we do not have. Stop words are English; elsewhere punctuation alone divides. A sentence
ends at a full stop, question or exclamation mark with white space behind it, and at every line's end; a paragraph at a
blank line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.core.compression import Span

_ENDS = (".", "!", "?", "\u3002", "\uff01", "\uff1f")
_PUNCTUATION = ".,;:!?()[]{}\"'\u2014\u3001\u3002\uff0c\uff01\uff1f\uff1b\uff1a"
_CLOSING = "\"')]}\u201d\u2019\u300d"
_WORDS = """
    a an the this that these those some any each every no and or but nor so yet if then than because while when where
    who whom whose which what how as of at by for with about against between into through during before after above
    below to from up down in out on off over under again i me my we our you your he him his she her it its they them
    their is am are was were be been being have has had do does did will would shall should can could may might must not
"""
_STOP_WORDS = frozenset(_WORDS.split())


def tokens(texts: Sequence[str], span: Span) -> list[Span]:
    return [(i, i + 1) for i in range(*span)]


def words(texts: Sequence[str], span: Span) -> list[Span]:
    def begins(i: int) -> bool:
        before = texts[i - 1]
        ended = before[-1:].isspace() and (bool(before.strip()) or "\n" in before)  # a lone blank belongs to its word
        return ended or texts[i][:1].isspace()

    return _cut(span, begins)


def phrases(texts: Sequence[str], span: Span) -> list[Span]:
    found = words(texts, span)
    kinds = [_kind("".join(texts[a:b])) for a, b in found]
    starts = {
        found[n][0] for n in range(1, len(found)) if kinds[n - 1][1] or (kinds[n][0] and not kinds[n - 1][0])
    }  # fmt: skip
    return _cut(span, starts.__contains__)


def sentences(texts: Sequence[str], span: Span) -> list[Span]:
    def begins(i: int) -> bool:
        before = texts[i - 1]
        if "\n" in before:
            return "\n" not in texts[i]
        ended = before.rstrip(_CLOSING) or (texts[i - 2] if i - 2 >= span[0] else "")
        return ended.rstrip(_CLOSING).endswith(_ENDS) and texts[i][:1].isspace() and "\n" not in texts[i]

    return _cut(span, begins)


def paragraphs(texts: Sequence[str], span: Span) -> list[Span]:
    starts, lines = set(), 0
    for i in range(*span):
        if texts[i].strip() and lines > 1:
            starts.add(i)
        blank = not texts[i].strip()
        lines = texts[i].count("\n") + (lines if blank else 0)
    return _cut(span, starts.__contains__)


UNITS: dict[str, Callable[[Sequence[str], Span], list[Span]]] = {
    "token": tokens, "phrase": phrases, "sentence": sentences, "paragraph": paragraphs,
}  # fmt: skip


def _cut(span: Span, begins: Callable[[int], bool]) -> list[Span]:
    """`span` cut before every place that `begins` something."""
    starts = [span[0], *(i for i in range(span[0] + 1, span[1]) if begins(i))]
    return list(zip(starts, [*starts[1:], span[1]], strict=True))


def _kind(word: str) -> tuple[bool, bool]:
    """(is it a stop word, does a phrase end behind it)."""
    bare = word.strip()
    return bare.strip(_PUNCTUATION).lower() in _STOP_WORDS, bare[-1:] in _PUNCTUATION or "\n" in word
