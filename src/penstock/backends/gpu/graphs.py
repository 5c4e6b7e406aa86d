"""Decode steps as graphs: captured once for a few numbers of rows, and started with one copy and one call.

A step of single tokens starts some hundred small operations; starting them from Python takes longer than they take on
a large GPU. So a step is captured for each of a few sizes, and a step with fewer rows is filled up. Rows of padding
have no pages: they read one key that is zero and write to the spare page of every plane (`device_array.new_plane`).

What the operations read (tokens, positions, tables) lies in buffers at fixed places, filled by one copy from pinned
memory. Where the kernels' grids or partial results grow with the longest context, there is a graph for each of a few
contexts, too.

Shape letters: N rows of a graph, M blocks of a table, B sequences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from penstock.backends.gpu.adapter_plan import numbers_of_adapters
from penstock.backends.gpu.device_array import DeviceArray
from penstock.backends.gpu.expert_ops import why_not_captured
from penstock.backends.gpu.graph_plan import contexts_up_to
from penstock.backends.gpu.step import HostRead, StaticTables, TorchStep, put_taken
from penstock.backends.program import BoundCall
from penstock.core.cache_spec import CacheGroup
from penstock.ops.plan import GroupPlan, StepPlan

_ALIGNED = 16
"""Buffers begin at multiples of so many numbers: kernels are compiled for pointers that are multiples of 16 bytes."""
_BUFFERS = 2

_AT_HOST = {
    "experts": "experts are chosen on the host",
    "write_kept": "blocks are encoded as they fill up", "observe": "a KV selector looks at its queries",
    "rehearse": "what a layer reads is chosen on the host", "adapt": "adapters are looked up on the host",
    "attend_blocks": "an indexer's choice of blocks is made on the host",
    **dict.fromkeys(("choose_tokens", "attend_chosen"), "an indexer's choice of tokens is made on the host"),
    **dict.fromkeys(("write_entries", "choose_entries", "attend_entries"),
                    "entries of several tokens are looked up on the host"),
    **dict.fromkeys(("recurrent", "retention", "gated_delta", "causal_conv", "mamba_scan", "mamba2_scan", "token_shift",
                     "wkv4", "wkv5", "wkv6", "shared_wkv6", "wkv7", "rg_lru", "diagonal_scan", "mlstm_gates", "mlstm"),
                    "the pages of recurrent states are looked up on the host"),
}  # fmt: skip


class CapturedGraph(Protocol):
    """`result`: where every run leaves what the captured function returned."""

    @property
    def result(self) -> Any: ...

    @property
    def replay(self) -> Callable[[], None]: ...


class Graphs(Protocol):
    """What captures; graphs of one share memory, so a run spoils the results of the others."""

    def capture(self, fn: Callable[[], Tensor]) -> CapturedGraph:
        """`fn` reads and writes the same memory at every call. Raises: what keeps it from being captured."""
        ...


class CudaGraph(NamedTuple):
    """See `CapturedGraph`."""

    result: Any
    replay: Callable[[], None]


class CudaGraphs:
    """See `Graphs`."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._pool = device, torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, fn: Callable[[], Tensor]) -> CudaGraph:
        """See `Graphs.capture`. Runs `fn` once before, on a stream of its own: libraries set themselves up then."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            fn()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result = fn()
        return CudaGraph(result, graph.replay)


def why_not(code: Sequence[BoundCall], groups: Sequence[CacheGroup]) -> str | None:
    """What keeps a model's decode steps from being captured, as an end of a sentence; None: nothing known does.

    A function with the attribute `capture_safe` says that it waits for nothing.
    """
    for call in code:
        if call.op in _AT_HOST and not getattr(call.fn, "capture_safe", False):
            return _AT_HOST[call.op]
        if call.op == "experts" and (reason := why_not_captured(call.bound[0])) is not None:
            return reason
        if call.named.get("kept") is not None:
            return "blocks are encoded as they fill up"
        if call.named.get("pages") is not None or call.named.get("bounds"):
            return "tokens choose the pages they read"
    if any(group.spec.lanes > 1 for group in groups):
        return "heads keep tables of their own"
    return None


class _Inputs:
    """The buffers of all graphs: on the device, and pinned ones that are filled in turn while copies are on their way.

    Graphs lay out their own views from the beginning on.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.device = torch.zeros(size, dtype=torch.int32, device=device)
        self._hosts = [torch.zeros(size, dtype=torch.int32, pin_memory=pinned) for _ in range(_BUFFERS)]
        self.arrays = [host.numpy() for host in self._hosts]
        new: Any = torch.cuda.Event if pinned else lambda: None
        self._copied: list[Any] = [new() for _ in range(_BUFFERS)]
        self._turn = 0

    def next(self) -> int:
        """The number of a buffer that nobody reads any more."""
        self._turn = (self._turn + 1) % _BUFFERS
        if self._copied[self._turn] is not None:
            self._copied[self._turn].synchronize()
        return self._turn

    def copy(self, turn: int, size: int) -> None:
        """The first `size` numbers of a buffer to the device. Mutates: `device`."""
        self.device[:size].copy_(self._hosts[turn][:size], non_blocking=True)
        if self._copied[turn] is not None:
            self._copied[turn].record(torch.cuda.current_stream(self.device.device))


