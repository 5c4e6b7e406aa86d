"""A tensor with an array's face: planes of keys and values, and rows of logits, for those who work beside the model.

What moves pages, takes drafts back or changes logits indexes arrays. It stays as it is: a `DeviceArray` takes the same
indices and the arithmetic below, and nothing leaves the device until `np.asarray`, `tolist`, `float` or `astype` ask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

_TYPES: dict[Any, torch.dtype] = {
    np.float32: torch.float32, np.float16: torch.float16, np.uint16: torch.bfloat16, np.int8: torch.int8,
    np.uint8: torch.uint8, np.int64: torch.int64, np.bool_: torch.bool,
}  # fmt: skip
_DTYPES = {own: np.dtype(kind) for kind, own in _TYPES.items()}
_UFUNCS: dict[Any, Callable[..., torch.Tensor]] = {
    np.add: torch.add, np.subtract: torch.sub, np.multiply: torch.mul, np.divide: torch.div, np.greater: torch.gt,
    np.isnan: torch.isnan, np.isfinite: torch.isfinite, np.negative: torch.neg,
}  # fmt: skip


class DeviceArray(np.lib.mixins.NDArrayOperatorsMixin):
    """`dtype` is numpy's; bfloat16 shows as its bits, as everywhere (`base.bf16`).

    `x[i]` is another of its kind, on the device: a view or a copy, as with arrays. `whole`: of a plane, with the spare
    page behind its own, which nobody reads: there goes what rows of padding write.
    """

    def __init__(self, tensor: torch.Tensor, whole: torch.Tensor | None = None) -> None:
        self.tensor = tensor
        self.whole = tensor if whole is None else whole
        self.shape, self.ndim = tuple(tensor.shape), tensor.ndim
        self.dtype = _DTYPES[tensor.dtype]
        self.nbytes = tensor.numel() * tensor.element_size()

    # -- indices ---------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, at: Any) -> DeviceArray:
        return DeviceArray(self.tensor[self._index(at)])

    def __setitem__(self, at: Any, what: Any) -> None:
        self.tensor[self._index(at)] = self._taken(what)

    def copy(self) -> DeviceArray:
        return DeviceArray(self.tensor.clone())

    def reshape(self, *shape: int) -> DeviceArray:
        return DeviceArray(self.tensor.reshape(*shape))

    def fill(self, value: float) -> None:
        self.tensor.fill_(value)

    # -- arithmetic ------------------------------------------------------------------------------------------------

    def argmax(self) -> int:
        return int(self.tensor.argmax())

    def max(self) -> np.float32:
        return np.float32(self.tensor.max().item())

    def any(self) -> bool:
        return bool(self.tensor.any())

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **named: Any) -> Any:
        op = _UFUNCS.get(ufunc)
        if op is None or method != "__call__" or named:
            return NotImplemented
        result = op(*(self._taken(x) for x in inputs))
        if out is None:
            return DeviceArray(result)
        out[0].tensor.copy_(result)
        return out[0]

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func is np.where and not kwargs:
            return DeviceArray(torch.where(*(self._taken(x) for x in args)))
        if func is np.copyto and set(kwargs) == {"where"}:
            target, value = args
            target.tensor.masked_fill_(self._taken(kwargs["where"]), value)
            return None
        return NotImplemented

    # -- away from the device --------------------------------------------------------------------------------------

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        tensor = self.tensor.detach().cpu()
        array: np.ndarray[Any, Any] = (
            tensor.view(torch.int16).numpy().view(np.uint16) if tensor.dtype == torch.bfloat16 else tensor.numpy()
        )
        return array if dtype is None else array.astype(dtype, copy=False)

    def __float__(self) -> float:
        return float(self.tensor.item())

    def astype(self, dtype: Any, copy: bool = True) -> np.ndarray[Any, Any]:
        """An array of this process."""
        return np.asarray(self).astype(dtype, copy=copy)

    def tolist(self) -> Any:
        return self.tensor.tolist()

    def _index(self, at: Any) -> Any:
        if isinstance(at, tuple):
            return tuple(map(self._index, at))
        if isinstance(at, np.ndarray | list):
            array = np.asarray(at)
            wide = array if array.dtype == np.bool_ else array.astype(np.int64)
            return torch.from_numpy(wide).to(self.tensor.device)
        return int(at) if isinstance(at, np.integer) else at

    def _taken(self, what: Any) -> Any:
        """An operand where this one is."""
        if isinstance(what, DeviceArray):
            return what.tensor
        if isinstance(what, np.generic):
            return torch.tensor(what.item(), dtype=_TYPES[what.dtype.type], device=self.tensor.device)
        if isinstance(what, np.ndarray):
            array = np.ascontiguousarray(what)
            if array.dtype == np.uint16:
                return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(self.tensor.device)
            return torch.from_numpy(array).to(self.tensor.device)
        return what


def new_plane(device: torch.device, shape: tuple[int, ...], dtype: type[np.generic], content: Any) -> DeviceArray:
    """A plane full of `content`, an integer that is a bit pattern where `dtype` is that of bfloat16."""
    kind, spacious = _TYPES[dtype], (shape[0] + 1, *shape[1:])
    if kind == torch.bfloat16:
        whole = torch.full(spacious, content, dtype=torch.int16, device=device).view(torch.bfloat16)
    else:
        whole = torch.full(spacious, content, dtype=kind, device=device)
    return DeviceArray(whole[: shape[0]], whole)
