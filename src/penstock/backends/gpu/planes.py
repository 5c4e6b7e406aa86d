"""KV memory of a device: planes as tensors, and the view of them that the rest of the rank has.

What moves pages, takes drafts back or looks at keys beside the step indexes planes as if they were arrays. It stays as
it is: a `DevicePlane` takes the same indices, and copies between pages without leaving the device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


_TYPES: dict[Any, torch.dtype] = {
    np.float32: torch.float32, np.float16: torch.float16, np.uint16: torch.bfloat16, np.int8: torch.int8,
    np.uint8: torch.uint8,
}  # fmt: skip


class DevicePlane:
    """A tensor with an array's indices. `dtype` is numpy's; bfloat16 shows as its bits, as everywhere (`base.bf16`).

    `plane[i]` is another of its kind, on the device: a view or a copy, as with arrays. `np.asarray` brings it here.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.shape, self.ndim = tuple(tensor.shape), tensor.ndim
        self.dtype = np.dtype(next(kind for kind, own in _TYPES.items() if own == tensor.dtype))
        self.nbytes = tensor.numel() * tensor.element_size()

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, at: Any) -> DevicePlane:
        return DevicePlane(self.tensor[self._index(at)])

    def __setitem__(self, at: Any, what: Any) -> None:
        if isinstance(what, DevicePlane):
            what = what.tensor
        elif isinstance(what, np.ndarray):
            array = np.ascontiguousarray(what)
            if array.dtype == np.uint16:
                what = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
            else:
                what = torch.from_numpy(array)
            what = what.to(self.tensor.device)
        self.tensor[self._index(at)] = what

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        tensor = self.tensor.detach().cpu()
        array: np.ndarray[Any, Any] = (
            tensor.view(torch.int16).numpy().view(np.uint16) if tensor.dtype == torch.bfloat16 else tensor.numpy()
        )
        return array if dtype is None else array.astype(dtype, copy=False)

    def copy(self) -> DevicePlane:
        return DevicePlane(self.tensor.clone())

    def reshape(self, *shape: int) -> DevicePlane:
        return DevicePlane(self.tensor.reshape(*shape))

    def _index(self, at: Any) -> Any:
        if isinstance(at, tuple):
            return tuple(map(self._index, at))
        if isinstance(at, np.ndarray):
            return torch.from_numpy(at.astype(np.int64)).to(self.tensor.device)
        return int(at) if isinstance(at, np.integer) else at


def new_plane(device: torch.device, shape: tuple[int, ...], dtype: type[np.generic], content: Any) -> DevicePlane:
    """A plane full of `content`, an integer that is a bit pattern where `dtype` is that of bfloat16."""
    kind = _TYPES[dtype]
    if kind == torch.bfloat16:
        bits = torch.full(shape, content, dtype=torch.int16, device=device)
        return DevicePlane(bits.view(torch.bfloat16))
    return DevicePlane(torch.full(shape, content, dtype=kind, device=device))
