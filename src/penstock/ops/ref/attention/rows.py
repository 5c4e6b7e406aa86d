"""What both reference backends share: gather a sequence's context once, then attend one token after the other.

Shape letters: T tokens, H query heads, G kv heads, D key dim, W value dim, n keys in a token's reach.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from penstock.base.bf16 import F32
from penstock.ops.plan import I32
from penstock.ops.ref.storage import read_kv
from penstock.ops.step import Step


class Rule(NamedTuple):
    """How a layer scores. `slopes` and `sinks` are [G, H/G, 1] or None."""

    scale: float
    soft_cap: float | None
    slopes: F32 | None
    sinks: F32 | None


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
        sinks: F32 | None = None,
    ) -> F32:  # fmt: skip
        """See `core.protocols.AttentionBackend.attend`.

        The token at position p reduces over the keys first_key(p) ... p, in order, and over no others: what follows in
        its chunk is sliced off, not masked, so its shapes depend on p alone. In a tree (`ops.tree`) the keys of its
        path are put together before, in the order of their positions.
        """
        plan, planes = step.plan, step.planes[group]
        rows: list[F32] = []
        for b in range(step.num_sequences):
            lo, hi = step.bounds[b], step.bounds[b + 1]
            if lo == hi:
                continue
            start, end = int(plan.positions[lo]), int(plan.positions[lo]) + hi - lo
            base = first_key(start, window, chunk)
            pages = plan.groups[group].pages(b, layer)
            parts = {name: read_kv(planes, name, pages, base, end) for name in {*keys, value}}
            k = parts[keys[0]] if len(keys) == 1 else np.concatenate([parts[name] for name in keys], axis=-1)
            v = parts[value]
            per_kv_head = (k.shape[1], q.shape[1] // k.shape[1])
            rule = Rule(scale, soft_cap, *(None if x is None else x.reshape(*per_kv_head, 1) for x in (slopes, sinks)))
            paths = step.trees(b)
            for t in range(lo, hi):
                p = int(plan.positions[t])
                first = first_key(p, window, chunk)
                reach: slice | I32 = slice(first - base, p + 1 - base)
                if paths is not None:
                    cached = np.arange(start - base, dtype=np.int32)
                    seen = np.array(paths[t - lo], np.int32) + np.int32(start - base - lo)
                    reach = np.concatenate([cached, seen])[reach]
                own = q[t].reshape(*per_kv_head, k.shape[2])
                rows.append(self._attend_row(own, k[reach], v[reach], first, rule))
        if not rows:
            return np.zeros((0, q.shape[1], planes[value].shape[-1]), np.float32)
        return np.stack(rows).reshape(len(rows), q.shape[1], -1)
