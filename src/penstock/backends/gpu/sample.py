"""Tokens drawn on the device: `runner.sampler`'s and `runner.truncate`'s, bit for bit.

Weights are whole numbers (`ops.draw_weights`), by steps that are each rounded once in float64, so that the order of
sums cannot show. Shape letters: R rows, V tokens of the vocabulary, K tokens that may be drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.backends.gpu.device_array import DeviceArray
from penstock.base.rng import uniform
from penstock.ops.draw_weights import EVEN, LOG2_E, LOWEST, ODD, UNIT, UNIT_BITS
from penstock.ops.draws import Ranked


def weigh(logits: Tensor, scale: float) -> Tensor:
    """`ops.draw_weights.weigh` of [..., V]: int64."""
    y = (logits.double() - logits.double().amax(dim=-1, keepdim=True)) * scale
    y = y.clamp(min=LOWEST)
    n = torch.round(y)
    y = y - n
    square = y * y
    p, odd = square * EVEN[-1], square * ODD[-1]
    for c in EVEN[-2:0:-1]:
        p = (p + c) * square
    p = p + EVEN[0]
    for c in ODD[-2:0:-1]:
        odd = (odd + c) * square
    odd = (odd + ODD[0]) * y
    p = (p + odd) * y + 1.0
    scaled = (p.view(torch.int64) + ((n.long() + UNIT_BITS) << 52)).view(torch.float64)
    return torch.round(scaled).long()


class _Ask(NamedTuple):
    row: int
    scale: float
    min_p: float
    top_k: int
    top_p: float
    seed: int
    sample_index: int
    position: int
    num_tokens: int


class TorchRows:
    """See `ops.draws.DrawRows`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._asked: list[_Ask] = []
        self._drawn: list[list[int]] = []
        self._logits = torch.empty((0, 0), device=device)
        self._peaks: list[float] = []

    def point(self, logits: Any) -> None:
        """Rows of the next run: a `DeviceArray` or an array [R, V]."""
        self._logits = logits.tensor if isinstance(logits, DeviceArray) else torch.from_numpy(logits).to(self._device)
        self._asked.clear()

    def ask(self, *asked: Any) -> None:
        """As `DrawRows.ask`."""
        self._asked.append(_Ask(*asked))

    @torch.no_grad()
    def run(self, num_rows: int) -> tuple[list[int], list[int]]:
        """(the first largest of each row, 1 for each healthy row)."""
        peaks, best = self._logits[:num_rows].max(dim=-1)
        # `max` need not name the first of equals.
        best = torch.where(torch.isnan(peaks), best, (self._logits[:num_rows] == peaks[:, None]).int().argmax(dim=-1))
        self._drawn = [self._draw(ask) if math.isfinite(peaks[ask.row].item()) else [0] * ask.num_tokens
                       for ask in self._asked]  # fmt: skip
        self._peaks = peaks.tolist()
        return best.tolist(), torch.isfinite(peaks).int().tolist()

    def tokens(self) -> list[list[int]]:
        """What was drawn, in the order of `ask`."""
        return self._drawn

    def peak(self, r: int) -> float:
        """The largest logit of row `r`."""
        return self._peaks[r]

    def _draw(self, ask: _Ask) -> list[int]:
        ids, weights = truncate(self._logits[ask.row], ask)
        sums = torch.cumsum(weights, dim=0)
        total = int(sums[-1])
        targets = [
            int(uniform(ask.seed, ask.sample_index + j, ask.position) * 2**53) * total >> 53
            for j in range(ask.num_tokens)
        ]
        at = torch.searchsorted(sums, torch.tensor(targets, device=self._device), right=True)
        tokens: list[int] = (at if ids is None else ids[at]).tolist()
        return tokens


def truncate(logits: Tensor, ask: _Ask) -> tuple[Tensor | None, Tensor]:
    """`runner.truncate.truncate` of [V]: ids [K], ascending (None: all), and weights."""
    weights = weigh(logits, ask.scale)
    ids: Tensor | None = None
    if ask.min_p > 0.0:
        ids = torch.nonzero(weights >= min(ask.min_p, 1.0) * UNIT)[:, 0]
        logits, weights = logits[ids], weights[ids]
    top_k = ask.top_k if 0 < ask.top_k < len(logits) else 0
    if not top_k and ask.top_p >= 1.0:
        return ids, weights
    ranked = torch.sort(-logits, stable=True).indices
    if top_k:
        ranked = ranked[:top_k]
    if ask.top_p < 1.0:
        mass = torch.cumsum(weights[ranked], dim=0)
        target = math.ceil(ask.top_p * float(int(mass[-1])))
        ranked = ranked[: int((mass < target).sum()) + 1]
    kept = torch.sort(ranked).values
    return (kept if ids is None else ids[kept]), weights[kept]


class TorchKernel:
    """See `ops.draws.DrawKernel`."""

    def __init__(self, device: torch.device, vocab_size: int) -> None:
        self._device, self.vocab_size = device, vocab_size

    def rows(self) -> TorchRows:
        return TorchRows(self._device)

    @torch.no_grad()
    def logprobs(self, jobs: Sequence[tuple[Any, Sequence[int], int]]) -> list[Ranked]:
        """One row each: (healthy logits [V], tokens whose ranks are wanted, how many of the likeliest)."""
        out = []
        for row, tokens, num_top in jobs:
            logits = row.tensor if isinstance(row, DeviceArray) else torch.from_numpy(row).to(self._device)
            total = int(weigh(logits, LOG2_E).sum())
            order = torch.sort(-logits, stable=True).indices
            place = torch.empty_like(order)
            place[order] = torch.arange(len(order), device=order.device)
            ranks = (place[torch.tensor(list(tokens), dtype=torch.int64, device=order.device)] + 1).tolist()
            top = order[: max(0, min(num_top, self.vocab_size))].tolist()
            out.append(Ranked(float(logits.max()), total, ranks, top))
        return out
