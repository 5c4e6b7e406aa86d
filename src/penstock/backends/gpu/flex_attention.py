"""Attention by torch's FlexAttention: compiled on a GPU, eager on the CPU.

It reads one run of keys for the whole step: those of its sequences one behind the other, gathered from their pages and
decoded. A mask says which of them a token sees. So nothing is shared with `attention.py` but the gathering.

Source: Dong et al., Flex Attention, arXiv 2412.05496.
Shape letters: T tokens, N keys of the step, H query heads, G kv heads, D key dim, W value dim.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from penstock.backends.gpu.attention import TorchAttention
from penstock.backends.gpu.cache_ops import read_kv
from penstock.backends.gpu.step import TorchStep
from penstock.base.errors import EngineError
from penstock.config import EngineConfig
from penstock.core.kv_format import parse_kv_format
from penstock.core.model_spec import ModelSpec
from penstock.ops.ref.attention.rows import first_key

_EAGER = "flex_attention called without torch.compile"


class _Run(NamedTuple):
    """The keys of a step, for layers of one group with one reach: where they lie, and who sees them."""

    spans: list[tuple[int, int, int]]
    """(sequence, first slot, last slot + 1), in order."""
    mask: BlockMask
    query_positions: Tensor
    key_positions: Tensor


class FlexAttention(TorchAttention):
    """See `TorchAttention`. `counts`: calls, for tests."""

    name = "flex"

    def __init__(self, device: torch.device) -> None:
        self.counts = {"flex": 0}
        self._eager = device.type == "cpu"
        self._call: Any = flex_attention if self._eager else torch.compile(flex_attention, dynamic=True)

    @classmethod
    def why_not(cls, config: EngineConfig, spec: ModelSpec) -> str | None:
        """What keeps it from a model with these settings, as an end of a sentence."""
        if config.selection is not None:
            return "flex reads whole contexts, and a KV selector keeps or reads parts"
        kind = config.cache.kv_cache_dtype
        if kind != "auto" and any(layer.recent for layer in parse_kv_format(kind).every):
            return "flex has no form for newest tokens that kv_cache_dtype keeps beside their codes"
        return None

    def attend(
        self, q: Tensor, step: TorchStep, group: int, layer: int, *, keys: tuple[str, ...], value: str, scale: float,
        window: int | None = None, chunk: int | None = None, soft_cap: float | None = None,
        slopes: Tensor | None = None, sinks: Tensor | None = None, rotation: Any = None, kept: Any = None,
        pages: Any = None, chosen: Any = None,
    ) -> Tensor:  # fmt: skip
        where = step.plan.groups[group]
        if kept is not None or rotation is not None or pages is not None or where.dropped or where.lanes > 1:
            raise EngineError(
                "flex attention was given a context that it has no form for; leave attention_backend away"
            )
        if not step.bounds[-1]:
            return q.new_zeros((0, q.shape[1], step.tensor(group, value).shape[-1]))
        self.counts["flex"] += 1
        key = ("flex", window, chunk)
        if key not in step.memo:
            step.memo[key] = _run(step, window, chunk)
        run: _Run = step.memo[key]
        parts = {name: _gathered(step, group, layer, name, run) for name in {*keys, value}}
        k = torch.cat([parts[name] for name in keys], dim=-1)

        bent = soft_cap is not None or slopes is not None

        def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            if soft_cap is not None:
                s = torch.tanh(s / soft_cap) * soft_cap
            if slopes is not None:
                s = s - slopes[h] * (run.query_positions[i] - run.key_positions[j])
            return s

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=_EAGER)
            out, aux = self._call(
                q.float().transpose(0, 1)[None].contiguous(), k.transpose(0, 1)[None].contiguous(),
                parts[value].transpose(0, 1)[None].contiguous(), score_mod=score if bent else None,
                block_mask=run.mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1],
                return_aux=AuxRequest(lse=True),
            )  # fmt: skip
        if sinks is not None:
            out = out * torch.sigmoid(aux.lse - sinks[None, :, None])[..., None]
        found: Tensor = out[0].transpose(0, 1).contiguous()
        return found


def _run(step: TorchStep, window: int | None, chunk: int | None) -> _Run:
    plan = step.plan
    spans: list[tuple[int, int, int]] = []
    owners: list[Any] = []
    positions: list[Any] = []
    nodes: list[Any] = []
    for b in range(step.num_sequences):
        lo, hi = step.bounds[b], step.bounds[b + 1]
        if lo == hi:
            continue
        start = int(plan.positions[lo])
        first = first_key(start, window, chunk)
        spans.append((b, first, start + hi - lo))
        owners.append(np.full(start + hi - lo - first, b))
        positions += [np.arange(first, start), plan.positions[lo:hi]]
        nodes += [np.full(start - first, -1), np.arange(lo, hi)]
    own = np.repeat(np.arange(step.num_sequences), np.diff(plan.query_start_loc))
    owner, place, node = (step.on_device(np.concatenate(parts)) for parts in (owners, positions, nodes))
    token_owner, token_place = step.on_device(own), step.on_device(plan.positions)
    paths = _paths(step)

    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = (token_owner[i] == owner[j]) & (place[j] <= token_place[i])
        if window is not None:
            seen = seen & (place[j] > token_place[i] - window)
        if chunk is not None:
            seen = seen & (place[j] >= token_place[i] // chunk * chunk)
        if paths is not None:
            seen = seen & ((node[j] < 0) | paths[i, node[j].clamp(min=0)])
        return seen

    mask = create_block_mask(sees, None, None, len(own), len(owner), device=str(step.device))
    return _Run(spans, mask, token_place, place)


def _paths(step: TorchStep) -> Tensor | None:
    """[T, T] which tokens of the step each token of a tree of drafts sees; None without trees."""
    if step.plan.mask is None or not step.plan.mask.any():
        return None
    seen = np.tril(np.ones((step.bounds[-1],) * 2, bool))
    for b in range(step.num_sequences):
        for i, path in enumerate(step.trees(b) or ()):
            seen[step.bounds[b] + i] = False
            seen[step.bounds[b] + i, path] = True
    return torch.from_numpy(seen).to(step.device)


def _gathered(step: TorchStep, group: int, layer: int, name: str, run: _Run) -> Tensor:
    where = step.plan.groups[group]
    found = [read_kv(step, group, name, where.pages(b, layer), first, end) for b, first, end in run.spans]
    return found[0] if len(found) == 1 else torch.cat(found)
