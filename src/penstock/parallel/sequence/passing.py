"""What methods have in common: a layer's rows, keys and values on one rank, and the softmax over parts of the keys.

Shape letters: T rows of a rank, H query heads, G kv heads, D key dim, W value dim, n keys of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from penstock.base.bf16 import F32
from penstock.ops.plan import I32
from penstock.ops.ref.attention.online import Partial, combine
from penstock.ops.ref.attention.rows import first_key
from penstock.parallel.messages import Messages
from penstock.parallel.sequence.shares import HeldKv, SeqShare

Planes = tuple[F32, F32]
"""What a layer caches, twice [n, G, components]: keys and values, or the two planes of a latent."""
_LOW = np.finfo(np.float32).min


class Scoring(NamedTuple):
    """How a layer scores (`core.protocols.AttentionBackend.attend`). `slopes` and `sinks` are [H] or None.

    `keys` and `value`: places among the planes that keys are made of, side by side, and of the values.
    """

    keys: tuple[int, ...]
    value: int
    scale: float
    window: int | None = None
    chunk: int | None = None
    soft_cap: float | None = None
    slopes: F32 | None = None
    sinks: F32 | None = None

    def parts(self, planes: Planes) -> tuple[F32, F32]:
        """Keys [n, G, D] and values [n, G, W]."""
        k = [planes[i] for i in self.keys]
        return (k[0] if len(k) == 1 else np.concatenate(k, axis=-1)), planes[self.value]

    def bent(self, x: F32 | None, num_kv_heads: int) -> F32 | None:
        """Slopes or sinks as [G, H/G, 1]."""
        return None if x is None else x.reshape(num_kv_heads, -1, 1)


@dataclass
class RankWork:
    """What one rank has done since it was made: floating-point operations of scores and values, the largest array of
    scores in bytes, and of every round of a ring (operations, bytes that went on at the same time)."""

    flops: int = 0
    workspace: int = 0
    rounds: list[tuple[int, int]] = field(default_factory=list)

    def scored(self, scores: F32, k: F32, v: F32) -> None:
        """`scores` [..., n] were made of keys of D components, and weigh values of W."""
        self.flops += 2 * scores.size * (k.shape[-1] + v.shape[-1])
        self.workspace = max(self.workspace, scores.nbytes)


class Passing(Protocol):
    """A method. It keeps nothing; `view` is of one layer in one step."""

    def attend(self, view: LayerView, q: F32, rule: Scoring) -> F32:
        """Of this rank's rows q [T, H, D]: [T, H, W]."""
        ...


