"""A graph bound to a table of operations: a flat list of calls over registers, the oracle of every other backend."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from penstock.base.bf16 import F32
from penstock.core.protocols import AttentionBackend
from penstock.model.adapted import adapted
from penstock.model.graph import NO_LAYER, STEP_INPUTS, Graph, Node, Value, layer_bounds
from penstock.ops.adapter_units import PlacedPart, UnitMemory
from penstock.ops.adapters import AdaptingTable, LowRank, PlainTable
from penstock.ops.plan import Planes, StepPlan
from penstock.ops.step import Step
from penstock.ops.table import Op, OpTable


@dataclass(frozen=True)
class BoundCall:
    """`registers[output] = fn(*registers[inputs], *bound, **named)`; the first registers are STEP_INPUTS.

    `output` is -1, which nobody reads, for a call that only writes a cache. `text` is the call for people.
    """

    op: str
    fn: Op
    inputs: tuple[int, ...]
    output: int
    bound: tuple[Any, ...] = ()
    named: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""


class Program:
    """Runs its calls in order, once per step, for the whole mixed batch of prefill chunks and decodes.

    Attributes:
        code: the calls.
        calls: number of calls so far, per op name.
        rows: rows (tokens) given to each op so far: the first axis of its first array. Nothing is padded, so an op that
            runs on every token grows by T per call.
    """

    def __init__(
        self, graph: Graph, ops: OpTable, attention: AttentionBackend, adapters: AdaptingTable | None = None
    ) -> None:
        """`adapters`: of a graph with places for them."""
        self.vocab_size, self.max_model_len = graph.vocab_size, graph.max_model_len
        made = _Lowering(graph, ops, attention, adapters)
        self.code, num_body = made.calls()
        self._bounds = layer_bounds(graph, made.ends)
        self.num_layers = len(self._bounds) - 1
        self._pause: Callable[[int], None] | None = None
        self._body, self._head = self.code[:num_body], self.code[num_body:]
        self._hidden, self._logits = made.register(graph.hidden), made.register(graph.logits)
        self._registers: list[Any] = [None] * (made.num_registers + 1)
        self.calls: Counter[str] = Counter()
        self.rows: Counter[str] = Counter()
        self._queries: list[F32] = []
        self._progress = ctypes.c_uint64()

    def watch(self, progress: int) -> None:
        """See `model.forward.WatchedForward`."""
        self._progress = ctypes.c_uint64.from_address(progress)

    def pause(self, call: Callable[[int], None] | None) -> None:
        """See `model.forward.LayeredForward`."""
        self._pause = call

    def queries(self, num_tokens: int) -> list[F32]:
        """See `model.forward.ObservedForward`."""
        assert all(len(q) == num_tokens for q in self._queries), "the step that ran last had other tokens"
        return self._queries

    def run(self, plan: StepPlan, planes: Sequence[Planes]) -> F32:
        """Logits [R, V] of `plan.logits_indices`, as float32.

        `planes[g]` is the storage of the plan's g-th cache group. Mutates: the planes, at this step's tokens.
        """
        return self.run_pooling(plan, planes)[0]

    def run_pooling(self, plan: StepPlan, planes: Sequence[Planes]) -> tuple[F32, F32]:
        """`run`, and the hidden states [P, E] of `plan.hidden_indices`: what the output matrix would be given."""
        assert len(planes) >= len(plan.groups), "one dict of planes per cache group; others' come behind its own"
        assert not plan.positions.size or plan.positions.max() < self.max_model_len, "position beyond max_model_len"
        rows, num_logits = plan.logits_indices, len(plan.logits_indices)
        if plan.hidden_indices.size:
            rows = np.concatenate([rows, plan.hidden_indices])
        step = Step(plan, planes)
        registers = [*self._registers]
        registers[: len(STEP_INPUTS)] = [step, plan.token_ids, plan.positions, rows]
        # A row that went to infinity or NaN is reported by whoever reads its logits, and must not stop the others.
        with np.errstate(all="ignore"):
            self._run_body(registers)
            hidden = registers[self._hidden]
            registers[self._hidden] = hidden[:num_logits]
            self._execute(self._head, registers)
        self._queries = step.observed
        logits: F32 = registers[self._logits]
        return logits, hidden[num_logits:]

    def run_head(self, hidden: F32, planes: Sequence[Planes]) -> F32:
        """Logits [R, V] of hidden states [R, E] that `run_pooling` might have given; nothing is cached."""
        registers = [*self._registers]
        registers[self._hidden] = hidden
        with np.errstate(all="ignore"):
            self._execute(self._head, registers)
        logits: F32 = registers[self._logits]
        return logits

    def _run_body(self, registers: list[Any]) -> None:
        """All that comes before the head."""
        first = 0
        for n, bound in enumerate(self._bounds if self._pause is not None else ()):
            self._execute(self._body[first:bound], registers)
            first = bound
            if self._pause is not None:
                self._pause(n)
        self._execute(self._body[first:], registers)

    def _execute(self, code: Sequence[BoundCall], registers: list[Any]) -> None:
        for call in code:
            inputs = [registers[i] for i in call.inputs]
            registers[call.output] = call.fn(*inputs, *call.bound, **call.named)
            self._count(call.op, inputs)
            self._progress.value += 1

    def _count(self, op: str, inputs: list[Any]) -> None:
        first = inputs[1] if isinstance(inputs[0], Step) else inputs[0]
        self.calls[op] += 1
        self.rows[op] += len(first)

    def describe(self) -> list[str]:
        """The program for people, a line per call: `q = linear(h, layers.0.q [64, 32])`."""
        return [call.text for call in self.code]


class AdaptedProgram(Program):
    """See `model.forward.AdaptingForward`: every product of a layer may be adapted."""

    def __init__(self, graph: Graph, ops: OpTable, attention: AttentionBackend, count: int) -> None:
        """`count`: adapters that a step may have."""
        self._table = PlainTable(count)
        names = {n.weights[0] for n in graph.nodes if n.op == "linear" and n.layer != NO_LAYER}
        super().__init__(adapted(graph, names), ops, attention, self._table)

    def prepare(self, parts: Mapping[str, LowRank]) -> Mapping[str, LowRank]:
        """See `ops.adapters.AdapterTable`."""
        return self._table.prepare(parts)

    def lay(self, parts: Mapping[str, LowRank], memory: UnitMemory) -> Mapping[str, PlacedPart]:
        """See `model.forward.PlacingForward`."""
        return {name: PlacedPart(part, memory) for name, part in parts.items()}

    def put(self, number: int, parts: Mapping[str, LowRank | PlacedPart]) -> None:
        """See `ops.adapters.AdapterTable`."""
        self._table.put(number, parts)

    def drop(self, number: int) -> None:
        """See `ops.adapters.AdapterTable`."""
        self._table.drop(number)


_Key = tuple[int, int, int, int | None]
"""A value: its maker, columns and heads."""


class _Lowering:
    """Calls of a graph, over registers that are used again as soon as nobody reads what they hold.

    Views become calls of `heads`, `flat` and `columns` where they are first read.
    """

    def __init__(
        self, graph: Graph, ops: OpTable, attention: AttentionBackend, adapters: AdaptingTable | None = None
    ) -> None:
        self._adapters = adapters
        self.num_registers = len(STEP_INPUTS)
        self._ops, self._attention = ops, attention
        self._made: list[tuple[BoundCall, tuple[_Key | int, ...], _Key | None]] = []
        self._names: dict[_Key, str] = {}
        self._registers: dict[_Key, int] = {}
        self.ends = [0]
        """Calls that the first so many nodes have become."""
        for i, node in enumerate(graph.nodes):
            if i == graph.head:
                self._reach(graph.hidden)
                self._num_body = len(self._made)
            self._lower(node)
            self.ends.append(len(self._made))
        self._reach(graph.logits)
        self._kept = {self._key(graph.hidden), self._key(graph.logits)}

    def register(self, value: Value) -> int:
        return self._registers[self._key(value)]

    def calls(self) -> tuple[tuple[BoundCall, ...], int]:
        """All of them, and how many come before the head."""
        last = {key: i for i, (_, inputs, _) in enumerate(self._made) for key in inputs if not isinstance(key, int)}
        free: list[int] = []
        code = []
        for i, (call, inputs, output) in enumerate(self._made):
            places = tuple(key if isinstance(key, int) else self._registers[key] for key in inputs)
            keys = [key for key in dict.fromkeys(inputs) if not isinstance(key, int)]
            free += [self._registers[key] for key in keys if last[key] == i and key not in self._kept]
            target = -1
            if output is not None:
                target = free.pop() if free else self._new()
                self._registers[output] = target
                if output not in last and output not in self._kept:
                    free.append(target)
            code.append(replace(call, inputs=places, output=target))
        return tuple(code), self._num_body

    def _new(self) -> int:
        self.num_registers += 1
        return self.num_registers - 1

    @staticmethod
    def _key(value: Value) -> _Key:
        return id(value.maker), value.start, value.width, value.heads

    def _lower(self, node: Node) -> None:
        inputs: list[_Key | int] = [self._reach(v) for v in node.inputs]
        if node.takes is not None:
            name, place = node.takes
            inputs.insert(place, STEP_INPUTS.index(name))
        if node.op == "adapt":
            assert self._adapters is not None, "only a program with a table of adapters has places for them"
            own = BoundCall(node.op, self._adapters.adapt, (), -1, (self._adapters.of(node.bound[0]),), {}, node.label)
            self._add(own, inputs, self._key(node.out) if node.out is not None else None, node.out)
            return
        if node.op == "gather":
            ranks, widths = node.bound
            call = BoundCall(node.op, ranks.gather, (), -1, (widths,), {}, node.label)
            self._add(call, inputs, self._key(node.out) if node.out is not None else None, node.out)
            return
        fn = self._attention.attend if node.op == "attention" else self._ops[node.op]
        named = {**node.named, "linear": self._ops["linear"]} if node.op == "experts" else node.named
        out = None if node.out is None else self._key(node.out)
        self._add(BoundCall(node.op, fn, (), -1, node.bound, named, node.label), inputs, out, node.out)

    def _reach(self, value: Value) -> _Key:
        """The value in a register of its own."""
        key = self._key(value)
        if key in self._names:
            return key
        assert value.maker is not None
        whole = value.maker.out
        assert whole is not None
        if value.heads is not None:
            base = self._reach(value.view(0, value.width))
            return self._view("heads", base, (value.heads,), value)
        if (value.start, value.width) == (whole.start, whole.width):
            return self._view("flat", self._key(whole), (), value)
        base = self._reach(whole.view(0, whole.width))
        return self._view("columns", base, (value.start, value.start + value.width), value)

    def _view(self, op: str, base: _Key, bound: tuple[int, ...], value: Value) -> _Key:
        call = BoundCall(op, self._ops[op], (), -1, bound, {}, ", ".join(map(str, bound)))
        self._add(call, [base], self._key(value), value)
        return self._key(value)

    def _add(self, call: BoundCall, inputs: Sequence[_Key | int], output: _Key | None, value: Value | None) -> None:
        arguments = [STEP_INPUTS[k] if isinstance(k, int) else self._names[k] for k in inputs]
        arguments += [call.text] if call.text else []
        text = f"{call.op}({', '.join(arguments)})"
        if output is not None and value is not None:
            self._names[output] = value.name
            text = f"{value.name} = {text}"
        self._made.append((replace(call, text=text), tuple(inputs), output))
