"""User text can never open a role: breaking up control-token literals on their way through a chat template.

Before rendering, a private mark is put inside every control-token literal of a client's text, and at its edge where
text that is joined on later could complete one. After rendering, the text is cut at those marks that lie within a
literal and the pieces are encoded apart; all other marks are taken out. No piece holds a whole literal that a client
wrote, whatever the template did with the text in between (joined, sliced, trimmed, dropped).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

from penstock.base.errors import InputError
from penstock.text.encoding import PIECE_CHARS, Steps, bounded, checked
from penstock.text.messages import strings
from penstock.text.tokenizer import Tokenizer

MAX_LITERALS = 1 << 16
"""Literals in one conversation; more are an attack on the time it takes to encode them apart."""

_PRIVATE = re.compile("[\ue000-\uf8ff]|\\\\u([ef][0-9a-f]{3})")


_STRIDE = 1 << 16
"""Characters that are searched in one go: a search keeps the interpreter's lock until it finds something."""


def _matches(pattern: re.Pattern[str], text: str, reach: int) -> Iterator[re.Match[str]]:
    """All matches, as `finditer` finds them; none looks at more than `reach` characters, and none is longer."""
    at = 0
    for stop in range(_STRIDE, len(text) + _STRIDE, _STRIDE):
        for match in pattern.finditer(text, at, stop + reach):
            if match.start() >= stop:
                break
            yield match
            at = match.end()
        at = max(at, stop)


def unused_marks(texts: Iterable[str], count: int) -> list[str]:
    """`count` private-use characters that neither stand in `texts` nor are written there as a JSON escape."""
    used: set[str] = set()
    for text in texts:
        used |= {chr(int(m[1], 16)) if m[1] else m[0] for m in _matches(_PRIVATE, text, 6)}
    free = [c for c in map(chr, range(0xE000, 0xF900)) if c not in used]
    if len(free) < count:
        raise InputError("the messages use every private character of Unicode", param="messages")
    return free[:count]


class _Matcher:
    """Finds literals. `starts` costs one step per character of text, however many literals there are."""

    def __init__(self, literals: frozenset[str]) -> None:
        self.literals = literals
        self.longest = max(map(len, literals), default=0)
        self.heads = frozenset(t[:n] for t in literals for n in range(1, len(t)))
        self.tails = frozenset(t[n:] for t in literals for n in range(1, len(t)))
        groups = [f"{re.escape(first)}(?={_tree(rest)})" for first, rest in _by_first(literals)]
        self.pattern = re.compile("|".join(groups)) if groups else None

    def starts(self, text: str) -> list[int]:
        return [] if self.pattern is None else [m.start() for m in _matches(self.pattern, text, self.longest)]

    def break_up(self, text: str, mark: str, framed: bool) -> str:
        """`text` with `mark` inside each literal, and at its ends where a literal could be completed.

        `framed`: also if it could be completed at both ends at once.
        """
        cuts = [start + 1 for start in self.starts(text)]
        if any(text[:n] in self.tails for n in range(1, min(self.longest, len(text) + 1))):
            cuts.append(0)
        if any(text[-n:] in self.heads for n in range(1, min(self.longest, len(text) + 1))):
            cuts.append(len(text))
        core = text.strip() if framed else ""
        if core and len(core) < self.longest and any(core in literal for literal in self.literals):
            start = text.index(core)
            cuts += [start, start + len(core)]
        return text if not cuts else mark.join(pieces(text, sorted(set(cuts))))

    def spans(self, text: str, cut: int) -> bool:
        """Whether a literal of `text` begins before `cut` and ends behind it."""
        for start in range(cut - 1, max(cut - self.longest, -1), -1):
            if self.pattern is not None and self.pattern.match(text, start):
                longest = min(self.longest, len(text) - start)
                if any(text[start : start + n] in self.literals for n in range(cut - start + 1, longest + 1)):
                    return True
        return False


@lru_cache(maxsize=64)
def _matcher(literals: frozenset[str]) -> _Matcher:
    return _Matcher(literals)


