"""Memory that is touched in the background: zeros, nobody's bytes changed, and nothing kept alive."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import threading
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.core.cache_spec import CacheGroup, CacheSpec, PlaneSpec
from penstock.runner import memory
from penstock.runner.lazy import LazyStorage
from penstock.runner.memory import Array, populate, zeroed
from penstock.runner.storage import Storage

GROUP = CacheGroup(0, CacheSpec("paged", (PlaneSpec("k", 2, 64, "float32"), PlaneSpec("v", 2, 64, "float32"))), (0, 1))


def resident(array: Array) -> float:
    """Share of an array's pages that are in memory (mincore)."""
    first = array.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    count = -(-array.nbytes // mmap.PAGESIZE)
    pages = (ctypes.c_ubyte * count)()
    libc = ctypes.CDLL(None)
    assert libc.mincore(ctypes.c_void_p(first), ctypes.c_size_t(array.nbytes), pages) == 0
    return sum(page & 1 for page in pages) / count


def whole(array: Array) -> tuple[Array, int, int]:
    return array, 0, array.nbytes


@pytest.fixture
def _all_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "SMALL_BYTES", 0)
    monkeypatch.setattr(memory, "_CHUNK_BYTES", 1 << 20)
    monkeypatch.setattr(memory, "_BUSY_S", 0)


@pytest.mark.usefixtures("_all_is_large")
def test_large_arrays_are_touched_by_a_thread() -> None:
    array = zeroed((16 << 20,), np.uint8)
    assert resident(array) < 0.5
    thread = populate([whole(array)])
    assert thread is not None
    thread.join(60)
    assert resident(array) == 1.0
    assert not array.any()


@pytest.mark.usefixtures("_all_is_large")
def test_touching_changes_no_byte() -> None:
    """Somebody writes while the thread goes over the same pages."""
    array = zeroed((48 << 20,), np.uint8)
    wanted = np.random.default_rng(1).integers(0, 256, array.size, np.uint8)
    thread = populate([whole(array)])
    assert thread is not None
    array[:] = wanted
    thread.join(60)
    assert np.array_equal(array, wanted)


@pytest.mark.usefixtures("_all_is_large")
def test_memory_that_is_given_up_is_not_touched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread stops at the next chunk, and holds nothing."""
    go = threading.Event()
    calls: list[int] = []

    class Libc:
        def madvise(self, *_: object) -> int:
            calls.append(1)
            go.wait(30)
            return 0

    monkeypatch.setattr(memory.ctypes, "CDLL", lambda *a, **k: Libc())
    array = zeroed((8 << 20,), np.uint8)
    thread = populate([whole(array)])
    assert thread is not None
    del array
    gc.collect()
    go.set()
    thread.join(30)
    assert not thread.is_alive()
    assert len(calls) <= 1


@pytest.mark.usefixtures("_all_is_large")
def test_the_first_blocks_of_all_arrays_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are handed out from the front, keys and values of each."""
    ranges: list[tuple[int, int]] = []

    class Libc:
        def madvise(self, begin: Any, size: Any, _: int) -> int:
            ranges.append((begin.value, begin.value + size.value))
            return 0

    monkeypatch.setattr(memory.ctypes, "CDLL", lambda *a, **k: Libc())
    arrays = [zeroed((num_bytes,), np.uint8) for num_bytes in (24 << 20, (12 << 20) + 5)]
    thread = populate(map(whole, arrays))
    assert thread is not None
    thread.join(30)
    shares = []
    for array in arrays:
        at = array.ctypes.data
        own = [(begin, end) for begin, end in ranges if at <= begin < at + array.nbytes]
        assert own[0][0] == at
        assert own[-1][1] >= at + array.nbytes
        assert all(a[1] == b[0] for a, b in pairwise(own)), "no gap, nothing twice"
        shares.append([(end - at) / array.nbytes for _, end in own])
    assert len(shares[0]) == len(shares[1]) > 4
    np.testing.assert_allclose(shares[0], shares[1], atol=0.001)


@pytest.mark.usefixtures("_all_is_large")
def test_storage_takes_what_it_is_told_to_and_gives_back_the_rest() -> None:
    """Slabs are backed from the front, in every plane; what was given back reads as zeros."""
    wide = CacheGroup(
        0, CacheSpec("paged", (PlaneSpec("k", 8, 64, "float32"), PlaneSpec("v", 8, 64, "float32"))), (0, 1)
    )
    storage = Storage((wide,), [512], 16)  # 32 MiB a plane
    planes = storage.planes[0].values()
    assert all(resident(array) < 0.1 for array in planes)
    for wanted, least, most in ((128, 0.25, 0.4), (256, 0.5, 0.65), (64, 0.125, 0.25), (512, 1, 1)):
        storage.back([wanted])
        if storage._populating is not None:
            storage._populating.join(60)
        assert all(least <= resident(array) <= most for array in planes), f"{wanted} of 512"
        for array in planes:
            assert not array[-2:].any()
            array[2 * wanted - 1] = 7


def test_small_arrays_are_filled_at_once() -> None:
    array = zeroed((1 << 20,), np.uint8)
    assert resident(array) == 1.0
    assert populate([whole(array)]) is None


@pytest.mark.usefixtures("_all_is_large")
def test_virtual_planes_stay_untouched() -> None:
    storage = Storage((GROUP,), [256], 16)
    lazy = LazyStorage((GROUP,), [256], 16)
    storage.back([256])
    lazy.back([256])
    assert storage._populating is not None
    storage._populating.join(60)
    assert resident(storage.planes[0]["k"]) == 1.0
    assert resident(lazy.planes[0]["k"]) == 0.0


@pytest.mark.skipif(not os.path.exists("/proc/loadavg"), reason="says whether processors are free")
def test_memory_is_touched_slowly_while_no_processor_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(memory, "time", SimpleNamespace(sleep=waits.append))
    taken = {}
    for free in (True, False):
        monkeypatch.setattr(memory, "_all_are_busy", lambda free=free: not free)
        array = memory.zeroed((8 * memory._CHUNK_BYTES,), np.uint8)
        thread = memory.populate([whole(array)])
        assert thread is not None
        thread.join(60)
        assert resident(array) == 1.0
        taken[free], waits[:] = len(waits), []
    assert (taken[True], taken[False] >= 8) == (0, True)


@pytest.mark.skipif(not hasattr(os, "sched_getscheduler"), reason="this system does not tell how threads are scheduled")
def test_whoever_holds_the_lock_of_our_memory_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """With idle scheduling it would hold the lock until a processor is free, and a step would wait as long."""
    policies: list[tuple[int, int]] = []
    touch = memory._touch

    def watched(parts: Any) -> None:
        touch(parts)
        policies.append((os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))

    monkeypatch.setattr(memory, "_touch", watched)
    array = memory.zeroed((memory.SMALL_BYTES + mmap.PAGESIZE,), np.uint8)
    thread = memory.populate([whole(array)])
    assert thread is not None
    thread.join(60)
    assert policies == [(os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0))]
