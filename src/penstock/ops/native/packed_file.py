"""Packed weights on disk: made once, mapped (or read into huge pages) at every later start.

Source of how they are read: ServerlessLLM (Fu et al., OSDI 2024, section 4): a checkpoint that is laid out as memory
will be, read in large parts by several threads, past the system's cache, straight to its place.

One file per key, in a folder that only this user can change. Whatever is wrong with a file means that it is absent,
with a warning: the caller packs again. Nothing here raises for the state of the disk.
"""

from __future__ import annotations

import logging
import mmap
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from penstock.base.cache import cache_folder
from penstock.base.errors import ConfigError
from penstock.ops.native.direct_file import PAGE, U8, DirectFile, UnsoundError, cached_pages
from penstock.ops.native.library import best_library
from penstock.ops.native.matrix import Packed
from penstock.ops.native.packed_format import (
    Checked,
    Growing,
    Index,
    PageSums,
    Span,
    check_digest,
    decoded,
    index_room,
    matrices_of,
    page_sums,
    page_up,
)
from penstock.ops.native.private_folder import PrivateFolder

if TYPE_CHECKING:
    from penstock.ops.native.resident import ResidentWeights

T = TypeVar("T")
SUFFIX = ".pst"
MAX_BYTES = 20 << 30
_KEY = re.compile(r"[0-9a-f]{64}")
_SPARE_BYTES = 256 << 20  # a disk is never filled to the last
_PART_BYTES = 8 << 20  # read, then summed while it is still in the cache
_READ_BYTES, _READERS = 4 << 20, 4
_WARM_PAUSE_S = 0.01
SLOW_BYTES_PER_S = 1e9
"""A drive that is slower is read into the system's cache as well, for the next start. One that is quicker is as good as
the cache, which costs memory that virtual machines get slowly."""
_HUGE = 2 << 20
_log = logging.getLogger(__name__)


