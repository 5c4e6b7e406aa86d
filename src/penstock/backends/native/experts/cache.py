"""The experts of a model that are in memory; the others are in their file (`ops.native.filed`).

Memory is cut into slots of one size. Whoever runs a layer asks for the experts its tokens have chosen, before they run:
those that are missing are read by a few threads at once, each into a slot. Which experts are there changes what has
to be waited for and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.backends.native.experts.order import ExpertOrder
from penstock.base.errors import ConfigError
from penstock.core.events import ExpertCounts
from penstock.ops.native.filed import FiledStack
from penstock.ops.native.packed_file import huge_pages

READERS = 4
"""Threads that read: a drive is quicker with a few reads at once, and one expert is two or three."""
I64 = npt.NDArray[np.int64]


class Piece(NamedTuple):
    """One matrix of an expert: that of `pointer` of its PST_EXPERTS, which is matrix `number` of a stack."""

    pointer: int
    stack: FiledStack
    number: int


class LayerExperts(NamedTuple):
    """The experts of one layer: its `name`, and of each expert what is not always in memory."""

    name: str
    pieces: list[list[Piece]]


class ExpertCache:
    """For one thread; reads are done by others. Experts are numbered through all layers (`bounds`).

    Args:
        num_bytes: for experts, at most; rounded down to whole slots.
        order: who leaves, made of `bounds`.

    Raises ConfigError if a layer's experts do not fit.
    """

    def __init__(self, layers: Sequence[LayerExperts], num_bytes: int, order: type[ExpertOrder]) -> None:
        self.numbers = {layer.name: n for n, layer in enumerate(layers)}
        self.bounds = [0, *np.cumsum([len(layer.pieces) for layer in layers]).tolist()]
        self._pieces = [pieces for layer in layers for pieces in layer.pieces]
        num = len(self._pieces)
        self.slot_bytes = max(sum(p.stack.span(p.number)[1] for p in pieces) for pieces in self._pieces)
        most = max(len(layer.pieces) for layer in layers)
        self.num_slots = min(num, num_bytes // self.slot_bytes)
        if self.num_slots < most:
            raise ConfigError(
                f"expert_memory_bytes: {num_bytes} holds {self.num_slots} of {num} experts, and one step may need all "
                f"{most} of a layer; give at least {most * self.slot_bytes}",
                field="expert_memory_bytes",
            )
        self._memory = huge_pages(self.num_slots * self.slot_bytes)
        self.slots: I64 = np.full(num, -1, np.int64)
        """[experts]: where each is or is about to be; -1: nowhere."""
        self._free = list(range(self.num_slots))[::-1]
        self._coming: dict[int, Future[None]] = {}
        self._ahead: set[int] = set()
        """Fetched because somebody expected them, and not asked for since."""
        self._held: set[int] = set()
        """Expected: they stay until their layer has asked."""
        self._layers = np.repeat(np.arange(len(self.bounds) - 1), np.diff(self.bounds)).tolist()
        self._layer = 0
        self._needed: frozenset[int] = frozenset()
        """By the layer that asked last."""
        self._evictable = np.zeros(num, bool)
        self._order = order(self.bounds)
        self._threads = ThreadPoolExecutor(READERS, "penstock-experts")
        self.counts = ExpertCounts()

    def ask(self, layer: int, chosen: I64) -> I64:
        """Begin to fetch what is missing of a layer's `chosen` experts, by their numbers in the layer. What was
        expected and has not begun to come gives way. Returns the experts for `wait`."""
        experts: I64 = chosen + self.bounds[layer]
        self._needed = frozenset(experts.tolist())
        # In a new step nothing that the last one expected is still to come.
        over = self._held if layer <= self._layer else {e for e in self._held if self._layers[e] <= layer}
        self._layer = layer
        self._release(over)
        self._sweep()
        missing = experts[self.slots[experts] < 0]
        foreseen = self._ahead & self._needed
        self._ahead -= foreseen
        num_late = sum(expert in self._coming for expert in self._needed)
        c = self.counts
        c.num_expert_hits += len(experts) - len(missing) - num_late
        c.num_expert_late += num_late
        c.num_expert_misses += len(missing)
        c.num_experts_foreseen += len(foreseen)
        self._evictable[experts] = False
        if len(missing):
            self._give_way()
            for expert in missing.tolist():
                self._fetch(expert, self._room())
        self._order.used(layer, experts)
        return experts

    def expect(self, layer: int, experts: I64) -> None:
        """Fetch these of a layer, the likeliest first, while others run: they will be asked for next. Never waits,
        and puts out nobody who was asked for now."""
        for expert in (experts + self.bounds[layer]).tolist():
            if expert in self._needed:
                continue
            if self.slots[expert] < 0:
                if not (self._free or self._evictable.any()):
                    return
                self._fetch(expert, self._room())
                self._ahead.add(expert)
                self.counts.num_experts_ahead += 1
            self._held.add(expert)
            self._evictable[expert] = False

    def wait(self, experts: I64) -> None:
        """Until all that were asked for are in memory. Raises EngineError for what cannot be read."""
        begun = perf_counter()
        waited = False
        for expert in experts.tolist():
            work = self._coming.pop(expert, None)
            if work is None:
                continue
            waited = waited or not work.done()
            try:
                work.result()
            except BaseException:
                self._drop(expert)
                raise
        self._evictable[experts] = True
        self._needed = frozenset()
        if waited:
            self.counts.expert_stall_s += perf_counter() - begun

    def addresses(self, expert: int) -> list[tuple[int, int]]:
        """(pointer, address) of each matrix of an expert that is in memory."""
        base, found = self._memory.ctypes.data + int(self.slots[expert]) * self.slot_bytes, []
        for p in self._pieces[expert]:
            found.append((p.pointer, base + p.stack.place(p.number)))
            base += p.stack.span(p.number)[1]
        return found

    # -- slots ---------------------------------------------------------------------------------------------------

    def _release(self, experts: set[int]) -> None:
        """They need not stay any longer."""
        self._held = self._held - experts
        self._ahead -= experts - self._needed
        for expert in experts - self._needed:
            self._evictable[expert] = self.slots[expert] >= 0 and expert not in self._coming

    def _sweep(self) -> None:
        """What has come may leave again, unless it has to stay."""
        for expert, work in list(self._coming.items()):
            if work.done() and expert not in self._needed:
                del self._coming[expert]
                if work.exception() is not None:  # whoever needs it reads it again, and says what is wrong
                    self._drop(expert)
                else:
                    self._evictable[expert] = expert not in self._held

    def _give_way(self) -> None:
        for expert, work in list(self._coming.items()):
            if expert not in self._needed and work.cancel():
                del self._coming[expert]
                self._drop(expert)

    def _room(self) -> int:
        if not self._free:
            while not (there := np.flatnonzero(self._evictable)).size:
                if self._held:
                    self._release(self._held)
                else:  # all that could leave is still coming
                    next(work for expert, work in self._coming.items() if expert not in self._needed).exception()
                self._sweep()
            self._drop(int(there[np.argmin(self._order.worth[there])]))
        return self._free.pop()

    def _drop(self, expert: int) -> None:
        self._free.append(int(self.slots[expert]))
        self.slots[expert] = -1
        self._evictable[expert] = False
        self._ahead.discard(expert)
        self._held.discard(expert)

    def _fetch(self, expert: int, slot: int) -> None:
        self.slots[expert] = slot
        self._coming[expert] = self._threads.submit(self._read, expert, slot)
        self.counts.expert_read_bytes += sum(p.stack.span(p.number)[1] for p in self._pieces[expert])
        self._order.came(expert)

    def _read(self, expert: int, slot: int) -> None:
        at = slot * self.slot_bytes
        for piece in self._pieces[expert]:
            length = piece.stack.span(piece.number)[1]
            piece.stack.fetch(piece.number, self._memory[at : at + length])
            at += length
