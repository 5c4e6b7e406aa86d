"""Methods in which a rank has all keys that its rows, or its heads, see: the bits are those of one rank."""

from __future__ import annotations

import numpy as np

from penstock.base.bf16 import F32
from penstock.ops.plan import I32
from penstock.ops.ref.attention.full import attend_row
from penstock.ops.ref.attention.rows import Rule, first_key
from penstock.parallel.sequence.passing import LayerView, Planes, RankWork, Scoring
from penstock.parallel.shard import head_ranges


def attend_whole(q: F32, at: I32, planes: Planes, rule: Scoring, work: RankWork) -> F32:
    """Rows q [T, H, D] at positions `at` over keys of all positions from 0 on: [T, H, W], as the reference does it."""
    k, v = rule.parts(planes)
    shape = (k.shape[1], q.shape[1] // k.shape[1])
    how = Rule(rule.scale, rule.soft_cap, rule.bent(rule.slopes, shape[0]), rule.bent(rule.sinks, shape[0]))
    out = np.zeros((*q.shape[:2], v.shape[-1]), np.float32)
    for t, position in enumerate(at.tolist()):
        first = first_key(position, rule.window, rule.chunk)
        reach = slice(first, position + 1)
        work.flops += 2 * q.shape[1] * (position + 1 - first) * (k.shape[-1] + v.shape[-1])
        work.workspace = max(work.workspace, 4 * q.shape[1] * (position + 1 - first))
        out[t] = attend_row(q[t].reshape(*shape, -1), k[reach], v[reach], first, how).reshape(out.shape[1:])
    return out


class GatherKv:
    """Every rank gets all keys and values of a layer, for as long as it attends (Korthikanti et al., arXiv 2205.05198,
    section 4.2.1 gathers rows of activations; here only what attention needs of other rows is gathered)."""

    def attend(self, view: LayerView, q: F32, rule: Scoring) -> F32:
        blocks = view.comm.gather(view.block(), view.group, "kv")
        split = []
        for source, (a, b) in zip(view.group, blocks, strict=True):
            view.pick((a, b), source)
            split.append(view.split((a, b), source))
        out, first = [], 0
        for n, share in enumerate(view.shares):
            planes: list[F32] = []
            for i in range(2):
                plane = np.empty((share.end, *view.fresh[i].shape[1:]), np.float32)
                for source, parts in zip(view.group, split, strict=True):
                    plane[share.block(source)] = parts[n][i]
                planes.append(plane)
            at = share.rows[view.comm.rank]
            own = q[first : first + len(at)]
            out.append(attend_whole(own, at, (planes[0], planes[1]), rule, view.work))
            first += len(at)
        return np.concatenate(out)


class Ulysses:
    """Rows go to all ranks by heads, and come back by rows: each rank has all tokens of its heads (Jacobs et al.,
    DeepSpeed Ulysses, arXiv 2309.14509, section 3.1). Where there are fewer kv heads than ranks, several have one."""

    def attend(self, view: LayerView, q: F32, rule: Scoring) -> F32:
        comm, group = view.comm, view.group
        size, at = len(group), group.index(comm.rank)
        heads, kv_heads = (head_ranges(x.shape[1], 1, size) for x in (q, view.fresh[0]))
        own_q = self._to_heads(view, (q,), heads)[0]
        if view.new:
            a, b = self._to_heads(view, view.fresh, kv_heads)
            for n, share in enumerate(view.shares):
                rows = self._rows(view, n)
                order = np.argsort(np.concatenate([share.rows[rank] for rank in group]))
                view.picked.setdefault(n, []).append((share.kept[comm.rank], (a[rows][order], b[rows][order])))
                self._store(view, n)
        out = []
        bent = [None if x is None else x[slice(*heads[at])] for x in (rule.slopes, rule.sinks)]
        mine = rule._replace(slopes=bent[0], sinks=bent[1])
        like = (view.fresh[0][:0, slice(*kv_heads[at])], view.fresh[1][:0, slice(*kv_heads[at])])
        for n, share in enumerate(view.shares):
            positions = np.concatenate([share.rows[rank] for rank in group])
            planes = view.held.of(share.seq, view.where, like)
            out.append(attend_whole(own_q[self._rows(view, n)], positions, planes, mine, view.work))
        return self._to_rows(view, np.concatenate(out))

    @staticmethod
    def _store(view: LayerView, n: int) -> None:
        """What all heads of this rank get is there before anybody attends to it."""
        ((_, planes),) = view.picked.pop(n)
        view.held.add(view.shares[n].seq, view.where, planes)

    @staticmethod
    def _rows(view: LayerView, n: int) -> slice:
        """The n-th sequence among rows that are in order of sequences, and of ranks within each."""
        counts = [sum(len(share.rows[rank]) for rank in view.group) for share in view.shares]
        return slice(sum(counts[:n]), sum(counts[: n + 1]))

    @staticmethod
    def _to_heads(view: LayerView, arrays: tuple[F32, ...], ranges: tuple[tuple[int, int], ...]) -> list[F32]:
        """Of own rows [T, heads, ...] this rank's heads of everybody's, sequence by sequence and rank by rank."""
        label = "q" if len(arrays) == 1 else "kv"
        parts = [tuple(np.ascontiguousarray(x[:, first:last]) for x in arrays) for first, last in ranges]
        found = view.comm.all_to_all(parts, view.group, label)
        made = []
        for i in range(len(arrays)):
            by_rank = []
            for rank, got in zip(view.group, found, strict=True):
                ends = np.cumsum([len(share.rows[rank]) for share in view.shares])[:-1]
                by_rank.append(np.split(got[i], ends))
            made.append(np.concatenate([part[n] for n in range(len(view.shares)) for part in by_rank]))
        return made

    def _to_rows(self, view: LayerView, x: F32) -> F32:
        """The way back: [all rows, own heads, W] -> [own rows, all heads, W]."""
        parts: list[list[F32]] = [[] for _ in view.group]
        for n, share in enumerate(view.shares):
            ends = np.cumsum([len(share.rows[rank]) for rank in view.group])[:-1]
            for part, rows in zip(parts, np.split(x[self._rows(view, n)], ends), strict=True):
                part.append(rows)
        found = view.comm.all_to_all([(np.concatenate(part),) for part in parts], view.group, "attended")
        return np.concatenate([got[0] for got in found], axis=1)
