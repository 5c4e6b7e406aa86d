"""Entries that several tokens share: made when the last of them has come, chosen, and read beside a window.

See `core.mixers.compressed.EntryAttention`. Everything is worked out for many tokens at once; what a token gets from an
array depends on its position alone: contexts are padded to lengths that follow from it, and products are stacks of one
product per token. Shape letters: T tokens, H heads, D head dim, m tokens of an entry, n entries, W window, S block
size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.base.bf16 import F32
from penstock.base.errors import EngineError
from penstock.core.kv_codec import KV_CODECS
from penstock.ops.plan import I32, GroupPlan, Planes
from penstock.ops.ref.norm import rms_norm
from penstock.ops.ref.rotary import rope
from penstock.ops.ref.storage import codec_of, read_kv, store, write_kv
from penstock.ops.step import Step

I64 = npt.NDArray[np.int64]
_PAD = 64
"""Entries that a token may see are padded to a multiple of so many."""
_MOST = 1 << 22
"""Elements of what tokens have chosen that are gathered at a time."""


class Piece(NamedTuple):
    """Tokens lo ... hi-1 of the step, neighbours in sequence `b` whose first one is at position `start`."""

    b: int
    lo: int
    hi: int
    start: int

    @property
    def end(self) -> int:
        """The position behind the last one."""
        return self.start + self.hi - self.lo


def pieces(step: Step) -> Iterator[Piece]:
    """The tokens of every sequence that runs some. Raises: EngineError if one has a tree."""
    if step.plan.mask is not None and step.plan.mask.any():
        raise EngineError("entries of several tokens follow one path, and cannot run a tree of drafts")
    for b in range(step.num_sequences):
        lo, hi = step.bounds[b], step.bounds[b + 1]
        if lo < hi:
            yield Piece(b, lo, hi, int(step.plan.positions[lo]))


def places(where: GroupPlan, b: int, layer: int, first: int, last: int, every: int) -> tuple[I32, I64]:
    """Pages and rows of entries first ... last-1: each in the block of its last token, behind those that end there
    before it."""
    numbers = np.arange(first, last)
    blocks = (numbers * every + every - 1) // where.block_size
    return where.pages(b, layer)[blocks], numbers - blocks * where.block_size // every


def read_entries(planes: Planes, plane: str, at: tuple[I32, I64]) -> F32:
    """[n, D] of what a plane holds at pages and rows."""
    codec, scales = codec_of(planes, plane)
    x = KV_CODECS.get(codec).decode(np.asarray(planes[plane][at]), None if scales is None else np.asarray(scales[at]))
    return x[:, 0]


def write_entries(
    step: Step, value: F32, score: F32, group: int, layer: int, entry_group: int, entry_layer: int, plane: str, *,
    every: int, overlap: bool, bias: F32, weight: F32, eps: float, table: F32, interleaved: bool,
) -> None:  # fmt: skip
    """Keep what tokens give to entries, value and score [T, s*D] (s: 2 with `overlap`, else 1), and make the entries
    that end in this step.

    Shapes: bias [m, s*D], weight [D], table [2, P, dim/2]. Mutates: `PLANE_value` and `PLANE_score` of the one group,
    `plane` of the other.
    """
    names = (f"{plane}_value", f"{plane}_score")
    write_kv(step, value[:, None], score[:, None], group, layer, names)
    for piece in pieces(step):
        first, last = piece.start // every, piece.end // every
        if first == last:
            continue
        pages = step.plan.groups[group].pages(piece.b, layer)
        begin = max(0, first - overlap) * every
        v, g = (read_kv(step.planes[group], name, pages, begin, last * every)[:, 0] for name in names)
        x = rms_norm(pool(v, g, bias, every, last - first, overlap=overlap), weight, eps)
        angles = table[:, np.arange(first, last) * every]
        x = rope(x[:, None], angles, interleaved, x.shape[1] - 2 * table.shape[2])
        at = places(step.plan.groups[entry_group], piece.b, entry_layer, first, last, every)
        store(step.planes[entry_group], plane, at, x)  # type: ignore[arg-type]


def pool(value: F32, score: F32, bias: F32, every: int, num: int, *, overlap: bool) -> F32:
    """The last `num` entries of tokens value, score [n*m, s*D], bias [m, s*D] -> [num, D].

    With `overlap` the tokens of one entry more stand in front, unless the text begins with the first.
    """
    v, g = value.reshape(-1, every, value.shape[1]), score.reshape(-1, every, score.shape[1]) + bias
    if overlap:
        dim = value.shape[1] // 2
        if len(v) == num:  # nothing is before the first entry of a text
            v = np.concatenate([np.zeros_like(v[:1]), v])
            g = np.concatenate([np.full_like(g[:1], -np.inf), g])
        v = np.concatenate([v[:-1, :, :dim], v[1:, :, dim:]], axis=1)
        g = np.concatenate([g[:-1, :, :dim], g[1:, :, dim:]], axis=1)
    e = np.exp(g - np.maximum.reduce(g, axis=1, keepdims=True))
    shares = e / np.add.reduce(e, axis=1, keepdims=True)
    out: F32 = np.add.reduce(v * shares, axis=1)
    return out


def choose_entries(
    q: F32, weights: F32, step: Step, group: int, layer: int, plane: str, top_k: int, scale: float, every: int
) -> I64:
    """q [T, H, D], weights [T, H] -> [T, top_k]: the entries that each token reads, ascending, and -1 behind them.

    The best sums over heads of weight * relu(scale q.entry) among those that have ended with it or before; ties go to
    the earlier one.
    """
    out = np.full((len(q), top_k), -1, np.int64)
    for piece, seen, padded, entries in _stretches(step, group, layer, plane, every):
        own = slice(piece.lo, piece.hi)
        shares = np.maximum(np.matmul(q[own], entries.T) * np.float32(scale), np.float32(0))
        worth = np.matmul(weights[own, None], shares)[:, 0]
        worth[np.arange(padded) >= seen[:, None]] = -np.inf
        best = np.argsort(-worth, axis=-1, kind="stable")[:, :top_k]
        best = np.sort(np.where(best < seen[:, None], best, padded), axis=-1)
        out[own, : best.shape[1]] = np.where(best < padded, best, -1)
    return out


def attend_entries(q: F32, step: Step, *more: Any, every: int, window: int, scale: float, sinks: F32) -> F32:
    """Softmax attention of each token over its window and the entries that it has chosen, or all it may see.

    `more`: what `choose_entries` gave, if there is a choice; then group and layer of the window, group and layer of the
    entries, and the planes of both. q [T, H, D], sinks [H] -> [T, H, D].
    """
    chosen, at = (more[0], more[1:]) if len(more) == 7 else (None, more)
    group, layer, entry_group, entry_layer, near, far = at
    out = np.empty_like(q)
    rule = (np.float32(scale), sinks[:, None])
    for piece, seen, padded, entries in _stretches(step, entry_group, entry_layer, far, every):
        keys, mask = _windows(step, piece, group, layer, near, window)
        own = slice(piece.lo, piece.hi)
        if chosen is None:
            hidden = np.arange(padded) >= seen[:, None]
            out[own] = _attend(q[own], keys, mask, entries[None], hidden, *rule)
            continue
        width = min(padded, chosen.shape[1])
        read = chosen[own, :width]
        size = max(1, _MOST // max(1, width * q.shape[2]))
        for i in range(0, len(read), size):
            part = slice(i, i + size)
            found = entries[read[part]] if padded else np.zeros((len(read[part]), 0, q.shape[2]), np.float32)
            rows = slice(piece.lo + i, min(piece.lo + i + size, piece.hi))
            out[rows] = _attend(q[rows], keys[part], mask[part], found, read[part] < 0, *rule)
    return out


def _attend(q: F32, keys: F32, mask: Any, entries: F32, hidden: Any, scale: np.float32, sinks: F32) -> F32:
    """q [T, H, D] over keys [T, W, D] and entries [T or 1, n, D], but those of mask [T, W] and hidden [T, n]."""
    w = keys.shape[1]
    s = np.concatenate([np.matmul(q, x.transpose(0, 2, 1)) for x in (keys, entries)], axis=2) * scale
    s[np.broadcast_to(np.concatenate([mask, hidden], axis=1)[:, None], s.shape)] = -np.inf
    most = np.maximum(np.maximum.reduce(s, axis=2, keepdims=True), sinks)
    e = np.exp(s - most)
    total = np.add.reduce(e, axis=2, keepdims=True) + np.exp(sinks - most)
    out: F32 = (np.matmul(e[:, :, :w], keys) + np.matmul(e[:, :, w:], entries)) / total
    return out


def _stretches(step: Step, group: int, layer: int, plane: str, every: int) -> Iterator[tuple[Piece, I64, int, F32]]:
    """Neighbouring tokens whose entries are padded alike: who they are; how many entries each sees [T]; to how many
    they are padded; the entries, with zeros behind those that the last of them sees."""
    for piece in pieces(step):
        where = step.plan.groups[group]
        last = piece.end // every
        held = read_entries(step.planes[group], plane, places(where, piece.b, layer, 0, last, every))
        at = piece.start
        while at < piece.end:
            padded = -(-((at + 1) // every) // _PAD) * _PAD
            # The first position that sees more than `padded` entries.
            stop = min(piece.end, (padded + 1) * every - 1)
            part = Piece(piece.b, piece.lo + at - piece.start, piece.lo + stop - piece.start, at)
            entries = np.zeros((padded, held.shape[1]), np.float32)
            visible = stop // every
            entries[:visible] = held[:visible]
            yield part, (np.arange(at, stop) + 1) // every, padded, entries
            at = stop


def _windows(step: Step, piece: Piece, group: int, layer: int, plane: str, window: int) -> tuple[F32, Any]:
    """Of each token the keys of its window [T, W, D], zeros before the text, and which of them are those [T, W]."""
    begin = piece.start + 1 - window
    pages = step.plan.groups[group].pages(piece.b, layer)
    held = read_kv(step.planes[group], plane, pages, max(0, begin), piece.end)[:, 0]
    if begin < 0:
        held = np.concatenate([np.zeros((-begin, held.shape[1]), np.float32), held])
    keys = np.lib.stride_tricks.sliding_window_view(held, window, axis=0).transpose(0, 2, 1)
    at = np.arange(piece.start, piece.end)[:, None] + np.arange(1 - window, 1)
    return keys, at < 0
