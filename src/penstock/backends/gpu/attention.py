"""Attention token by token on tensors: what `ops.ref.attention.rows` does, and the oracle of the kernels beside it.

A token reduces over its own keys, in order, with shapes that follow from its position alone. Shape letters: T tokens, H
query heads, G kv heads, D key dim, W value dim, n keys in a token's reach.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.backends.gpu.cache_ops import contexts, read_kv
from penstock.backends.gpu.fixed_attention import attend_fixed
from penstock.backends.gpu.ops import rope, rope_angles
from penstock.backends.gpu.step import TorchStep
from penstock.core.selection import BOUNDS, PageReads, TokenReads
from penstock.ops.kept import Kept
from penstock.ops.ref.attention.pages import choose_pages
from penstock.ops.ref.attention.rows import first_key


class _Rule(NamedTuple):
    """How a layer scores. `slopes` and `sinks` are [G, H/G, 1] or None."""

    scale: float
    soft_cap: float | None
    slopes: Tensor | None
    sinks: Tensor | None


def _attend_row(q: Tensor, k: Tensor, v: Tensor, rule: _Rule) -> Tensor:
    """One token: q [G, H/G, D] over k [n, G, D] and v [n, G, W] -> [G, H/G, W]. The last key is the token's own."""
    s = torch.matmul(q.contiguous(), k.permute(1, 2, 0).contiguous()) * rule.scale
    if rule.soft_cap is not None:
        s = torch.tanh(s / rule.soft_cap) * rule.soft_cap
    if rule.slopes is not None:
        s = s - rule.slopes * torch.arange(k.shape[0] - 1, -1, -1, dtype=torch.float32, device=k.device)
    m = s.amax(dim=-1, keepdim=True)
    if rule.sinks is not None:
        m = torch.maximum(m, rule.sinks)
    weights = torch.exp(s - m)
    total = weights.sum(dim=-1, keepdim=True)
    if rule.sinks is not None:
        total = total + torch.exp(rule.sinks - m)
    return torch.matmul(weights, v.transpose(0, 1).contiguous()) / total


