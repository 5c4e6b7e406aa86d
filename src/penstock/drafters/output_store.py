"""Outputs of ended requests, and where in them any two tokens follow each other."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

BYTES_PER_TOKEN = 200
"""What a kept token counts as, its place in the index included; measured 67 ... 145, most where pairs come twice."""
_SHIFT = 32
_LOW = (1 << _SHIFT) - 1


class Match(NamedTuple):
    """An earlier occurrence: the last `length` tokens stand before tokens[end], too. `key`: whose tokens."""

    length: int
    tokens: Sequence[int]
    end: int
    key: int


class PairIndex:
    """Places (any numbers) by the two tokens that stand before them, in the order in which they were added."""

    def __init__(self) -> None:
        self._places: dict[int, int | dict[int, None]] = {}  # a pair -> its only place, or all of them

    def __len__(self) -> int:
        return len(self._places)

    def add(self, first: int, second: int, place: int) -> None:
        pair = first << _SHIFT | second
        there = self._places.setdefault(pair, place)
        if isinstance(there, dict):
            there[place] = None
        elif there != place:
            self._places[pair] = {there: None, place: None}

    def discard(self, first: int, second: int, place: int) -> None:
        pair = first << _SHIFT | second
        there = self._places[pair]
        if isinstance(there, int) or len(there) == 1:
            del self._places[pair]
        else:
            del there[place]

    def newest(self, first: int, second: int, limit: int) -> list[int]:
        """At most `limit` places, newest first."""
        there = self._places.get(first << _SHIFT | second)
        if there is None:
            return []
        return [there] if isinstance(there, int) else list(islice(reversed(there), limit))


class _Output(NamedTuple):
    key: int
    number: int
    tokens: array[int]
    first: int


class OutputStore:
    """At most `max_requests` outputs and `max_bytes` bytes; what was useful longest ago goes first.

    In place of a suffix tree, each pair of tokens knows its places: counting what follows a suffix of n tokens asks
    for the places of its last two, newest first, and compares the tokens before them.
    """

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self._max_requests, self._max_tokens = max_requests, max_bytes // BYTES_PER_TOKEN
        self._outputs: OrderedDict[int, _Output] = OrderedDict()
        self._numbered: dict[int, _Output] = {}
        self._index = PairIndex()
        self._next = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._outputs)

    @property
    def num_bytes(self) -> int:
        return self.num_tokens * BYTES_PER_TOKEN

    @property
    def num_pairs(self) -> int:
        return len(self._index)

    def add(self, key: int, tokens: Sequence[int], first: int) -> None:
        """Keep the output tokens[first:] of request `key`; what is before it is found, but never drafted.

        Of an output that is larger than the store its end is kept.
        """
        self.discard(key)
        cut = max(0, len(tokens) - self._max_tokens)
        tokens, first = array("i", tokens[cut:]), max(first - cut, 0)
        if self._max_requests == 0 or len(tokens) <= max(first, 2):
            return
        while self._outputs and (
            len(self._outputs) >= self._max_requests or self.num_tokens + len(tokens) > self._max_tokens
        ):
            self.discard(next(iter(self._outputs)))
        self._next += 1
        output = self._outputs[key] = self._numbered[self._next] = _Output(key, self._next, tokens, first)
        self.num_tokens += len(tokens)
        for first, second, place in _pairs(output):
            self._index.add(first, second, place)

    def discard(self, key: int) -> None:
        """Forget a request's output, if there is one."""
        output = self._outputs.pop(key, None)
        if output is None:
            return
        del self._numbered[output.number]
        self.num_tokens -= len(output.tokens)
        for first, second, place in _pairs(output):
            self._index.discard(first, second, place)

    def touch(self, key: int) -> None:
        """It was useful: others go before it."""
        if key in self._outputs:
            self._outputs.move_to_end(key)

    def find(self, tail: Sequence[int], limit: int) -> list[Match]:
        """Where the last two tokens or more of `tail` occur: the newest `limit` places, newest first."""
        if len(tail) < 2:
            return []
        found: list[Match] = []
        for place in self._index.newest(tail[-2], tail[-1], limit):
            output, end = self._numbered[place >> _SHIFT], place & _LOW
            found.append(Match(common(output.tokens, end, tail), output.tokens, end, output.key))
        return found


def common(tokens: Sequence[int], end: int, tail: Sequence[int]) -> int:
    """How many of the last tokens of `tail` stand before tokens[end] too, where the last two are known to."""
    length, most = 2, min(end, len(tail))
    while length < most and tokens[end - 1 - length] == tail[-1 - length]:
        length += 1
    return length


def _pairs(output: _Output) -> Iterator[tuple[int, int, int]]:
    """(two tokens, place) for every place that a token of the output follows."""
    tokens, number = output.tokens, output.number << _SHIFT
    for end in range(max(output.first, 2), len(tokens)):
        yield tokens[end - 2], tokens[end - 1], number | end
