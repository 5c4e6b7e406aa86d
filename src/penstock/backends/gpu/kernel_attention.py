"""Attention by the Triton kernels where they can, and token by token where they cannot.

The kernels get one table of slabs for all layers of a group: a layer's planes are a view with every `num_layers`-th
page, so that nothing is computed per layer but the attention itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.backends.gpu.attention import TorchAttention
from penstock.backends.gpu.kernels.attention_decode import SPLIT, Cache, Rule, attend_tokens, sequences_of
from penstock.backends.gpu.kernels.attention_prefill import attend_rows
from penstock.backends.gpu.staging import bring, ragged
from penstock.backends.gpu.step import TorchStep
from penstock.core.cache_spec import run_name
from penstock.core.kv_codec import scales_name
from penstock.ops.kept import Kept

MANY = 16
"""From so many tokens of a sequence on, a step reads it as a prompt: they share what they load."""
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class KernelAttention(TorchAttention):
    """See `TorchAttention`. `counts`: calls by the kernels and by torch, for tests and benchmarks."""

    name, reads_tables = "triton", True

    def __init__(self, *, prompts: bool = True) -> None:
        """`prompts`: many tokens of a sequence by the kernel for prompts, whose bits are not those of the other; and
        cuts that a row's company decides."""
        self._prompts = prompts
        self.counts = {"tokens": 0, "rows": 0, "torch": 0}

    def attend(
        self, q: Tensor, step: TorchStep, group: int, layer: int, *, keys: tuple[str, ...], value: str, scale: float,
        window: int | None = None, chunk: int | None = None, soft_cap: float | None = None,
        slopes: Tensor | None = None, sinks: Tensor | None = None, rotation: Any = None, kept: Kept | None = None,
        pages: Any = None, chosen: Any = None,
    ) -> Tensor:  # fmt: skip
        cache = None
        if kept is None and rotation is None and pages is None and chosen is None and step.bounds[-1]:
            cache = _cache(step, group, layer, keys, value)
        if cache is None:
            self.counts["torch"] += 1
            return super().attend(
                q.float(), step, group, layer, keys=keys, value=value, scale=scale, window=window, chunk=chunk,
                soft_cap=soft_cap, slopes=slopes, sinks=sinks, rotation=rotation, kept=kept, pages=pages,
                chosen=chosen,
            )  # fmt: skip
        rule = Rule(scale, window, chunk, soft_cap, slopes, sinks)
        at = _places(step)
        if self._prompts and at.longest >= MANY and at.mask is None:
            self.counts["rows"] += 1
            return attend_rows(q, cache, rule, at.starts, at.positions, at.longest)
        self.counts["tokens"] += 1
        split = None if self._prompts else SPLIT
        return attend_tokens(
            q, cache, rule, at.starts, at.positions, at.last, sequences=at.sequences, mask=at.mask, split=split,
        )  # fmt: skip


class _Places:
    """What the kernels read of a step besides tables, once for all its layers. `last`: the highest position."""

    def __init__(self, step: TorchStep) -> None:
        plan, device = step.plan, step.device
        self.mask: Tensor | None = None
        if step.static is not None:
            self.starts = torch.arange(len(plan.positions) + 1, dtype=torch.int32, device=device)
            self.positions, self.sequences = step.static.positions, self.starts[:-1]
            self.longest, self.last = 1, step.static.most - 1
            return
        given = {"starts32": plan.query_start_loc, "positions32": plan.positions}
        if not given.keys() <= step.memo.keys():  # who only warms up makes a step by hand
            step.memo.update(bring(given, device))
        self.starts, self.positions = step.memo["starts32"], step.memo["positions32"]
        self.sequences = sequences_of(self.starts, len(plan.positions))
        self.longest = int(np.diff(plan.query_start_loc).max())
        self.last = max(int(plan.positions.max()), step.memo.get("last", 0))
        if plan.mask is not None and plan.mask.any():
            self.mask = torch.from_numpy(plan.mask.view(np.int64).copy()).to(device)


def _places(step: TorchStep) -> _Places:
    if "places" not in step.memo:
        step.memo["places"] = _Places(step)
    found: _Places = step.memo["places"]
    return found


def _cache(step: TorchStep, group: int, layer: int, keys: tuple[str, ...], value: str) -> Cache | None:
    """The layer's planes and tables as the kernels take them; None where they do not."""
    where, planes = step.plan.groups[group], step.planes[group]
    if where.lanes > 1 or where.dropped is not None or len(keys) > 2 or where.block_size % 16:
        return None
    if where.block_size > 32 and where.block_size % 64:
        return None
    if any(run_name(name, 1) in planes for name in (*keys, value)):
        return None  # its heads have codecs of their own
    tables = where.tables
    shared = all(table.shape[0] == 1 for table in tables)
    first, every = (layer, where.num_layers) if shared else (0, 1)

    def own(name: str) -> Tensor:
        return step.tensor(group, name)[first::every]

    kinds = {step.tensor(group, name).dtype for name in (*keys, value)}
    scales = [scales_name(name, "int8") for name in (keys[0], value)]
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None
    if kinds == {torch.int8} and len(keys) == 1 and all(name in planes for name in scales):
        key_scales, value_scales = map(own, scales)
    elif len(kinds) != 1 or not kinds <= set(_FLOATS):
        return None
    key = ("pages", group) if shared else ("pages", group, layer)
    if key not in step.memo:
        step.memo[key] = torch.from_numpy(ragged(where, None if shared else layer)).to(step.device)
    rope_keys = own(keys[1]) if len(keys) == 2 else None
    first_keys = own(keys[0])
    values = first_keys if value == keys[0] else own(value)  # one tensor: a latent is read once
    return Cache(first_keys, values, step.memo[key], key_scales, value_scales, rope_keys)
