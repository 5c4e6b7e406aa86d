"""Large zeroed arrays that need no waiting for: the system fills them in while others work already.

Touching every byte before an engine is ready keeps page faults out of its steps, but costs a second per gigabyte or so,
and in a virtual machine whose host hands out memory late much more: 12 s for the first gigabyte were seen. Pages are
zeroed when they are handed out, so nothing depends on the first touch: it is left to a thread. The thread leaves a
quarter of the memory to others: what a cache may hold one day is no reason to push out what runs beside it now.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import mmap
import os
import threading
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.plan.probe import probe

Array = npt.NDArray[Any]

SMALL_BYTES = 64 << 20
"""Arrays up to this are filled at once."""
_CHUNK_BYTES = 4 << 20
_CHUNKS_A_LOOK = 16
"""Chunks that are touched from one look at the free memory to the next."""
_LEFT_SHARE = 4
"""A `_LEFT_SHARE`-th of the memory is left for what really needs it."""
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE (Linux 5.14): as if every page had been written to, without changing one."""
_LOG = logging.getLogger(__name__)


def zeroed(shape: tuple[int, ...], dtype: type[np.generic]) -> Array:
    """Zeros: touched if they are few, else for `populate` to touch, in huge pages if the system has them."""
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
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


def populate(arrays: Iterable[Array]) -> threading.Thread | None:
    """Touch the pages of large arrays in a thread, from front to back.

    It ends when they are gone, when others need the memory more (`_LEFT_SHARE`), or when the process ends.

    None if none is large. Where the system cannot do it, the first step that needs a page waits for it.
    """
    large = [array for array in arrays if array.nbytes > SMALL_BYTES]
    if not large:
        return None
    # Weak: the thread must not keep the memory of an engine that was given up.
    parts = [(weakref.ref(array), array.ctypes.data, array.nbytes) for array in large]
    thread = threading.Thread(target=_touch, args=(parts,), name="penstock-populate", daemon=True)
    thread.start()
    return thread


def _touch(parts: list[tuple[weakref.ref[Array], int, int]]) -> None:
    # Only while nobody else wants the processor: the first requests would share theirs with it for seconds.
    with contextlib.suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # of this thread
    libc = ctypes.CDLL(None, use_errno=True)
    steps, page = max(num_bytes for _, _, num_bytes in parts) // _CHUNK_BYTES + 1, mmap.PAGESIZE
    # All arrays from front to back together: the first blocks, which are handed out first, are in each of them.
    for step in range(steps):
        if step % _CHUNKS_A_LOOK == 0 and (machine := probe()).available_bytes < machine.memory_bytes // _LEFT_SHARE:
            _LOG.debug("memory is not touched ahead any more: others have most of it")
            return
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
