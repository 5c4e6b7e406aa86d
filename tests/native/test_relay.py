"""Ranks whose memories are several, with sockets between them: the bits of one rank, counted bytes, broken peers."""

from __future__ import annotations

import os
import queue
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
import pytest

from penstock.backends.native.backend import NativeBackend
from penstock.ops.native.abi import RELAY_HEAD, RELAY_VERSION
from penstock.ops.native.library import best_library, libraries, open_library
from penstock.ops.native.program import Pool
from penstock.parallel.comm import SharedComm, shared_memory
from penstock.parallel.relay import HostRelay, WireCounts
from penstock.plan.ranks import ranks_of_host
from tests.native.running import ISAS, pytestmark_native
from tests.native.test_model import weights_as
from tests.native.test_ranks import Ranked, divides, small_units
from tests.paged import Paged

pytestmark = pytestmark_native
__all__ = ["small_units"]
SLOT = 4096
MAGIC = 0x47545350


class Hosts:
    """`hosts` memories for `size` ranks, connected to the first one's; `slow`: bytes trickle."""

    def __init__(self, size: int, hosts: int, *, slow: random.Random | None = None) -> None:
        memories = [shared_memory(size, SLOT) for _ in range(hosts)]
        each = size // hosts
        self.comms = [SharedComm(memories[r // each], r, size, slot_bytes=SLOT, spin_us=20) for r in range(size)]
        self.ended: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.relays: list[tuple[HostRelay, HostRelay]] = []
        for host in range(1, hosts):
            here, there = pair(slow)
            own = ranks_of_host(host, size, hosts)
            others = set(range(size)) - set(own)
            self.relays.append(
                (
                    self.relay(memories[0], here, others, own),
                    self.relay(memories[host], there, own, others),
                )
            )
        for memory in memories:
            os.close(memory)

    def relay(self, memory: int, sock: socket.socket, gives: object, takes: object) -> HostRelay:
        size = len(self.comms)
        exchange = SharedComm(memory, 0, size, slot_bytes=SLOT, spin_us=20).exchange
        return HostRelay(exchange, sock, gives=gives, takes=takes, ended=self.ended.put)  # type: ignore[arg-type]

    def close(self) -> None:
        for ends in self.relays:
            for relay in ends:
                relay.close()


def pair(slow: random.Random | None) -> tuple[socket.socket, socket.socket]:
    if slow is None:
        return socket.socketpair()
    (here, a), (b, there) = socket.socketpair(), socket.socketpair()
    ends = threading.Semaphore(0)
    for source, to in ((a, b), (b, a)):
        threading.Thread(target=trickle, args=(source, to, slow, ends), daemon=True).start()
    threading.Thread(target=close_both, args=(a, b, ends), daemon=True).start()
    return here, there


def trickle(source: socket.socket, to: socket.socket, rng: random.Random, ends: threading.Semaphore) -> None:
    with suppress(OSError):
        while data := source.recv(rng.choice([1, 7, 100, 5000])):
            if rng.random() < 0.05:
                time.sleep(rng.random() * 0.003)
            to.sendall(data)
    with suppress(OSError):
        to.shutdown(socket.SHUT_RDWR)
    ends.release()


def close_both(a: socket.socket, b: socket.socket, ends: threading.Semaphore) -> None:
    for _ in range(2):
        ends.acquire()
    a.close()
    b.close()


@contextmanager
def hosts_of(size: int, hosts: int, *, slow: random.Random | None = None) -> Iterator[Hosts]:
    made = Hosts(size, hosts, slow=slow)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize(("size", "hosts"), [(2, 2), (4, 2), (4, 4)])
@pytest.mark.parametrize("name", ["llama_gqa", "windowed"])
def test_H01_logits_on_several_hosts_are_those_of_one_rank(name: str, size: int, hosts: int, slow: bool) -> None:
    """Slots of 4,096 bytes, so that gathers come in pieces, in steps of many sizes."""
    spec, weights = weights_as(name, "bfloat16")
    assert divides(spec, size), "heads can be shared out"
    alone = Paged(spec, weights)
    alone.on(NativeBackend(Pool(open_library(libraries()[ISAS[-1]]), 1, spin_us=5)))
    rng = random.Random(f"hosts-{name}-{size}-{hosts}-{slow}")
    with hosts_of(size, hosts, slow=rng if slow else None) as made:
        ranked = Ranked(spec, weights, size, threads=1, comms=made.comms)
        at = 0
        for _ in range(12):
            count = rng.choice([1, 1, 2, 40])
            ids = [3 + (at + i) % 50 for i in range(count)]
            at += count
            want = np.array(alone.one_go("a", ids))
            for got in ranked.run({"a": (ids, range(count))}):
                assert np.array_equal(want, got["a"], equal_nan=True)


@pytest.mark.parametrize(("size", "hosts"), [(2, 2), (4, 2), (4, 4)])
def test_H01_bytes_between_hosts_are_what_the_formula_says(size: int, hosts: int) -> None:
    """Each part of a rank crosses as many connections as there are other hosts, with a head."""
    spec, weights = weights_as("llama_gqa", "bfloat16")
    with hosts_of(size, hosts) as made:
        ranked = Ranked(spec, weights, size, threads=1, comms=made.comms)
        ranked.run({"a": (list(range(3, 33)), [29])})
        exchange = made.comms[0].exchange
        gathers = {exchange.given(rank)[0] for rank in range(size)}
        given = [exchange.given(rank)[1] // (size - 1) for rank in range(size)]
        for rank, comm in enumerate(made.comms):
            assert comm.exchange.given(rank) == exchange.given(rank), "the lead's memory counts for all"
        (num,) = gathers
        total = 0
        for host, (lead, other) in enumerate(made.relays, 1):
            own = set(ranks_of_host(host, size, hosts))
            theirs = set(range(size)) - own
            out, back = (sum(given[r] for r in ranks) for ranks in (theirs, own))
            assert lead.counts == WireCounts.expected(num, len(theirs), len(own), out, back)
            assert other.counts == WireCounts.expected(num, len(own), len(theirs), back, out)
            total += lead.counts.given_bytes + lead.counts.taken_bytes
        assert total == (sum(given) + num * size * RELAY_HEAD) * (hosts - 1)
        assert made.ended.empty()


def head(magic: int = MAGIC, version: int = RELAY_VERSION, rank: int = 1, turn: int = 1, size: int = 4) -> bytes:
    return struct.pack("<IHHII", magic, version, rank, turn, size)


BROKEN = [
    (head(magic=0x20544547), "no frame of a rank"),
    (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", "no frame of a rank"),
    (head(version=2), "another version than 1"),
    (head(rank=0), "of a rank that is not there"),
    (head(rank=2), "of a rank that is not there"),
    (head(rank=65535), "of a rank that is not there"),
    (head(turn=2), "not the rank's next"),
    (head(turn=0), "not the rank's next"),
    (head(size=SLOT + 1), "longer than a slot"),
    (head(size=0xFFFFFFFF), "longer than a slot"),
    (head(size=SLOT), "closed the connection"),
    (head()[:7], "closed the connection"),
    (b"", "closed the connection"),
]


@pytest.mark.parametrize(("said", "words"), BROKEN)
def test_a_peer_that_says_what_it_must_not_is_left_with_a_sentence(said: bytes, words: str) -> None:
    memory = shared_memory(2, SLOT)
    exchange = SharedComm(memory, 0, 2, slot_bytes=SLOT).exchange
    os.close(memory)
    ended: queue.SimpleQueue[str] = queue.SimpleQueue()
    ours, theirs = socket.socketpair()
    relay = HostRelay(exchange, ours, gives=[0], takes=[1], ended=ended.put)
    with theirs:
        theirs.sendall(said)
        if "closed" in words:
            theirs.shutdown(socket.SHUT_WR)
        assert words in ended.get(timeout=10)
        theirs.settimeout(10)
        assert theirs.recv(1) == b"", "it is hung up"
    relay.close()
    assert ended.empty(), "one sentence"
    assert exchange.given(0) == exchange.given(1) == (0, 0), "nobody took it for a gather"


def test_a_relay_is_closed_while_nobody_gives_anything() -> None:
    began = time.monotonic()
    for _ in range(20):
        with hosts_of(4, 2):
            time.sleep(0.002)
    assert time.monotonic() - began < 10, "nobody waits for a second"


def test_what_a_relay_says_of_a_rank_wakes_who_sleeps() -> None:
    """Ranks that sleep at once, whose relays sleep, too: all are woken, for thousands of gathers."""
    library = best_library()
    memories = [shared_memory(2, SLOT) for _ in range(2)]
    comms = [SharedComm(memory, rank, 2, slot_bytes=SLOT, spin_us=0) for rank, memory in enumerate(memories)]
    ended: queue.SimpleQueue[str] = queue.SimpleQueue()
    relays = [
        HostRelay(
            SharedComm(memory, 0, 2, slot_bytes=SLOT, spin_us=0).exchange, sock, gives=[own], takes=[1 - own],
            ended=ended.put,
        )
        for own, (memory, sock) in enumerate(zip(memories, socket.socketpair(), strict=True))
    ]  # fmt: skip
    for memory in memories:
        os.close(memory)
    taken: dict[int, int] = {}

    def run(rank: int) -> None:
        taken[rank] = library.pst_exchange_time(comms[rank].exchange.address, 1000, 3000)  # type: ignore[union-attr]

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(taken) == [0, 1], "somebody was not woken"
    assert ended.empty()
    for relay in relays:
        assert relay.counts.given_frames == relay.counts.taken_frames == 3016
        relay.close()
