"""A file that is read while the engine runs, past the system's cache where that can be done."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]
PAGE = 4096


class UnsoundError(ValueError):
    """A file that is not what it should be; the text completes "it ..."."""


class DirectFile:
    """`fd` is its own from now on, and is closed with the last reference to it. Any thread may read.

    Attributes:
        is_direct: whether reads pass by the system's cache; else what was read is dropped from it.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._direct = _direct(fd)
        self.is_direct = self._direct is not None

    def __del__(self) -> None:
        for fd in (self.fd, self._direct):
            if fd is not None:
                os.close(fd)

    def read(self, offset: int, into: U8) -> None:
        """`into`, whole pages that begin with a page, becomes what the file has from `offset`, a multiple of PAGE, on.

        Raises: OSError; UnsoundError if the file ends before.
        """
        view, done = into.data, 0
        fd = self.fd if self._direct is None else self._direct
        while done < len(view):
            num_read = os.preadv(fd, [view[done:]], offset + done)
            if num_read == 0:
                raise UnsoundError("has become shorter")
            done += num_read
        if not self.is_direct and hasattr(os, "posix_fadvise"):
            # Else the system would keep all of the file in memory that was to be saved.
            os.posix_fadvise(fd, offset, len(view), os.POSIX_FADV_DONTNEED)

    def read_kept(self, offset: int, into: U8) -> None:
        """As `read`, through the system's cache, which keeps what it has."""
        view, done = into.data, 0
        while done < len(view):
            num_read = os.preadv(self.fd, [view[done:]], offset + done)
            if num_read == 0:
                raise UnsoundError("became shorter")
            done += num_read


def cached_pages(fd: int) -> npt.NDArray[np.bool_] | None:
    """Of each page of a file, whether the system's cache has it; None where the system does not say.

    Asking reads nothing ahead, as trying to read without waiting (RWF_NOWAIT) does.
    """
    num_pages = -(-os.fstat(fd).st_size // PAGE)
    if sys.platform != "linux" or not num_pages:
        return None
    with mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as mapped:
        view = np.frombuffer(mapped, np.uint8)
        found = np.zeros(num_pages, np.uint8)
        size = ctypes.c_size_t(len(mapped))
        status = ctypes.CDLL(None).mincore(ctypes.c_void_p(view.ctypes.data), size, ctypes.c_void_p(found.ctypes.data))
        del view
    return None if status else (found & 1).astype(bool)


def _direct(fd: int) -> int | None:
    """The same file for reading past the system's cache; None if that cannot be done."""
    if not hasattr(os, "O_DIRECT"):
        return None
    try:
        found = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        with mmap.mmap(-1, PAGE) as page:
            os.preadv(found, [page], 0)
    except OSError:  # it can be opened so, and not read
        os.close(found)
        return None
    return found
