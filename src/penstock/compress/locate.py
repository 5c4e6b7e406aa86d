"""Which tokens a stretch of text is made of."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from itertools import accumulate

from penstock.base.errors import InputError
from penstock.core.compression import Span


def texts_of(pieces: Sequence[bytes]) -> list[str]:
    """What each token spells; broken characters are replaced."""
    return [piece.decode("utf-8", "replace") for piece in pieces]


def find_once(pieces: Sequence[bytes], text: str, param: str) -> Span:
    """The tokens that lie wholly within `text`, which must stand once in what `pieces` spell. Raises InputError."""
    whole, wanted = b"".join(pieces), text.encode("utf-8", "replace")
    at = whole.find(wanted)
    if at < 0:
        raise InputError(f"{param} does not stand in the prompt; it must be a part of it, word for word", param=param)
    if whole.find(wanted, at + 1) >= 0:
        raise InputError(f"{param} stands in the prompt more than once; give a longer part of it", param=param)
    return tokens_within(pieces, [(at, at + len(wanted))])[0]


def tokens_within(pieces: Sequence[bytes], stretches: Sequence[Span]) -> list[Span]:
    """For each stretch of bytes the tokens that lie wholly within it; (n, n) where there are none."""
    ends = list(accumulate(map(len, pieces)))
    starts = [0, *ends[:-1]] if ends else ends
    out = []
    for a, b in stretches:
        first = bisect_left(starts, a)
        out.append((first, max(first, bisect_right(ends, b))))
    return out


def compressible(spans: Sequence[Span], ids: Sequence[int], fixed: Collection[int], keep_last: int) -> list[Span]:
    """`spans` without tokens of `fixed` and without the last `keep_last`; ascending, none empty."""
    places = sorted({i for span in spans for i in range(*span) if ids[i] not in fixed})
    places = places[: max(0, len(places) - keep_last)]
    out: list[Span] = []
    for i in places:
        if out and out[-1][1] == i:
            out[-1] = (out[-1][0], i + 1)
        else:
            out.append((i, i + 1))
    return out
