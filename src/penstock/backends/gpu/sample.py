"""Tokens drawn on the device: `runner.sampler`'s and `runner.truncate`'s, bit for bit.

Weights are whole numbers (`ops.draw_weights`), by steps that are each rounded once in float64, so that the order of
sums cannot show. All rows of a step are drawn together, by the kernels of `kernels.sample` where they are used and can,
and nothing is looked at on the way: what a step yields is packed into one tensor, which is copied to the host once.
Shape letters: R rows, V tokens of the vocabulary, A rows that draw, N tokens that a row draws at most, L logprobs, K of
the likeliest tokens beside each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.backends.gpu.device_array import DeviceArray
from penstock.backends.gpu.staging import bring
from penstock.base.rng import uniform
from penstock.ops.draw_weights import EVEN, LOG2_E, LOWEST, ODD, UNIT, UNIT_BITS
from penstock.ops.draws import AskedDraw, DrawnRows, Likely, Ranked

_MOST = 1 << 24
"""Weights that are worked out at once: 128 MiB of them, several times."""
_LOW = 27
"""Bits of the low part of a draw's 53."""


def weigh(logits: Tensor, scale: float | Tensor) -> Tensor:
    """`ops.draw_weights.weigh` of [..., V]: int64. `scale`: one for all, or [..., 1]."""
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


