"""Storage whose addresses are backed by chunks of shared memory: the rank's side of `kv_allocator="vtensor"`.

Each plane has a file in memory (memfd). A chunk of it is mapped over the addresses that a sequence grows into, and when
it is given up, it is free for whoever grows next. Source: vTensor, arXiv 2407.15309 (CUDA's virtual memory there).
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterable
from typing import Any

from penstock.base.errors import ConfigError
from penstock.core.page_ops import AnyPageOp, BlendOp, LoadOp, PackOp, PageOp
from penstock.runner.lazy import LazyStorage
from penstock.runner.storage import Array

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_FIXED = 0x10  # MAP_FIXED of Linux


class PlaneChunks:
    """Of one plane: `mapped[i]` says which chunk of the file is at the i-th place of its addresses."""

    def __init__(self, array: Array, num_bytes: int) -> None:
        self.address, self.num_bytes = array.ctypes.data, num_bytes
        self.mapped: dict[int, int] = {}
        self.free: list[int] = []
        self.num_chunks = self.num_reused = 0
        self._file = os.memfd_create("penstock-kv")
        self._map = ctypes.CDLL(None, use_errno=True).mmap
        self._map.restype = ctypes.c_void_p
        self._map.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]

    def reach(self, first: int, end: int) -> None:
        """Bytes `first` to `end` of the plane have memory. What is new of it holds anything."""
        for place in range(first // self.num_bytes, -(-end // self.num_bytes)):
            if place not in self.mapped:
                self.num_reused += bool(self.free)
                chunk = self.free.pop() if self.free else self._made()
                self._place(place, mmap.MAP_SHARED, self._file, chunk * self.num_bytes)
                self.mapped[place] = chunk

    def give_up(self, first: int, end: int) -> None:
        for place in range(first // self.num_bytes, -(-end // self.num_bytes)):
            if place in self.mapped:
                self.free.append(self.mapped.pop(place))
                self._place(place, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE, -1, 0)

    def resident_bytes(self) -> int:
        """As the system counts them."""
        return os.fstat(self._file).st_blocks * 512

    def _made(self) -> int:
        self.num_chunks += 1
        os.ftruncate(self._file, self.num_chunks * self.num_bytes)
        return self.num_chunks - 1

    def _place(self, place: int, flags: int, file: int, offset: int) -> None:
        at = self.address + place * self.num_bytes
        found = self._map(at, self.num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags | _FIXED, file, offset)
        if found != at:
            raise OSError(ctypes.get_errno(), "a chunk of KV memory could not be mapped")

    def __del__(self) -> None:
        os.close(self._file)


class ChunkedStorage(LazyStorage):
    """A LazyStorage whose blocks have memory of chunks. Raises ConfigError where there are no files in memory.

    `chunk_blocks`: see `kv.vtensor`.
    """

    def __init__(self, groups: Any, *args: Any, chunk_blocks: int, **kw: Any) -> None:
        if not hasattr(os, "memfd_create"):
            raise ConfigError("kv_allocator: vtensor needs Linux; use paged", field="kv_allocator")
        super().__init__(groups, *args, **kw)
        self.chunks: dict[int, PlaneChunks] = {}
        """By the address of the plane."""
        for group, planes, width in zip(groups, self.planes, self.pages_per_slab, strict=True):
            for array in planes.values() if group.spec.per_token else ():
                num_bytes = chunk_blocks * width * array.strides[0]
                self.chunks[array.ctypes.data] = PlaneChunks(array, num_bytes)

    def apply(
        self, ops: Iterable[AnyPageOp], pack: Callable[[PackOp], None] | None = None,
        blend: Callable[[BlendOp], None] | None = None,
    ) -> dict[int, bool]:  # fmt: skip
        """As `Storage.apply`; what is written has memory first."""
        moves: dict[int, bool] = {}
        for op in ops:
            if isinstance(op, PageOp | LoadOp) and op.src >= 0:
                for array in self.planes[op.group].values():
                    self._reach(array, op.dst, op.count)
            for move, good in super().apply((op,), pack, blend).items():
                moves[move] = good and moves.get(move, True)
        return moves | {move: good for move, good in self.ended().items() if move not in moves}

    def _reach(self, array: Array, first: int, count: int) -> None:
        if (chunks := self.chunks.get(array.ctypes.data)) is not None:
            chunks.reach(first * array.strides[0], (first + count) * array.strides[0])

    def _zero(self, array: Array, first: int, count: int) -> None:
        if array.ctypes.data not in self.chunks:
            super()._zero(array, first, count)
            return
        self._reach(array, first, count)
        array[first : first + count] = 0

    def _give_up(self, array: Array, first: int, count: int) -> None:
        self.chunks[array.ctypes.data].give_up(first * array.strides[0], (first + count) * array.strides[0])

    def resident_bytes(self) -> int:
        """Bytes of all chunks that were ever written, as the system counts them."""
        return sum(chunks.resident_bytes() for chunks in self.chunks.values())
