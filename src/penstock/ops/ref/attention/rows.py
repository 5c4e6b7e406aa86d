"""What both reference backends share: gather a sequence's context once, then attend one token after the other.

Shape letters: T tokens, H query heads, G kv heads, D key dim, W value dim, n keys in a token's reach.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

from penstock.base.bf16 import F32
from penstock.core.selection import PageReads, TokenReads
from penstock.ops.kept import Kept
from penstock.ops.plan import I32
from penstock.ops.ref.attention.kept import contexts
from penstock.ops.ref.attention.pages import attend_pages, read_bounds
from penstock.ops.ref.rehearsal import attend_tokens
from penstock.ops.ref.rotary import rope, rope_angles
from penstock.ops.ref.storage import read_kv
from penstock.ops.step import Step

Rotation = tuple[F32, bool, int]
"""Table [2, positions, dim/2], interleaved, first component: how raw keys turn when they are read, at their slots."""


class Rule(NamedTuple):
    """How a layer scores. `slopes` and `sinks` are [G, H/G, 1] or None."""

    scale: float
    soft_cap: float | None
    slopes: F32 | None
    sinks: F32 | None


class _Lane(NamedTuple):
    """The arguments of `attend` for one lane's heads."""

    keys: tuple[str, ...]
    value: str
    scale: float
    window: int | None
    chunk: int | None
    soft_cap: float | None
    slopes: F32 | None
    sinks: F32 | None
    rotation: Rotation | None
    pages: PageReads | None
    chosen: bool

    @property
    def names(self) -> set[str]:
        return {*self.keys, self.value}


class AttendRow(Protocol):
    """One token: q [G, H/G, D] over k [n, G, D] and v [n, G, W], the first key at position `first` -> [G, H/G, W].

    The last key is the token's own.
    """

    def __call__(self, q: F32, k: F32, v: F32, first: int, rule: Rule) -> F32: ...


def scores(q: F32, k: F32, rule: Rule, behind: int) -> F32:
    """Scores [G, H/G, n] of keys of which the last lies `behind` tokens behind the query."""
    out: F32 = np.matmul(q, k.transpose(1, 2, 0)) * rule.scale
    if rule.soft_cap is not None:
        out = np.tanh(out / rule.soft_cap) * rule.soft_cap
    if rule.slopes is not None:
        n = k.shape[0]
        out = out - rule.slopes * np.arange(behind + n - 1, behind - 1, -1, dtype=np.float32)
    return out


