"""How fast this machine reads memory now: what decoding is measured against.

Shared machines drift within minutes, so whoever compares times probes before and after each of them.
"""

from __future__ import annotations

import contextlib
import mmap
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.ops.native.library import best_library
from penstock.ops.native.program import Pool
from penstock.plan.probe import probe

GIB = 1 << 30
_HUGE_PAGE = 2 << 20


@dataclass(frozen=True)
class Bandwidth:
    """Bytes per second over the passes. `method`: "native" (all threads, the kernels' own loads) or "numpy"."""

    median: float
    low: float
    high: float
    threads: int
    method: str


class ReadProbe:
    """A buffer larger than the caches, and threads to read it with. Keep one: filling the buffer takes longest.

    `threads` None: as many as this process may use. Without the native library numpy adds the numbers up, with a thread
    per part; it is slower, and `method` says so.
    """

    def __init__(self, num_bytes: int = GIB, threads: int | None = None) -> None:
        self.threads = threads or probe().num_cores
        self.num_bytes = max(_HUGE_PAGE, num_bytes // _HUGE_PAGE * _HUGE_PAGE)
        # A huge page more than needed, so that the part that is read can begin at a border of one.
        self._map = mmap.mmap(-1, self.num_bytes + _HUGE_PAGE)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them: small pages cost some per cent
                self._map.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(self._map, np.uint64)
        skip = (-whole.ctypes.data % _HUGE_PAGE) // 8
        self._data = whole[skip : skip + self.num_bytes // 8]
        self._data[:] = 1  # written once, so that every page is memory of its own and not the kernel's page of zeros
        library = best_library()
        self._pool = Pool(library, self.threads) if library is not None else None
        self._workers = ThreadPoolExecutor(self.threads) if self._pool is None else None

    @property
    def method(self) -> str:
        return "numpy" if self._pool is None else "native"

    def measure(self, passes: int = 5) -> Bandwidth:
        """Read all of the buffer so many times."""
        rates = [self.num_bytes / self._pass_s() for _ in range(max(1, passes))]
        return Bandwidth(statistics.median(rates), min(rates), max(rates), self.threads, self.method)

    def close(self) -> None:
        """End the threads and give the memory back."""
        if self._pool is not None:
            self._pool.close()
        if self._workers is not None:
            self._workers.shutdown()
        self._data = np.zeros(0, np.uint64)
        with contextlib.suppress(BufferError):  # somebody still looks at it: it goes with the last view
            self._map.close()

    def __enter__(self) -> ReadProbe:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _pass_s(self) -> float:
        began_s = time.perf_counter()
        if self._pool is not None:
            self._pool.library.pst_read(self._pool.handle, self._data.ctypes.data, self.num_bytes)
        else:
            assert self._workers is not None
            parts: list[Any] = np.array_split(self._data, self.threads)
            list(self._workers.map(np.add.reduce, parts))
        return time.perf_counter() - began_s