class Breaker:
    """Breaks up the literals of one conversation.

    `variables` is what the template will read; `markers` are literals of control tokens beside the special ones. An
    assistant's messages may hold those of them that are not `role_markers`.
    """

    def __init__(
        self, tokenizer: Tokenizer, markers: frozenset[str], role_markers: frozenset[str], template: str,
        variables: dict[str, Any],
    ) -> None:  # fmt: skip
        self._special = _matcher(tokenizer.special_literals | role_markers)
        self._all = _matcher(tokenizer.special_literals | markers)
        self._tokenizer = tokenizer
        self._variables = variables
        self.mark = unused_marks([template, *strings(variables)], 1)[0]

    def broken(self) -> dict[str, Any]:
        """The variables, with marks. Raises: InputError for literals that cannot be broken up."""
        rest = {name: value for name, value in self._variables.items() if name != "messages"}
        out: dict[str, Any] = {name: self._walk(value, self._all, name) for name, value in rest.items()}
        out["messages"] = [
            self._walk(message, self._special if message["role"] == "assistant" else self._all, f"messages[{i}]")
            # A role is a name that was checked; some templates make the token of it: '<|' + role + '|>'.
            | {"role": message["role"]}
            for i, message in enumerate(self._variables["messages"])
        ]
        return out

    def cuts(self, marked: str) -> tuple[str, list[int]]:
        """The rendered text without marks, and where it has to be cut."""
        # A template may print text with everything but ASCII escaped.
        marked = marked.replace(json.dumps(self.mark)[1:-1], self.mark)
        parts = marked.split(self.mark)
        text, at = "".join(parts), 0
        cuts: list[int] = []
        for part in parts[:-1]:
            at += len(part)
            if self._all.spans(text, at) and (not cuts or cuts[-1] != at):
                cuts.append(at)
        if len(cuts) > MAX_LITERALS:
            raise InputError(f"the messages hold more than {MAX_LITERALS} special tokens", param="messages")
        return text, cuts

    def _walk(self, value: Any, matcher: _Matcher, where: str, key: str = "") -> Any:
        if isinstance(value, str):
            # Templates compare other short strings (types, for example) with their own words.
            return self._text(value, matcher, where, framed=key in ("content", "name", "text"))
        if isinstance(value, dict):
            return {self._text(k, matcher, where): self._walk(v, matcher, where, k) for k, v in value.items()}
        if isinstance(value, list):
            return [self._walk(v, matcher, where) for v in value]
        return value

    def _text(self, text: str, matcher: _Matcher, where: str, framed: bool = False) -> str:
        hidden = [t for t in self._tokenizer.hidden_literals(text) if t in matcher.literals]
        if hidden or any(len(t) == 1 and t in text for t in matcher.literals):
            raise InputError(f"{where} holds characters that this model reads as a special token", param=where)
        return matcher.break_up(text, self.mark, framed)


def encode_broken(tokenizer: Tokenizer, breaker: Breaker, marked: str, most: int) -> Steps[list[int]]:
    """Ids of a text rendered from `breaker.broken()`; control tokens in it are the template's own.

    Raises: as `text.encoding.encode_steps`.
    """
    text, cuts = breaker.cuts(marked)
    yield from bounded(tokenizer, text, most)
    ids: list[int] = []
    left = 0
    for i, piece in enumerate(pieces(text, cuts)):
        if left < len(piece) or i == 0:
            left = max(len(piece), PIECE_CHARS)
            yield left
        left -= len(piece)
        ids += tokenizer.encode_inner(piece) if i else tokenizer.encode(piece, add_special_tokens=False)
    return checked(ids, most)


def pieces(text: str, cuts: list[int]) -> Iterator[str]:
    """`text` cut at ascending positions."""
    at = 0
    for cut in cuts:
        yield text[at:cut]
        at = cut
    yield text[at:]


def _by_first(words: Iterable[str]) -> list[tuple[str, list[str]]]:
    groups: dict[str, list[str]] = {}
    for word in sorted(words):
        groups.setdefault(word[0], []).append(word[1:])
    return list(groups.items())


def _tree(words: list[str]) -> str:
    """A pattern that matches where one of `words` begins, sharing common prefixes (a word ends the search)."""
    low, high = min(words), max(words)
    prefix = low[
        : next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))
    ]
    rest = [word[len(prefix) :] for word in words]
    if "" in rest:
        return re.escape(prefix)
    branches = [re.escape(first) + _tree(tails) for first, tails in _by_first(rest)]
    return f"{re.escape(prefix)}(?:{'|'.join(branches)})"