def first_key(position: int, window: int | None, chunk: int | None) -> int:
    """The earliest position that the token at `position` sees."""
    first = 0 if window is None else max(0, position + 1 - window)
    return first if chunk is None else max(first, position // chunk * chunk)


class RowBackend:
    """An AttentionBackend (core.protocols) made of a function for one token. Keeps no state."""

    def __init__(self, name: str, online: bool, attend_row: AttendRow) -> None:
        self.name = name
        self.online = online
        self._attend_row = attend_row

    def attend(
        self, q: F32, step: Step, group: int, layer: int, *, keys: tuple[str, ...], value: str, scale: float,
        window: int | None = None, chunk: int | None = None, soft_cap: float | None = None, slopes: F32 | None = None,
        sinks: F32 | None = None, rotation: Rotation | None = None, kept: Kept | None = None,
        pages: PageReads | None = None, chosen: TokenReads | None = None,
    ) -> F32:  # fmt: skip
        """See `core.protocols.AttentionBackend.attend`.

        The token at position p reduces over the keys first_key(p) ... p, in order, and over no others: what follows in
        its chunk is sliced off, not masked, so its shapes depend on p alone. In a tree (`ops.tree`) the keys of its
        path are put together before, in the order of their positions. A line that has dropped tokens is the same with
        slots for positions.
        """
        if kept is not None:
            return self._attend_kept(q, step, group, layer, kept, Rule(scale, soft_cap, slopes, sinks))
        planes, lanes = step.planes[group], step.plan.groups[group].lanes
        if not step.bounds[-1]:
            return np.zeros((0, q.shape[1], planes[value].shape[-1]), np.float32)
        heads = q.shape[1] // lanes
        parts: list[F32] = []
        for lane in range(lanes):
            own = slice(lane * heads, (lane + 1) * heads)
            call = _Lane(
                keys, value, scale, window, chunk, soft_cap, None if slopes is None else slopes[own],
                None if sinks is None else sinks[own], rotation, pages, chosen is not None,
            )  # fmt: skip
            rows = [
                row
                for b in range(step.num_sequences)
                for row in self._rows(q[:, own], step, group, layer, lane, b, call)
            ]
            parts.append(np.stack(rows).reshape(len(rows), heads, -1))
        return parts[0] if lanes == 1 else np.concatenate(parts, axis=1)

    def _rows(self, q: F32, step: Step, group: int, layer: int, lane: int, b: int, call: _Lane) -> list[F32]:
        """The tokens of sequence `b` over one lane's keys: [G, H/G, W] each."""
        plan, planes, where = step.plan, step.planes[group], step.plan.groups[group]
        lo, hi = step.bounds[b], step.bounds[b + 1]
        if lo == hi:
            return []
        gone = where.num_dropped(b, layer, lane)
        start = int(plan.positions[lo]) - gone
        end = start + hi - lo
        base = first_key(start, call.window, call.chunk)
        pages = where.pages(b, layer, lane)
        low, more = where.num_low(b, layer, lane), 0
        parts = {name: read_kv(planes, name, pages, max(base, low * where.block_size), end) for name in call.names}
        if low:
            from penstock.ops.ref.codecs.halves import read_halves

            # Two tokens in each slot of these pages; nothing but selections makes them.
            parts = {name: np.concatenate([read_halves(planes, name, pages[:low]), x]) for name, x in parts.items()}
            more = low * where.block_size
        k = parts[call.keys[0]] if len(call.keys) == 1 else np.concatenate([parts[n] for n in call.keys], axis=-1)
        v = parts[call.value]
        if call.rotation is not None:
            table, interleaved, first_dim = call.rotation
            k = rope(k, rope_angles(np.arange(base, end, dtype=np.int32), table), interleaved, first_dim)
        per_kv_head = (k.shape[1], q.shape[1] // k.shape[1])
        bent = (None if x is None else x.reshape(*per_kv_head, 1) for x in (call.slopes, call.sinks))
        rule = Rule(call.scale, call.soft_cap, *bent)
        paths = step.trees(b)
        rows: list[F32] = []
        for t in range(lo, hi):
            p = int(plan.positions[t]) - gone
            first = first_key(p, call.window, call.chunk)
            reach: slice | I32 = slice(first - base, p + 1 - base + more)
            if paths is not None:
                cached = np.arange(start - base, dtype=np.int32)
                seen = np.array(paths[t - lo], np.int32) + np.int32(start - base - lo)
                reach = np.concatenate([cached, seen])[reach]
            own = q[t].reshape(*per_kv_head, k.shape[2])
            if call.pages is not None and step.chooses(b, t):
                found = partial(read_bounds, planes, pages)
                rows.append(
                    attend_pages(
                        own, k[: p + 1], v[: p + 1], rule, self._attend_row, call.pages, where.block_size, found
                    )
                )
                continue
            some = step.memo.get(("rehearse", group, layer, t)) if call.chosen else None
            if some is not None:
                rows.append(attend_tokens(own, k, v, rule, self._attend_row, some))
                continue
            rows.append(self._attend_row(own, k[reach], v[reach], first, rule))
        return rows

    def _attend_kept(self, q: F32, step: Step, group: int, layer: int, kept: Kept, rule: Rule) -> F32:
        """`attend` where the newest tokens, and perhaps the first ones, are read from caches of their own."""
        out = np.zeros((*q.shape[:2], step.planes[kept.group]["v"].shape[-1]), np.float32)
        for t, (k, v) in enumerate(contexts(step, group, layer, kept)):
            shape = (k.shape[1], q.shape[1] // k.shape[1])
            own = (None if x is None else x.reshape(*shape, 1) for x in (rule.slopes, rule.sinks))
            row = self._attend_row(q[t].reshape(*shape, -1), k, v, 0, Rule(rule.scale, rule.soft_cap, *own))
            out[t] = row.reshape(out.shape[1:])
        return out
