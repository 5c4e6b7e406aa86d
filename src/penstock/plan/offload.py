"""Which layers of weights stay in memory, how far the others are read ahead, how many sequences share what is read, and
how many of these have their keys and values on the disk.

Source: FlexGen (Sheng et al., ICML 2023, section 4): a column of sequences goes through a layer before the next layer
comes, and how memory is shared out is searched for by a cost model. Theirs is a linear program over tensors that may be
cut anywhere; here layers are whole, so that all plans can be tried.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from penstock.base.errors import ConfigError

_TURNS = 3  # after two the pipeline of a model is as it stays
_SLIGHT = 0.02
"""Of tokens/s: a difference that a model of a pipeline cannot tell."""


class OffloadRates(NamedTuple):
    """What a machine does. `read`: bytes/s from the disk, which `read_load` seconds of all its processors go with for
    each byte. A step of n rows takes `step_s` + n * `row_s` seconds with all weights in memory, `layers_share` of it in
    layers. `kv_read`: bytes/s of keys and values, which come in smaller pieces; None: as weights."""

    read: float
    step_s: float
    row_s: float
    layers_share: float
    read_load: float = 0.0
    kv_read: float | None = None


class OffloadModel(NamedTuple):
    """Bytes: of each layer, of what is no layer's, and of keys and values of a sequence. `moved`: what a step reads and
    writes of them where they are on the disk; 0: they cannot be. `least_kv`: memory for keys and values, at least."""

    layers: tuple[int, ...]
    beside: int
    row: int
    moved: int = 0
    least_kv: int = 0

    @property
    def sets(self) -> int:
        """Of a sequence whose keys and values are on the disk, what is in memory: those of two layers."""
        return min(self.row, -(-2 * self.row // len(self.layers)))


class OffloadPlan(NamedTuple):
    """`rows`: sequences at once, of which `away` have keys and values on the disk; `prefetch`: layers on the way while
    one computes; `weight_bytes`, `kv_bytes`: what weights, and keys and values, may take; `step_s`: seconds of a
    step of all rows."""

    rows: int
    prefetch: int
    weight_bytes: int
    step_s: float
    away: int = 0
    kv_bytes: int = 0

    @property
    def tokens_s(self) -> float:
        return self.rows / self.step_s


def kept_layers(sizes: Sequence[int], limit: int | None, prefetch: int, *, beside: int = 0) -> list[bool]:
    """Which layers stay in memory, of `sizes` bytes each: as many as `limit` allows with `beside` that always are.

    Of the others 1 + `prefetch` are in memory at a time, in turn and round and round. They are spread evenly, so that
    the next ones come while layers that stay compute. Raises ConfigError if not even those fit.
    """
    n = len(sizes)
    room = sum(sizes) if limit is None else limit - beside
    if sum(sizes) <= room:
        return [True] * n
    for coming in range(1, n + 1):
        keeps = [i * coming // n == (i + 1) * coming // n for i in range(n)]
        others = [size for size, stays in zip(sizes, keeps, strict=True) if not stays]
        needed = window_bytes(others, prefetch) + sum(sizes) - sum(others)
        if needed <= room and coming > 1 + prefetch:
            return keeps
    least = window_bytes(sizes, prefetch)
    raise ConfigError(
        f"weight_memory_bytes: {limit} are too few: {min(n, 1 + prefetch)} layers at a time take {least}, and what is "
        f"no layer's {beside}; give at least {least + beside}, or a lower weight_prefetch",
        field="weight_memory_bytes",
    )


def window_bytes(sizes: Sequence[int], prefetch: int) -> int:
    """The most that 1 + `prefetch` of these in a row take; behind the last comes the first."""
    count, n = min(1 + prefetch, len(sizes)), len(sizes)
    return max((sum(sizes[(i + j) % n] for j in range(count)) for i in range(n)), default=0)


def step_seconds(
    model: OffloadModel, keeps: Sequence[bool], prefetch: int, rates: OffloadRates, rows: int, away: int = 0
) -> float:
    """Of a step among many: layers wait for their weights, and for the keys and values of `away` rows, and the disk for
    a layer that is done with."""
    coming = [size for size, stays in zip(model.layers, keeps, strict=True) if not stays]
    moved = away * model.moved
    work = rates.step_s + rows * rates.row_s
    slower = 1.0 + rates.read_load * (sum(coming) + moved) / work
    each = slower * work * rates.layers_share / len(keeps)
    kv_s = moved / len(keeps) / (rates.kv_read or rates.read)
    now = began = 0.0
    free = 2 * kv_s
    ready = deque([kv_s, free])  # keys and values of the next two layers, each into its set
    done = dict.fromkeys(range(1 + prefetch), 0.0)
    for i in range(min(1 + prefetch, len(coming))):
        free += coming[i] / rates.read
        done[i] = free
    number = 0
    for _ in range(_TURNS):
        began = now
        for stays in keeps:
            now = max(now, ready.popleft(), 0.0 if stays else done.pop(number)) + each
            if kv_s:
                free = max(free, now) + kv_s
            ready.append(free if kv_s else 0.0)
            if not stays:
                following = number + 1 + prefetch
                free = max(free, now) + coming[following % len(coming)] / rates.read
                done[following] = free
                number += 1
        now += slower * work * (1.0 - rates.layers_share)
    return now - began


def offload_plans(
    model: OffloadModel, memory: int, rates: OffloadRates, rows: Iterable[int], prefetches: Iterable[int] = range(4)
) -> list[OffloadPlan]:
    """Every plan that fits `memory` bytes, for weights and for keys and values, the one with most tokens/s first."""
    found, ahead = [], tuple(prefetches)
    for count in rows:
        shares = {count * quarter // 4 for quarter in range(5)} if model.moved else {0}
        for away in sorted(shares):
            kv_bytes = max(model.least_kv, (count - away) * model.row + away * model.sets)
            for prefetch in ahead:
                limit = memory - kv_bytes
                try:
                    keeps = kept_layers(model.layers, limit, prefetch, beside=model.beside)
                except ConfigError:
                    continue
                step_s = step_seconds(model, keeps, prefetch, rates, count, away)
                found.append(OffloadPlan(count, prefetch, limit, step_s, away, kv_bytes))
    return sorted(found, key=lambda plan: -plan.tokens_s)


def best_plan(plans: Sequence[OffloadPlan]) -> OffloadPlan | None:
    """The first, unless one with fewer on the disk, or with fewer sequences, promises as much but for `_SLIGHT`."""
    if not plans:
        return None
    near = [plan for plan in plans if plan.tokens_s >= (1.0 - _SLIGHT) * plans[0].tokens_s]
    return min(near, key=lambda plan: (plan.away, plan.rows))
