"""What both reference backends share: gather a sequence's context once, then attend one token after the other.

Shape letters: T tokens, H query heads, G kv heads, D key dim, W value dim, n keys in a token's reach.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from penstock.base.bf16 import F32
from penstock.ops.ref.storage import gather
from penstock.ops.step import Step


class AttendRow(Protocol):
    """One token: q [G, H/G, D] over k [n, G, D] and v [n, G, W], the first key at position `first` -> [G, H/G, W]."""

    def __call__(self, q: F32, k: F32, v: F32, first: int, scale: float, soft_cap: float | None) -> F32: ...


def scores(q: F32, k: F32, scale: float, soft_cap: float | None) -> F32:
    """scale * q.k [G, H/G, n], squashed into (-soft_cap, soft_cap) if there is one."""
    out: F32 = np.matmul(q, k.transpose(1, 2, 0)) * scale
    return out if soft_cap is None else np.tanh(out / soft_cap) * soft_cap


class RowBackend:
    """An AttentionBackend (core.protocols) made of a function for one token. Keeps no state."""

    def __init__(self, name: str, online: bool, attend_row: AttendRow) -> None:
        self.name = name
        self.online = online
        self._attend_row = attend_row

    def attend(
        self, q: F32, step: Step, group: int, layer: int, *, keys: tuple[str, ...], value: str, scale: float,
        window: int | None = None, soft_cap: float | None = None,
    ) -> F32:  # fmt: skip
        """See `core.protocols.AttentionBackend.attend`.

        The token at position p reduces over the keys max(0, p+1-window) ... p, in order, and over no others: what
        follows in its chunk is sliced off, not masked, so its shapes depend on p alone.
        """
        plan, planes = step.plan, step.planes[group]
        rows: list[F32] = []
        for b in range(step.num_sequences):
            lo, hi = step.bounds[b], step.bounds[b + 1]
            if lo == hi:
                continue
            start, end = int(plan.positions[lo]), int(plan.positions[hi - 1]) + 1
            base = 0 if window is None else max(0, start + 1 - window)
            pages = plan.groups[group].pages(b, layer)
            parts = {name: gather(planes[name], pages, base, end) for name in {*keys, value}}
            k = parts[keys[0]] if len(keys) == 1 else np.concatenate([parts[name] for name in keys], axis=-1)
            v = parts[value]
            for t, p in zip(range(lo, hi), range(start, end), strict=True):
                first = 0 if window is None else max(0, p + 1 - window)
                reach = slice(first - base, p + 1 - base)
                own = q[t].reshape(k.shape[1], -1, k.shape[2])
                rows.append(self._attend_row(own, k[reach], v[reach], first, scale, soft_cap))
        if not rows:
            return np.zeros((0, q.shape[1], planes[value].shape[-1]), np.float32)
        return np.stack(rows).reshape(len(rows), q.shape[1], -1)
