"""Arrays between ranks that are processes or threads of one machine: to one of them, round a ring, from all to all.

Every rank has a socket to every other one. What goes out and what comes in has a thread each, so a rank computes while
a block is on its way, and two that give each other something never wait for each other's sockets. Frames say what they
hold (a kind of number, a shape); nothing is unpickled. Bytes of arrays that are given to others are counted by label.

These are the messages of reference operations. Native kernels gather through memory (`parallel.comm`).
"""

from __future__ import annotations

import socket
import struct
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.base.errors import EngineError, RankGoneError

Arrays = tuple[npt.NDArray[Any], ...]

_FRAME = struct.Struct("<4sHH")
"""Mark, version, number of arrays; an `_ARRAY` for each, then their numbers."""
_ARRAY = struct.Struct("<BBxxIIII")
_MARK, _VERSION = b"PSRM", 1
_DTYPES = (np.dtype(np.float32), np.dtype(np.int32), np.dtype(np.float64), np.dtype(np.uint16))
_PATIENCE_S = 2.0
_MOST_ARRAYS, _MOST_DIMS, _MOST_BYTES = 16, 4, 1 << 30


def socket_mesh(size: int) -> list[list[socket.socket | None]]:
    """[rank][other]: its end of what connects them; None: itself. Whoever makes them closes them."""
    ends: list[list[socket.socket | None]] = [[None] * size for _ in range(size)]
    for a in range(size):
        for b in range(a):
            ends[a][b], ends[b][a] = socket.socketpair()
    return ends


class Messages:
    """One rank's end of a `socket_mesh`. Every rank makes the same calls in the same order.

    Attributes:
        given: bytes of arrays that this rank has given to others, by label; headers are not in it.
        sent: messages, by label.
    """

    def __init__(self, rank: int, ends: Sequence[socket.socket | None]) -> None:
        """The sockets are this object's from now on."""
        self.rank, self.size = rank, len(ends)
        self.given: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self._ends = ends
        self._out, self._in = (ThreadPoolExecutor(1, f"rank-{rank}-{way}") for way in ("out", "in"))
        self._going: deque[Future[None]] = deque()

    def close(self) -> None:
        """What others have been given reaches them, if they take it within a moment."""
        wait(self._going, _PATIENCE_S)
        for end in self._ends:
            if end is not None:
                with suppress(OSError):  # the other has gone first
                    end.shutdown(socket.SHUT_RDWR)
                end.close()
        self._out.shutdown()
        self._in.shutdown()

    # -- one to one ----------------------------------------------------------------------------------------------

    def send(self, to: int, arrays: Arrays, label: str) -> None:
        """Give `arrays` to rank `to`; they go while this rank goes on, and may not be written to any more."""
        while self._going and self._going[0].done():
            self._going.popleft().result()
        self.given[label] += sum(x.nbytes for x in arrays)
        self.sent[label] += 1
        self._going.append(self._out.submit(self._write, to, arrays))

    def receive(self, source: int) -> Future[Arrays]:
        """What rank `source` gives next. Results come in the order of these calls.

        The result raises RankGoneError if that rank has ended, and EngineError for bytes that are no message.
        """
        return self._in.submit(self._read, source)

    # -- all of a group ------------------------------------------------------------------------------------------

    def shift(self, arrays: Arrays, group: Sequence[int], label: str) -> Future[Arrays]:
        """Give `arrays` to the next of `group`, which is a ring, and get what the one before gives."""
        at = group.index(self.rank)
        self.send(group[(at + 1) % len(group)], arrays, label)
        return self.receive(group[at - 1])

    def gather(self, arrays: Arrays, group: Sequence[int], label: str) -> list[Arrays]:
        """What each of `group` gives, in its order."""
        return self.all_to_all([arrays] * len(group), group, label)

    def all_to_all(self, parts: Sequence[Arrays], group: Sequence[int], label: str) -> list[Arrays]:
        """`parts[i]` goes to the i-th of `group`; what each of them gave to this rank, in its order."""
        assert len(parts) == len(group), "something for each"
        for to, part in zip(group, parts, strict=True):
            if to != self.rank:
                self.send(to, part, label)
        coming = [None if source == self.rank else self.receive(source) for source in group]
        return [own if future is None else future.result() for future, own in zip(coming, parts, strict=True)]

    # -- frames --------------------------------------------------------------------------------------------------

    def _write(self, to: int, arrays: Arrays) -> None:
        assert len(arrays) <= _MOST_ARRAYS, "a message of many arrays"
        head = [_FRAME.pack(_MARK, _VERSION, len(arrays))]
        for x in arrays:
            assert x.ndim <= _MOST_DIMS, "an array of many dimensions"
            head.append(_ARRAY.pack(_DTYPES.index(x.dtype), x.ndim, *x.shape, *[1] * (_MOST_DIMS - x.ndim)))
        try:
            end = self._end(to)
            end.sendall(b"".join(head))
            for x in arrays:
                if x.size:
                    end.sendall(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data)
        except OSError as error:
            raise self._gone(to) from error

    def _read(self, source: int) -> Arrays:
        mark, version, count = _FRAME.unpack(self._bytes(source, _FRAME.size))
        if mark != _MARK or version != _VERSION or count > _MOST_ARRAYS:
            raise EngineError(f"rank {source} sends no messages of version {_VERSION}; use one build for all ranks")
        shapes = []
        for _ in range(count):
            kind, ndim, *dims = _ARRAY.unpack(self._bytes(source, _ARRAY.size))
            if kind >= len(_DTYPES) or ndim > _MOST_DIMS or prod(dims) * _DTYPES[kind].itemsize > _MOST_BYTES:
                raise EngineError(f"rank {source} sends an array of kind {kind} and shape {dims}: more than is taken")
            shapes.append((_DTYPES[kind], dims[:ndim]))
        return tuple(
            np.frombuffer(self._bytes(source, prod(shape) * dtype.itemsize), dtype).reshape(shape)
            for dtype, shape in shapes
        )

    def _bytes(self, source: int, count: int) -> bytearray:
        data, have = bytearray(count), 0
        view = memoryview(data)
        while have < count:
            try:
                n = self._end(source).recv_into(view[have:])
            except OSError:
                n = 0
            if not n:
                raise self._gone(source)
            have += n
        return data

    def _gone(self, other: int) -> RankGoneError:
        return RankGoneError(f"rank {other} has ended, so rank {self.rank} cannot go on; begin all ranks again")

    def _end(self, other: int) -> socket.socket:
        end = self._ends[other]
        assert end is not None, "a rank gives itself nothing"
        return end
