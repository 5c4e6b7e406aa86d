"""Which beginnings of prompts the engine has probably in its prefix cache: those that it has computed lately.

A guess from this side of the engine, which decides alone: as many pieces of texts are remembered as its memory holds,
those that were last used longest ago are forgotten first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

PIECE = 64
"""Tokens."""


class SeenPrefixes:
    """`kv_tokens`: what the engine's memory holds; 0: it keeps nothing."""

    def __init__(self, kv_tokens: int) -> None:
        self._most = kv_tokens // PIECE
        self._known: OrderedDict[int, None] = OrderedDict()

    def add(self, namespace: bytes, tokens: Sequence[int]) -> None:
        """These have been computed."""
        if self._most:
            for key in _keys(namespace, tokens):
                self._known[key] = None
                self._known.move_to_end(key)
            while len(self._known) > self._most:
                self._known.popitem(last=False)

    def num_known(self, namespace: bytes, tokens: Sequence[int]) -> int:
        """How many of the first tokens have been computed lately: whole pieces, never all tokens."""
        found = 0
        if self._known:
            for key in _keys(namespace, tokens):
                if key not in self._known:
                    break
                found += PIECE
        return min(found, max(0, len(tokens) - 1))


def _keys(namespace: bytes, tokens: Sequence[int]) -> Iterator[int]:
    key = hash(namespace)
    for start in range(0, len(tokens) - PIECE + 1, PIECE):
        key = hash((key, tuple(tokens[start : start + PIECE])))
        yield key
