"""Quality of experience (QoE) of a text stream: what a reader was shown, against what a reader expects.

A reader expects the first token `ttft_s` after asking and then `tds` tokens per second (token delivery speed), which is
how fast he reads: the expected token delivery timeline (TDT). What comes faster than that waits in a buffer at the
client, whose pacer shows tokens no faster than `tds`: the digest curve of the actual TDT. The quality is the area below
the digest curve over the area below the expected one, at most 1. It is 1 for a stream that is never behind, whatever is
ahead of time; a late start and a slow stream cost area in proportion to how much, how long and how early.

Both areas end when the later of the two timelines has shown its last token for one token's time, so that the last token
counts, too. With n tokens that all come D seconds late the quality is 1 / (1 + 2 D tds / (n + 1)).

Everything here takes O(1) memory and time per piece of news: the digest curve is arithmetic wherever it is ahead.
Source: Liu et al., Andes, arXiv 2404.16283 (v1), section 3 (definition), section 5 (the client's pacer).
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil, floor, inf
from typing import NamedTuple

from penstock.base.errors import InputError

MAX_TTFT_S = 86_400.0
MAX_TDS = 1e6


class Expected(NamedTuple):
    """What a reader expects. Units: `ttft_s` seconds from asking to the first token, `tds` tokens per second after it.

    The defaults are a reader of chats: 4.8 tokens/s is how fast people read (Andes, section 2.2).
    """

    ttft_s: float = 1.0
    tds: float = 4.8

    def check(self) -> Expected:
        """Itself. Raises InputError naming the field that no reader can mean."""
        if not 0 <= self.ttft_s <= MAX_TTFT_S:
            raise InputError(
                f"expected_ttft_s must be from 0 to {MAX_TTFT_S:,.0f} seconds, not {self.ttft_s:g}",
                param="expected_ttft_s",
            )
        if not 0 < self.tds <= MAX_TDS:
            raise InputError(
                f"expected_tds must be above 0 and at most {MAX_TDS:,.0f} tokens per second, not {self.tds:g}",
                param="expected_tds",
            )
        return self


def expected_of(ttft_s: float | None, tds: float | None, default: Expected) -> Expected:
    """Of a request, which may leave out either."""
    return Expected(default.ttft_s if ttft_s is None else ttft_s, default.tds if tds is None else tds)


class TokenPacer:
    """A client's buffer: tokens are shown in order, as soon as they are there but no faster than `tds` per second.

    For clients that show a stream as it is read: `push` every token when it comes, show it when it says.
    """

    def __init__(self, tds: float) -> None:
        self.gap_s = 1 / tds
        self.next_s = -inf
        """Before then, nothing more is shown."""

    def push(self, now_s: float) -> float:
        """A token has come; when it is to be shown, in the same clock's seconds."""
        shown_s = max(now_s, self.next_s)
        self.next_s = shown_s + self.gap_s
        return shown_s

    def ahead_s(self, now_s: float) -> float:
        """Seconds for which there is something to show without another token."""
        return max(0.0, self.next_s - now_s)


class Delivery:
    """The two timelines of one stream so far. Times: seconds on the caller's clock; `asked_s`: when it was asked for.

    Kept relative to the time at which the first token is expected, so that sums stay exact for clocks that began long
    ago. News must come in order of time.
    """

    __slots__ = ("expects_s", "gap_s", "last_s", "num", "shown_s")

    def __init__(self, asked_s: float, expected: Expected) -> None:
        self.expects_s = asked_s + expected.ttft_s
        self.gap_s = 1 / expected.tds
        self.num = 0
        self.last_s = -inf
        """When the newest token is shown (relative)."""
        self.shown_s = 0.0
        """The sum of those times over all tokens."""

    def take(self, num: int, now_s: float) -> None:
        """`num` > 0 tokens have come at once."""
        gap_s = self.gap_s
        first = max(now_s - self.expects_s, self.last_s + gap_s)
        self.last_s = first + (num - 1) * gap_s
        self.shown_s += num * first + gap_s * (num * (num - 1) / 2)
        self.num += num

    def ahead_s(self, now_s: float) -> float:
        """Seconds from `now_s` for which the reader has something to read; below 0: for so long he has had nothing."""
        return self.last_s + self.gap_s - (now_s - self.expects_s)

    @property
    def quality(self) -> float:
        """Of a stream that has ended, 0 to 1; 0 if no token ever came."""
        n, gap_s = self.num, self.gap_s
        if not n:
            return 0.0
        expected = gap_s * (n * (n - 1) / 2)
        end = max(self.last_s, (n - 1) * gap_s) + gap_s
        return min(1.0, (n * end - self.shown_s) / (n * end - expected))

    def area(self, until_s: float) -> float:
        """Token-seconds that the reader has been shown by then, from what has come; `until_s` is not before the last
        news."""
        x, num, shown = until_s - self.expects_s, self.num, self.shown_s
        if self.last_s > x:  # the newest ones are shown later; they are spaced evenly, since they have been waiting
            later = min(num, ceil((self.last_s - x) / self.gap_s))
            num -= later
            shown -= later * self.last_s - self.gap_s * (later * (later - 1) / 2)
        return num * x - shown

    def more_area(self, from_s: float, until_s: float, rate: float) -> float:
        """Token-seconds by `until_s` of tokens that would still come, from `from_s` on, `rate` of them per second."""
        first = max(from_s - self.expects_s + 1 / rate, self.last_s + self.gap_s)
        return _stairs(until_s - self.expects_s - first, max(self.gap_s, 1 / rate))

    def expected_area(self, until_s: float) -> float:
        """Token-seconds that the reader expects to have been shown by then, of an answer without an end."""
        return _stairs(until_s - self.expects_s, self.gap_s)


def _stairs(seconds: float, gap_s: float) -> float:
    """Area below one token at once and another every `gap_s` seconds, after so many seconds."""
    if seconds <= 0:
        return 0.0
    n = floor(seconds / gap_s) + 1
    return n * seconds - gap_s * (n * (n - 1) / 2)


def quality(times_s: Iterable[float], expected: Expected) -> float:
    """Of an answer whose tokens came at these times, in seconds from when it was asked for; 0 to 1."""
    delivery = Delivery(0.0, expected)
    for time_s in times_s:
        delivery.take(1, time_s)
    return delivery.quality
