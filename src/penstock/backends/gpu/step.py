"""A step on a device: what the operations read of its plan, as tensors, each brought there once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from penstock.ops.plan import StepPlan
from penstock.ops.step import Step


class TorchStep(Step):
    """See `ops.step.Step`. `planes[g][name]` are `device_array.DeviceArray`."""

    __slots__ = ("device",)

    def __init__(self, plan: StepPlan, planes: Sequence[Any], device: torch.device) -> None:
        super().__init__(plan, planes)
        self.device = device

    def tensor(self, group: int, name: str) -> torch.Tensor:
        """A plane of a group, whole."""
        plane: Any = self.planes[group][name]
        tensor: torch.Tensor = plane.tensor
        return tensor

    def on_device(self, array: Any) -> torch.Tensor:
        """Whole numbers as a tensor of 64 bits, which is what indices are made of."""
        return torch.from_numpy(array.astype("int64")).to(self.device, non_blocking=True)

    def slots_of(self, group: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`token_pages` on the device."""
        key = ("slots_of", group)
        if key not in self.memo:
            pages, offsets = self.token_pages(group)
            self.memo[key] = self.on_device(pages), self.on_device(offsets)
        found: tuple[torch.Tensor, torch.Tensor] = self.memo[key]
        return found
