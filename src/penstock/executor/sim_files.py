"""A store of blocks on the virtual clock: what `runner.block_files` does with files, at the rates of a disk.

Nothing but names and times: which blocks are there from when on, when a read or a write that was ordered will end.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from typing import NamedTuple

from penstock.core.page_ops import DISK, STATE, AnyPageOp, DropOp, FetchOp, GetOp, PutOp

NUM_READERS = 2
"""Threads that read, as in `runner.block_files`; one writes."""


class DiskRates(NamedTuple):
    """How fast a disk is. Units: bytes/s of all readers together, bytes/s, seconds for each file besides.

    `patience_s`, `patience_bytes_per_s`, `most_waiting_bytes`: when a load is given up, and what may wait to be written
    (`runner.block_files`). The defaults are an estimate of files in a system's page cache.
    """

    read_bytes_per_s: float = 2e9
    write_bytes_per_s: float = 1e9
    read_s: float = 1e-4
    write_s: float = 2e-4
    patience_s: float = 5.0
    patience_bytes_per_s: float = 20e6
    most_waiting_bytes: int = 256 << 20


class SimFolder:
    """Blocks by path, and since when they are there. Engines that share one share a clock.

    Attributes:
        blocks: (bytes, virtual second at which the block is whole) by path.
        evictor: who makes room; None: whoever looks next.
    """

    def __init__(self, rates: DiskRates | None = None) -> None:
        self.rates = rates or DiskRates()
        self.blocks: dict[str, tuple[int, float]] = {}
        self.evictor: object | None = None

    def holds(self, path: str, now_s: float) -> bool:
        found = self.blocks.get(path)
        return found is not None and found[1] <= now_s


class SimFiles:
    """One engine's reads and writes in a folder.

    Args:
        block_bytes, state_bytes: of a block's file, and of a state's.
    """

    def __init__(self, folder: SimFolder, block_bytes: int, state_bytes: int = 0) -> None:
        self._folder, self._bytes = folder, {False: block_bytes, True: state_bytes}
        self._readers = [0.0] * NUM_READERS
        self._num_read, self._read_s = 0, 0.0
        self._writer_s = 0.0
        self._waiting: list[tuple[float, int]] = []  # (end of a write, bytes), oldest first
        self._ends: list[tuple[float, int, bool]] = []  # heap of (when, move, whether it did what it should)
        self._loads: dict[int, float] = {}  # ends of loads that nobody has heard of
        self._asked: dict[int, list[GetOp]] = {}
        self._fetches: list[FetchOp] = []
        self._ahead: dict[str, float] = {}  # when they are in memory

    def order(self, ops: Iterable[AnyPageOp], now_s: float) -> int:
        """A step's orders. Returns bytes that it copies for what is to be written, and waits for."""
        num_bytes = 0
        for op in ops:
            if isinstance(op, PutOp):
                num_bytes += self._put(op, now_s)
            elif isinstance(op, GetOp):
                self._asked.setdefault(op.move, []).append(op)
            elif isinstance(op, FetchOp):
                self._ahead.pop(op.path, None)
                if op.move >= 0:
                    self._fetches.append(op)
            elif isinstance(op, DropOp):
                for path in op.paths:
                    self._folder.blocks.pop(path, None)
        return num_bytes

    def begin(self, now_s: float) -> None:
        """All orders of the step have been given: it reads what it was asked for."""
        for move, blocks in self._asked.items():
            self._load(move, blocks, now_s)
        for op in self._fetches:
            size = self._bytes[op.path.endswith(STATE)]
            end_s, good = self._read(op.path, size, now_s)
            if good:
                self._ahead[op.path] = end_s
            heapq.heappush(self._ends, (end_s, op.move, good))
        self._asked.clear()
        self._fetches.clear()

    def _read(self, path: str, size: int, now_s: float) -> tuple[float, bool]:
        """When it ends, and whether it is there."""
        if self._ahead.get(path, math.inf) <= now_s:
            return now_s, True
        rates = self._folder.rates
        reader = min(range(NUM_READERS), key=self._readers.__getitem__)
        begin_s = max(now_s, self._readers[reader])
        good = self._folder.holds(path, begin_s)
        took_s = rates.read_s + (size * NUM_READERS / rates.read_bytes_per_s if good else 0.0)
        self._readers[reader] = begin_s + took_s
        self._num_read += size * good
        self._read_s += took_s / NUM_READERS
        return begin_s + took_s, good

    def took(self) -> dict[int, tuple[int, float, float]]:
        """As `Outside.took`, of what was ordered since this was last asked."""
        found = {DISK: (self._num_read, self._read_s, 0.0)} if self._read_s else {}
        self._num_read, self._read_s = 0, 0.0
        return found

    def _put(self, op: PutOp, now_s: float) -> int:
        """Bytes that are copied; none if too many wait to be written."""
        rates, size = self._folder.rates, self._bytes[op.path.endswith(STATE)]
        self._waiting = [(end_s, num) for end_s, num in self._waiting if end_s > now_s]
        if sum(num for _, num in self._waiting) + size > rates.most_waiting_bytes:
            heapq.heappush(self._ends, (now_s, op.move, False))
            return 0
        self._writer_s = max(now_s, self._writer_s) + rates.write_s + size / rates.write_bytes_per_s
        self._waiting.append((self._writer_s, size))
        self._folder.blocks[op.path] = size, self._writer_s
        heapq.heappush(self._ends, (self._writer_s, op.move, True))
        return size

    def _load(self, move: int, blocks: list[GetOp], now_s: float) -> None:
        rates = self._folder.rates
        sizes = [self._bytes[op.path.endswith(STATE)] for op in blocks]
        until_s = now_s + rates.patience_s + sum(sizes) / rates.patience_bytes_per_s
        ended_s, all_good = now_s, True
        for op, size in zip(blocks, sizes, strict=True):
            end_s, good = self._read(op.path, size, now_s)
            if end_s > until_s:
                good, end_s = False, until_s
            heapq.heappush(self._ends, (end_s, op.block, good))
            ended_s, all_good = max(ended_s, end_s), all_good and good
        heapq.heappush(self._ends, (ended_s, move, all_good))
        self._loads[move] = ended_s

    @property
    def next_load_s(self) -> float | None:
        """When the first of the loads on their way ends; None: there is none."""
        return min(self._loads.values(), default=None)

    def ended(self, now_s: float) -> dict[int, bool]:
        """Moves that have ended by then and were not reported yet, and whether they did what they should."""
        moves: dict[int, bool] = {}
        while self._ends and self._ends[0][0] <= now_s:
            _, move, good = heapq.heappop(self._ends)
            moves[move] = good
            self._loads.pop(move, None)
        return moves
