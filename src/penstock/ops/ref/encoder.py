"""Attention of an encoder: every token of a text sees all of it, or those that are near."""

from __future__ import annotations

import numpy as np

from penstock.base.bf16 import F32
from penstock.base.errors import EngineError
from penstock.ops.step import Step


def attend_text(q: F32, k: F32, v: F32, step: Step, scale: float, reach: int | None) -> F32:
    """softmax(q k^T scale) v of each text by itself; q, k, v and the result [T, H, D].

    `reach`: a token sees those at most so many places away. Raises: EngineError for a text that did not begin in this
    step. Source: Devlin et al., BERT, arXiv 1810.04805, section 3.
    """
    out = np.empty_like(v)
    for b in range(step.num_sequences):
        start, stop = step.bounds[b], step.bounds[b + 1]
        if start == stop:
            continue
        if step.plan.positions[start] != 0:
            raise EngineError("an encoder reads a text in one step, and this one was cut")
        keys, values = k[start:stop], v[start:stop]
        for t in range(start, stop):
            # By shapes that follow from the text alone: neighbours change no sum.
            low, high = (0, stop - start) if reach is None else (max(t - start - reach, 0), t - start + reach + 1)
            scores = (q[t][None] * keys[low:high]).sum(axis=-1) * np.float32(scale)
            weights = np.exp(scores - scores.max(axis=0))
            weights /= weights.sum(axis=0)
            out[t] = (weights[..., None] * values[low:high]).sum(axis=0)
    return out