class LayerView:
    """One attention of one step, on one rank.

    Attributes:
        group: the ranks that take part, ascending.
        where: which layer's cache.
        fresh: both planes of this rank's own rows.
        picked: by sequence and position, new planes of other ranks that this rank is to keep.
    """

    def __init__(
        self, comm: Messages, group: Sequence[int], shares: Sequence[SeqShare], where: tuple[int, int], fresh: Planes,
        held: HeldKv, work: RankWork, new: bool,
    ) -> None:  # fmt: skip
        """`new`: nobody has attended to this cache in this step."""
        self.comm, self.group, self.shares, self.where = comm, list(group), shares, where
        self.fresh, self.held, self.work, self.new = fresh, held, work, new
        self.picked: dict[int, list[tuple[I32, Planes]]] = {}

    def block(self) -> Planes:
        """What this rank has cached and makes, sequence after sequence; the positions are `SeqShare.block`."""
        planes: list[Planes] = []
        for share, own in zip(self.shares, self.split(self.fresh, self.comm.rank, rows=True), strict=True):
            planes += [self.held.of(share.seq, self.where, own), own]
        return (np.concatenate([p[0] for p in planes]), np.concatenate([p[1] for p in planes]))

    def split(self, planes: Planes, rank: int, *, rows: bool = False) -> list[Planes]:
        """What `block` of a rank gave, or planes of its rows, by sequence."""
        ends = np.cumsum([len(s.rows[rank] if rows else s.block(rank)) for s in self.shares])[:-1]
        return list(zip(np.split(planes[0], ends), np.split(planes[1], ends), strict=True))

    def pick(self, block: Planes, source: int) -> None:
        """Take what this rank is to keep and `source` makes out of its block, which comes by anyway."""
        if not self.new or source == self.comm.rank:
            return
        for n, (share, planes) in enumerate(zip(self.shares, self.split(block, source), strict=True)):
            at = np.flatnonzero(np.isin(share.block(source), share.kept[self.comm.rank]))
            if len(at):
                self.picked.setdefault(n, []).append((share.block(source)[at], (planes[0][at], planes[1][at])))

    def partial(self, q: F32, owner: int, block: Planes, source: int, rule: Scoring, tile: int = 0) -> Partial:
        """Rows q [T, H, D] of rank `owner` over the block of rank `source`: [T, G, H/G, 1], twice, and [..., W].

        `tile`: scores of so many rows and keys at a time; 0: a row over all its keys.
        """
        num_kv_heads = block[0].shape[1]
        own = q.reshape(len(q), num_kv_heads, q.shape[1] // num_kv_heads, q.shape[2])
        found, first = nothing(own, block[rule.value].shape[-1]), 0
        for share, planes in zip(self.shares, self.split(block, source), strict=True):
            rows = slice(first, first + len(share.rows[owner]))
            first = rows.stop
            k, v = rule.parts(planes)
            into = (found[0][rows], found[1][rows], found[2][rows])
            score = _by_tiles if tile else _by_rows
            score(own[rows], share.rows[owner], k, v, share.block(source), rule, into, self.work, tile)
        return found


def nothing(q: F32, width: int) -> Partial:
    """Of q [T, G, H/G, D] over no keys at all."""
    shape = (*q.shape[:3], 1)
    return np.full(shape, _LOW, np.float32), np.zeros(shape, np.float32), np.zeros((*shape[:3], width), np.float32)


def whole(part: Partial, rule: Scoring) -> F32:
    """[T, H, W] of a partial of all keys."""
    if rule.sinks is not None:
        sinks = np.broadcast_to(rule.sinks.reshape(part[0].shape[1:]), part[0].shape)
        part = combine(part, (sinks, np.ones_like(sinks), np.zeros_like(part[2])))
    out: F32 = part[2] / part[1]
    return out.reshape(len(out), out.shape[1] * out.shape[2], out.shape[3])


def seen(position: int, keys: I32, rule: Scoring) -> tuple[int, int]:
    """Which of ascending key positions the token at `position` sees: first, last + 1."""
    lo, hi = np.searchsorted(keys, [first_key(position, rule.window, rule.chunk), position + 1])
    return int(lo), int(hi)


def _by_rows(
    q: F32, at: I32, k: F32, v: F32, keys: I32, rule: Scoring, into: Partial, work: RankWork, tile: int
) -> None:  # fmt: skip
    """Each row over the keys that it sees, and no others."""
    slopes = rule.bent(rule.slopes, k.shape[1])
    for t, position in enumerate(at.tolist()):
        lo, hi = seen(position, keys, rule)
        if lo == hi:
            continue
        s = np.matmul(q[t], k[lo:hi].transpose(1, 2, 0)) * np.float32(rule.scale)
        if rule.soft_cap is not None:
            s = np.tanh(s / rule.soft_cap) * rule.soft_cap
        if slopes is not None:
            s = s - slopes * (position - keys[lo:hi]).astype(np.float32)
        work.scored(s, k, v)
        m = s.max(axis=-1, keepdims=True)
        weights = np.exp(s - m)
        into[0][t], into[1][t] = m, weights.sum(axis=-1, keepdims=True)
        into[2][t] = np.matmul(weights, v[lo:hi].transpose(1, 0, 2))


def _by_tiles(
    q: F32, at: I32, k: F32, v: F32, keys: I32, rule: Scoring, into: Partial, work: RankWork, tile: int
) -> None:  # fmt: skip
    """Tiles of rows over tiles of keys (Dao et al., FlashAttention, arXiv 2205.14135, algorithm 1); those that nobody
    sees are left out, and what is hidden within one is computed for nothing."""
    slopes = rule.bent(rule.slopes, k.shape[1])
    reach = np.array([seen(p, keys, rule) for p in at.tolist()], np.int64).reshape(-1, 2)
    for r in range(0, len(at), tile):
        rows = slice(r, r + tile)
        some = reach[rows]
        running: Partial = (into[0][rows], into[1][rows], into[2][rows])
        for c in range(0, len(keys), tile):
            column = np.arange(c, min(c + tile, len(keys)))
            hidden = (column < some[:, :1]) | (column >= some[:, 1:])
            if hidden.all():
                continue
            own_k, own_v = k[c : c + tile].transpose(1, 2, 0), v[c : c + tile].transpose(1, 0, 2)
            s = np.matmul(q[rows], own_k) * np.float32(rule.scale)
            if rule.soft_cap is not None:
                s = np.tanh(s / rule.soft_cap) * rule.soft_cap
            if slopes is not None:
                behind = (at[rows, None] - keys[column]).astype(np.float32)
                s = s - slopes * behind[:, None, None]
            s = np.where(hidden[:, None, None], _LOW, s)
            work.scored(s, k, v)
            m = s.max(axis=-1, keepdims=True)
            weights = np.where(hidden[:, None, None], 0, np.exp(s - m)).astype(np.float32)
            running = combine(running, (m, weights.sum(axis=-1, keepdims=True), np.matmul(weights, own_v)))
        for old, new in zip(into, running, strict=True):
            old[rows] = new
