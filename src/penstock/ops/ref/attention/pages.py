"""Pages that a single token reads: their bounds, and the choice by them.

Source: Quest, arXiv 2406.10774, section 3.3: q.k <= sum over the components of max(q low, q high) for every key of a
page whose least and largest components are `low` and `high`.

Shape letters: M pages, S tokens of a page, G kv heads, H query heads, D key dim, W value dim, n keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.base.bf16 import F32
from penstock.core.selection import BOUNDS, PageReads
from penstock.ops.plan import I32, Planes
from penstock.ops.ref.product import as_float32


def read_bounds(planes: Planes, pages: I32) -> tuple[F32, F32]:
    """Of `pages` [M]: each [M, G, D]."""
    low, high = (as_float32(planes[name][pages, 0]) for name in BOUNDS)
    return low, high


def upper_bounds(q: F32, low: F32, high: F32) -> F32:
    """Of one kv head's queries [H/G, D] with the keys of pages whose bounds are [M, D]: none of the products of any of
    them with a page's keys is larger than this [M].
    """
    largest = np.maximum(q[:, None] * low, q[:, None] * high).sum(axis=-1, dtype=np.float32)
    out: F32 = largest.max(axis=0)
    return out


def choose_pages(upper: F32, num_tokens: int, block_size: int, reads: PageReads) -> I32:
    """The pages, ascending, that the last of `num_tokens` tokens reads of those whose products `upper` [M] bounds.

    Equals go to the lower page; a NaN is larger than all.
    """
    recent = reads.first_recent(num_tokens, block_size)
    wanted = reads.num_pages(num_tokens, block_size) - (len(upper) - recent)
    upper = np.where(np.isnan(upper), np.inf, upper)[:recent]
    best = np.argsort(-upper, kind="stable")[: max(0, wanted)]
    return np.concatenate([np.sort(best), np.arange(recent, -(-num_tokens // block_size))]).astype(np.int32)


def attend_pages(
    q: F32, k: F32, v: F32, rule: Any, attend_row: Callable[..., F32], reads: PageReads, block_size: int,
    bounds: Callable[[], tuple[F32, F32]],
) -> F32:  # fmt: skip
    """A single token's q [G, H/G, D] over what it reads of k [n, G, D] and v [n, G, W]: [G, H/G, W].

    Every kv head has pages of its own choice, which it sees as if there were no others. See `rows.AttendRow`.
    """
    n, pages = len(k), -(-len(k) // block_size)
    if reads.num_pages(n, block_size) >= pages:
        return attend_row(q, k, v, 0, rule)
    low, high = (x[:pages] for x in bounds())
    out: list[F32] = []
    for g in range(q.shape[0]):
        chosen = choose_pages(upper_bounds(q[g], low[:, g], high[:, g]), n, block_size, reads)
        own = (chosen[:, None] * block_size + np.arange(block_size)).reshape(-1)
        own = own[own < n]
        sinks = None if rule.sinks is None else rule.sinks[g : g + 1]
        out.append(attend_row(q[g : g + 1], k[own, g : g + 1], v[own, g : g + 1], 0, rule._replace(sinks=sinks)))
    return np.concatenate(out)
