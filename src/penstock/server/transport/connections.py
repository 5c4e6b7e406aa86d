"""How many connections there may be, of all clients and of one, and which give way when there are too many.

A connection that waits for (the rest of) a request's header costs its client nothing, so thousands of them must not
keep others out: when there is no room they are closed, oldest first; those that never asked for anything before those
that may ask again. What works on a request is never closed for another.
"""

from __future__ import annotations

import ipaddress
import os
import resource
from collections import Counter
from contextlib import suppress
from functools import lru_cache
from typing import Protocol

SPARE_FILES = 16
"""Descriptors that are left to files, grammar compilers and connections on their way in or out."""


class Connection(Protocol):
    def give_way(self) -> bool:
        """Close, if nothing of an answer is on its way. Whether it does."""
        ...


class Connections:
    """All connections of one listener.

    `most`: at once; `most_of_one`: of them, those of one client address. `all`: each with the address it counts for.
    `num_given_way`: connections that were closed to make room; `num_refused`: those that found none.
    """

    def __init__(self, most: int, most_of_one: int = 0) -> None:
        self.most = most
        self.most_of_one = most_of_one or max(1, most * 3 // 4)
        self.num_given_way = self.num_refused = 0
        self.all: dict[Connection, str] = {}
        self._of_one: Counter[str] = Counter()
        self._silent: dict[Connection, None] = {}
        """Have not asked for anything yet; oldest first. All are in `all`, too."""
        self._idle: dict[Connection, None] = {}
        """Have had an answer and may ask again; those that have waited longest first."""

    def __len__(self) -> int:
        return len(self.all)

    @property
    def num_waiting(self) -> int:
        """Those that would give way."""
        return len(self._silent) + len(self._idle)

    def enter(self, connection: Connection, client: tuple[str, int] | None) -> bool:
        """Take it in, making room if there is none. False: everything that is there works."""
        address = "" if client is None else network_of(client[0])
        if address and self._of_one[address] >= self.most_of_one:
            fits = self._make_room(address)
        else:
            fits = len(self.all) < self.most or self._make_room(None)
        if fits:
            self.all[connection] = address
            self._of_one[address] += 1
            self._silent[connection] = None
        else:
            self.num_refused += 1
        return fits

    def works(self, connection: Connection) -> None:
        """The header of a request is there."""
        self._silent.pop(connection, None)
        self._idle.pop(connection, None)

    def rests(self, connection: Connection) -> None:
        """All its requests are answered."""
        if connection in self.all:
            self._idle[connection] = None

    def leave(self, connection: Connection) -> None:
        """It is gone, or no longer counts. May be called again."""
        address = self.all.pop(connection, None)
        self.works(connection)
        if address is not None:
            self._of_one[address] -= 1
            if not self._of_one[address]:
                del self._of_one[address]

    def _make_room(self, address: str | None) -> bool:
        for waiting in (self._silent, self._idle):
            for connection in waiting:
                if (address is None or self.all[connection] == address) and connection.give_way():
                    self.leave(connection)
                    self.num_given_way += 1
                    return True
        return False


@lru_cache(maxsize=4096)
def network_of(host: str) -> str:
    """Who counts as one client: an IPv4 address, or the 64 bits of an IPv6 address that one subscriber is given."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.IPv6Network((address, 64), strict=False))
    return host


def want_files(number: int) -> None:
    """Raise this process's limit of open files, as far as it may be raised, to `number` beside those it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = number + _num_open() + 4 * SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def possible(number: int) -> int:
    """Of `number` connections, as many as this process may open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return number if soft == resource.RLIM_INFINITY else max(1, min(number, soft - _num_open() - SPARE_FILES))


def _num_open() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 4 * SPARE_FILES