class PackedStore:
    """A folder of packed models.

    Args:
        folder: by default `cache_folder("weights")`. It is made, mode 0700, when something is saved.
        max_bytes: of all files together; what was used longest ago makes room.
    """

    def __init__(self, folder: Path | None = None, *, max_bytes: int = MAX_BYTES) -> None:
        self.folder = cache_folder("weights") if folder is None else folder
        self.max_bytes = max_bytes

    def path(self, key: str) -> Path:
        """Where the file of a key is, if it is."""
        return self.folder / (key + SUFFIX)

    def num_bytes(self) -> int:
        """Of all files that are kept."""
        with _Closing(PrivateFolder.open(self.folder, create=False)) as folder:
            return 0 if folder is None else sum(info.st_size for _, info in folder.files(SUFFIX))

    def load(self, key: str, *, copy: bool = True, leave: bool = False) -> dict[str, Packed] | None:
        """Name -> matrix, read-only; None if there is none of this key, or none that can be trusted.

        `copy`: into memory for which huge pages are asked (products then read it about 17 % faster); else mapped, which
        shares memory with other processes, and asks that nobody shortens the file while it is in use. `leave`: stacks
        stay in the file (`Packed.filed`), and all else is copied.
        """
        return self._opened(key, lambda fd: _read(fd, key, copy, str(self.path(key)) if leave else ""))

    def open(self, key: str, limit: int | None, prefetch: int) -> ResidentWeights | None:
        """As `load`, for weights that are read while they are used. See `ResidentWeights`.

        Raises: ConfigError, for a limit that is too low.
        """
        from penstock.ops.native.resident import ResidentWeights  # nobody else needs it at the start

        damaged = partial(self.forget, key)

        def made(fd: int) -> ResidentWeights:
            index, _ = _index(fd, key)
            return ResidentWeights(os.dup(fd), index, limit, prefetch=prefetch, path=self.path(key), damaged=damaged)

        return self._opened(key, made)

    def _opened(self, key: str, read: Callable[[int], T]) -> T | None:
        """What `read` makes of a key's open file; None, and a warning, if there is none that can be trusted."""
        _check_key(key)
        with _Closing(PrivateFolder.open(self.folder, create=False)) as folder:
            fd = None if folder is None else folder.open_file(key + SUFFIX)
            if fd is None:
                return None
            try:
                found = read(fd)
                _touch(fd)
                return found
            except ConfigError:
                raise
            except UnsoundError as error:
                _log.warning("%s is not used: it %s; the weights are packed again", self.path(key), error)
            except (OSError, MemoryError, ValueError) as error:
                _log.warning("%s cannot be read: %s", self.path(key), error or type(error).__name__)
            finally:
                os.close(fd)
        return None

    def forget(self, key: str) -> None:
        """The next start packs anew."""
        with _Closing(PrivateFolder.open(self.folder, create=False)) as folder:
            if folder is not None:
                folder.remove(key + SUFFIX)

    def save(self, key: str, matrices: Mapping[str, Packed]) -> bool:
        """Whether it is on the disk now; if not, a warning says why. Replaces what was there under this key.

        Raises ValueError for a matrix whose arrays do not fit its format.
        """
        arrays = [a for m in matrices.values() for a in (m.data, m.bias, m.order) if a is not None]
        num_bytes = sum(page_up(a.nbytes) for a in arrays)
        return self.save_each(key, matrices.items(), list(matrices), num_bytes)

    def save_each(self, key: str, matrices: Iterable[tuple[str, Packed]], names: Sequence[str], num_bytes: int) -> bool:
        """`save` of matrices that come one after the other, and need not be in memory together. `names`: of all;
        `num_bytes`: about what they take."""
        _check_key(key)
        room = index_room(names)
        num_bytes += room
        if num_bytes > self.max_bytes:
            _log.warning("packed weights of %d bytes are not kept: the cache holds %d", num_bytes, self.max_bytes)
            return False
        with _Closing(PrivateFolder.open(self.folder, create=True)) as folder:
            if folder is None:
                return False
            try:
                self._make_room(folder, key, num_bytes)
                if folder.free_bytes() < num_bytes + _SPARE_BYTES:
                    _log.warning("packed weights are not kept: %s has too little room on its disk", self.folder)
                    return False
                growing = Growing(_library(), key, room)
                folder.write(key + SUFFIX, growing.parts(matrices), growing.head)
            except OSError as error:
                _log.warning("packed weights are not kept: %s: %s", self.folder, error.strerror or error)
                return False
        return True

    def _make_room(self, folder: PrivateFolder, key: str, num_bytes: int) -> None:
        files = [(name, info) for name, info in folder.files(SUFFIX) if name != key + SUFFIX]
        total = num_bytes + sum(info.st_size for _, info in files)
        for name, info in files:
            if total <= self.max_bytes:
                return
            # Whoever has it mapped keeps it: only the name goes.
            folder.remove(name)
            total -= info.st_size


class _Closing:
    """A folder that may be None as a context."""

    def __init__(self, folder: PrivateFolder | None) -> None:
        self._folder = folder

    def __enter__(self) -> PrivateFolder | None:
        return self._folder

    def __exit__(self, *error: object) -> None:
        if self._folder is not None:
            self._folder.close()


def _library() -> Any:
    library = best_library()
    assert library is not None, "only native kernels have packed weights"
    return library


def _check_key(key: str) -> None:
    if not _KEY.fullmatch(key):
        raise ValueError(f"a key is 64 hexadecimal digits, not {key!r}")


def _touch(fd: int) -> None:
    """Remember that it was used: now is its time of change, which nothing else depends on."""
    try:
        os.utime(fd)
    except OSError as error:
        _log.debug("a cached file keeps its old time: %s", error)


def _read(fd: int, key: str, copy: bool, leave: str) -> dict[str, Packed]:
    """`leave`: what the file is called in messages, if its stacks stay there. Raises UnsoundError, OSError,
    MemoryError."""
    index, start = _index(fd, key)
    if leave:
        return _partly(fd, start, index, leave)
    num_bytes = index.file_bytes - start
    arrays = _copied(fd, start, num_bytes, index) if copy else _mapped(fd, start, num_bytes, index)
    arrays.flags.writeable = False
    return matrices_of(index, arrays, start)


def _index(fd: int, key: str) -> tuple[Index, int]:
    """And where its arrays begin. Raises UnsoundError, OSError."""

    def exactly(offset: int, num_bytes: int) -> bytes:
        data = os.pread(fd, num_bytes, offset)
        if len(data) != num_bytes:
            raise UnsoundError("became shorter")
        return data

    return decoded(_library(), os.pread(fd, PAGE, 0), exactly, key, os.fstat(fd).st_size)


