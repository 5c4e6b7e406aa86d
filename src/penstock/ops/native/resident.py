"""Packed weights of which only some are in memory: a layer is read from its file while those before it compute.

Every layer has its addresses for good, so nothing that points at its matrices changes: to fetch is to read into them,
to drop is to give their pages back to the system. What is read is compared with its sums each time, so a file that
changes under the engine ends a run instead of changing a token.

Source: ZeRO-Inference (Aminabadi et al., SC 2022, section 5): one layer computes while the next ones come; PipeSwitch
(Bai et al., OSDI 2020): a model computes while it is loaded.
"""

from __future__ import annotations

import ctypes
import mmap
import re
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from penstock.base.errors import EngineError
from penstock.ops.native.direct_file import PAGE, U8, DirectFile, UnsoundError
from penstock.ops.native.matrix import Packed
from penstock.ops.native.packed_format import (
    Index,
    PackedEntry,
    PageSums,
    check_digest,
    check_order,
    matrix_of,
    page_sums,
)
from penstock.plan.offload import kept_layers, window_bytes

_HUGE = 2 << 20
_PART_BYTES = 4 << 20
_READERS = 4
"""So many parts are on their way at a time. While all processors compute a thread waits for one of them behind each
part that it has read, and with two the drive waits, too."""
_NEAR = 4  # stops for which what stays is read ahead, where other layers come and go beside it
_NORESERVE = 0x4000  # of Linux; mmap has no name for it in every Python
_MOVE = 1 | 2 | 4  # MREMAP_MAYMOVE, MREMAP_FIXED, MREMAP_DONTUNMAP
_LAYER = re.compile(r"layers\.(\d+)\.")


class Segment:
    """Matrices that come and go together: those of a layer, or of none.

    Attributes:
        owner: whose it is. `stays`: it is never dropped. `is_here`: its bytes are in memory, and are what was written.
        num_bytes: of memory, in whole pages.
    """

    def __init__(self, owner: ResidentWeights, entries: Sequence[PackedEntry], at: int, num_bytes: int) -> None:
        self.owner, self.entries, self.at, self.num_bytes = owner, tuple(entries), at, num_bytes
        self.stays = self.is_here = False
        self._coming: list[tuple[PackedEntry, list[Future[bytes]]]] | None = None

    @property
    def is_absent(self) -> bool:
        return self._coming is None and not self.is_here

    def fetch(self) -> None:
        """Begin to read it."""
        at, self._coming = self.at, []
        for entry in self.entries:
            first, num_bytes = entry.span
            parts = range(0, num_bytes, _PART_BYTES)
            cuts = [(first + p, at + p, min(_PART_BYTES, num_bytes - p)) for p in parts]
            self._coming.append((entry, [self.owner.read(*cut) for cut in cuts]))
            at += num_bytes

    def wait(self) -> None:
        """Until it is here. Raises: UnsoundError, OSError; then it is absent."""
        assert self._coming is not None, "somebody fetched it"
        try:
            for entry, parts in self._coming:
                sums = PageSums()
                for part in parts:
                    sums.summed(part.result())
                check_digest(entry, sums)
                check_order(entry, self.owner.matrices[entry.name].order)
        except BaseException:
            self.drop()
            raise
        self._coming, self.is_here = None, True

    def drop(self) -> None:
        """Give its memory back."""
        self.leave()
        self.owner.release(self)

    def leave(self) -> None:
        """It is absent, and what its memory holds means nothing."""
        for _, parts in self._coming or ():
            for part in parts:
                if not part.cancel():
                    part.exception()  # whoever reads into it must have ended
        self._coming, self.is_here = None, False


