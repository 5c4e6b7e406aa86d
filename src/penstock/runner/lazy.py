"""Storage whose memory exists only where something was written: the rank's side of `kv_allocator="virtual"`.

Each device plane is one private anonymous mapping that is never filled. The operating system maps a page at its first
write; zeroing whole pages gives them back (MADV_DONTNEED: they read as zeros). Source: vAttention, arXiv 2405.04437,
which does the same with a GPU's virtual memory; a CPU has it for nothing. The price is a page fault for each page that
is handed out, in the middle of a step.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from typing import Any

import numpy as np

from penstock.base.errors import ConfigError
from penstock.runner.storage import Array, Storage

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux; Python names it from 3.13 on


class LazyStorage(Storage):
    """A Storage that is as large as its addresses, not its memory.

    Raises ConfigError if the addresses cannot be had. `poison` fills, and so commits, everything.
    """

    touches = False

    def __init__(self, *args: Any, **kw: Any) -> None:
        self._mappings: dict[int, tuple[mmap.mmap, Array]] = {}  # by address; the bytes of the whole mapping
        super().__init__(*args, **kw)

    def _new(self, shape: tuple[int, ...], dtype: type[np.generic], content: Any) -> Array:
        num_bytes = max(1, math.prod(shape) * np.dtype(dtype).itemsize)
        if not hasattr(mmap, "MADV_NOHUGEPAGE"):
            # Elsewhere memory that was given back need not read as zeros.
            raise ConfigError("kv_allocator: virtual needs Linux; use paged", field="kv_allocator")
        try:
            mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        except OSError as error:
            raise ConfigError(
                f"kv_allocator: no {num_bytes} bytes of addresses for a virtual KV plane ({error.strerror}); lower "
                "max_num_seqs or max_model_len, or use kv_allocator paged",
                field="kv_allocator",
            ) from error
        mapping.madvise(mmap.MADV_NOHUGEPAGE)  # a huge page would commit 2 MiB for one token
        array: Array = np.frombuffer(mapping, dtype, math.prod(shape)).reshape(shape)
        self._mappings[array.ctypes.data] = mapping, np.frombuffer(mapping, np.uint8)
        if content != 0:
            array.fill(content)
        return array

    def _zero(self, array: Array, first: int, count: int) -> None:
        """Whole pages of memory go back to the system, the rest of the range is overwritten."""
        mapping, raw = self._mappings[array.ctypes.data]
        width = array.strides[0]
        lo, hi = first * width, (first + count) * width
        inner = -(-lo // mmap.PAGESIZE) * mmap.PAGESIZE
        outer = hi // mmap.PAGESIZE * mmap.PAGESIZE
        if inner >= outer:
            raw[lo:hi] = 0
            return
        raw[lo:inner] = 0
        mapping.madvise(mmap.MADV_DONTNEED, inner, outer - inner)
        raw[outer:hi] = 0

    def history(self, group: int, name: str, layer: int, first_slab: int, num_blocks: int) -> Array:
        """What a kernel without block tables reads: one layer of one sequence's run, a view and not a copy.

        Shapes: [num_blocks, S, heads, dim]. `layer` counts within the group. With one layer to a group it is one
        contiguous array; with more, their blocks alternate, so that a sequence's layers fill one page of memory
        together before the next is taken, and the first axis has a constant stride.
        """
        array = self.planes[group][name]
        slabs = array.reshape(-1, self.pages_per_slab[group], *array.shape[1:])
        return slabs[first_slab : first_slab + num_blocks, layer]

    def resident_bytes(self) -> int:
        """Bytes of all device planes that are in memory now, as the operating system counts them (mincore)."""
        libc = ctypes.CDLL(None, use_errno=True)
        total = 0
        for address, (_, raw) in self._mappings.items():
            pages = (ctypes.c_ubyte * -(-raw.nbytes // mmap.PAGESIZE))()
            if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(raw.nbytes), pages) != 0:
                raise OSError(ctypes.get_errno(), "mincore failed")
            total += sum(page & 1 for page in pages) * mmap.PAGESIZE
        return total
