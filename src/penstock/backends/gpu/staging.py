"""The whole numbers of a step, brought to the device by one copy from pinned memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from penstock.ops.plan import GroupPlan
from penstock.ops.step import Step

_ALIGNED = 16
"""Arrays begin at multiples of so many bytes: kernels are compiled for such pointers."""
_Array = npt.NDArray[Any]


def numbers_of(step: Step, rows: _Array, written: Collection[int], tables: bool) -> dict[Any, _Array]:
    """What operations read of a step, by its key in `step.memo`: int64 where it indexes, int32 where kernels read it.

    `rows`: of the tokens that the head gets. `written`: groups whose keys and values it writes. `tables`: there are
    kernels that read tables, starts and positions.
    """
    plan = step.plan
    wide = {"token_ids": plan.token_ids, "positions": plan.positions, "rows": rows}
    out: dict[Any, _Array] = {name: array.astype(np.int64) for name, array in wide.items()}
    for group in written:
        for i, array in enumerate(step.token_pages(group)):
            out["slots_of", group, i] = array.astype(np.int64)
    if tables:
        out["starts32"], out["positions32"] = plan.query_start_loc, plan.positions
        for group in written:
            if all(table.shape[0] == 1 for table in plan.groups[group].tables):
                out["pages", group] = ragged(plan.groups[group])
    return out


def ragged(where: GroupPlan, layer: int | None = None) -> npt.NDArray[np.int32]:
    """Tables [B, M] of a group, -1 where a sequence has no block: slabs, or the pages of a layer."""
    lines = [table[0] if layer is None else where.pages(b, layer) for b, table in enumerate(where.tables)]
    out = np.full((len(lines), max([1, *map(len, lines)])), -1, np.int32)
    for row, line in zip(out, lines, strict=True):
        row[: len(line)] = np.maximum(line, -1)
    return out


def bring(arrays: Mapping[Any, _Array], device: torch.device) -> dict[Any, torch.Tensor]:
    """The arrays as tensors of their types and shapes on the device: parts of one, by one copy.

    The host does not wait: torch keeps pinned memory until what reads it is done.
    """
    spans, size = {}, 0
    for key, array in arrays.items():
        spans[key] = size, size + array.nbytes
        size = -(-spans[key][1] // _ALIGNED) * _ALIGNED
    pinned = device.type == "cuda" and torch.cuda.is_available()
    host = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    memory = host.numpy()
    for key, (first, last) in spans.items():
        memory[first:last] = np.ascontiguousarray(arrays[key]).reshape(-1).view(np.uint8)
    there = host.to(device, non_blocking=True)
    types = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64}
    return {
        key: there[first:last].view(types[arrays[key].dtype]).view(arrays[key].shape)
        for key, (first, last) in spans.items()
    }
