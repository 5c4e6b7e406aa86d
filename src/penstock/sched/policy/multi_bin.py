"""Batches formed within bins of similar length: the more bins, the less a batch waits for its longest member.

Request-level batching, as `static`. Every request goes into one of `bins` bins by its expected output (or its prompt);
the bins' bounds are quantiles of the last WINDOW requests, so that each gets the same share. A bin with `size` requests
has a batch, and batches run in the order in which they became full. Whoever waits for company does so for `timeout_s`
at most: then its bin's batch runs with whoever is there.
Sources: Guldogan et al., Multi-Bin Batching, arXiv 2412.04504, section 3 (their bins' bounds are known in advance);
Du et al., 2023, and others bucket prompts in the same way to bound padding (`by=prompt`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence as Seq

from penstock.base.errors import ConfigError
from penstock.core.sequence import Sequence
from penstock.sched.policy.dynamic import Dynamic

WINDOW = 1024


class MultiBin(Dynamic):
    """Args:
    bins: how many, >= 1. With one this is `dynamic`.
    size: requests of a full batch.
    timeout_s: seconds that a request waits for its bin to fill.
    by: `output` (`Request.expected_tokens`, max_tokens without), `prompt` or `total`.
    """

    name = "multi-bin"

    def __init__(self, bins: int = 4, size: int = 8, timeout_s: float = 1.0, by: str = "output") -> None:
        super().__init__(timeout_s=timeout_s, size=size)
        if bins < 1:
            raise ConfigError(f"bins is {bins}; there is at least one", field="bins")
        if by not in ("output", "prompt", "total"):
            raise ConfigError(f"by is {by!r}; it must be output, prompt or total", field="by")
        self.bins = bins
        self.by = by
        self._seen: deque[int] = deque(maxlen=WINDOW)
        self._newest = -1
        self._bin: dict[int, int] = {}
        """Of each request that waits for its first batch, by arrival."""

    def not_before_s(self, running: Seq[Sequence], waiting: Seq[Sequence]) -> float | None:
        """When the oldest request's timeout ends, unless a batch runs, or a bin is full."""
        if running or not waiting or self._members(waiting):
            return None
        if any(len(bin_) >= self.size for bin_ in self._filled(waiting)):
            return None
        return waiting[0].request.arrival_s + self.timeout_s

    def _launch(self, waiting: Seq[Sequence]) -> list[Sequence]:
        """The bin that was full first; if none is, that of the oldest request."""
        filled = self._filled(waiting)
        full = [bin_ for bin_ in filled if len(bin_) >= self.size]
        chosen = min(full, key=lambda bin_: bin_[self.size - 1]) if full else min(filled, default=[])
        self._batch = set(chosen[: self.size])
        return self._members(waiting)

    def _filled(self, waiting: Seq[Sequence]) -> list[list[int]]:
        """Arrivals of those that wait, in order, of each bin that has any."""
        arrivals = {seq.arrival for seq in waiting}
        news = {seq.arrival: self._length(seq) for seq in waiting if seq.arrival > self._newest}
        self._seen.extend(news.values())
        bounds = self._bounds()
        known = self._bin | {arrival: bisect_left(bounds, length) for arrival, length in news.items()}
        self._newest = max(self._newest, max(news, default=-1))
        self._bin = {arrival: known.get(arrival, 0) for arrival in arrivals}
        filled: dict[int, list[int]] = {}
        for arrival in dict.fromkeys(seq.arrival for seq in waiting if not seq.held):
            filled.setdefault(self._bin[arrival], []).append(arrival)
        return list(filled.values())

    def _bounds(self) -> list[float]:
        """The last length of each bin but the last."""
        ordered = sorted(self._seen)
        cuts = [len(ordered) * k // self.bins for k in range(1, self.bins)]
        return [(ordered[cut - 1] + ordered[cut]) / 2 for cut in cuts if cut]

    def _length(self, seq: Sequence) -> int:
        request = seq.request
        output = 0 if self.by == "prompt" else request.expected_tokens or request.max_tokens
        return output + (0 if self.by == "output" else seq.prompt_len)
