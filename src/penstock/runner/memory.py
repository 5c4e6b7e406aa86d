"""Large zeroed arrays that need no waiting for: the system fills them in while others work already.

Touching every byte before it is needed keeps page faults out of steps, but costs a second per gigabyte or so, and in a
virtual machine whose host hands out memory late much more: 12 s for the first gigabyte were seen. And memory that is
touched is gone for whoever else runs on the machine. So a thread touches what will be used next, and no more
(`kv.backing` says how much). Pages are zeroed when they are handed out, so nothing depends on it.
"""

from __future__ import annotations

import ctypes
import logging
import math
import mmap
import os
import threading
import time
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Part = tuple[Array, int, int]
"""Bytes first ... end-1 of an array."""

SMALL_BYTES = 1 << 20
"""Arrays up to this are filled at once, and stay in memory."""
_CHUNK_BYTES = 2 << 20
"""At a time: a huge page, half a millisecond for which whoever maps memory may have to wait."""
_BUSY_S = 0.02
"""Between chunks while no processor is free: 100 MB/s at most."""
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE (Linux 5.14): as if every page had been written to, without changing one."""
_ADVISES = hasattr(mmap, "MADV_DONTNEED")
_LOG = logging.getLogger(__name__)


def zeroed(shape: tuple[int, ...], dtype: type[np.generic]) -> Array:
    """Zeros: touched if they are few, else for `populate` to touch, in huge pages if the system has them."""
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    if not _ADVISES:  # such a system gives memory as it is touched
        return np.zeros(shape, dtype)
    if num_bytes <= SMALL_BYTES:
        array: Array = np.empty(shape, dtype)
        array.fill(0)
        return array
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            mapping.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:  # a kernel without them
            _LOG.debug("no huge pages: %s", error)
    return np.frombuffer(mapping, dtype, math.prod(shape)).reshape(shape)


def populate(parts: Iterable[Part]) -> threading.Thread | None:
    """Touch the pages of parts of large arrays in a thread, from front to back.

    It ends when they are gone, or when the process ends. None if no array is large. Where the system cannot do it, the
    first step that needs a page waits for it.
    """
    # Weak: the thread must not keep the memory of an engine that was given up.
    large = [
        (weakref.ref(array), array.ctypes.data + first, end - first)
        for array, first, end in parts
        if array.nbytes > SMALL_BYTES and end > first
    ]
    if not large or not _ADVISES:
        return None
    thread = threading.Thread(target=_touch, args=(large,), name="penstock-populate", daemon=True)
    thread.start()
    return thread


def give_back(parts: Iterable[Part]) -> None:
    """Give the whole pages in parts of large arrays back to the system: they read as zeros. Nobody may use them now.

    Nothing happens on systems that take no advice.
    """
    if not _ADVISES:
        return
    libc, page = ctypes.CDLL(None, use_errno=True), mmap.PAGESIZE
    for array, first, end in parts:
        begin = -(-(array.ctypes.data + first) // page) * page
        size = (array.ctypes.data + end) // page * page - begin
        if array.nbytes <= SMALL_BYTES or size <= 0:
            continue
        if libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), mmap.MADV_DONTNEED) != 0:
            _LOG.debug("memory is not given back: errno %d", ctypes.get_errno())


def slab_parts(planes: Mapping[str, Array], pages: range) -> list[Part]:
    """Of planes [pages, ...], what these pages have."""
    return [(a, pages.start * a.strides[0], pages.stop * a.strides[0]) for a in planes.values()]


def _touch(parts: list[tuple[weakref.ref[Array], int, int]]) -> None:
    # While no processor is free only a little: the first requests would share theirs with it for seconds. Not by
    # SCHED_IDLE: the system's lock on our memory is held meanwhile, and whoever wants it would wait until some
    # processor is free (4 s were seen beside three busy processes).
    libc = ctypes.CDLL(None, use_errno=True)
    steps, page = max(num_bytes for _, _, num_bytes in parts) // _CHUNK_BYTES + 1, mmap.PAGESIZE
    # All arrays from front to back together: the first blocks, which are handed out first, are in each of them.
    for step in range(steps):
        for ref, address, num_bytes in parts:
            array = ref()  # alive while this chunk is touched
            if array is None:
                return
            begin, end = (-(-(address + num_bytes * i // steps) // page) * page for i in (step, step + 1))
            size = ctypes.c_size_t(end - begin)
            if end > begin and libc.madvise(ctypes.c_void_p(begin), size, _POPULATE_WRITE) != 0:
                _LOG.debug("memory is not touched ahead: errno %d", ctypes.get_errno())
                return
            del array
        if _all_are_busy():
            time.sleep(_BUSY_S)


def _all_are_busy() -> bool:
    """Whether something runs on every processor, this thread aside (Linux says; False elsewhere)."""
    try:
        with open("/proc/loadavg", "rb") as file:
            num_running = int(file.read().split()[3].split(b"/")[0])
    except (OSError, ValueError, IndexError):
        return False
    return num_running > (os.cpu_count() or 1)
