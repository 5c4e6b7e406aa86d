"""A model as a flat list of bound op calls."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.base.bf16 import F32
from penstock.ops.plan import Planes, StepPlan
from penstock.ops.step import Step
from penstock.ops.table import Op

INPUTS = ("step", "token_ids", "positions", "rows")
"""Registers that a step fills in before the first call."""
NO_LAYER = -1
"""Embedding, head, and what layers share."""


@dataclass(frozen=True)
class Call:
    """`registers[output] = fn(*registers[inputs], *bound, **named)`.

    `output` is "" for a call that only writes a cache. `label` says to people what is bound; `weights` are the names of
    the first of `bound`. `layer`: the layer that it belongs to, or NO_LAYER.
    """

    op: str
    fn: Op
    inputs: tuple[str, ...]
    output: str
    bound: tuple[Any, ...] = ()
    named: dict[str, Any] = field(default_factory=dict)
    label: str = ""
    weights: tuple[str, ...] = ()
    layer: int = NO_LAYER


class Program:
    """Runs its calls in order, once per step, for the whole mixed batch of prefill chunks and decodes.

    Attributes:
        code: the calls. The last `num_head` of them turn the hidden state "x" into logits.
        calls: number of calls so far, per op name.
        rows: rows (tokens) given to each op so far: the first axis of its first array. Nothing is padded, so an op that
            runs on every token grows by T per call.
    """

    def __init__(self, code: Sequence[Call], *, vocab_size: int, max_model_len: int, num_head: int = 0) -> None:
        self.code, self.num_head = tuple(code), num_head
        self._body, self._head = self.code[: len(code) - num_head], self.code[len(code) - num_head :]
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.calls: Counter[str] = Counter()
        self.rows: Counter[str] = Counter()
        self._queries: list[F32] = []
        self._progress = ctypes.c_uint64()

    def watch(self, progress: int) -> None:
        """See `runner.forward.WatchedForward`."""
        self._progress = ctypes.c_uint64.from_address(progress)

    def queries(self, num_tokens: int) -> list[F32]:
        """See `runner.forward.ObservedForward`."""
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
        registers: dict[str, Any] = {
            "step": step,
            "token_ids": plan.token_ids,
            "positions": plan.positions,
            "rows": rows,
        }
        # A row that went to infinity or NaN is reported by whoever reads its logits, and must not stop the others.
        with np.errstate(all="ignore"):
            self._execute(self._body, registers)
            x = registers["x"]
            registers["x"] = x[:num_logits]
            self._execute(self._head, registers)
        self._queries = step.observed
        logits: F32 = registers["logits"]
        return logits, x[num_logits:]

    def run_head(self, hidden: F32, planes: Sequence[Planes]) -> F32:
        """Logits [R, V] of hidden states [R, E] that `run_pooling` might have given; nothing is cached."""
        registers: dict[str, Any] = {"x": hidden}
        with np.errstate(all="ignore"):
            self._execute(self.code[len(self.code) - self.num_head :], registers)
        logits: F32 = registers["logits"]
        return logits

    def part(self, layers: Collection[int]) -> Program:
        """The same model without all other layers: the same weights, and each layer's cache where it was."""
        code = [call for call in self.code if call.layer == NO_LAYER or call.layer in layers]
        return Program(code, vocab_size=self.vocab_size, max_model_len=self.max_model_len, num_head=self.num_head)

    def _execute(self, code: Sequence[Call], registers: dict[str, Any]) -> None:
        for call in code:
            inputs = [registers[name] for name in call.inputs]
            registers[call.output] = call.fn(*inputs, *call.bound, **call.named)
            self._count(call.op, inputs)
            self._progress.value += 1

    def _count(self, op: str, inputs: list[Any]) -> None:
        first = inputs[1] if isinstance(inputs[0], Step) else inputs[0]
        self.calls[op] += 1
        self.rows[op] += len(first)

    def reset_counters(self) -> None:
        """Forget `calls` and `rows`."""
        self.calls.clear()
        self.rows.clear()

    def describe(self) -> list[str]:
        """The program for people, a line per call: `q = linear(h, layers.0.q [64, 32])`."""
        lines = []
        for call in self.code:
            arguments = [*call.inputs, call.label] if call.label else call.inputs
            target = f"{call.output} = " if call.output else ""
            lines.append(f"{target}{call.op}({', '.join(arguments)})")
        return lines
