"""How much slower requests were for each other's sake: JCT over JCT alone, by classes of size.

Some further requests of the same sizes are asked one after the other on the idle server. A straight line through them,
a + b x prompt tokens + c x further output tokens, says what every other one would have taken alone. Their prompts are
new, because the prefix cache has those of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock.base.errors import ConfigError, PenstockError
from penstock.measure.latency import slowdown_classes

if TYPE_CHECKING:
    from penstock.bench.http import HttpClient
    from penstock.bench.metrics import Outcome
    from penstock.bench.prompts import Maker
    from penstock.bench.serve import Target

Floats = npt.NDArray[np.float64]
LEAST = 3


def check(num: int) -> None:
    """Raises ConfigError."""
    if num < LEAST:
        raise ConfigError(f"--alone: a line needs {LEAST} requests at least, not {num}", field="alone")


def fitted(num_prompt: Floats, num_more: Floats, jct_s: Floats) -> Floats:
    """[a, b, c] of least squares, none of them negative."""
    columns = np.stack([np.ones_like(num_prompt), num_prompt, num_more], 1)
    kept = [0, 1, 2]
    while True:
        found, *_ = np.linalg.lstsq(columns[:, kept], jct_s, rcond=None)
        if (found >= 0).all() or len(kept) == 1:
            break
        del kept[int(np.argmin(found))]
    out = np.zeros(3)
    out[kept] = np.maximum(found, 0.0)
    return out


async def slowdown(
    client: HttpClient, target: Target, maker: Maker, outcomes: Sequence[Outcome], num: int, seed: int
) -> dict[str, Any]:
    """`slowdown`: of all, by class of size, and the line. Raises PenstockError if the server does not answer."""
    from penstock.bench.prompts import Sample
    from penstock.bench.serve import one

    good = [o for o in outcomes if o.ok and o.output_tokens > 0]
    if not good:
        return {"slowdown": None}
    sizes = sorted((o.prompt_tokens + o.output_tokens, o.prompt_tokens, o.output_tokens) for o in good)
    rng, rows = np.random.default_rng([seed, 3]), []
    for k in range(num):
        _, num_prompt, num_output = sizes[round(k * (len(sizes) - 1) / (num - 1))]
        sample = Sample(maker.join(maker.draw(rng, num_prompt)), num_prompt, num_output)
        outcome = await one(client, target.endpoint, target.body(sample), num_prompt)
        if not outcome.ok:
            raise PenstockError(f"--alone: the server did not answer one request alone: {outcome.error}")
        rows.append((outcome.prompt_tokens, outcome.output_tokens - 1, outcome.latency_s))
    return {"slowdown": slow_figures(good, fitted(*np.array(rows, np.float64).T))}


def slow_figures(good: Sequence[Outcome], line: Floats) -> dict[str, Any]:
    """Figures of answered requests, by the line of those alone."""
    prompt = np.array([o.prompt_tokens for o in good], np.float64)
    output = np.array([o.output_tokens for o in good], np.float64)
    jct_s = np.array([o.latency_s for o in good])
    alone_s = line[0] + line[1] * prompt + line[2] * (output - 1)
    slow = jct_s / np.maximum(alone_s, 1e-9)
    return {
        "mean": float(slow.mean()), "p99": float(np.percentile(slow, 99)), "alone_s": line.tolist(),
        "classes": slowdown_classes((prompt + output).astype(np.int64), jct_s, alone_s),
    }  # fmt: skip
