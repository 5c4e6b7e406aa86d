"""How long requests would take alone on the simulated device: what slowdowns are measured by.

Alone, a prompt is read in steps of at most `budget` tokens, and every further token takes a step of its own; nothing is
found in a prefix cache, so a request that finds its prompt there may be faster than alone.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from penstock.core.protocols import StepTimer
from penstock.core.step_shape import EMPTY
from penstock.sim.result import Floats, Ints, SimResult

NUM_POINTS = 513
"""Contexts at which a step of one decode is asked for; between them the time is taken to be a straight line."""


class Alone:
    """Times of single requests by the timer's own word. `budget`: tokens of a prompt in one step."""

    def __init__(self, timer: StepTimer, budget: int) -> None:
        self._timer = timer
        self._budget = budget

    def jct_s(self, num_prompt: Ints, num_output: Ints) -> Floats:
        """Seconds from arrival to the last token, for requests of these lengths, each alone."""
        lengths, where = np.unique(num_prompt, return_inverse=True)
        before = np.array(self._prefill_s(lengths.tolist()), np.float64)[where]
        longest = int((num_prompt + num_output).max(initial=1))
        grid = np.unique(np.linspace(0, longest, NUM_POINTS).astype(np.int64))
        steps = np.array([self._timer.step_s(EMPTY.plus(int(c), 1, 1)) for c in grid])
        # Sum of the steps at contexts below grid[k]: the last one below grid[k + 1] is a little short of its time.
        widths = np.diff(grid)
        slopes = np.diff(steps) / widths
        sums = widths * steps[:-1] + slopes * widths * (widths - 1) / 2
        total = np.concatenate([[0.0], np.cumsum(sums)])

        def below(contexts: Ints) -> Floats:
            k = np.clip(np.searchsorted(grid, contexts, side="right") - 1, 0, len(widths) - 1)
            n = contexts - grid[k]
            out: Floats = total[k] + n * steps[k] + slopes[k] * n * (n - 1) / 2
            return out

        return before + below(num_prompt + np.maximum(num_output - 1, 0)) - below(num_prompt)

    def _prefill_s(self, lengths: list[int]) -> list[float]:
        """Seconds to the first token of each; `lengths` ascend."""
        out, whole_s, start = [], 0.0, 0
        for length in lengths:
            while length - start > self._budget:
                whole_s += self._timer.step_s(EMPTY.plus(start, self._budget))
                start += self._budget
            out.append(whole_s + self._timer.step_s(EMPTY.plus(start, length - start, 1)))
        return out


def with_alone(result: SimResult, timer: StepTimer, budget: int) -> SimResult:
    """The same run, knowing what its requests would have taken alone."""
    r = result.requests
    return replace(result, alone_s=Alone(timer, budget).jct_s(r.num_prompt, r.num_output)) if len(r) else result
