"""What ranks give goes to other hosts and comes from there: native threads between shared memory and a socket.

Native kernels know of none of this: a rank of another host has its line and its slots in this host's memory, too, and
who fills them is a thread that reads a socket. Frames and the reason why nobody has to ask before a slot is filled
again: `pst_relay` and `csrc/src/relay.cpp`.
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NamedTuple

from penstock.base.errors import EngineError
from penstock.ops.native.abi import RELAY_HEAD, RELAY_VERSION, RelayEnd
from penstock.ops.native.abi import Relay as RelayStruct
from penstock.ops.native.library import best_library
from penstock.parallel.comm import SharedExchange

RELAY_SPIN_US = 0
"""A relay that has nothing to do sleeps at once: awake, its threads would take cores that ranks compute with."""
_SAID = {
    RelayEnd.CLOSED: "it has closed the connection",
    RelayEnd.STRANGE: "what came is no frame of a rank",
    RelayEnd.VERSION: f"a frame of another version than {RELAY_VERSION} came",
    RelayEnd.RANK: "a frame came of a rank that is not there",
    RelayEnd.TURN: "a frame came that is not the rank's next",
    RelayEnd.LENGTH: "a frame came that is longer than a slot",
}


class WireCounts(NamedTuple):
    """Frames and bytes, their heads (`RELAY_HEAD` each) among them, that went and came."""

    given_frames: int
    given_bytes: int
    taken_frames: int
    taken_bytes: int

    @classmethod
    def expected(cls, gathers: int, given: int, taken: int, bytes_given: int, bytes_taken: int) -> WireCounts:
        """The formula: of `gathers` of `given` ranks that went and `taken` that came, with the bytes of their slots."""
        out, back = gathers * given, gathers * taken
        return cls(out, out * RELAY_HEAD + bytes_given, back, back * RELAY_HEAD + bytes_taken)


class HostRelay:
    """A connection between the memory of two hosts. `ended` hears, in another thread, why it is over, unless it was
    closed here."""

    def __init__(
        self, exchange: SharedExchange, sock: socket.socket, *, gives: Iterable[int], takes: Iterable[int],
        ended: Callable[[str], None],
    ) -> None:  # fmt: skip
        """Ranks of `gives` have their memory on this side of it, those of `takes` behind it. `sock` is blocking, and
        is closed by `close`. Raises EngineError without native kernels."""
        library = best_library()
        if library is None:
            raise EngineError("ranks on several hosts need native kernels, and there are none")
        self._library, self._exchange, self._sock, self._ended = library, exchange, sock, ended
        sock.settimeout(None)
        self._struct = RelayStruct(exchange.address, _bits(gives), _bits(takes), sock.fileno(), 0)
        self._lock = threading.Lock()
        self._over = False
        self._threads = [
            threading.Thread(target=self._run, args=(run,), name=f"penstock-relay-{way}", daemon=True)
            for way, run in (("give", library.pst_relay_give), ("take", library.pst_relay_take))
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, run: Callable[[int], int]) -> None:
        end = RelayEnd(run(self._address))
        why = _SAID.get(end, "")
        if end == RelayEnd.LOST:
            why = f"the connection is lost ({os.strerror(self._struct.error)})"
        with self._lock:
            first, self._over = not self._over, True
        self._stop()  # the other direction ends, too
        if first:
            self._ended(why)

    @property
    def _address(self) -> int:
        return ctypes.addressof(self._struct)

    @property
    def counts(self) -> WireCounts:
        s = self._struct
        return WireCounts(s.given_frames, s.given_bytes, s.taken_frames, s.taken_bytes)

    def _stop(self) -> None:
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._library.pst_relay_stop(self._address)

    def close(self) -> None:
        """Returns when nothing of it runs any more. Not from `ended`."""
        with self._lock:
            self._over = True
        self._stop()
        for thread in self._threads:
            thread.join()
        self._sock.close()


def _bits(ranks: Iterable[int]) -> int:
    return sum(1 << rank for rank in set(ranks))
