"""A native program that stops before each layer's experts, until they are in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from penstock.backends.native.emit import Emitted
from penstock.backends.native.experts.cache import ExpertCache, LayerExperts, Piece
from penstock.backends.native.experts.predictor import ExpertPredictor, LayerRun
from penstock.backends.native.stacks import ExpertCall
from penstock.ops.native.abi import TOKENS, StepArgs
from penstock.ops.native.matrix import Packed
from penstock.ops.native.program import NativeProgram
from penstock.ops.plan import StepPlan


def layer_of(call: ExpertCall, matrices: Mapping[str, Packed]) -> LayerExperts:
    """Where each expert's matrices are."""
    pieces: list[list[Piece]] = [[] for run in call.stacks.first for _ in run.matrices]
    for pointer, runs in enumerate((call.stacks.first, call.stacks.beside, call.stacks.down)):
        expert = 0
        for run in runs:
            packed = matrices[run.name]
            for index in range(packed.count):
                if packed.filed is not None:
                    pieces[expert].append(Piece(pointer, packed.filed, index))
                expert += 1
    return LayerExperts(call.name, pieces)


class ExpertStops:
    """What a program does between its operations where experts are not all in memory. Programs may share a cache."""

    def __init__(
        self, cache: ExpertCache, calls: Sequence[ExpertCall], bounds: Sequence[int], predictor: ExpertPredictor | None
    ) -> None:
        """`bounds`: operations before which a run pauses for others (`LayeredForward.pause`). `predictor`: of the whole
        model's programs."""
        self.cache, self.predictor = cache, predictor
        self._bounds = bounds
        self._calls = [(call, cache.numbers[call.name]) for call in calls]
        self.forget()

    def of(self, code: Emitted) -> ExpertStops:
        """For another program over the same experts."""
        return ExpertStops(self.cache, code.experts, code.bounds, None)

    def forget(self) -> None:
        """The program was made anew: it knows of no expert where it is."""
        self._slots = [np.full(sum(len(run.matrices) for run in c.stacks.first), -1, np.int64) for c, _ in self._calls]

    def run(
        self, native: NativeProgram, args: StepArgs, plan: StepPlan, end: int, pause: Callable[[int], None] | None
    ) -> None:
        """Operations up to `end`."""
        stops: list[tuple[int, int, Callable[[], None]]] = []
        if pause is not None:
            stops = [(at, 0, partial(pause, n)) for n, at in enumerate(self._bounds)]
        for number, (call, _) in enumerate(self._calls):
            stops.append((call.op, 1, partial(self._before, native, args, plan, number)))
        first = 0
        for at, _, do in sorted(stops, key=lambda stop: stop[:2]):
            native.run(args, first, at)
            do()
            first = at
        native.run(args, first, end)

    def _before(self, native: NativeProgram, args: StepArgs, plan: StepPlan, number: int) -> None:
        call, layer = self._calls[number]
        count = args.num_tokens if call.rows == TOKENS else args.num_rows
        if not count:
            return
        cache, slots = self.cache, self._slots[number]
        routes = native.values(call.routes, count)[:, : call.top_k]
        each = np.where((routes >= 0) & (routes < len(slots)), routes, 0).astype(np.int64)
        chosen = np.unique(each)
        experts = cache.ask(layer, chosen)
        if self.predictor is not None:
            owners = None
            if call.rows == TOKENS:
                owners = np.repeat(np.arange(args.num_seqs, dtype=np.int32), np.diff(plan.query_start_loc))
            run = LayerRun(layer, each, native.values(call.x, count), owners)
            for later, expected in self.predictor.after(run):
                cache.expect(later, np.array(expected, np.int64))
        cache.wait(experts)
        moved = cache.slots[experts] != slots[chosen]
        for expert, index in zip(experts[moved].tolist(), chosen[moved].tolist(), strict=True):
            for pointer, address in cache.addresses(expert):
                native.move(call.op, pointer, index, address)
        slots[chosen] = cache.slots[experts]