class ResidentWeights:
    """The matrices of a checked `index`, of whose file at most `limit` bytes are in memory; None: all may be.

    `fd` is its own from now on. `prefetch`: layers that come while one computes. `damaged` is called when the file is
    found to be another than it was; `path` is its name, for people.

    Attributes:
        matrices: name -> matrix; its `home` is the Segment that has to be here while it is read.
        address, num_bytes: the region of memory in which all have their places.
        num_read: bytes read so far. `stalled_s`: seconds that runs have waited for them.

    Raises: ConfigError for a limit that is too low.
    """

    def __init__(
        self, fd: int, index: Index, limit: int | None = None, *, prefetch: int = 1, path: object = "the file",
        damaged: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._file = DirectFile(fd)
        self._mremap = _mremap()
        self._readers = ThreadPoolExecutor(_READERS, "penstock-weights")
        weakref.finalize(self, self._readers.shutdown, wait=False, cancel_futures=True)
        self._path, self._damaged = path, damaged
        self.num_read, self.stalled_s = 0, 0.0
        by_layer: dict[int, list[PackedEntry]] = {}
        for entry in index.matrices:
            by_layer.setdefault(_layer_of(entry.name), []).append(entry)
        at, places = 0, []
        for layer in sorted(by_layer):  # those of none come first, by their number -1
            own = by_layer[layer]
            num_bytes = sum(entry.span[1] for entry in own)
            at = _up(at, _HUGE if num_bytes >= _HUGE else PAGE)
            places.append((layer, own, at, num_bytes))
            at += num_bytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._region = mmap.mmap(-1, at + _HUGE, flags=flags | (_NORESERVE if sys.platform == "linux" else 0))
        raw = np.frombuffer(self._region, np.uint8)
        self._first = -raw.ctypes.data % _HUGE
        self._memory: U8 = raw[self._first : self._first + at]
        self.address, self.num_bytes = self._memory.ctypes.data, at
        self.segments = [Segment(self, own, *place) for _, own, *place in places]
        self.matrices: dict[str, Packed] = {}
        shown = self._memory.view()
        shown.flags.writeable = False
        for segment in self.segments:
            at = segment.at
            whole = segment.num_bytes // _HUGE * _HUGE  # the rest has small pages: no byte more than it needs
            if whole and hasattr(mmap, "MADV_HUGEPAGE"):
                self._region.madvise(mmap.MADV_HUGEPAGE, self._first + segment.at, whole)
            for entry in segment.entries:
                self.matrices[entry.name] = m = matrix_of(entry, shown[at : at + entry.span[1]])
                m.home = segment
                at += entry.span[1]
        self.matrices = {entry.name: self.matrices[entry.name] for entry in index.matrices}
        fixed = [s for s, place in zip(self.segments, places, strict=True) if place[0] < 0]
        layers = [s for s in self.segments if s not in fixed]
        sizes = [s.num_bytes for s in layers]
        keeps = kept_layers(sizes, limit, prefetch, beside=sum(s.num_bytes for s in fixed))
        for segment, stays in zip([*fixed, *layers], [*[True] * len(fixed), *keeps], strict=True):
            segment.stays = stays
        self._window = window_bytes([s.num_bytes for s in layers if not s.stays], prefetch)
        self._held: list[Segment] = []
        self._waits = [s for s in self.segments if s.stays]
        """Those that stay, and that no run has waited for."""
        self.streams = len(self._waits) < len(self.segments)

    @property
    def most_bytes(self) -> int:
        """Of memory that are taken at a time, at most."""
        return self._window + sum(s.num_bytes for s in self.segments if s.stays)

    @property
    def is_settled(self) -> bool:
        """Whether all is here, and stays."""
        return not self.streams and not self._waits

    def course(self, matrices: Sequence[Sequence[Packed]]) -> Course:
        """The way of a program: of each stretch of it, the matrices that it reads."""
        own = {id(segment) for segment in self.segments}
        homes = [dict.fromkeys(m.home for m in stretch if id(m.home) in own) for stretch in matrices]
        made = Course(self, [tuple(home for home in found if home is not None) for found in homes])
        if not self.streams:
            for segment in made.near[0]:
                if segment.is_absent:
                    segment.fetch()
        return made

    def ahead(self, stops: Sequence[Sequence[Segment]], k: int) -> tuple[Segment, ...]:
        """What should be in memory at stretch k, or on its way, of that which comes and goes."""
        wanted = {id(s): s for s in stops[k] if not s.stays}
        room = self._window - sum(s.num_bytes for s in wanted.values())
        for n in range(k + 1, k + len(stops)):
            for s in stops[n % len(stops)]:
                if s.stays or id(s) in wanted:
                    continue
                room -= s.num_bytes
                if room < 0:
                    return tuple(wanted.values())
                wanted[id(s)] = s
        return tuple(wanted.values())

    def enter(self, now: Sequence[Segment], ahead: Sequence[Segment], near: Sequence[Segment]) -> None:
        """Raises: EngineError, if what is needed `now` cannot be read, or is not what it was."""
        gone = [segment for segment in self._held if segment not in ahead]
        for segment in gone:
            segment.leave()
        self._held = list(ahead)
        for segment in (*now, *(near if self._waits else ()), *ahead):
            if segment.is_absent:
                other = next((one for one in gone if one.num_bytes == segment.num_bytes), None)
                if other is not None and self._move(other, segment):
                    gone.remove(other)
                segment.fetch()
        for segment in gone:
            self.release(segment)
        for segment in now:
            if not segment.is_here:
                self._wait(segment)

    def _wait(self, segment: Segment) -> None:
        start = time.perf_counter()
        try:
            segment.wait()
        except UnsoundError as error:
            self._damaged()
            raise EngineError(
                f"{self._path} {error}: somebody changed the packed weights while the engine used them; start it "
                "again, and they are packed anew"
            ) from error
        except OSError as error:
            raise EngineError(
                f"the packed weights cannot be read from {self._path}: {error.strerror or error}; see to the disk, and "
                "start the engine again"
            ) from error
        self.stalled_s += time.perf_counter() - start
        if segment.stays:
            self._waits.remove(segment)

    def read(self, offset: int, at: int, num_bytes: int) -> Future[bytes]:
        """Bytes of the file into the region, by a thread: their page sums."""
        self.num_read += num_bytes
        part = self._memory[at : at + num_bytes]
        return self._readers.submit(_read, self._file, offset, part)

    def _move(self, one: Segment, other: Segment) -> bool:
        """Let the pages of one be those of another of its size: fresh ones would be filled with zeros first, for which
        the processor takes longer than for reading. False if the system cannot do it."""
        start, to = self.address + one.at, self.address + other.at
        return self._mremap is not None and self._mremap(start, one.num_bytes, one.num_bytes, _MOVE, to) == to

    def release(self, segment: Segment) -> None:
        self._region.madvise(mmap.MADV_DONTNEED, self._first + segment.at, segment.num_bytes)


class Course:
    """The way of one program through the weights: of each stretch, what it reads."""

    def __init__(self, resident: ResidentWeights, stops: Sequence[tuple[Segment, ...]]) -> None:
        self.resident, self._stops = resident, stops
        reach = _NEAR if resident.streams else len(stops)
        self._ahead = [resident.ahead(stops, k) for k in range(len(stops))]
        self.near = [
            tuple(s for n in range(k, min(k + reach, len(stops))) for s in stops[n] if s.stays)
            for k in range(len(stops))
        ]

    def enter(self, k: int) -> bool:
        """Before stretch k runs. Whether that has to be said again in the next run. Raises: EngineError."""
        self.resident.enter(self._stops[k], self._ahead[k], self.near[k])
        return not self.resident.is_settled


def _mremap() -> Callable[..., int | None] | None:
    if sys.platform != "linux":
        return None
    found = ctypes.CDLL(None).mremap
    found.restype = ctypes.c_void_p
    found.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    return found


def _layer_of(name: str) -> int:
    """-1 for a matrix of none, or of several."""
    found = {int(layer[1]) if (layer := _LAYER.match(part)) else -1 for part in name.split()}
    return found.pop() if len(found) == 1 else -1


def _up(num_bytes: int, page: int) -> int:
    return -(-num_bytes // page) * page


def _read(file: DirectFile, offset: int, part: U8) -> bytes:
    file.read(offset, part)
    return page_sums(part)