def _partly(fd: int, start: int, index: Index, name: str) -> dict[str, Packed]:
    """All but the stacks, which are read through once, for their sums."""
    from penstock.ops.native.filed import FiledStack, WeightFile, addresses_only, stack_sums  # few want it

    arrays, part = addresses_only(index.file_bytes - start), huge_pages(_PART_BYTES)
    file, filed = WeightFile(fd, name), {}

    def parts(span: Span, sums: PageSums, *, stays: bool) -> Iterator[tuple[int, U8]]:
        at, end = span[0], sum(span)
        while at < end:
            to = part if stays else arrays[at - start :]
            to = to[: min(_PART_BYTES, end - at)]
            file.read_kept(at, to)
            sums.add(to)
            yield at, to
            at += len(to)

    for entry in index.matrices:
        sums = PageSums()
        for span in (entry.data, entry.bias, entry.order):
            if span is entry.data and entry.count > 1:
                each = span[1] // entry.count
                found_sums = stack_sums(parts(span, sums, stays=True), span[0], each, entry.count)
                filed[entry.name] = FiledStack(file, span[0], each, found_sums)
            elif span is not None:
                deque(parts(span, sums, stays=False), 0)
        check_digest(entry, sums)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    arrays.flags.writeable = False
    found = matrices_of(index, arrays, start)
    for stack, where in filed.items():
        found[stack].leave(where)
    return found


def huge_pages(num_bytes: int) -> U8:
    """Fresh memory that begins at a multiple of 2 MiB and may be backed by huge pages. Not touched yet."""
    # Private: huge pages of shared anonymous memory are another setting of the kernel, and usually off.
    region = mmap.mmap(-1, num_bytes + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        region.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        _log.debug("this kernel has no transparent huge pages")
    raw = np.frombuffer(region, np.uint8)
    first = -raw.ctypes.data % _HUGE
    return raw[first : first + num_bytes]


def _copied(fd: int, start: int, num_bytes: int, index: Index) -> U8:
    """What the system's cache has is copied from it; all else is read past it, straight to where it is to be."""
    out, file, checked, kept = huge_pages(num_bytes), DirectFile(os.dup(fd)), Checked(index), cached_pages(fd)

    def is_kept(at: int) -> bool:
        first, last = (start + at) // PAGE, (start + min(at + _READ_BYTES, num_bytes)) // PAGE
        return kept is None or not file.is_direct or bool(kept[first:last].all())

    def read(at: int) -> bytes:
        part = out[at : at + _READ_BYTES]
        (file.read_kept if is_kept(at) else file.read)(start + at, part)
        return page_sums(part)

    began_s = time.monotonic()
    # Several at a time: a drive is quicker so, and fresh memory is slow to get on some hosts.
    places = range(0, num_bytes, _READ_BYTES)
    with ThreadPoolExecutor(_READERS) as readers:
        reading = [readers.submit(read, at) for at in places]
        try:
            for part in reading:
                checked.add(part.result())
        except BaseException:
            readers.shutdown(cancel_futures=True)
            raise
    slow = time.monotonic() - began_s > num_bytes / SLOW_BYTES_PER_S
    if slow and not all(map(is_kept, places)):
        _warm(fd, start, num_bytes)
    return out


def _warm(fd: int, start: int, num_bytes: int) -> None:
    """Read a file into the system's cache behind the start: the next engine of these weights finds it there."""
    own = os.dup(fd)

    def go() -> None:
        for at in range(start, start + num_bytes, _PART_BYTES):
            os.posix_fadvise(own, at, _PART_BYTES, os.POSIX_FADV_WILLNEED)
            time.sleep(_WARM_PAUSE_S)  # the first requests go before
        os.close(own)

    threading.Thread(target=go, name="penstock-warm", daemon=True).start()


def _mapped(fd: int, start: int, num_bytes: int, index: Index) -> U8:
    # The whole file: a mapping cannot be empty, and its offset would have to suit the system's pages.
    whole = np.frombuffer(mmap.mmap(fd, 0, access=mmap.ACCESS_READ), np.uint8)
    arrays = whole[start : start + num_bytes]
    checked = Checked(index)
    for at in range(0, num_bytes, _PART_BYTES):
        checked.add(page_sums(arrays[at : at + _PART_BYTES]))
    return arrays
