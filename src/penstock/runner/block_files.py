"""Blocks as files: written behind the steps and read beside them, by threads.

A file is a header of 16 bytes (magic, length of what follows it), the pages of every plane of every group one after
the other (or what a codec has made of them), and an HMAC-SHA256 of its path, header and pages. It gets its name by a
rename when it is whole. Whatever is wrong with one - short, changed, another block's, not there, a disk that does not
answer - is a miss.

Content is not encrypted: who can read the folder can read what was computed from the texts.
"""

from __future__ import annotations

import atexit
import contextlib
import hmac
import itertools
import logging
import os
import queue
import stat
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.core.block_codec import BlockCodec
from penstock.core.cache_spec import HIDDEN, CacheGroup
from penstock.core.page_ops import STATE, DropOp, FetchOp, GetOp, KeepOp, PutOp
from penstock.ops.plan import Planes

MAGIC = b"PSTKV\x00\x00\x01"
MAC_BYTES = 32
OVERHEAD = 16 + MAC_BYTES
NUM_READERS = 2
MOST_WAITING_BYTES = 256 << 20
"""Copies of blocks that wait to be written; more are not kept."""
PATIENCE_S, PATIENCE_RATE = 5.0, 20e6
"""A load that takes longer than this and its bytes at that rate is given up, and computed."""
WRITE_WAIT_S = 0.002
RETRY_S = 30.0
"""After a write failed, nothing is written for so long."""
_log = logging.getLogger(__name__)


class _Load:
    """One move: numbers of its blocks that are still to be read, whether all came, and until when somebody waits.
    `ahead`: blocks that were read before."""

    __slots__ = ("ahead", "good", "left", "until_s")

    def __init__(self, until_s: float) -> None:
        self.left: set[int] = set()
        self.ahead: dict[int, bytearray] = {}
        self.good, self.until_s = True, until_s


