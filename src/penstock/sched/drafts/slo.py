"""Sequences that were promised a pace: how many drafts they need to keep it."""

from __future__ import annotations

from penstock.core.sequence import Sequence


def slo_of_request(seq: Sequence) -> float | None:
    """Seconds per output token that a request was promised, if it was."""
    return seq.request.slo_tpot_s


class SloProgress:
    """How a sequence stands against its promise of `slo_s` seconds per token.

    Source: AdaServe, arXiv 2501.12162, section 4.1: the tokens that a sequence must get in a step so that its mean time
    per token is within its promise at the end of it.
    """

    __slots__ = ("elapsed_s", "num_tokens", "slo_s")

    LEAST_GAIN = 0.3
    """A draft less likely to be used than that does not help to keep a promise."""

    def __init__(self, slo_s: float) -> None:
        self.slo_s = slo_s
        self.elapsed_s = 0.0
        self.num_tokens = 0

    def add(self, seconds: float, num_tokens: int) -> None:
        self.elapsed_s += seconds
        self.num_tokens += num_tokens

    def drafts(self, chances: list[float], draft_rate: float, step_s: float) -> int:
        """Drafts that a step of `step_s` needs for it; fewer if even those would not do it.

        `chances`: the chance of each draft to be used; `draft_rate`: the share of proposals that hold any.
        """
        short = (self.elapsed_s + step_s) / self.slo_s - self.num_tokens - 1.0
        count = 0
        for gain in chances:
            if short <= 0.0 or gain < self.LEAST_GAIN:
                break
            short -= draft_rate * gain
            count += 1
        return count
