"""The third schedule of `sim.search`: prompts and tokens on devices of their own, with a tensor degree for each.

`placed`: p engines compute prompts, up to `chunk` tokens a step, d engines make tokens, up to `num_seqs` sequences
each, and keys and values go by a link of every engine. With the terms of `sim.search`, K bytes of a token, r blocks'
tokens that the other engine computes once more, and w(b) = b - 2.33 sqrt(b) sequences that run on average, so that 99
times in 100 there is a place when a prompt is done:

    requests/s = min(0.9 p c / (P T_p(0, c tokens)), d w(b) / (N T_d(w(b), r w(b) / N)), link / (P K) of p and of d)
    latency    = (ceil(P'/c) + 1) T_p(0, c) + (c + P') K / link + (N' + 1) T_d(b, r)

Its bounds of a box go by the same corners as those of the other two.

Source: ExeGPT, arXiv 2404.07947, section 4 (workload-aware allocation; tensor parallelism of a part of the devices,
here of one phase's and not the other's).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, sqrt

from penstock.sim.search import PLACED, Point, Schedules

MOST_BUSY = 0.9
"""Of the time of the engines for prompts: lengths vary, and a queue without slack grows."""


@dataclass(frozen=True)
class HandoverLink:
    """`token_bytes` of keys and values; `bytes_per_s` of each engine's link; tokens of a block."""

    token_bytes: float
    bytes_per_s: float
    block_size: int


class PlacedSchedules:
    """One layout: `prompts.engines` of `prompts.degree` devices, `tokens.engines` of `tokens.degree`."""

    schedules: Sequence[str] = (PLACED,)

    def __init__(self, prompts: Schedules, tokens: Schedules, link: HandoverLink) -> None:
        self.most_seqs = tokens.most_seqs
        self._prompts, self._tokens, self._link = prompts, tokens, link

    def point(self, schedule: str, num_seqs: int, chunk: int) -> Point:
        prompts, tokens = self._prompts, self._tokens
        rate, latency_s = self.bounds(schedule, (num_seqs, num_seqs), (chunk, chunk))
        return Point(
            schedule, tokens.degree, num_seqs, chunk, rate, latency_s, tokens.engines, prompts.engines, prompts.degree
        )  # fmt: skip

    def bounds(self, schedule: str, seqs: tuple[int, int], chunk: tuple[int, int]) -> tuple[float, float]:
        """(requests/s that no point of the box exceeds, seconds that none is below); exact if it is one point."""
        n, (b, b1), (c, c1) = self._tokens.lengths, seqs, chunk
        prompts, tokens, again = self._prompts, self._tokens, self._link.block_size
        token_s = self._link.token_bytes / self._link.bytes_per_s
        few, many = _running(b), _running(b1)
        rate = min(
            MOST_BUSY * prompts.engines * c1 / (n.prompt * prompts.step_s(0, c, long=False)),
            tokens.engines * many / (n.output * tokens.step_s(few, again * few / n.output, long=False)),
            min(prompts.engines, tokens.engines) / (n.prompt * token_s) if token_s else float("inf"),
        )
        computed_s = (ceil(n.long_prompt / c1) + 1) * prompts.step_s(0, c, long=True)
        made_s = (n.long_output + 1) * tokens.step_s(b, again, long=True)
        return rate, computed_s + (c + n.long_prompt) * token_s + made_s


def _running(places: int) -> float:
    """So many on average, of which there are more than `places` one time in a hundred. Grows with `places`."""
    return max(1.0, places - 2.33 * sqrt(places)) if places > 1 else 0.5


def layouts(devices: int, degrees: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """(engines for prompts, their degree, engines for tokens, their degree) that use all devices."""
    for prompt_degree in degrees:
        for degree in degrees:
            for prompts in range(1, devices // prompt_degree + 1):
                left = devices - prompts * prompt_degree
                if left and left % degree == 0:
                    yield prompts, prompt_degree, left // degree, degree
