"""A step on a device: what the operations read of its plan, as tensors, each brought there once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from penstock.backends.gpu.staging import bring
from penstock.ops.plan import StepPlan, Taken
from penstock.ops.step import Step


class HostRead(RuntimeError):
    """An operation wants a number from the device, or brings one there, where a captured step does neither.

    Its text is the end of a sentence that begins with what cannot be captured.
    """


class StaticTables(NamedTuple):
    """What the operations of a captured step read in place of its plan: buffers that are filled before every run.

    Shapes: positions int32 [T]; tables[g] int32 [T, M], slabs of a group, negative where there is none. Every row is a
    sequence of its own; none stands at `most` or later.
    """

    positions: torch.Tensor
    tables: tuple[torch.Tensor, ...]
    most: int


class TorchStep(Step):
    """See `ops.step.Step`. `planes[g][name]` are `device_array.DeviceArray`. `static`: of a step to be captured."""

    __slots__ = ("device", "static")

    def __init__(
        self, plan: StepPlan, planes: Sequence[Any], device: torch.device, static: StaticTables | None = None
    ) -> None:
        super().__init__(plan, planes)
        self.device, self.static = device, static

    def tensor(self, group: int, name: str) -> torch.Tensor:
        """A plane of a group, whole."""
        plane: Any = self.planes[group][name]
        tensor: torch.Tensor = plane.tensor
        return tensor

    def on_device(self, array: Any) -> torch.Tensor:
        """Whole numbers as a tensor of 64 bits, which is what indices are made of; equal ones are copied once.

        Raises: HostRead in a step that is captured: what would be copied now would be read at every later run.
        """
        if self.static is not None:
            raise HostRead("numbers of the plan are copied to the device")
        key = ("on_device", array.shape, array.tobytes())
        if key not in self.memo:
            self.memo[key] = torch.from_numpy(array.astype("int64")).to(self.device, non_blocking=True)
        found: torch.Tensor = self.memo[key]
        return found

    def slots_of(self, group: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`token_pages` on the device."""
        key = ("slots_of", group)
        if key not in self.memo:
            if (*key, 0) not in self.memo:
                self.memo.update({(*key, i): self.on_device(x) for i, x in enumerate(self.token_pages(group))})
            self.memo[key] = self.memo[*key, 0], self.memo[*key, 1]
        found: tuple[torch.Tensor, torch.Tensor] = self.memo[key]
        return found


def put_taken(taken: Taken, ids: torch.Tensor) -> None:
    """Mutates: `ids` [T or more], a step's token ids on the device, at `taken.targets`."""
    count = len(taken.targets)
    if (taken.sources == np.arange(count)).all() and (taken.targets == taken.sources).all():
        ids[:count] = taken.tokens[:count]  # the same rows decode once more
        return
    sources, targets = bring({0: np.stack([taken.sources, taken.targets]).astype(np.int64)}, ids.device)[0]
    ids[targets] = taken.tokens[sources].to(ids.dtype)
