"""Methods in which blocks go round a ring while ranks compute, or queries go to where keys are."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from penstock.base.bf16 import F32
from penstock.ops.ref.attention.online import Partial, combine
from penstock.parallel.sequence.passing import LayerView, Scoring, whole
from penstock.parallel.sequence.shares import SeqShare

TILE = 32
"""Rows and keys whose scores `Burst` holds at a time."""


class Ring:
    """Blocks of keys and values go round; each rank adds up what its rows see of the block that it has, while the next
    one comes (Liu et al., Ring Attention, arXiv 2310.01889, section 3)."""

    tile = 0

    def attend(self, view: LayerView, q: F32, rule: Scoring) -> F32:
        comm, group = view.comm, view.group
        block, at, parts = view.block(), group.index(view.comm.rank), []
        for n in range(len(group)):
            source, before = group[at - n], (view.work.flops, comm.given["kv"])
            coming = comm.shift(block, group, "kv") if n < len(group) - 1 else None
            parts.append(view.partial(q, comm.rank, block, source, rule, self.tile))
            view.pick(block, source)
            view.work.rounds.append((view.work.flops - before[0], comm.given["kv"] - before[1]))
            if coming is not None:
                a, b = coming.result()
                block = (a, b)
                parts = [reduce(combine, parts)]
        return whole(reduce(combine, parts), rule)


class Burst(Ring):
    """The same with the scores of a tile at a time, whatever the length, and two buffers: one is computed from, one is
    filled (Sun et al., BurstAttention, arXiv 2403.09347, sections 3.2 and 3.4)."""

    tile = TILE


class PassQ:
    """Queries go round, and what they find comes back to the rank whose rows they are (Yang et al., arXiv 2411.01783,
    section 3.5.3)."""

    def attend(self, view: LayerView, q: F32, rule: Scoring) -> F32:
        comm, group = view.comm, view.group
        block, at, found = view.block(), group.index(view.comm.rank), {}
        for n in range(len(group)):
            source = group[at - n]
            coming = comm.shift((q,), group, "q") if n < len(group) - 1 else None
            found[source] = view.partial(q, source, block, comm.rank, rule)
            if coming is not None:
                (q,) = coming.result()
        returned = comm.all_to_all([found[rank] for rank in group], group, "partials")
        parts: list[Partial] = [(m, total, o) for m, total, o in returned]
        return whole(reduce(combine, parts), rule)


class PassFewer:
    """Whichever of both gives fewer bytes away in this layer and step: new rows are many where little is cached, and
    few where much is (Yang et al., arXiv 2411.01783, section 3.6: by counts of bytes, not by measured speeds)."""

    def attend(self, view: LayerView, q: F32, rule: Scoring) -> F32:
        shape = (q.shape[1], q.shape[2], view.fresh[rule.value].shape[2])
        per_token = sum(plane.shape[1] * plane.shape[2] for plane in view.fresh)
        pass_kv, pass_q = passed_bytes(view.shares, view.group, shape, per_token)
        method = Ring() if pass_kv <= pass_q else PassQ()
        return method.attend(view, q, rule)


def passed_bytes(
    shares: Sequence[SeqShare], group: Sequence[int], shape: tuple[int, int, int], per_token: int
) -> tuple[int, int]:
    """Bytes that all ranks of `group` give away for one attention: of blocks of keys and values, and of queries and
    what they find. `shape`: query heads, key dim, value dim. `per_token`: numbers that are cached of one."""
    heads, key_dim, value_dim = shape
    keys = sum(len(share.block(rank)) for share in shares for rank in group)
    rows = sum(len(share.rows[rank]) for share in shares for rank in group)
    others = len(group) - 1
    return 4 * others * keys * per_token, 4 * others * rows * heads * (key_dim + value_dim + 2)


def overlapped_seconds(
    rounds: Sequence[tuple[int, int]], flops_per_s: float, bytes_per_s: float, buffers: int
) -> float:  # fmt: skip
    """What counted rounds (`passing.RankWork`) would take: with two buffers a block comes while the one before is
    computed with; with one, behind it. No device is asked."""
    together = max if buffers > 1 else _sum
    return sum(together(flops / flops_per_s, moved / bytes_per_s) for flops, moved in rounds)


def _sum(a: float, b: float) -> float:
    return a + b
