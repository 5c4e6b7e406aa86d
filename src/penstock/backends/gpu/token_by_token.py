"""Functions of rows whose bits, on a CPU, depend on how many rows there are."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def each(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Of every token by itself: see `ops.EXACT`. A GPU has one form for all."""
    return function(x) if x.device.type != "cpu" or not len(x) else torch.stack([function(row) for row in x])
