"""How ranks of one model tell each other what they have computed.

Every rank makes the same calls in the same order; one that does not come leaves the others waiting, until whoever
started them ends them all. Nothing is added up between ranks: what is gathered has the bits that one rank would have.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from penstock.base.bf16 import F32
from penstock.base.errors import EngineError
from penstock.ops.native.abi import LINES_BYTES, MAX_RANKS, Exchange, RankLine

SLOT_BYTES = 4 << 20
"""Of what a rank gives to a gather at a time; a row at least. Memory is taken as it is used."""
SPIN_US = 200
"""So long a rank waits for the others awake: a step's gathers are some tens of microseconds apart."""


_FAILED = ctypes.c_void_p(-1).value
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Comm(Protocol):
    """One rank's end.

    Attributes:
        rank, size: which of how many.
        exchange: where native kernels gather, an object with an `address`; None: they cannot.
        pipe: the rank's place in a pipeline; None: it has a part of every layer.
    """

    rank: int
    size: int
    pipe: Pipe | None

    @property
    def exchange(self) -> SharedExchange | None: ...

    def gather(self, x: F32, widths: Sequence[int]) -> F32:
        """Of every rank's [T, widths[rank]], rank by rank: [T, sum of widths]."""
        ...


class RowPassage(Protocol):
    """Rows go through it to the next stage (`parallel.pipe.SharedChannel`)."""

    @property
    def address(self) -> int: ...


@dataclass(frozen=True)
class Pipe:
    """One rank's place in a pipeline.

    Attributes:
        stage: its number. `starts`: [stages + 1], the first layer of each stage, and how many layers there are.
        inner: with the ranks of the same stage; None: the stage has one rank.
        before, behind: from the stage before, and to the one behind.
        parts: into so many parts a step falls at most; 0: as many as stages, where it has rows enough.
    """

    stage: int
    starts: tuple[int, ...]
    inner: Comm | None
    before: RowPassage | None
    behind: RowPassage | None
    parts: int = 0

    @property
    def num_stages(self) -> int:
        return len(self.starts) - 1

    @property
    def layers(self) -> range:
        return range(self.starts[self.stage], self.starts[self.stage + 1])

    def stage_of(self, layer: int) -> int:
        return bisect_right(self.starts, layer) - 1


class SharedExchange:
    """`pst_exchange` over memory that several processes have mapped. See `ops.native.program.NativeOp`."""

    def __init__(self, fd: int, rank: int, size: int, slot_bytes: int, spin_us: int) -> None:
        """Mapped as long as this lives, without a descriptor, which `mmap.mmap` would keep."""
        start = mapped(self, fd, shared_bytes(size, slot_bytes))
        self.struct = Exchange(start, rank, size, slot_bytes, spin_us, 0)
        self._lines = (RankLine * size).from_address(start)

    @property
    def address(self) -> int:
        return ctypes.addressof(self.struct)

    def given(self, rank: int) -> tuple[int, int]:
        """Gathers that a rank has taken part in, and bytes that it has given, counted once for each of the others."""
        line = self._lines[rank]
        return int(line.gathers), int(line.bytes)

    def merged(self, rank: int) -> int:
        """Parts of other ranks that a rank has merged with its own, one behind the other (`PST_MERGE`)."""
        return int(self._lines[rank].merged)

    def waited_s(self, rank: int) -> float:
        """Seconds that a rank has waited in gathers until the others had come."""
        return int(self._lines[rank].waited) / 1e9


def mapped(owner: object, fd: int, num_bytes: int) -> int:
    """The address of shared memory, mapped as long as `owner` lives. Raises: EngineError."""
    start: int | None = _LIBC.mmap(None, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    if start is None or start == _FAILED:
        raise EngineError(f"memory that ranks share cannot be mapped: {os.strerror(ctypes.get_errno())}")
    weakref.finalize(owner, _LIBC.munmap, start, num_bytes).atexit = False  # threads may still look at it
    return start


def shared_bytes(size: int, slot_bytes: int = SLOT_BYTES) -> int:
    """Of the memory that `size` ranks share."""
    assert 2 <= size <= MAX_RANKS, f"{size} ranks"
    return LINES_BYTES + 2 * size * slot_bytes


def shared_memory(size: int, slot_bytes: int = SLOT_BYTES) -> int:
    """A descriptor of memory for `size` ranks. It has no name, so whoever is killed leaves nothing behind, and is no
    part of /dev/shm, whose size containers bound."""
    return unnamed_memory(shared_bytes(size, slot_bytes))


def unnamed_memory(num_bytes: int) -> int:
    """See `shared_memory`."""
    fd = os.memfd_create("penstock-ranks", os.MFD_CLOEXEC)
    os.ftruncate(fd, num_bytes)
    return fd


class SharedComm:
    """Ranks of one machine over `shared_memory`, in processes or threads; native kernels gather by themselves."""

    def __init__(
        self, fd: int, rank: int, size: int, *, slot_bytes: int = SLOT_BYTES, spin_us: int = SPIN_US,
        pipe: Pipe | None = None,
    ) -> None:  # fmt: skip
        """`fd` stays the caller's."""
        self.rank, self.size, self.pipe = rank, size, pipe
        self.exchange = SharedExchange(fd, rank, size, slot_bytes, spin_us)

    def gather(self, x: F32, widths: Sequence[int]) -> F32:
        raise AssertionError("native kernels gather by themselves; no other operations run on several ranks")


class OneRank:
    """Whoever shares layers with nobody."""

    rank, size = 0, 1
    exchange: SharedExchange | None = None
    pipe: Pipe | None = None

    def gather(self, x: F32, widths: Sequence[int]) -> F32:
        raise AssertionError("it has all columns")


class LocalGroup:
    """Ranks in threads of this process, which hand each other arrays (tests, reference operations)."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self.given: list[F32] = [np.zeros((0, 0), np.float32)] * size

    def comms(self) -> list[LocalComm]:
        return [LocalComm(self, rank) for rank in range(self.size)]


class LocalComm:
    """One rank of a `LocalGroup`."""

    exchange = pipe = None

    def __init__(self, group: LocalGroup, rank: int) -> None:
        self._group, self.rank, self.size = group, rank, group.size

    def gather(self, x: F32, widths: Sequence[int]) -> F32:
        group = self._group
        assert x.shape[1] == widths[self.rank], "a rank gives its columns"
        group.given[self.rank] = x
        group.barrier.wait()
        found = np.concatenate(group.given, axis=1)
        group.barrier.wait()  # before anybody gives the next
        return found
