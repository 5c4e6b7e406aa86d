"""The black box: a page of memory that an engine writes and its supervisor reads, also when the engine is dead.

A stopped, stuck or killed engine cannot send what one wants to know of it. Here it stands: when the loop last moved,
and which requests were being worked on. Writing costs no system call.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import time
from array import array
from collections.abc import Sequence
from hashlib import blake2b

SIZE = 16384
_BEAT, _BUSY, _STEPS, _COUNT, _PROGRESS, _ASIDE, _FIRST = 0, 1, 2, 3, 4, 5, 8
MAX_HANDLES = SIZE // 8 - _FIRST


def handle_of(request_id: str) -> int:
    """A request's name in the box: 64 bits that both sides compute."""
    return int.from_bytes(blake2b(request_id.encode(), digest_size=8).digest(), "little")


class BlackBox:
    """Words of 64 bits: time of the last sign of life (monotonic, ns), busy, steps, number of handles, operations of
    the model so far, handles of requests that are worked on beside the steps (0: none), handles of the step.

    An engine writes (its rank counts the operations), a supervisor only reads. `fd` is the memory's file descriptor, to
    be inherited by a child; None for a box within one process.
    """

    def __init__(self, memory: bytearray | mmap.mmap | None = None, fd: int | None = None) -> None:
        self._memory = bytearray(SIZE) if memory is None else memory
        self._words = memoryview(self._memory).cast("Q")
        self.fd = fd

    @classmethod
    def create(cls) -> BlackBox:
        """A box that can be shared with a child. Whoever creates it closes it."""
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("penstock-blackbox")
        else:
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        os.ftruncate(fd, SIZE)
        return cls(mmap.mmap(fd, SIZE), fd)

    @classmethod
    def attach(cls, fd: int) -> BlackBox:
        """The box behind an inherited descriptor. Whoever attaches it closes it, too."""
        os.set_inheritable(fd, False)
        return cls(mmap.mmap(fd, SIZE), fd)

    # -- the engine's side ---------------------------------------------------------------------------------------

    def beat(self, busy: bool) -> None:
        """The loop moves."""
        words = self._words
        words[_BUSY] = busy
        words[_BEAT] = time.monotonic_ns()

    def working_on(self, handles: Sequence[int]) -> None:
        """From now on a crash may be the fault of one of these. What does not fit is left out."""
        words, fit = self._words, handles[:MAX_HANDLES]
        words[_COUNT] = 0
        words[_FIRST : _FIRST + len(fit)] = memoryview(array("Q", fit))
        words[_COUNT] = len(fit)

    def working_aside(self, place: int, handle: int) -> None:
        """As `working_on`, for one request that another thread works on; 0: for none. A place belongs to a thread."""
        self._words[_ASIDE + place] = handle

    def progress(self) -> None:
        """Count one more operation."""
        self._words[_PROGRESS] += 1

    @property
    def progress_address(self) -> int:
        """Where a model counts its operations, so that a long step can be told from a stuck one."""
        return ctypes.addressof(ctypes.c_uint64.from_buffer(self._memory, 8 * _PROGRESS))

    def done(self) -> None:
        """The step is over: a crash from now on is nobody's fault."""
        self._words[_COUNT] = 0
        self._words[_STEPS] += 1

    # -- the supervisor's side -----------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        return bool(self._words[_BUSY])

    @property
    def num_steps(self) -> int:
        return self._words[_STEPS]

    @property
    def signs(self) -> tuple[int, int]:
        """Changes while the engine moves; (0, ...) until it has been loaded."""
        return self._words[_BEAT], self._words[_PROGRESS]

    def age_s(self) -> float:
        """Seconds since the last sign of life; 0 before the first."""
        last = self._words[_BEAT]
        return max(0.0, (time.monotonic_ns() - last) / 1e9) if last else 0.0

    def suspects(self) -> tuple[int, ...]:
        """Handles of the requests that were being worked on, in the step or beside it."""
        count = min(self._words[_COUNT], MAX_HANDLES)
        aside = [handle for handle in self._words[_ASIDE:_FIRST] if handle]
        return (*self._words[_FIRST : _FIRST + count], *aside)

    def close(self) -> None:
        """Let go of memory and descriptor. May be called twice."""
        self._words.release()
        if isinstance(self._memory, mmap.mmap):
            self._memory.close()
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
