"""Stacks of packed matrices that stay in their file: one matrix at a time is read into memory that somebody has for it.

Reads go past the system's cache of files where it lets them, so that the memory given for matrices is all they take,
and what was read is summed up and compared: no damaged or changed file becomes a wrong token.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from penstock.base.errors import EngineError, ModelError
from penstock.formats.files import quoted
from penstock.ops.native.direct_file import PAGE, U8, DirectFile, UnsoundError

_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class WeightFile(DirectFile):
    """What `fd`, still open for reading and not kept, is open on; `name`: for messages."""

    def __init__(self, fd: int, name: str) -> None:
        super().__init__(os.dup(fd))
        self.name = name
        self.remember()

    def remember(self) -> None:
        """What it is like now is what it shall be like."""
        info = os.fstat(self.fd)
        self._known = (info.st_size, info.st_mtime_ns)

    def read(self, offset: int, into: U8) -> None:
        """As `DirectFile.read`. Raises EngineError."""
        try:
            super().read(offset, into)
        except UnsoundError as error:
            raise self.changed(str(error)) from error
        except OSError as error:
            raise EngineError(f"{self.name} cannot be read: {error.strerror or error}") from error

    def changed(self, how: str) -> EngineError:
        """What to say where content is not what was written."""
        info = os.fstat(self.fd)
        if (info.st_size, info.st_mtime_ns) != self._known:
            how = "was changed"
        return EngineError(f"{self.name} {how} while its weights were in use; start again: they are packed anew")


class FiledStack:
    """The matrices of one stack in a file, one behind the other.

    Attributes:
        offset: of the first; `num_bytes`: of each.
        sums: of each; see `page_sum`.
    """

    def __init__(self, file: WeightFile, offset: int, num_bytes: int, sums: list[int]) -> None:
        self.file, self.offset, self.num_bytes, self.sums = file, offset, num_bytes, sums

    def span(self, index: int) -> tuple[int, int]:
        """Offset and size of the whole pages that one matrix lies in."""
        first = self.offset + index * self.num_bytes
        start = first // PAGE * PAGE
        return start, -(-(first + self.num_bytes) // PAGE) * PAGE - start

    def place(self, index: int) -> int:
        """Where in those pages it begins."""
        return (self.offset + index * self.num_bytes) % PAGE

    def zeros(self) -> U8:
        """As large as one, and no memory: what stands for those that nobody has fetched."""
        return addresses_only(self.num_bytes)

    def fetch(self, index: int, room: U8) -> None:
        """Those pages into `room`. Raises EngineError, if they cannot be read or are not what was written."""
        self.file.read(self.span(index)[0], room)
        first = self.place(index)
        if page_sum(room[first : first + self.num_bytes], first) != self.sums[index]:
            raise self.file.changed("is damaged")


def page_sum(part: U8, offset: int) -> int:
    """The sum of `part`, a stretch of a file from `offset` on, in words of 64 bits: those of page p count 2 p + 1
    times, modulo 2^64, and p begins with the page that `offset` is in.

    Parts and offsets are multiples of 8. Where a stretch falls into parts, sums of each with offsets from the same page
    on can be added.
    """
    words, first = part.view("<u8"), offset // PAGE
    head = min(len(part), -offset % PAGE) // 8
    whole = (len(words) - head) * 8 // PAGE
    total = (2 * first + 1) * int(np.add.reduce(words[:head]))
    first += head > 0
    last = head + whole * (PAGE // 8)
    sums = np.add.reduce(words[head:last].reshape(whole, PAGE // 8), axis=1)
    total += int(np.dot(sums, 2 * np.arange(first, first + whole, dtype=np.uint64) + np.uint64(1)))
    total += (2 * (first + whole) + 1) * int(np.add.reduce(words[last:]))
    return total % 2**64


def stack_sums(parts: Iterator[tuple[int, U8]], offset: int, num_bytes: int, count: int) -> list[int]:
    """`FiledStack.sums` of a stack that comes in `parts`, (offset in the file, bytes), in order and without gaps."""
    sums = [0] * count
    for at, part in parts:
        while len(part):
            index = (at - offset) // num_bytes
            if index >= count:
                break
            first = offset + index * num_bytes
            own = part[: first + num_bytes - at]
            sums[index] += page_sum(own, at - first // PAGE * PAGE)
            at, part = at + len(own), part[len(own) :]
    return [total % 2**64 for total in sums]


def addresses_only(num_bytes: int) -> U8:
    """Zeros that take no memory until somebody writes, however many."""
    return np.frombuffer(mmap.mmap(-1, num_bytes, flags=_PRIVATE | _NO_RESERVE), np.uint8)


class SpillFile:
    """A file without a name in `folder`, for stacks that are packed in this process and do not stay in its memory.

    Raises ModelError if the folder's disk does not take them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._end = folder, 0
        self._lock = threading.Lock()
        self._rooms: dict[int, mmap.mmap] = {}
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd, name = tempfile.mkstemp(dir=folder)
            os.unlink(name)
        except OSError as error:
            raise self._full(error) from error
        self.file = WeightFile(fd, f"the file of experts in {quoted(folder)}")
        os.close(fd)

    def room(self, num_bytes: int) -> tuple[int, U8]:
        """The offset of fresh bytes in the file, and the bytes."""
        with self._lock:
            first = -(-self._end // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
            length = -(-num_bytes // PAGE) * PAGE
            try:
                # All of it is taken now: a mapping of a hole would end the process when the disk is full.
                os.posix_fallocate(self.file.fd, first, length)
                mapped = mmap.mmap(self.file.fd, length, offset=first)
            except OSError as error:
                raise self._full(error) from error
            self._end, self._rooms[first] = first + length, mapped
        return first, np.frombuffer(mapped, np.uint8)[:num_bytes]

    def put(self, array: U8, offset: int, count: int) -> FiledStack:
        """What `room` gave, written to: it is on its way to the disk, and its memory may go."""
        each = array.nbytes // count
        sums = stack_sums(iter([(offset, array)]), offset, each, count)
        mapped = self._rooms.pop(offset)
        mapped.flush()
        mapped.madvise(mmap.MADV_DONTNEED)
        self.file.remember()
        os.posix_fadvise(self.file.fd, offset, array.nbytes, os.POSIX_FADV_DONTNEED)
        return FiledStack(self.file, offset, each, sums)

    def _full(self, error: OSError) -> ModelError:
        return ModelError(
            f"{quoted(self._folder)} cannot take the experts that expert_memory_bytes leaves on the disk: "
            f"{error.strerror or error}; set PENSTOCK_CACHE to a folder with more room"
        )