class _Shape(NamedTuple):
    """A graph's: rows, and tokens that a context may have."""

    rows: int
    context: int


class _DecodeGraph:
    """A captured step, and where its inputs lie.

    `step`: what was captured. A graph knows addresses alone, so what the step made before has to live as long.
    """

    def __init__(self, shape: _Shape, inputs: _Inputs, num_groups: int, block_size: int, adapted: bool) -> None:
        self.shape, self._inputs = shape, inputs
        self._spans: list[tuple[int, tuple[int, ...]]] = []
        self.size = 0
        self.num_groups = num_groups
        adapters = [(shape.rows,), (shape.rows, 3)] if adapted else []
        for own in ((shape.rows,), (shape.rows,), *[(shape.rows, -(-shape.context // block_size))] * num_groups,
                    *adapters):  # fmt: skip
            self._spans.append((self.size, own))
            self.size += -(-int(np.prod(own)) // _ALIGNED) * _ALIGNED
        self.step: Callable[[], Tensor] | None = None
        self.graph: CapturedGraph | None = None
        self._arrays: list[list[Any]] = []

    def views(self, buffer: Any) -> list[Any]:
        """Token ids [N], positions [N], and tables [N, M] of each group, of a tensor or an array of int32; then, with
        adapters, what `adapter_plan.numbers_of_adapters` gives."""
        return [buffer[first : first + int(np.prod(own))].reshape(own) for first, own in self._spans]

    def fill(self, plan: StepPlan) -> None:
        """A step's numbers, and padding behind them. Mutates: the buffers."""
        if not self._arrays:
            self._arrays = [self.views(array) for array in self._inputs.arrays]
        n, turn = len(plan.token_ids), self._inputs.next()
        ids, positions, *rest = self._arrays[turn]
        tables, adapters = rest[: self.num_groups], rest[self.num_groups :]
        for buffer, given in ((ids, plan.token_ids), (positions, plan.positions)):
            buffer[:n], buffer[n:] = given, 0
        for lines, where in zip(tables, plan.groups, strict=True):
            lines.fill(-1)
            for line, table in zip(lines, where.tables, strict=False):
                m = min(table.shape[1], len(line))
                line[:m] = table[0, :m]
        if adapters:
            for buffer, array in zip(adapters, numbers_of_adapters(plan, self.shape.rows).values(), strict=True):
                buffer[:] = array
        self._inputs.copy(turn, self.size)
        if plan.taken is not None:
            put_taken(plan.taken, self.views(self._inputs.device)[0])


class DecodeGraphs:
    """The graphs of one model over the planes that it runs on for good.

    `counts`: steps that ran by a graph of so many rows, and by none ("eager"). `captured`: their shapes. `problem`: why
    there are none.
    """

    def __init__(
        self, compute: Callable[..., Tensor], planes: Sequence[Any], groups: Sequence[CacheGroup], *, block_size: int,
        sizes: Sequence[int], max_model_len: int, device: torch.device, graphs: Graphs, adapted: bool = False,
        kernels: bool = False,
    ) -> None:  # fmt: skip
        """`compute`: logits [N, V] of (step, token ids, positions, None). `groups`: the model's own, the first ones.
        `adapted`: the model has places for adapters. `kernels`: what a step begins with is computed by Triton's."""
        self.counts: Counter[int | str] = Counter()
        self.problem: str | None = None
        self._compute, self.graphs, self._device, self._block_size = compute, graphs, device, block_size
        self._groups, self._planes, self._adapted, self._kernels = groups, planes, adapted, kernels
        contexts = contexts_up_to(max_model_len)
        # The largest first: those behind it find their memory in its.
        self._shapes = [_Shape(n, c) for c in reversed(contexts) for n in sorted(sizes, reverse=True)]
        largest = _DecodeGraph(self._shapes[0], None, len(groups), block_size, adapted)  # type: ignore[arg-type]
        self._inputs = _Inputs(largest.size, device)
        self._made: list[_DecodeGraph] = []

    @property
    def captured(self) -> tuple[tuple[int, int], ...]:
        return tuple(one.shape for one in self._made)

    def __len__(self) -> int:
        """How many there are to capture."""
        return len(self._shapes)

    @torch.no_grad()
    def capture(self) -> Iterator[int]:
        """All of them; yields after each how many there are. One that cannot be captured ends it: then there are none,
        `problem` says why, and every step runs as if it were the first of its kind. Mutates: spare pages."""
        for shape in self._shapes:
            one = _DecodeGraph(shape, self._inputs, len(self._groups), self._block_size, self._adapted)
            try:
                one.step = self._step(one)
                one.graph = self.graphs.capture(one.step)
            except (HostRead, RuntimeError) as error:
                self._made.clear()
                self.problem = str(error).partition("\n")[0]
                return
            self._made.append(one)
            yield len(self._made)
        self._made.reverse()  # the smallest that fits is found first

    def run(self, plan: StepPlan, planes: Sequence[Any]) -> Tensor | None:
        """Logits [R, V] of a step, valid until the next one; None for a step that no graph holds. Mutates: planes."""
        one = self._fitting(plan)
        if one is None or one.graph is None:
            self.counts["eager"] += 1
            return None
        assert planes is self._planes, "graphs are captured over the planes of one rank"
        one.fill(plan)
        one.graph.replay()
        self.counts[one.shape.rows] += 1
        logits: Tensor = one.graph.result
        n = len(plan.logits_indices)
        if n == len(plan.token_ids):
            return logits[:n]
        return logits[torch.from_numpy(plan.logits_indices.astype(np.int64)).to(self._device)]

    def _fitting(self, plan: StepPlan) -> _DecodeGraph | None:
        n = len(plan.token_ids)
        single = 0 < n == len(plan.query_start_loc) - 1 and bool((np.diff(plan.query_start_loc) == 1).all())
        if not single or plan.hidden_indices.size or (plan.mask is not None and plan.mask.any()):
            return None
        for where in plan.groups:
            if where.dropped is not None or any(table.shape[0] != 1 for table in where.tables):
                return None
        last = int(plan.positions.max())
        return next((one for one in self._made if n <= one.shape.rows and last < one.shape.context), None)

    def _step(self, one: _DecodeGraph) -> Callable[[], Tensor]:
        """The step of a graph, over its buffers: what is captured."""
        n = one.shape.rows
        ids, positions, *rest = one.views(self._inputs.device)
        tables, adapters = rest[: len(self._groups)], rest[len(self._groups) :]
        for part in (ids, positions, *adapters[:1]):  # what the capture runs on writes to spare pages alone
            part.fill_(0)
        for part in (*tables, *adapters[1:]):
            part.fill_(-1)
        at = np.arange(n + 1, dtype=np.int32)
        nothing = np.zeros(n, np.int32)
        nowhere = tuple(np.full((1, 1), -1, np.int32) for _ in range(n))
        groups = tuple(GroupPlan(g.pages_per_slab, self._block_size, nowhere) for g in self._groups)
        plan = StepPlan(nothing, nothing, at, nothing + 1, at[:n], groups)
        spare = [{name: DeviceArray(plane.whole) for name, plane in own.items()} for own in self._planes]
        static = StaticTables(positions, tuple(tables), one.shape.context)

        def run() -> Tensor:
            step = TorchStep(plan, spare, self._device, static)
            wide_ids = at = None
            for g, where in enumerate(self._groups):
                *slots, wide_ids, at = self._slots(ids, positions, tables[g], where.pages_per_slab, spare[g])
                step.memo["slots_of", g], step.memo["pages", g] = tuple(slots), tables[g]
            if at is None or wide_ids is None:  # no layer keeps anything
                wide_ids, at = ids.long(), positions.long()
            if adapters:
                step.memo["adapter_order"], step.memo["adapter_tiles"] = adapters
            return self._compute(step, wide_ids, at, None)

        return run

    def _slots(
        self, ids: Tensor, positions: Tensor, tables: Tensor, num_layers: int, planes: Any
    ) -> tuple[Tensor, ...]:
        """`TorchStep.slots_of` on the device: pages [L, N] and offsets [N]; the spare page where a row has none. Then
        ids and positions as int64."""
        spare = len(next(iter(planes.values()))) - 1
        if self._kernels:
            from penstock.backends.gpu.kernels.inputs import token_places

            return token_places(ids, positions, tables, self._block_size, num_layers, spare)
        at = positions.long()
        slabs = tables.long().gather(1, (at // self._block_size)[:, None])[:, 0]
        pages = slabs * num_layers + torch.arange(num_layers, device=self._device)[:, None]
        return torch.where(slabs >= 0, pages, spare), at % self._block_size, ids.long(), at
