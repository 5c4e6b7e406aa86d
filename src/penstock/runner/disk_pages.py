"""A file as a tier: what waits outside the device waits on the disk, and takes no memory.

The file has no name: it is this process's own, and goes with it. Pages of one layer lie next to each other, all planes
of a page together, so that a layer of a sequence (`kv.layerkv`) comes in a few reads. Where pages are whole sectors,
reads and writes pass by the system's cache, which would spend the memory that was saved.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from zlib import crc32

import numpy as np
import numpy.typing as npt

from penstock.base.cache import cache_folder
from penstock.base.errors import ConfigError, EngineError
from penstock.core.cache_spec import CacheGroup
from penstock.core.page_ops import LoadOp, StoreOp
from penstock.ops.plan import I32, Planes
from penstock.runner.storage import filled, planes_of

_SECTOR = 4096
_MOST_BYTES = 4 << 20
"""Of one read or write."""
U8 = npt.NDArray[np.uint8]


class DiskPages:
    """A `PageStore`, and `runner.layer_streams.LayerStore`. `folder`: where the file is; by default
    `cache_folder("swap")`.

    `checked`: a page that is not what was stored is not brought back. Otherwise the disk is trusted, as swap space is.

    Attributes:
        threads: that may read and write layers at once. `num_read`, `num_written`: bytes so far.

    Raises: ConfigError if the disk has no room for the file; later EngineError, if it fails.
    """

    threads = 2

    def __init__(
        self, groups: Sequence[CacheGroup], num_slabs: Sequence[int], block_size: int, *, checked: bool = False,
        folder: Path | None = None,
    ) -> None:  # fmt: skip
        self._slabs, self._width = tuple(num_slabs), [group.pages_per_slab for group in groups]
        self.num_pages = tuple(n * width for n, width in zip(num_slabs, self._width, strict=True))
        models = [planes_of(group, 1, block_size, False, filled) for group in groups]
        self._planes = [[(name, a.dtype, a.shape[1:], a.nbytes) for name, a in planes.items()] for planes in models]
        self._each = [sum(plane[3] for plane in planes) for planes in self._planes]
        sizes = [n * each for n, each in zip(self.num_pages, self._each, strict=True)]
        self._first = [sum(sizes[:g]) for g in range(len(sizes))]
        self._sums: dict[tuple[int, int], int] | None = {} if checked else None
        self._scratch = threading.local()
        self.num_read = self.num_written = 0
        self._folder = cache_folder("swap") if folder is None else folder
        self._fds: list[int] = []
        if sum(sizes):
            self._open(sum(sizes), direct=all(each % _SECTOR == 0 for each in self._each))

    def __del__(self) -> None:
        for fd in self._fds:
            os.close(fd)

    @property
    def is_direct(self) -> bool:
        """Whether the system's cache has no part in it."""
        return len(self._fds) > 1

    def store(self, op: StoreOp, planes: Planes) -> None:
        assert 0 <= op.dst <= self.num_pages[op.group] - op.count, f"{op}: destination outside the tier"
        self.write(op.group, _range(op.dst, op.count), planes, _range(op.src, op.count))

    def load(self, op: LoadOp, planes: Planes) -> bool | None:
        assert 0 <= op.src <= self.num_pages[op.group] - op.count, f"{op}: source outside the tier"
        return self.read(op.group, _range(op.src, op.count), planes, _range(op.dst, op.count))

    def look(self, group: int) -> Planes:
        raise AssertionError("what is on the disk is not read where it is")

    def begin(self) -> None:
        """Nothing is done beside the steps."""

    def ended(self, wait_s: float = 0.0) -> dict[int, bool]:
        return {}

    def read(self, group: int, pages: I32, planes: Mapping[str, npt.NDArray[np.generic]], into: I32) -> bool:
        """Pages of the tier become pages of `planes`. False if one is not what was stored; then some may be written."""
        for offset, part in self._runs(group, pages):
            found = self._buffer(group, part)
            self._move(os.preadv, found, offset)
            self.num_read += found.nbytes
            if not self._is_good(group, pages[part], found):
                return False
            at = 0
            for name, dtype, shape, num_bytes in self._planes[group]:
                planes[name][into[part]] = found[:, at : at + num_bytes].view(dtype).reshape(-1, *shape)
                at += num_bytes
        return True

    def write(self, group: int, pages: I32, planes: Mapping[str, npt.NDArray[np.generic]], source: I32) -> None:
        """Pages of `planes` become pages of the tier."""
        for offset, part in self._runs(group, pages):
            made, at = self._buffer(group, part), 0
            for name, _, _, num_bytes in self._planes[group]:
                one = planes[name][source[part]]
                made[:, at : at + num_bytes] = one.reshape(len(made), -1).view(np.uint8)
                at += num_bytes
            if self._sums is not None:
                self._sums |= {(group, int(page)): crc32(row) for page, row in zip(pages[part], made, strict=True)}
            self._move(os.pwritev, made, offset)
            self.num_written += made.nbytes

    def _is_good(self, group: int, pages: I32, found: U8) -> bool:
        sums = self._sums
        if sums is None:
            return True
        return all(sums.get((group, int(page))) == crc32(row) for page, row in zip(pages, found, strict=True))

    def _runs(self, group: int, pages: I32) -> Iterator[tuple[int, slice]]:
        """Where in the file stretches of these pages lie that are one, and which they are."""
        blocks, layers = np.divmod(pages.astype(np.int64), self._width[group])
        places = layers * self._slabs[group] + blocks
        each = self._each[group]
        most = max(1, _MOST_BYTES // each)
        for first, end in pairwise([0, *(np.flatnonzero(np.diff(places) != 1) + 1).tolist(), len(places)]):
            for at in range(first, end, most):
                yield self._first[group] + int(places[at]) * each, slice(at, min(at + most, end))

    def _buffer(self, group: int, part: slice) -> U8:
        """[pages, bytes] of this thread, that begins with a page of memory."""
        num_bytes = (part.stop - part.start) * self._each[group]
        have: U8 | None = getattr(self._scratch, "memory", None)
        if have is None or len(have) < num_bytes:
            have = self._scratch.memory = np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)
        return have[:num_bytes].reshape(-1, self._each[group])

    def _move(self, how: Callable[[int, list[memoryview], int], int], rows: U8, offset: int) -> None:
        view, done = rows.reshape(-1).data, 0
        try:
            while done < len(view):
                done += how(self._fds[-1], [view[done:]], offset + done)
            if not self.is_direct and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._fds[0], offset, len(view), os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise EngineError(
                f"keys and values that wait on the disk of {self._folder}: {error.strerror or error}; see to the disk, "
                "and start the engine again"
            ) from error

    def _open(self, num_bytes: int, *, direct: bool) -> None:
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._folder) as file:
                self._fds.append(os.dup(file.fileno()))
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._fds[0], 0, num_bytes)  # a disk that is full says so now, not in a step
            else:
                os.truncate(self._fds[0], num_bytes)
        except OSError as error:
            raise ConfigError(
                f"swap_space: {num_bytes} bytes on the disk of {self._folder}: {error.strerror or error}; give less, "
                "or name another folder in PENSTOCK_CACHE",
                field="swap_space",
            ) from error
        if direct and hasattr(os, "O_DIRECT"):
            try:
                again = os.open(f"/proc/self/fd/{self._fds[0]}", os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
                self._fds.append(again)
                os.preadv(again, [mmap.mmap(-1, _SECTOR)], 0)
            except OSError:  # a file system without it
                for fd in self._fds[1:]:
                    os.close(fd)
                del self._fds[1:]


def _range(first: int, count: int) -> I32:
    return np.arange(first, first + count, dtype=np.int32)