class BlockFiles:
    """The bytes of a store in a folder; on a rank.

    Args:
        folder: exists, and is nobody else's.
        secret: of the folder.
        planes: the device's, per group, as `Storage.planes`; `widths`: pages of a slab of each group.
        slots: groups whose pages are states: they have files of their own.
        codec: of blocks; states are written as they are.
    """

    def __init__(
        self,
        folder: Path,
        secret: bytes,
        planes: Sequence[Planes],
        widths: Sequence[int],
        slots: Collection[int] = (),
        codec: BlockCodec | None = None,
    ) -> None:
        self._codec = codec
        self._folder = folder
        self._key = secret
        self._planes, self._widths = planes, widths
        blocks = [g for g in range(len(planes)) if g not in slots]
        self._kinds = {False: blocks, True: sorted(slots)}
        self._bytes = {kind: block_bytes(planes, widths, groups) for kind, groups in self._kinds.items()}
        self._lock = threading.Lock()
        self._done = threading.Condition(self._lock)
        self._ended: dict[int, bool] = {}
        self._loads: dict[int, _Load] = {}
        self._asked: list[tuple[GetOp, _Load] | FetchOp] = []
        self._ahead: dict[str, bytearray | None] = {}  # None: it is still to be read
        self._order = itertools.count()
        self._waiting_bytes = 0
        self._paused_s = float("-inf")
        self._writes: queue.SimpleQueue[tuple[PutOp, bytearray] | DropOp | KeepOp | None] = queue.SimpleQueue()
        self._reads: queue.PriorityQueue[tuple[int, int, tuple[GetOp, _Load] | FetchOp | None]] = queue.PriorityQueue()
        self._threads: list[threading.Thread] = []
        self._free: deque[bytearray] = deque()
        self._misses: Counter[str] = Counter()
        self._num_reading, self._since_s, self._is_first = 0, 0.0, False
        self._took = [0, 0.0, 0.0]

    @staticmethod
    def trouble(site: str, path: Path) -> None:
        """Called before files are touched; for tests, which put something here that may raise (`engine.faults`)."""

    # -- orders of a step --------------------------------------------------------------------------------------------

    def put(self, op: PutOp) -> None:
        """Copies the block now; a thread writes the copy."""
        num_bytes = self._bytes[op.path.endswith(STATE)]
        if self._waiting_bytes + num_bytes > MOST_WAITING_BYTES or time.monotonic() < self._paused_s:
            with self._lock:
                self._ended[op.move] = False
            return
        copy = self._buffer(num_bytes)
        at = 16
        for view, first in self._parts(op):
            assert first >= 0, f"{op}: a part of the block is not on the device"
            flat = np.frombuffer(copy, np.uint8, view.nbytes, at)
            flat[:] = np.ascontiguousarray(view).reshape(-1).view(np.uint8)
            at += view.nbytes
        with self._lock:
            self._waiting_bytes += num_bytes
        self._queue((op, copy))

    def get(self, op: GetOp) -> None:
        """Reading begins with `begin`: when all blocks of the load are known."""
        with self._lock:
            load = self._loads.get(op.move)
            if load is None:
                load = self._loads[op.move] = _Load(time.monotonic() + PATIENCE_S)
            load.left.add(op.block)
            load.until_s += self._bytes[op.path.endswith(STATE)] / PATIENCE_RATE
            if (block := self._ahead.get(op.path)) is not None:
                load.ahead[op.block] = block
        self._asked.append((op, load))

    def fetch(self, op: FetchOp) -> None:
        """As `get`, into memory; or what is there is forgotten."""
        with self._lock:
            if op.move < 0:
                self._ahead.pop(op.path, None)
                return
            self._ahead[op.path] = None
        self._asked.append(op)

    def begin(self) -> None:
        """All orders of a step have been given."""
        if self._asked:
            self._start()
            with self._lock:
                if not self._num_reading:
                    self._since_s, self._is_first = time.monotonic(), True
                self._num_reading += len(self._asked)
            for asked in self._asked:
                self._reads.put((isinstance(asked, FetchOp), next(self._order), asked))
            self._asked.clear()

    def change(self, op: DropOp | KeepOp) -> None:
        """By the thread that writes, behind what it was told before."""
        self._queue(op)

    def _queue(self, order: tuple[PutOp, bytearray] | DropOp | KeepOp) -> None:
        self._start()
        self._writes.put(order)

    def ended(self, wait_s: float = 0.0) -> dict[int, bool]:
        """Moves that have ended since this was last asked, and whether they did what they should.

        `wait_s`: how long to wait for one if loads are on their way; for a block that is being written less.
        """
        now = time.monotonic()
        with self._lock:
            if wait_s and (self._loads or self._waiting_bytes):
                self._done.wait(wait_s if self._loads else min(wait_s, WRITE_WAIT_S))
            for move, load in list(self._loads.items()):
                if now > load.until_s:
                    del self._loads[move]
                    self._ended |= dict.fromkeys([move, *load.left], False)
                    load.good = False
                    self._passed(0)
                    self._misses["late"] += len(load.left)
                    _log.warning("%s does not answer: what it holds is computed", self)
            ended, self._ended = self._ended, {}
        return ended

    def misses(self) -> dict[str, int]:
        """Blocks that could not be read since this was last asked, by reason."""
        with self._lock:
            found, self._misses = self._misses, Counter()
        return found

    def took(self) -> tuple[int, float, float] | None:
        """What was read since this was last asked: bytes, the seconds that they took, and those until a first block
        came while nothing else was read (it is not one of those bytes; 0: there was none). None: nothing."""
        with self._lock:
            if not (self._took[1] or self._took[2]):
                return None
            (num_bytes, seconds, first_s), self._took = self._took, [0, 0.0, 0.0]
        return int(num_bytes), seconds, first_s

    def _passed(self, num_bytes: int) -> None:
        """Reading has gone on until now, and yielded so much."""
        now = time.monotonic()
        if self._is_first and num_bytes:
            self._took[2] = now - self._since_s
        else:
            self._took[0] += num_bytes
            self._took[1] += now - self._since_s
        self._since_s, self._is_first = now, False

    def close(self, wait_s: float = 5.0) -> None:
        """Write what waits, but not for longer than that."""
        for _ in range(NUM_READERS):
            self._reads.put((0, next(self._order), None))
        self._writes.put(None)
        until = time.monotonic() + wait_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        self._threads = []

    # -- threads -----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if not self._threads:
            runs = [self._write_all, *[self._read_all] * NUM_READERS]
            self._threads = [threading.Thread(target=run, name="penstock-blocks", daemon=True) for run in runs]
            for thread in self._threads:
                thread.start()
            atexit.register(_close, weakref.ref(self))

    def _write_all(self) -> None:
        while (order := self._writes.get()) is not None:
            self._write_one(order)

    def _write_one(self, order: tuple[PutOp, bytearray] | DropOp | KeepOp) -> None:
        if isinstance(order, KeepOp):
            for path in order.paths:
                self._keep(path, order.seconds)
            return
        if isinstance(order, DropOp):
            for path in order.paths:
                self._remove(path)
            return
        op, copy = order
        good = True
        try:
            coded = self._coded(op.path, copy)
            if good := coded is not None:
                seal(self._key, op.path, coded)
                good = self._write(op.path, coded)
        except (OSError, ValueError) as error:
            good = False
            self._paused_s = time.monotonic() + RETRY_S
            _log.warning(
                "blocks are not written to %s for %.0f s: %s", self, RETRY_S, getattr(error, "strerror", None) or error
            )
        with self._lock:
            self._ended[op.move] = good
            self._waiting_bytes -= len(copy) - OVERHEAD
            self._done.notify_all()
            if len(copy) == self._bytes[False] + OVERHEAD:
                self._free.append(copy)

    def _coded(self, path: str, copy: bytearray) -> bytearray | None:
        """As it is written; None if the codec makes no less of it, and it is not."""
        if self._codec is None or path.endswith(STATE):
            return copy
        data = self._codec.encode(memoryview(copy)[16:-MAC_BYTES])
        return None if data is None else bytearray(16) + data + bytes(MAC_BYTES)

    def _miss(self, reason: str) -> bool:
        """One block was not read. False."""
        with self._lock:
            self._misses[reason] += 1
        return False

    # -- of a folder -------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        return str(self._folder)

    def _remove(self, path: str) -> None:
        with contextlib.suppress(OSError):
            (self._folder / path).unlink()

    def _keep(self, path: str, seconds: float) -> None:
        """The time of last use says until when; a time long ago, that it goes first."""
        with contextlib.suppress(OSError):
            until = time.time() + seconds if seconds else 0.0
            os.utime(self._folder / path, (until, until), follow_symlinks=False)

    def _write(self, path: str, copy: bytearray) -> bool:
        """False: there is no room now."""
        target = self._folder / path
        part = target.with_name(f".{target.name}.{os.getpid()}.part")
        self.trouble("store-folder", self._folder)
        self.trouble("store-write", target)
        try:
            fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            # Not the store's own, which has its key.
            for place in (target.parent.parent, target.parent):
                place.mkdir(mode=0o700, exist_ok=True)
            fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            try:
                view = memoryview(copy)
                while view.nbytes:
                    view = view[os.write(fd, view) :]
            finally:
                os.close(fd)
            self.trouble("store-rename", part)
            os.replace(part, target)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        return True

    def _read_all(self) -> None:
        buffers = {kind: bytearray(num_bytes + OVERHEAD) for kind, num_bytes in self._bytes.items()}
        while (order := self._reads.get()[2]) is not None:
            op = order if isinstance(order, FetchOp) else order[0]
            self._read_one(order, buffers[op.path.endswith(STATE)])

    def _read_one(self, order: tuple[GetOp, _Load] | FetchOp, own: bytearray) -> None:
        """`own`: where a file is read to."""
        if isinstance(order, FetchOp):
            self._fetch_one(order)
            return
        op, load = order
        block = load.ahead.pop(op.block, None)
        good = block is not None or self._read(op.path, own)
        with self._lock:
            self._num_reading -= 1
            if block is None:
                self._passed(len(own) * good)
            if self._loads.get(op.move) is not load:
                return  # whoever gave up waiting has given the pages to others: nothing is written to them
            if good:
                self._fill(op, own if block is None else block)
            load.good = load.good and good
            load.left.discard(op.block)
            self._ended[op.block] = good
            if not load.left:
                del self._loads[op.move]
                self._ended[op.move] = load.good
                self._done.notify_all()

    def _fetch_one(self, op: FetchOp) -> None:
        with self._lock:
            wanted = op.path in self._ahead
        block = bytearray(self._bytes[op.path.endswith(STATE)] + OVERHEAD if wanted else 0)
        good = wanted and self._read(op.path, block)
        with self._lock:
            self._num_reading -= 1
            if wanted:
                self._passed(len(block) * good)
            if good and op.path in self._ahead:
                self._ahead[op.path] = block
            self._ended[op.move] = good

    def _read(self, path: str, into: bytearray) -> bool:
        codec = None if path.endswith(STATE) else self._codec
        try:
            self.trouble("store-read", self._folder / path)
            # NONBLOCK: a pipe of this name must not make us wait; on files it means nothing.
            fd = os.open(self._folder / path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                info = os.fstat(fd)
                fits = info.st_size == len(into) if codec is None else OVERHEAD <= info.st_size <= len(into)
                size = info.st_size if stat.S_ISREG(info.st_mode) and fits else 0
                view, at = memoryview(into), 0
                while at < size and (num := os.readv(fd, [view[at:size]])):
                    at += num
                if info.st_mtime < time.time():  # else it is kept until then
                    os.utime(fd)
            finally:
                os.close(fd)
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                _log.warning("%s cannot be read: %s", self._folder / path, error.strerror)
                return self._miss("unreadable")
            return self._miss("gone")
        return self._is_good(path, into, at)

    def _is_good(self, path: str, into: bytearray, size: int) -> bool:
        """Whether the block, of which so many bytes were read, is what was written under its name."""
        codec = None if path.endswith(STATE) else self._codec
        end = size - MAC_BYTES
        head = MAGIC + max(0, end - 16).to_bytes(8, "little")
        view = memoryview(into)
        if not OVERHEAD <= size <= len(into) or (codec is None and size != len(into)):
            reason = "short"
        elif into[:16] != head or not hmac.compare_digest(into[end:size], mac_of(self._key, path, view[:end])):
            reason = "changed"
        elif codec is None or codec.decode(memoryview(into[16:end]), view[16:-MAC_BYTES]):
            return True
        else:
            reason = "changed"
        _log.warning("%s of %s is not what was written, and is not used", path, self)
        return self._miss(reason)

    def _fill(self, op: GetOp, block: bytearray) -> None:
        at = 16
        for view, first in self._parts(op):
            count = view.nbytes
            if first >= 0:
                view[:] = np.frombuffer(block, view.dtype, count // view.dtype.itemsize, at).reshape(view.shape)
            at += count

    def _parts(self, op: PutOp | GetOp) -> list[tuple[npt.NDArray[Any], int]]:
        """Of each plane of each group in the file the pages of a slab, and the first one's number; below zero: none."""
        return [
            (array[max(0, first) : max(0, first) + self._widths[g]], first)
            for g in self._kinds[op.path.endswith(STATE)]
            for first in (op.pages[g],)
            for array in self._planes[g].values()
        ]

    def _buffer(self, num_bytes: int) -> bytearray:
        with self._lock:
            if self._free and num_bytes == self._bytes[False]:
                return self._free.popleft()
        return bytearray(num_bytes + OVERHEAD)


def _close(files: weakref.ref[BlockFiles]) -> None:
    """At the end of the process."""
    found = files()
    if found is not None:
        found.close()


def block_bytes(planes: Sequence[Planes], widths: Sequence[int], groups: Iterable[int]) -> int:
    """Bytes of one slab of each of these groups, all planes."""
    return sum(widths[g] * array.nbytes // len(array) for g in groups for array in planes[g].values())


def file_bytes(groups: Iterable[CacheGroup], block_size: int) -> tuple[int, int]:
    """Of a block's file, and of a state's. Of pages with hidden states only these are written."""
    sizes = {True: OVERHEAD, False: OVERHEAD}
    for group in groups:
        hidden = sum(len(group.layers) * block_size * p.num_bytes for p in group.spec.planes if p.name == HIDDEN)
        sizes[group.spec.per_token] += hidden or group.slab_bytes(block_size)
    return sizes[True], sizes[False]


def seal(secret: bytes, path: str, block: bytearray) -> None:
    """Write the header and the MAC of a block whose pages are in their place."""
    end = len(block) - MAC_BYTES
    block[:8], block[8:16] = MAGIC, (end - 16).to_bytes(8, "little")
    block[end:] = mac_of(secret, path, memoryview(block)[:end])


def is_whole(folder: Path, path: str, secret: bytes) -> bool:
    """Whether the file of a block is what was written, of whatever size."""
    try:
        data = (folder / path).read_bytes()
    except OSError:
        return False
    end = len(data) - MAC_BYTES
    head = MAGIC + (end - 16).to_bytes(8, "little") if end >= 16 else b""
    return data[:16] == head and hmac.compare_digest(data[end:], mac_of(secret, path, memoryview(data)[:end]))


def mac_of(secret: bytes, path: str, data: memoryview) -> bytes:
    mac = hmac.new(secret, path.encode() + b"\0", "sha256")
    mac.update(data)
    return mac.digest()
