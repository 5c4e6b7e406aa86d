"""From time stamps of tokens to figures. One way for all engines, so that none is counted by its own rules."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

Stamps = Sequence[tuple[float, int]]
"""One request: (seconds since it was sent, tokens so far) whenever tokens came. Two of them, where an
engine only knows the times of the first and the last token."""

FIGURES = {
    "W0": ("decode_tps", "ttft_s"),
    "W1": ("decode_tps", "ttft_s", "itl_s"),
    "W2": ("ttft_s", "prefill_tps"),
    "W3": ("output_tps", "total_tps", "wall_s"),
    "W4": ("wall_s", "output_tps"),
}
"""What a report shows of a workload; the first is its headline."""
TITLES = {
    "decode_tps": "decode, tokens/s", "ttft_s": "first token", "itl_s": "between tokens",
    "prefill_tps": "prefill, tokens/s", "output_tps": "generated, tokens/s", "total_tps": "all tokens/s",
    "wall_s": "wall",
}  # fmt: skip


def is_rate(figure: str) -> bool:
    """Whether more is better."""
    return figure.endswith("_tps")


def ttft_s(stamps: Stamps) -> float:
    return stamps[0][0]


def decode_tps(stamps: Stamps) -> float | None:
    """Tokens after the first piece over the seconds from the first piece to the last. None if there is one piece."""
    (first_s, first), (last_s, last) = stamps[0], stamps[-1]
    return (last - first) / (last_s - first_s) if last > first and last_s > first_s else None


def together_tps(stamps: Sequence[Stamps]) -> float | None:
    """Tokens of all requests over the seconds in which all of them decode: from the last first token to the first last
    one. None if there is no such time. Between two stamps tokens come evenly."""
    begin, end = max(s[0][0] for s in stamps), min(s[-1][0] for s in stamps)
    tokens = sum(_by(s, end) - _by(s, begin) for s in stamps)
    return tokens / (end - begin) if end > begin else None


def _by(stamps: Stamps, at_s: float) -> float:
    """How many tokens a request had at a moment."""
    for (from_s, before), (to_s, after) in itertools.pairwise(stamps):
        if at_s <= to_s:
            return before + (after - before) * (at_s - from_s) / (to_s - from_s) if to_s > from_s else after
    return stamps[-1][1]


def itl_s(stamps: Stamps) -> float | None:
    """Median time between tokens; a piece of several tokens counts its gap once for each, in equal parts."""
    gaps: list[float] = []
    for (from_s, before), (to_s, after) in itertools.pairwise(stamps):
        if after > before:
            gaps += [(to_s - from_s) / (after - before)] * (after - before)
    return statistics.median(gaps) if gaps else None


def figures(requests: Sequence[tuple[Sequence[int], int]], stamps: Sequence[Stamps], wall_s: float) -> dict[str, Any]:
    """All figures of one run of a workload; medians over its requests where a figure is of one request.

    Raises ValueError if a request got another number of tokens than it asked for.
    """
    for number, ((_, asked), got) in enumerate(zip(requests, stamps, strict=True)):
        if not got or got[-1][1] != asked:
            raise ValueError(f"request {number} got {got[-1][1] if got else 0} tokens, not {asked}")
    num_in, num_out = sum(len(prompt) for prompt, _ in requests), sum(asked for _, asked in requests)
    firsts = [ttft_s(s) for s in stamps]
    out: dict[str, Any] = {
        "wall_s": wall_s, "output_tps": num_out / wall_s, "total_tps": (num_in + num_out) / wall_s,
        "ttft_s": statistics.median(firsts), "prefill_tps": num_in / max(firsts),
    }  # fmt: skip
    for name, function in (("decode_tps", decode_tps), ("itl_s", itl_s)):
        values = [v for s in stamps if (v := function(s)) is not None]
        if values:
            out[name] = statistics.median(values)
    return out
