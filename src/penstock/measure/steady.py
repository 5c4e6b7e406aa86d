"""The part of a run that says what the system does at its rate: without warming up and without running empty.

The run is cut into equal buckets of time. It ends, for this purpose, when the last request has got its first token:
from then on nothing takes the place of what finishes (*drain*). Of what is left, MSER-5 finds how much of the beginning
to leave out (*warm-up*): means over five buckets are made, and the cut is where the standard error of the mean of all
that follows is least; it is looked for in the first half only. A cut at the end of that half says that the run has
never become steady.

Source: White, An Effective Truncation Heuristic for Bias Reduction in Simulation Output, Simulation 69, 1997 (MSER);
White, Cobb and Spratt, WSC 2000 (MSER-5, the first half).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

BATCH = 5
NUM_BUCKETS = 200
MIN_BATCHES = 4
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class SteadyWindow:
    """[start_s, end_s) of a run, seconds from its beginning. `settled`: False if MSER found no steady part within the
    first half. `method`: in words."""

    start_s: float
    end_s: float
    settled: bool
    method: str

    @property
    def span_s(self) -> float:
        return self.end_s - self.start_s


def mser(values: Floats) -> tuple[int, bool]:
    """(how many of `values` to leave out at their beginning, whether a minimum lies before the end of the first half).

    0 if there are too few to tell.
    """
    num = len(values) // BATCH
    if num < MIN_BATCHES:
        return 0, True
    means = values[: num * BATCH].reshape(num, BATCH).mean(1)
    last = num // 2
    errors = [float(((means[d:] - means[d:].mean()) ** 2).sum()) / (num - d) ** 2 for d in range(last + 1)]
    best = int(np.argmin(errors))
    return best * BATCH, best < last


def steady_window(
    tokens: Floats, width_s: float, last_first_s: float, warmup_s: float | None = None
) -> SteadyWindow | None:
    """The steady part of a run whose bucket k, [k, k + 1) * `width_s`, has brought `tokens[k]`.

    `last_first_s`: when the last request got its first token. `warmup_s`: what to leave out instead of asking MSER.
    None if nothing is left.
    """
    num = min(len(tokens), int(last_first_s / width_s))
    if warmup_s is not None:
        first, settled, method = int(np.ceil(warmup_s / width_s)), True, f"{warmup_s:g} s of warm-up, as given"
    else:
        (first, settled), method = mser(tokens[:num]), "MSER-5"
    if num - first < 1:
        return None
    return SteadyWindow(first * width_s, num * width_s, settled, f"{method}; until the last first token")


def buckets(times_s: Floats, amounts: Floats, end_s: float, num: int = NUM_BUCKETS) -> tuple[Floats, float]:
    """(amounts by bucket, width of a bucket in seconds) of what came at `times_s`, from 0 to `end_s`."""
    width_s = max(end_s, 1e-9) / num
    at = np.clip((times_s / width_s).astype(np.int64), 0, num - 1)
    return np.bincount(at, weights=amounts, minlength=num).astype(np.float64), width_s


def rates(
    window: SteadyWindow | None, output_tokens: float, first_s: Floats, num_prompt: npt.NDArray[Any], finish_s: Floats
) -> dict[str, float | str | bool | None]:
    """Per second of `window`: a prompt counts when its request's first token comes, a request when its last does.

    `output_tokens`: that came in it. Times in seconds from the run's beginning, NaN where there is none. Without a
    window all is None. A part in which no request ended is not steady: nothing took the place of anything.
    """
    if window is None:
        names = ("start_s", "end_s", "method", "settled", "requests_per_s", "input_tokens_per_s",
                 "output_tokens_per_s", "total_tokens_per_s")  # fmt: skip
        return dict.fromkeys(names)
    inside = (first_s >= window.start_s) & (first_s < window.end_s)
    ended = ((finish_s >= window.start_s) & (finish_s < window.end_s)).sum()
    num_in = float(num_prompt[inside].sum())
    return {
        "start_s": window.start_s, "end_s": window.end_s, "method": window.method,
        "settled": bool(window.settled and ended),
        "requests_per_s": float(ended) / window.span_s,
        "input_tokens_per_s": num_in / window.span_s,
        "output_tokens_per_s": float(output_tokens) / window.span_s,
        "total_tokens_per_s": (num_in + float(output_tokens)) / window.span_s,
    }  # fmt: skip
