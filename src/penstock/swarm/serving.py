"""Connections of a swarm's servers: who may come, how many, how long. A thread for each."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from penstock.runner.block_wire import Channel, Greeting, PeerError, admit

MOST_CONNECTIONS = 128
FRAME_S, IDLE_S = 10.0, 600.0
"""The longest that a frame may take, and that a connection may say nothing."""
_log = logging.getLogger("penstock.swarm")


@dataclass
class CallCounts:
    """Since start. `refused`: connections that did not know the secret, or said what is no message."""

    connections: int = 0
    refused: int = 0


class Acceptor:
    """`serve` is called with each connection that knows the secret, in a thread of its own; it may raise PeerError, and
    returns when it has had enough."""

    def __init__(
        self, sock: socket.socket, secret: bytes, greeting: Greeting, serve: Callable[[Channel], None]
    ) -> None:
        """`sock` listens already."""
        self.sock, self.counts = sock, CallCounts()
        self._secret, self._greeting, self._serve = secret, greeting, serve
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()

    @property
    def address(self) -> str:
        host, port = self.sock.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def run(self) -> None:
        """Until `close`."""
        while True:
            try:
                peer, place = self.sock.accept()
            except OSError:
                return  # closed
            with self._lock:
                room = len(self._open) < MOST_CONNECTIONS
                if room:
                    self._open.add(peer)
                    self.counts.connections += 1
            if not room:
                peer.close()
                continue
            threading.Thread(target=self._meet, args=(peer, place[0]), name="penstock-peer", daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)  # accept returns
        self.sock.close()
        with self._lock:
            peers = list(self._open)
        for peer in peers:
            with suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)

    def _meet(self, peer: socket.socket, host: str) -> None:
        try:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            channel = admit(peer, self._secret, FRAME_S, self._greeting)
            channel.idle_s = IDLE_S
            self._serve(channel)
        except PeerError as error:
            if error.reason in ("secret", "version", "frame"):
                with self._lock:
                    self.counts.refused += 1
                _log.warning("%s is not served: %s", host, error)
        except OSError as error:
            _log.warning("%s is not served: %s", host, error.strerror or error)
        finally:
            with self._lock:
                self._open.discard(peer)
            peer.close()
