"""Which experts a token gets: scores, the best of them, and what they weigh, as one pass instead of a dozen.

A program has one token. Source: Shazeer et al., arXiv 1701.06538, section 2 (the softmax over experts, the best of
them). Shape letters: T tokens, X experts, C choices of a token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.backends.gpu.kernels.activation import _sigmoid
from penstock.backends.gpu.kernels.loads import LAUNCH, load, overlap, padded, store, wait_for_others

SCORES = ("softmax", "sigmoid")


@triton.jit
def _softmax(x, own):
    y = tl.where(own, tl.exp(x - tl.max(tl.where(own, x, float("-inf")), 0)), 0.0)
    return y / tl.sum(y, 0)


@triton.jit
def _route(
    logits, correction, expert_scale, ids, weights, factor, logits_stride, X: tl.constexpr, BLOCK: tl.constexpr,
    CHOICES: tl.constexpr, SCORE: tl.constexpr, CHOSEN_ONLY: tl.constexpr, RENORMALIZED: tl.constexpr,
    CORRECTED: tl.constexpr, SCALED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)
    there = e < X
    if CORRECTED:
        more = load(correction + e, mask=there)
    if SCALED:
        own_scale = load(expert_scale + e, mask=there)
    wait_for_others(EARLY)
    x = load(logits + t * logits_stride + e, mask=there)
    if SCORE == "softmax":
        score = _softmax(x, there)
    else:
        score = _sigmoid(x)
    worth = score
    if CORRECTED:
        worth = worth + more
    # What is no number comes last, as in a sort; what is chosen has no worth any more.
    worth = tl.where(worth == worth, worth, -3.0e38)
    worth = tl.where(there, worth, float("-inf"))
    chosen = e < 0
    for _ in range(CHOICES):
        left = tl.where(chosen, float("-inf"), worth)
        best = tl.min(tl.where((left == tl.max(left, 0)) & there & (chosen == 0), e, BLOCK), 0)
        chosen = chosen | (e == best)
    share = score
    if CHOSEN_ONLY:
        share = _softmax(x, chosen)
    if RENORMALIZED:
        total = tl.sum(tl.where(chosen, share, 0.0), 0)
        if SCORE == "sigmoid":
            total += 1e-20
        share = share / total
    share = share * factor
    if SCALED:
        share = share * own_scale
    at = t * CHOICES + tl.cumsum(chosen.to(tl.int32), 0) - 1
    store(ids + at, e, mask=chosen)
    store(weights + at, share, mask=chosen)


def route(
    logits: torch.Tensor, choices: int, *, score: str = "softmax", chosen_only: bool = False,
    renormalize: bool = False, factor: float = 1.0, correction: torch.Tensor | None = None,
    expert_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The experts int64 [T, C] with the best scores, ascending, and their weights float32 [T, C].

    Shapes: logits [T, X] float32, float16 or bfloat16, rows of which lie side by side; correction (added to scores for
    the choice alone) and expert_scale [X]. Ties go to the lower id. `chosen_only`: weights are the softmax of the
    chosen logits; `renormalize`: they add up to one before `factor`. Raises: ValueError for another score.
    """
    if score not in SCORES:
        raise ValueError(f"no kernel knows the score {score!r}: it is one of {', '.join(SCORES)}")
    t, num = logits.shape
    ids = torch.empty((t, choices), dtype=torch.int64, device=logits.device)
    weights = torch.empty((t, choices), dtype=torch.float32, device=logits.device)
    if t:
        _route[t,](
            logits, correction, expert_scale, ids, weights, float(factor), logits.stride(0), X=num, BLOCK=padded(num),
            CHOICES=choices, SCORE=score, CHOSEN_ONLY=chosen_only, RENORMALIZED=renormalize,
            CORRECTED=correction is not None, SCALED=expert_scale is not None, num_warps=1 if num <= 256 else 4,
            **overlap(), **LAUNCH,
        )  # fmt: skip
    return ids, weights
