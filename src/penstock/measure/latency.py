"""Response latency in its two parts, and how much a request suffers from others.

*Decomposition.* A response should take TTFT + TPOT x (output tokens after the first). Of one request that is true by
the definition of TPOT; as a rule for planning, with the means of all requests, it is not: long answers may be slower
per token than short ones, because they run while more others do. The residual says how far the rule is off:

    residual = (mean JCT - (mean TTFT + mean TPOT x mean (N - 1))) / mean JCT

The source multiplies TPOT by N, all output tokens; that residual is told as well.

*Slowdown* of a request is its JCT over its JCT alone on the idle system. Requests are sorted into classes of equal
numbers by their size, prompt and output tokens together: a policy that is kind to the mean may be cruel to one class.

Sources: Databricks, LLM Inference Performance Engineering: Best Practices, 2023 (latency = TTFT + TPOT x tokens);
Harchol-Balter, Performance Modeling and Design of Computer Systems, 2013, chapter 28 (slowdown by size).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
NUM_CLASSES = 4


def decomposition(ttft_s: Floats, jct_s: Floats, num_output: npt.NDArray[Any]) -> dict[str, float | None]:
    """Of finished requests. Means in seconds; residuals as shares of the mean JCT; None where nothing finished."""
    known = ~np.isnan(jct_s) & ~np.isnan(ttft_s) & (num_output > 0)
    ttft_s, jct_s, num = ttft_s[known], jct_s[known], num_output[known].astype(np.float64)
    if not len(jct_s):
        return dict.fromkeys(("ttft_s", "tpot_s", "jct_s", "predicted_s", "residual", "residual_all_tokens"))
    several = num > 1
    tpot_s = float(((jct_s - ttft_s)[several] / (num[several] - 1)).mean()) if several.any() else 0.0
    mean_s, first_s = float(jct_s.mean()), float(ttft_s.mean())
    predicted_s = first_s + tpot_s * float((num - 1).mean())

    def residual(of_s: float) -> float:
        return (mean_s - of_s) / mean_s if mean_s > 0 else 0.0

    return {
        "ttft_s": first_s, "tpot_s": tpot_s, "jct_s": mean_s, "predicted_s": predicted_s,
        "residual": residual(predicted_s), "residual_all_tokens": residual(first_s + tpot_s * float(num.mean())),
    }  # fmt: skip


def slowdown_classes(
    size: npt.NDArray[Any], jct_s: Floats, alone_s: Floats, num_classes: int = NUM_CLASSES
) -> list[dict[str, float | int]]:
    """Per class of size, the smallest first: bounds in tokens, requests, mean JCT, and mean, p50, p99, max slowdown.

    Classes are quantiles of the sizes of finished requests; those of equal size are one class.
    """
    known = ~np.isnan(jct_s) & (alone_s > 0)
    size, slow, jct_s = size[known], jct_s[known] / alone_s[known], jct_s[known]
    if not len(size):
        return []
    inner = np.quantile(size, np.arange(1, num_classes) / num_classes, method="inverted_cdf")
    which = np.searchsorted(np.unique(inner), size, side="left")
    return [_class(size[mine], jct_s[mine], slow[mine]) for k in range(num_classes) if (mine := which == k).any()]


def _class(size: npt.NDArray[Any], jct_s: Floats, slow: Floats) -> dict[str, float | int]:
    def at(p: float) -> float:
        return float(np.percentile(slow, p, method="inverted_cdf"))

    return {
        "from_tokens": int(size.min()), "to_tokens": int(size.max()), "requests": len(size),
        "mean_jct_s": float(jct_s.mean()), "mean": float(slow.mean()), "p50": at(50), "p99": at(99),
        "max": float(slow.max()),
    }  # fmt: skip