def truncate(logits: Tensor, weights: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """`runner.truncate.truncate` of rows [A, V]: the weights, 0 for what may not be drawn. Rules are [A, 1]."""
    fit = weights >= min_p.clamp(max=1.0) * UNIT
    # From 0, so that both zeros are one.
    order = torch.sort(0.0 - logits.masked_fill(~fit, -torch.inf), dim=-1, stable=True).indices
    place = torch.arange(logits.shape[-1], device=logits.device)
    ranked = (weights * fit).gather(-1, order)
    ranked = ranked * (place < top_k)
    mass = ranked.cumsum(-1)
    target = torch.ceil(top_p * mass[:, -1:].double()).long()
    last = (mass < torch.where(top_p < 1.0, target, torch.iinfo(torch.int64).max)).sum(-1, keepdim=True)
    return torch.zeros_like(weights).scatter(-1, order, ranked * (place <= last))


def pick(weights: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """The first token whose running sum exceeds u times the whole: [A, N]. `low`, `high` [A, N]: parts of u's bits."""
    sums = weights.cumsum(-1)
    total = sums[:, -1:]
    total_low, total_high = total & 0xFFFFFFFF, total >> 32
    # floor(u * total / 2^53), a product of 116 bits: what is shifted out is below the whole units of what is added.
    target = ((low * total_low) >> _LOW) + high * total_low
    target = (((target >> 5) + low * total_high) >> 21) + ((high * total_high) << 6)
    return torch.searchsorted(sums, target.contiguous(), right=True).clamp(max=weights.shape[-1] - 1)


class TorchDraws:
    """See `ops.draws.StartedDraws`. The copy to the host is on its way."""

    def __init__(
        self, tokens: Tensor, parts: Sequence[Tensor], asked: Sequence[AskedDraw], likely: Sequence[Likely],
        beside: Any = None,
    ) -> None:  # fmt: skip
        """`parts`: whole numbers, and floats in float64; or one, what `kernels.sample.argmax` gives. `beside`: a stream
        of a GPU, on which the copy keeps nothing else waiting."""
        self.tokens = tokens
        self._asked, self._likely = asked, likely
        self._shapes = [tuple(part.shape) for part in parts]
        if len(parts) == 1:
            packed = parts[0]
        else:
            bits = [part if part.dtype == torch.int64 else part.view(torch.int64) for part in parts]
            packed = torch.cat([part.reshape(-1) for part in bits])
        self._event: Any = None
        if beside is None:
            self._packed = packed.to("cpu", non_blocking=True)
            return
        beside.wait_stream(torch.cuda.current_stream(tokens.device))
        with torch.cuda.stream(beside):
            self._packed = packed.to("cpu", non_blocking=True)
            new: Any = torch.cuda.Event
            self._event = new()
            self._event.record(beside)
        packed.record_stream(beside)  # its memory is not given to others before

    def ready(self) -> bool:
        return self._event is None or bool(self._event.query())

    def read(self) -> DrawnRows:
        """Waits until it is there."""
        if self._event is not None:
            self._event.synchronize()
        flat = self._packed.numpy()
        if len(self._shapes) == 1:
            found = flat[1].view(np.float64)
            return DrawnRows(flat[0].tolist(), np.isfinite(found).tolist(), found.tolist(), [], [])
        ends = np.cumsum([int(np.prod(shape)) for shape in self._shapes])
        best, drawn, peaks, raw, *more = (
            part.reshape(shape) for part, shape in zip(np.split(flat, ends[:-1]), self._shapes, strict=True)
        )
        peaks, raw = peaks.view(np.float64), raw.view(np.float64)
        tokens = [row[: ask.num_tokens] for row, ask in zip(drawn.tolist(), self._asked, strict=True)]
        return DrawnRows(best.tolist(), np.isfinite(raw if raw.size else peaks).tolist(), peaks.tolist(), tokens,
                     self._ranked(more))  # fmt: skip

    def _ranked(self, parts: list[Any]) -> list[tuple[Ranked, float, list[float]]]:
        if not self._likely:
            return []
        ranks, totals, ids, values, own_peaks, tops = parts
        values, own_peaks, tops = (part.view(np.float64) for part in (values, own_peaks, tops))
        return [
            (Ranked(peak, total, [rank], own_ids[: _num_told(wanted)]), value, own_tops[: _num_told(wanted)])
            for wanted, rank, total, own_ids, value, peak, own_tops in zip(
                self._likely, *(part.tolist() for part in (ranks, totals, ids, values, own_peaks, tops)), strict=True
            )
        ]


class TorchRows:
    """See `ops.draws.DrawRows`."""

    def __init__(self, kernel: TorchKernel) -> None:
        self._kernel = kernel
        self._asked: list[AskedDraw] = []
        self._logits: Any = None
        self._drawn = DrawnRows([], [], [], [], [])

    def point(self, logits: Any) -> None:
        """Rows of the next run: a `DeviceArray` or an array [R, V]."""
        self._logits = logits
        self._asked = []

    def ask(self, *asked: Any) -> None:
        """As `DrawRows.ask`."""
        self._asked.append(AskedDraw(*asked))

    def run(self, num_rows: int) -> tuple[list[int], list[int]]:
        """(the first largest of each row, 1 for each healthy row)."""
        self._drawn = self._kernel.start(self._logits, self._logits, self._asked, ()).read()
        return self._drawn.best, [int(fit) for fit in self._drawn.healthy]

    def tokens(self) -> list[list[int]]:
        """What was drawn, in the order of `ask`."""
        return self._drawn.tokens

    def peak(self, r: int) -> float:
        """The largest logit of row `r`."""
        return self._drawn.peaks[r]


class TorchKernel:
    """See `ops.draws.StartingKernel`."""

    def __init__(self, device: torch.device, vocab_size: int, *, kernels: bool = False) -> None:
        """`kernels`: Triton's, where there is one for what is asked."""
        self._device, self.vocab_size, self._kernels = device, vocab_size, kernels
        self._copies: Any = None

    def rows(self) -> TorchRows:
        return TorchRows(self)

    @torch.no_grad()
    def start(self, raw: Any, final: Any, asked: Sequence[AskedDraw], likely: Sequence[Likely]) -> TorchDraws:
        """See `ops.draws.StartingKernel`."""
        changed = final is not raw
        own, raw = self._tensor(final), self._tensor(raw)
        if not (asked or likely or changed) and self._by_kernel(own):
            from penstock.backends.gpu.kernels.sample import argmax

            found = argmax(own)
            return TorchDraws(found[0], [found], (), (), self._beside())
        best, peaks = self._best(own, exact=changed)
        tokens, drawn = best, best.new_zeros((len(asked), max((ask.num_tokens for ask in asked), default=0)))
        if asked:
            tokens = best.clone()
            for group in _in_groups(asked, self.vocab_size):
                where, found = self._draw(own, [asked[i] for i in group])
                tokens[where] = found[:, 0]
                drawn[self._whole(np.array(group)), : found.shape[1]] = found
        parts = [best, drawn, peaks.double(), raw.amax(dim=-1).double() if changed else peaks.new_zeros(0).double()]
        if any(wanted.ids for wanted in likely):  # then all have as many columns
            likely = [one._replace(num_top=min(one.num_top, self.vocab_size)) for one in likely]
        if likely:
            parts += self._rank(raw, tokens, likely)
        return TorchDraws(tokens, parts, asked, likely, self._beside())

    @torch.no_grad()
    def logprobs(self, jobs: Sequence[tuple[Any, Sequence[int], int]]) -> list[Ranked]:
        """One row each: (healthy logits [V], tokens whose ranks are wanted, how many of the likeliest)."""
        out = []
        for row, tokens, num_top in jobs:
            logits = self._tensor(row)
            total = int(weigh(logits, LOG2_E).sum())
            order = torch.sort(-logits, stable=True).indices
            place = torch.empty_like(order)
            place[order] = torch.arange(len(order), device=order.device)
            ranks = (place[torch.tensor(list(tokens), dtype=torch.int64, device=order.device)] + 1).tolist()
            top = order[: max(0, min(num_top, self.vocab_size))].tolist()
            out.append(Ranked(float(logits.max()), total, ranks, top))
        return out

    # -- on the device ---------------------------------------------------------------------------------------------

    def _tensor(self, logits: Any) -> Tensor:
        return logits.tensor if isinstance(logits, DeviceArray) else torch.from_numpy(logits).to(self._device)

    def _beside(self) -> Any:
        """The stream of copies to the host; None where there is no GPU."""
        if self._copies is None and self._device.type == "cuda" and torch.cuda.is_available():
            self._copies = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return self._copies

    def _by_kernel(self, logits: Tensor) -> bool:
        return self._kernels and logits.stride(1) == 1 and logits.dtype == torch.float32

    def _whole(self, numbers: Any) -> Tensor:
        return bring({0: numbers.astype(np.int64)}, self._device)[0]

    def _best(self, logits: Tensor, *, exact: bool) -> tuple[Tensor, Tensor]:
        """The first largest of each row, and its logit. `exact`: also of rows that are -inf altogether; else they may
        have a NaN for it, as sick ones do."""
        if not exact and self._by_kernel(logits):
            from penstock.backends.gpu.kernels.sample import argmax

            found, peaks = argmax(logits)
            return found, peaks.view(torch.float64)
        best = logits.argmax(dim=-1)  # the first of equals, and of NaNs
        return best, logits.gather(1, best[:, None])[:, 0]

    def _draw(self, logits: Tensor, asked: Sequence[AskedDraw]) -> tuple[Tensor, Tensor]:
        """Rows [A], and what they draw [A, N]. What sick rows draw is some token."""
        most = max(ask.num_tokens for ask in asked)
        bits = np.zeros((most, len(asked)), np.int64)
        for i, ask in enumerate(asked):
            for j in range(ask.num_tokens):
                bits[j, i] = int(uniform(ask.seed, ask.sample_index + j, ask.position) * 2**53)
        v = logits.shape[1]
        floats = np.array([[ask.scale, ask.min_p, ask.top_p] for ask in asked], np.float64).T
        whole = np.array(
            [[ask.row, ask.top_k if 0 < ask.top_k < v else v, (ask.seed + 2**63) % 2**64 - 2**63, ask.sample_index,
              ask.position] for ask in asked], np.int64,
        ).T  # fmt: skip
        packed = self._whole(np.concatenate([whole, np.ascontiguousarray(floats).view(np.int64), bits]))
        where, top_k, seeds, indices, positions = packed[:5]
        scales, min_p, top_p = packed[5:8].view(torch.float64)
        rows = logits if whole[0].tolist() == list(range(len(logits))) else logits[where]
        cut = any(map(_ranks, asked))
        if self._kernels and most == 1 and rows.stride(1) == 1:
            from penstock.backends.gpu.kernels.sample import draw

            found = draw(rows, scales, seeds, indices.int(), positions, min_p=min_p, top_k=top_k.int(), top_p=top_p,
                         truncated=cut)  # fmt: skip
            return where, found.long().clamp(min=0)[:, None]
        weights = weigh(rows, scales[:, None])
        if cut:
            weights = truncate(rows, weights, min_p[:, None], top_k[:, None], top_p[:, None])
        elif any(ask.min_p > 0.0 for ask in asked):
            weights = weights * (weights >= min_p[:, None].clamp(max=1.0) * UNIT)
        high = packed[8:] >> _LOW
        return where, pick(weights, (packed[8:] - (high << _LOW)).t(), high.t())

    def _rank(self, logits: Tensor, tokens: Tensor, likely: Sequence[Likely]) -> list[Tensor]:
        """Ranks, totals [L], ids [L, K] and, as float64, values, peaks [L] and the values [L, K] of these ids."""
        most = max(0, min(max(wanted.num_top for wanted in likely), self.vocab_size))
        size = max(1, _MOST // self.vocab_size)
        named = max(len(wanted.ids) for wanted in likely)
        parts: list[list[Tensor]] = []
        for first in range(0, len(likely), size):
            some = likely[first : first + size]
            where, given = self._whole(np.array([[one.row for one in some], [one.token for one in some]]))
            rows, own = logits[where], torch.where(given < 0, tokens[where], given)[:, None]
            values = rows.gather(1, own)
            ids = torch.arange(rows.shape[1], device=rows.device)
            ranks = ((rows > values) | ((rows == values) & (ids < own))).sum(-1) + 1
            # By logit, then by id: floats as whole numbers that compare as they do, both zeros as one.
            bits = (rows + 0.0).view(torch.int32)
            order = (torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() << 32) + (0xFFFFFFFF - ids)
            top = torch.topk(order, most, dim=-1).indices
            if named:
                top = self._with_named(top, some, max(most, named))
            parts.append([ranks, weigh(rows, LOG2_E).sum(-1), top, values[:, 0].double(),
                          rows.amax(-1).double(), rows.gather(1, top).double()])  # fmt: skip
        return [torch.cat(part) for part in zip(*parts, strict=True)]

    def _with_named(self, top: Tensor, likely: Sequence[Likely], width: int) -> Tensor:
        """`top` [L, K] as [L, width], with the ids of those that name some in their place."""
        ids = np.zeros((len(likely), width + 1), np.int64)
        for i, wanted in enumerate(likely):
            ids[i, : len(wanted.ids)], ids[i, width] = wanted.ids, bool(wanted.ids)
        given = self._whole(ids)
        padded = torch.nn.functional.pad(top, (0, width - top.shape[1]))
        return torch.where(given[:, width:] > 0, given[:, :width], padded)


def _num_told(wanted: Likely) -> int:
    return len(wanted.ids) or wanted.num_top


def _ranks(ask: AskedDraw) -> bool:
    """Whether it draws from the likeliest tokens only, which have to be found."""
    return ask.top_k > 0 or ask.top_p < 1.0


def _in_groups(asked: Sequence[AskedDraw], vocab_size: int) -> list[list[int]]:
    """Who draws together: those that have to be ranked, and the others, as many as fit."""
    size = max(1, _MOST // vocab_size)
    groups = []
    for ranked in (False, True):
        own = [i for i, ask in enumerate(asked) if _ranks(ask) == ranked]
        groups += [own[first : first + size] for first in range(0, len(own), size)]
    return groups
