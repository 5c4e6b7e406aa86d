"""A mock of CUDA graphs for the CPU: it records a step's operations and runs them again on the same memory.

As with a graph, Python runs once: an operation finds its arguments where they were, a number that Python read is the
number it was, and every result lands where it landed first. Memory that was there before is not kept alive: a run that
finds it gone is an error here (a GPU reads what others have put there). Graphs that share a pool overwrite each other's
results, so a run spoils those of the others. What a CUDA graph refuses (to read a tensor from the host, or sizes that
follow from what is in one) is refused here, too; what is copied from the host is not, unless it comes by
`torch.tensor`. Launches of Triton's interpreter are recorded whole.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from penstock.backends.gpu.step import HostRead

_AT_HOST = {
    getattr(torch.Tensor, name)
    for name in ("item", "tolist", "numpy", "cpu", "__array__", "__bool__", "__int__", "__float__", "__index__")
} | {torch.tensor}
_SIZED_BY_DATA = ("aten::nonzero", "aten::_unique2", "aten::masked_select", "aten::_local_scalar_dense")


class MockGraph:
    """What was recorded: `result` is where the next run leaves what the function returned. `num_ops`: of a run."""

    def __init__(self, pool: list[MockGraph]) -> None:
        self.calls: list[Callable[[], object]] = []
        self.result: Any = None
        self._pool = pool
        pool.append(self)

    @property
    def num_ops(self) -> int:
        return len(self.calls)

    def replay(self) -> None:
        """Run it again."""
        for other in self._pool:
            if other.result is not None:
                other.result.fill_(float("nan"))
        with torch.no_grad():
            for call in self.calls:
                call()


class _Outside:
    """A tensor whose memory was there before a recording, by its address: as a graph knows it."""

    def __init__(self, tensor: Tensor, op: str) -> None:
        self._memory: Any = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self._view = tensor.storage_offset(), tensor.shape, tensor.stride()
        self._dtype, self._op = tensor.dtype, op

    def tensor(self) -> Tensor:
        """Raises: RuntimeError if its memory is gone."""
        if self._memory.expired():
            raise RuntimeError(f"a graph's {self._op} reads memory that nobody holds any more")
        memory = torch.UntypedStorage._new_with_weak_ptr(self._memory.cdata)
        return torch.empty(0, dtype=self._dtype).set_(memory, *self._view)


class MockGraphs:
    """See `graphs.Graphs`."""

    def __init__(self) -> None:
        self._pool: list[MockGraph] = []

    def capture(self, fn: Callable[[], Tensor]) -> MockGraph:
        """See `graphs.Graphs.capture`."""
        fn()  # as on a GPU: what is made at the first call is no part of the graph
        graph = MockGraph(self._pool)
        ops, calls = _Ops(graph.calls), _Calls()
        with _launches(ops, calls), calls, ops:
            graph.result = fn()
        return graph


class _Calls(TorchFunctionMode):
    """Refuses what reads tensors from the host."""

    paused = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _AT_HOST and not self.paused:
            raise HostRead(f"{func.__name__} waits for the device")
        return func(*args, **(kwargs or {}))


class _Ops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operations."""

    paused = False

    def __init__(self, calls: list[Callable[[], object]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = calls
        self._inside: set[int] = set()
        """Addresses of memory that was made here."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        out = func(*args, **named)
        if self.paused:
            return out
        name = func._schema.name
        masks = [x for x in args[1] if x is not None and x.dtype == torch.bool] if name == "aten::index" else []
        if name in _SIZED_BY_DATA or masks:
            raise HostRead(f"{name.removeprefix('aten::')} waits for the device")
        if func.is_view:
            return out
        if not func._schema.is_mutable:
            self._inside.update(x.untyped_storage().data_ptr() for x in _tensors(out))
        held, held_named = tree_map(self._held(name), (args, named))
        if func._schema.is_mutable:
            self.calls.append(partial(_on, func, held, held_named))
        else:
            self.calls.append(partial(_again, func, held, held_named, out))
        return out

    def _held(self, op: str) -> Callable[[Any], Any]:
        def hold(x: Any) -> Any:
            if not isinstance(x, Tensor) or x.untyped_storage().data_ptr() in self._inside:
                return x
            return x if op == "aten::fill_" and not x.ndim else _Outside(x, op)  # that is a number of Python's

        return hold


def _on(func: Any, args: Any, named: Any) -> Any:
    own, own_named = tree_map(lambda x: x.tensor() if isinstance(x, _Outside) else x, (args, named))
    return func(*own, **own_named)


def _again(func: Any, args: Any, named: Any, out: Any) -> None:
    new = _on(func, args, named)
    for old, fresh in zip(_tensors(out), _tensors(new), strict=True):
        if old.data_ptr() != fresh.data_ptr():
            old.copy_(fresh)


def _tensors(out: Any) -> list[Tensor]:
    return [x for x in tree_leaves(out) if isinstance(x, Tensor)]


@contextmanager
def _launches(ops: _Ops, calls: _Calls) -> Iterator[None]:
    """Meanwhile launches of the interpreter are recorded as they are, and what they do inside is not."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None:
        yield
        return
    executors: Any = interpreter.GridExecutor
    launch = executors.__call__

    def recorded(executor: Any, *args: Any, **named: Any) -> None:
        ops.paused = calls.paused = True
        try:
            launch(executor, *args, **named)
        finally:
            ops.paused = calls.paused = False
        ops.calls.append(partial(launch, executor, *args, **named))

    executors.__call__ = recorded
    try:
        yield
    finally:
        executors.__call__ = launch