class TorchAttention:
    """See `core.protocols.AttentionBackend`, whose arguments these are, on tensors."""

    name, online = "torch", False

    def attend(
        self, q: Tensor, step: TorchStep, group: int, layer: int, *, keys: tuple[str, ...], value: str, scale: float,
        window: int | None = None, chunk: int | None = None, soft_cap: float | None = None,
        slopes: Tensor | None = None, sinks: Tensor | None = None, rotation: Any = None, kept: Kept | None = None,
        pages: PageReads | None = None, chosen: TokenReads | None = None,
    ) -> Tensor:  # fmt: skip
        if kept is not None:
            return self._attend_kept(q, step, group, layer, kept, _Rule(scale, soft_cap, slopes, sinks))
        if step.static is not None:
            return attend_fixed(
                q, step, group, layer, keys=keys, value=value, scale=scale, window=window, chunk=chunk,
                soft_cap=soft_cap, slopes=slopes, sinks=sinks, rotation=rotation,
            )  # fmt: skip
        width = step.tensor(group, value).shape[-1]
        if not step.bounds[-1]:
            return q.new_zeros((0, q.shape[1], width))
        lanes = step.plan.groups[group].lanes
        heads = q.shape[1] // lanes
        parts: list[Tensor] = []
        for lane in range(lanes):
            own = slice(lane * heads, (lane + 1) * heads)
            rule = _Rule(
                scale, soft_cap, None if slopes is None else slopes[own], None if sinks is None else sinks[own]
            )
            reach = (keys, value, window, chunk, rotation, pages, chosen)
            rows = [
                row
                for b in range(step.num_sequences)
                for row in self._rows(q[:, own], step, group, (layer, lane), b, rule, reach)
            ]
            parts.append(torch.stack(rows).reshape(len(rows), heads, -1))
        return parts[0] if lanes == 1 else torch.cat(parts, dim=1)

    def _rows(
        self, q: Tensor, step: TorchStep, group: int, line: tuple[int, int], b: int, rule: _Rule, reach: Any
    ) -> list[Tensor]:
        """The tokens of sequence `b` over one lane's keys: [G, H/G, W] each."""
        keys, value, window, chunk, rotation, reads, chosen = reach
        plan, where = step.plan, step.plan.groups[group]
        lo, hi = step.bounds[b], step.bounds[b + 1]
        if lo == hi:
            return []
        gone = where.num_dropped(b, *line)
        start = int(plan.positions[lo]) - gone
        end = start + hi - lo
        base = first_key(start, window, chunk)
        pages = where.pages(b, *line)
        parts = {name: read_kv(step, group, name, pages, base, end) for name in {*keys, value}}
        k = parts[keys[0]] if len(keys) == 1 else torch.cat([parts[n] for n in keys], dim=-1)
        v = parts[value]
        if rotation is not None:
            table, interleaved, first_dim = rotation
            at = torch.arange(base, end, device=k.device)
            k = rope(k, rope_angles(at, table), interleaved, first_dim)
        shape = (k.shape[1], q.shape[1] // k.shape[1])
        bent = (None if x is None else x.reshape(*shape, 1) for x in (rule.slopes, rule.sinks))
        rule = _Rule(rule.scale, rule.soft_cap, *bent)
        paths = step.trees(b)
        rows: list[Tensor] = []
        for t in range(lo, hi):
            p = int(plan.positions[t]) - gone
            first = first_key(p, window, chunk)
            own = q[t].reshape(*shape, k.shape[2])
            if reads is not None and step.chooses(b, t):
                rows.append(self._attend_pages(own, k[: p + 1], v[: p + 1], rule, reads, step, group, pages))
                continue
            some = None if chosen is None else step.memo.get(("rehearse", group, line[0], t))
            if some is not None:
                parts_of = ((g, step.on_device(at)) for g, at in enumerate(some))
                one = [
                    _attend_row(own[g : g + 1], k[at][:, g : g + 1], v[at][:, g : g + 1],
                                rule._replace(sinks=None if rule.sinks is None else rule.sinks[g : g + 1]))
                    for g, at in parts_of
                ]  # fmt: skip
                rows.append(torch.cat(one))
                continue
            if paths is None:
                seen = slice(first - base, p + 1 - base)
                rows.append(_attend_row(own, k[seen], v[seen], rule))
                continue
            cached = np.arange(start - base, dtype=np.int64)
            path = np.array(paths[t - lo], np.int64) + (start - base - lo)
            at = step.on_device(np.concatenate([cached, path])[first - base : p + 1 - base])
            rows.append(_attend_row(own, k[at], v[at], rule))
        return rows

    def _attend_pages(
        self, q: Tensor, k: Tensor, v: Tensor, rule: _Rule, reads: PageReads, step: TorchStep, group: int, pages: Any
    ) -> Tensor:
        """A token over the pages it chooses. See `ops.ref.attention.pages.attend_pages`."""
        size = step.plan.groups[group].block_size
        n, count = len(k), -(-len(k) // size)
        if reads.num_pages(n, size) >= count:
            return _attend_row(q, k, v, rule)
        own = step.on_device(pages[:count])
        low, high = (step.tensor(group, name)[own, 0].float() for name in BOUNDS)
        out: list[Tensor] = []
        for g in range(q.shape[0]):
            largest = torch.maximum(q[g][:, None] * low[:, g], q[g][:, None] * high[:, g]).sum(dim=-1).amax(dim=0)
            chosen = choose_pages(largest.cpu().numpy(), n, size, reads)
            at = (chosen[:, None] * size + np.arange(size)).reshape(-1)
            seen = step.on_device(at[at < n])
            sinks = None if rule.sinks is None else rule.sinks[g : g + 1]
            out.append(_attend_row(q[g : g + 1], k[seen][:, g : g + 1], v[seen][:, g : g + 1],
                                   rule._replace(sinks=sinks)))  # fmt: skip
        return torch.cat(out)

    def _attend_kept(self, q: Tensor, step: TorchStep, group: int, layer: int, kept: Kept, rule: _Rule) -> Tensor:
        out = q.new_zeros((*q.shape[:2], step.tensor(kept.group, "v").shape[-1]))
        for t, (k, v) in enumerate(contexts(step, group, layer, kept)):
            shape = (k.shape[1], q.shape[1] // k.shape[1])
            bent = (None if x is None else x.reshape(*shape, 1) for x in (rule.slopes, rule.sinks))
            row = _attend_row(q[t].reshape(*shape, -1), k, v, _Rule(rule.scale, rule.soft_cap, *bent))
            out[t] = row.reshape(out.shape[1:])
        return out
