"""What blocks hold, for events that tell tokens: a router finds a block by its tokens and by the block that it follows,
in whatever medium it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

ON_THE_WAY = 4096
"""Blocks that are nowhere and may still arrive in a store; of more, the oldest are forgotten."""


class TextRun(NamedTuple):
    """Blocks each of which follows the one before, the first one `parent` (None: it begins a text)."""

    hashes: list[int]
    parent: int | None
    tokens: list[int]


class _Text:
    __slots__ = ("parent", "places", "tokens")

    def __init__(self, parent: int | None, tokens: Sequence[int]) -> None:
        self.parent, self.tokens, self.places = parent, tokens, 0


class BlockTexts:
    """Integers only. A text is kept as long as its block is anywhere, and then for a while."""

    def __init__(self) -> None:
        self._texts: dict[int, _Text] = {}
        self._away: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._texts)

    def learn(self, run: TextRun) -> None:
        """What blocks on the device hold, whose place there counts."""
        parent, size = run.parent, len(run.tokens) // len(run.hashes)
        for number, name in enumerate(run.hashes):
            if name not in self._texts:
                self._texts[name] = _Text(parent, run.tokens[number * size : (number + 1) * size])
            parent = name
        self.placed(run.hashes)

    def placed(self, hashes: Iterable[int]) -> None:
        """Each is in one place more."""
        for name in hashes:
            if (text := self._texts.get(name)) is not None:
                text.places += 1
                self._away.pop(name, None)

    def removed(self, hashes: Iterable[int]) -> None:
        """Each is in one place less."""
        for name in hashes:
            if (text := self._texts.get(name)) is not None:
                text.places -= 1
                if not text.places:
                    self._away[name] = None
        while len(self._away) > ON_THE_WAY:
            name = next(iter(self._away))
            del self._away[name], self._texts[name]

    def forget(self) -> None:
        """What is nowhere will not come back."""
        for name in self._away:
            del self._texts[name]
        self._away.clear()

    def knows(self, name: int) -> bool:
        return name in self._texts

    def runs(self, hashes: Sequence[int]) -> Iterator[TextRun]:
        """Of those that are known, in as few runs as they make; whoever follows another comes after it."""
        waiting = {name: text for name in hashes if (text := self._texts.get(name)) is not None}
        for last in list(waiting):
            at: int | None = last
            names, tokens = [], list[Sequence[int]]()
            while at is not None and (text := waiting.pop(at, None)) is not None:
                names.append(at)
                tokens.append(text.tokens)
                at = text.parent
            if names:
                yield TextRun(names[::-1], at, [token for piece in reversed(tokens) for token in piece])
