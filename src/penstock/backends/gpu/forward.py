"""A graph on tensors: what the runner calls once per step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from penstock.backends.gpu.adapter_plan import numbers_of_adapters
from penstock.backends.gpu.device_array import DeviceArray
from penstock.backends.gpu.graphs import DecodeGraphs
from penstock.backends.gpu.placed import Placement
from penstock.backends.gpu.staging import bring, numbers_of
from penstock.backends.gpu.step import TorchStep, put_taken
from penstock.backends.gpu.warm import Warming, warm
from penstock.backends.program import Program
from penstock.base.bf16 import F32
from penstock.core.matrix_format import NONE, Scheme
from penstock.model.forward import StepLimits
from penstock.model.graph import STEP_INPUTS, Graph
from penstock.ops.plan import StepPlan
from penstock.ops.table import OpTable


class TorchForward(Program):
    """`backends.program.Program` over tensors. See `model.forward.PoolingForward` and `GreedyForward`.

    Planes are `device_array.DeviceArray`. Greedy tokens are found on the device, so that of a greedy step only they are
    brought here; whoever can draw there gets logits that stay there.
    """

    takes_tokens = True  # `model.forward.TakingForward`

    def __init__(
        self, graph: Graph, ops: OpTable, attention: Any, placement: Placement, warming: Warming,
        scheme: Scheme = NONE, adapters: Any = None,
    ) -> None:  # fmt: skip
        """`scheme`: how the matrices of products are rounded. `adapters`: of a graph with places for them."""
        self.adapted = adapters is not None
        self.scheme = scheme
        self.placed = placed = graph.copy()
        for node in placed.nodes:
            node.bound = placement.place_bound(node, scheme)
            node.named = {name: placement.place(value) for name, value in node.named.items()}
        super().__init__(placed, ops, attention, adapters)
        self.attention = attention
        self.kernel_counts: Counter[str] = Counter()
        """Calls of operations by kernels, and by torch as "torch NAME": see `kernel_ops.KernelTable`."""
        self.placement = placement
        self._device = placement.device
        self._written = sorted({call.bound[0] for call in self.code if call.op == "write_kv"})
        self.warming = warming
        self.graphs: DecodeGraphs | None = None

    def warm(self, planes: Sequence[Any], limits: StepLimits, report: Callable[[int, int], None]) -> None:
        """See `model.forward.WarmedForward`."""
        self._enter()
        made = warm(self, planes, limits, report)
        self.graphs = made if isinstance(made, DecodeGraphs) else None

    @property
    def num_late(self) -> int:
        """See `model.forward.WarmedForward`."""
        return self.warming.watch.num_late

    def run_greedy(self, plan: StepPlan, planes: Sequence[Any]) -> list[int] | F32:
        """See `model.forward.GreedyForward`."""
        logits, _ = self._run(plan, planes)
        best = logits.argmax(dim=-1)
        fit = torch.isfinite(logits.gather(1, best[:, None])).all()
        found: list[int] = torch.cat([best, fit[None]]).tolist()  # both at once: a device is waited for once
        return found[:-1] if found[-1] else _array(logits)

    def run_resident(self, plan: StepPlan, planes: Sequence[Any]) -> DeviceArray:
        """See `model.forward.ResidentForward`."""
        return DeviceArray(self._run(plan, planes)[0].float())

    def run_pooling(self, plan: StepPlan, planes: Sequence[Any]) -> tuple[F32, F32]:
        """See `Program.run_pooling`."""
        logits, hidden = self._run(plan, planes)
        return _array(logits), _array(hidden)

    def run_head(self, hidden: F32, planes: Sequence[Any]) -> F32:
        """See `Program.run_head`."""
        registers = [*self._registers]
        with torch.no_grad():
            registers[self._hidden] = torch.from_numpy(np.ascontiguousarray(hidden)).to(self._device)
            self._execute(self._head, registers)
            return _array(registers[self._logits])

    def put_rows(self, first: int, rows: F32) -> None:
        """See `model.forward.TableForward`."""
        table = next(call.bound[0] for call in self.code if call.op == "embed")
        table[first : first + len(rows)] = torch.from_numpy(rows).to(self._device)

    def queries(self, num_tokens: int) -> list[F32]:
        """See `model.forward.ObservedForward`."""
        return [_array(q) for q in super().queries(num_tokens)]  # type: ignore[arg-type]

    @torch.no_grad()
    def _run(self, plan: StepPlan, planes: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [R, V] and hidden states [P, E], on the device."""
        assert not plan.positions.size or plan.positions.max() < self.max_model_len, "position beyond max_model_len"
        self._enter()
        self.warming.watch.plan = plan
        if self.graphs is not None:
            captured = self.graphs.run(plan, planes)
            if captured is not None:
                self._queries = []
                self._progress.value += len(self.code)
                return captured, captured[:0]
        num_logits = len(plan.logits_indices)
        step = TorchStep(plan, planes, self._device)
        rows = np.concatenate([plan.logits_indices, plan.hidden_indices])
        registers = [*self._registers]
        tables = getattr(self.attention, "reads_tables", False)
        numbers = numbers_of(step, rows, self._written, tables)
        if self.adapted:
            numbers.update(numbers_of_adapters(plan))
        step.memo.update(bring(numbers, self._device))
        if plan.taken is not None:
            put_taken(plan.taken, step.memo["token_ids"])
        registers[: len(STEP_INPUTS)] = [step, *map(step.memo.__getitem__, ("token_ids", "positions", "rows"))]
        self._execute(self._body, registers)
        hidden = registers[self._hidden]
        registers[self._hidden] = hidden[:num_logits]
        self._execute(self._head, registers)
        self._queries = step.observed
        return registers[self._logits], hidden[num_logits:]

    def _enter(self) -> None:
        """Streams and launches are those of the thread's current device, which is the first one unless told."""
        if self._device.index:
            torch.cuda.set_device(self._device)

    def compute(
        self, step: TorchStep, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | None
    ) -> Any:
        """Logits [R, V] of the tokens `rows` [R] of a step whose numbers are on the device, None: of all. It is what a
        graph captures."""
        registers = [*self._registers]
        registers[: len(STEP_INPUTS)] = [step, token_ids, positions, rows]
        counts = self.calls.copy(), self.rows.copy()
        self._execute(self.code, registers)
        self.calls, self.rows = counts
        return registers[self._logits]


def _array(tensor: torch.Tensor) -> F32:
    array: F32 = tensor.float().cpu().numpy()
    return array
