"""What steps take, learnt from the steps of this run: so much for the decodes in it, so much more per prompt token.

Steps without prompt tokens are remembered by how many sequences decoded (in powers of two); what a step with prompt
tokens takes beyond those is the prompt's. The two never mix, so a long time of pure decoding says nothing wrong about
prefills, as a line through all steps would. Used by the policy `slo`, by admission (`server.admission.forecast`), and
for prices of the two kinds of tokens (`measure.cost`).
"""

from __future__ import annotations

FORGETTING = 0.9
"""What a step counts less than the one behind it: some ten are remembered."""
MIN_SIZED = 2.5
"""Steps of a size, as far as they are remembered, from which on it is known."""
MIN_PREFILL = 8
"""Prompt tokens of a step from which it says something of them."""


class LearntCosts:
    """Units: seconds, tokens, sequences. What has not been seen is 0, or in proportion to what has."""

    def __init__(self) -> None:
        self.decode: list[float] = []
        """[b]: seconds of a step in which 2^b to 2^(b+1) - 1 sequences decode, and nothing else; 0: none was seen."""
        self.prefill_token_s = 0.0
        self._prefill = [0.0, 0.0]  # seconds, tokens
        self._sized: dict[int, list[float]] = {}  # seconds, tokens, steps

    def observe(self, num_decodes: int, num_prefill: int, seconds: float) -> float:
        """A step that took so long. Returns the seconds of it that decodes owe: as many as such a step takes without
        prompts. Before one was seen, all tokens owe alike."""
        if num_prefill <= 0:
            owed_s = seconds
        elif alone_s := self.decode_s(num_decodes):
            owed_s = min(alone_s, seconds)
        else:
            owed_s = seconds * num_decodes / (num_decodes + num_prefill)
        self._learn(num_decodes, num_prefill, seconds)
        return owed_s

    def _learn(self, num_decodes: int, num_prefill: int, seconds: float) -> None:
        if num_prefill <= 0:
            if num_decodes > 0 and seconds > 0:
                bucket = num_decodes.bit_length() - 1
                self.decode += [0.0] * (bucket + 1 - len(self.decode))
                old = self.decode[bucket]
                # A step that stands out (the machine was busy with something else) moves it by a little only.
                self.decode[bucket] = old + (1 - FORGETTING) * (min(seconds, 4 * old) - old) if old else seconds
        elif num_prefill >= MIN_PREFILL:
            beyond_s = max(0.0, seconds - self.decode_s(num_decodes))
            self._prefill = [FORGETTING * self._prefill[0] + beyond_s, FORGETTING * self._prefill[1] + num_prefill]
            self.prefill_token_s = self._prefill[0] / self._prefill[1]

    def took(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens, with prompt tokens among them, took so long."""
        sums = self._sized.setdefault((num_tokens - 1).bit_length(), [0.0, 0.0, 0.0])
        mean_s = sums[0] / sums[2] if sums[2] else seconds
        seen = (min(seconds, 4 * mean_s), num_tokens, 1.0)
        sums[:] = [FORGETTING * a + b for a, b in zip(sums, seen, strict=True)]

    def sized(self, most: int) -> tuple[float, float] | None:
        """(seconds, tokens), on average, of steps of at most `most` tokens and more than half of that; None: too few
        were seen. Kernels work in tiles, so that twice the tokens may take no longer, or three times as long."""
        seconds, tokens, steps = self._sized.get((most - 1).bit_length(), (0.0, 0.0, 0.0))
        return (seconds / steps, tokens / steps) if steps >= MIN_SIZED else None

    def decode_s(self, num_decodes: int) -> float:
        """Seconds of a step in which so many sequences decode."""
        return step_s(self.decode, num_decodes)


def step_s(decode: list[float], num_decodes: int) -> float:
    """`LearntCosts.decode_s` of what `LearntCosts.decode` holds.

    Between buckets that were seen along a line; below and above what was seen, as the nearest one: a step reads all
    weights, whoever is in it.
    """
    if num_decodes <= 0:
        return 0.0
    known = [b for b, seconds in enumerate(decode) if seconds > 0]
    if not known:
        return 0.0
    at = num_decodes.bit_length() - 1
    below = max((b for b in known if b <= at), default=known[0])
    above = min((b for b in known if b > at), default=below)
    if above <= below:
        return decode[below]
    low, high = 1.5 * (1 << below), 1.5 * (1 << above)
    part = min(1.0, max(0.0, (num_decodes - low) / (high - low)))
    return decode[below] + part * (decode[above] - decode[below])
