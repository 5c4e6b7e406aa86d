"""Where servers of layers say what they have, and clients find them. It keeps nothing: who is there says so again.

An offer goes with its connection, so a server whose process has ended is not found any more; one whose machine is gone
is forgotten after `GONE_S`.
"""

from __future__ import annotations

import socket
import threading

import msgspec

from penstock.base.clock import Clock, MonotonicClock
from penstock.runner.block_wire import Channel, PeerError
from penstock.swarm.serving import Acceptor
from penstock.swarm.wire import ANNOUNCE, DIRECTORY, DONE, GONE_S, LIST, SAID, SwarmOffer, read

_MOST_ADDRESS = 300


class Directory:
    """`sock` listens already; `secret`: of all who are in the swarm."""

    def __init__(self, sock: socket.socket, secret: bytes, clock: Clock | None = None) -> None:
        self.serving = Acceptor(sock, secret, DIRECTORY, self._serve)
        self._clock = clock or MonotonicClock()
        self._lock = threading.Lock()
        self._offers: dict[str, tuple[float, SwarmOffer]] = {}

    def offers(self) -> list[SwarmOffer]:
        """Of servers that have announced themselves of late, in order of their names."""
        least = self._clock.now() - GONE_S
        with self._lock:
            self._offers = {name: (at, offer) for name, (at, offer) in self._offers.items() if at >= least}
            return [offer for _, (_, offer) in sorted(self._offers.items())]

    def _serve(self, channel: Channel) -> None:
        announced: set[str] = set()
        try:
            while True:
                kind, payload = channel.receive()
                if kind == LIST and not payload:
                    channel.send(SAID, msgspec.msgpack.encode(self.offers()))
                elif kind == ANNOUNCE:
                    offer: SwarmOffer = read(payload, SwarmOffer)
                    if len(offer.address) > _MOST_ADDRESS or not 0 <= offer.facts.first < offer.facts.last:
                        raise PeerError("frame", "an offer of no layers came")
                    announced.add(offer.facts.server)
                    with self._lock:
                        self._offers[offer.facts.server] = self._clock.now(), offer
                    channel.send(DONE)
                else:
                    raise PeerError("frame", f"a directory is not asked for {kind}")
        finally:
            with self._lock:
                for name in announced:
                    self._offers.pop(name, None)
