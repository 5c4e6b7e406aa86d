"""Attention of an encoder on tensors: see `ops.ref.encoder`, whose formula and source this is."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.backends.gpu.step import HostRead, TorchStep
from penstock.base.errors import EngineError


def attend_text(q: Tensor, k: Tensor, v: Tensor, step: TorchStep, scale: float, reach: int | None) -> Tensor:
    """Text by text, so that shapes, and with them sums, follow from a text alone."""
    if step.static is not None:
        raise HostRead("where texts begin is read")
    out = torch.empty_like(v)
    for b in range(step.num_sequences):
        lo, hi = step.bounds[b], step.bounds[b + 1]
        if lo == hi:
            continue
        if step.plan.positions[lo] != 0:
            raise EngineError("an encoder reads a text in one step, and this one was cut")
        scores = torch.einsum("ihd,jhd->hij", q[lo:hi], k[lo:hi]).float() * scale
        if reach is not None:
            places = torch.arange(hi - lo, device=q.device)
            scores = scores.masked_fill((places[:, None] - places).abs() > reach, float("-inf"))
        out[lo:hi] = torch.einsum("hij,jhd->ihd", scores.softmax(dim=-1).to(v.dtype), v[lo:hi])
    return out


ENCODER_OPS = {"attend_text": attend_text}
