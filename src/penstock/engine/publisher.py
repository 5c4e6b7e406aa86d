"""Publishes events of KV blocks over ZeroMQ, from a thread beside the engine.

A message is (topic, number, batch): the number 8 bytes, big-endian, one more for each batch; the batch msgpack,
[seconds since 1970, events, 0]. Whoever sees a gap asks for what is missing at `replay_endpoint`: (empty, first number
that is missed) is answered by (empty, topic, number, batch) for all from there on that are kept, and at the end by the
number -1 without a batch; with the encoding `array` there is no topic, as there was none then. Source: vLLM's
`ZmqEventPublisher`, whose subscribers understand this one.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.base.errors import ConfigError
from penstock.core.kv_events import KVEvent

if TYPE_CHECKING:
    from penstock.config.kv_events import KVEventsConfig

END = (-1).to_bytes(8, "big", signed=True)
CLOSE_S = 1.0
"""How long the end of an engine waits for what has not been sent."""
_RANK = 0
"""Of the replica; there is one."""

Batch = tuple[int, float, list[KVEvent]]


class EventPublisher:
    """`publish` may be called from one thread, and never waits.

    Raises ConfigError if pyzmq is missing or an address cannot be bound.

    Attributes:
        num_batches: handed in so far, dropped ones included: the number of the next one.
    """

    def __init__(self, config: KVEventsConfig) -> None:
        try:
            import zmq
        except ModuleNotFoundError:
            raise ConfigError(
                "kv_events_config needs pyzmq; pip install 'penstock[events]'", field="kv_events_config"
            ) from None
        self.num_batches = 0
        self._zmq = zmq
        self._config = config
        self._topic = config.topic.encode()
        self._queue: deque[Batch] = deque()
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._closing = False
        self._context = zmq.Context()
        try:
            self._subscribers = self._bind(zmq.PUB, config.endpoint, "endpoint", config.hwm)
            self._missers = None
            if config.replay_endpoint is not None:
                # A peer's queue has room for all that is kept and the end; with more waiting it has to ask again.
                self._missers = self._bind(
                    zmq.ROUTER, config.replay_endpoint, "replay_endpoint", config.buffer_steps + 1, mandatory=True
                )
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._thread = threading.Thread(target=self._run, name="penstock-kv-events", daemon=True)
        self._thread.start()

    def publish(self, events: list[KVEvent]) -> bool:
        """A batch of its own. False: too many wait; it is dropped, and its number is missing at subscribers."""
        number = self.num_batches
        self.num_batches += 1
        if len(self._queue) >= self._config.max_queue_size:
            return False
        self._queue.append((number, time.time(), events))
        with suppress(BlockingIOError):  # it is full: the thread will wake
            os.write(self._wake, b"x")
        return True

    def close(self) -> None:
        """What waits is sent, unless that takes longer than `CLOSE_S`."""
        if self._closing:
            return
        self._closing = True
        with suppress(BlockingIOError):
            os.write(self._wake, b"x")
        self._thread.join(2 * CLOSE_S)

    # -- the thread's --------------------------------------------------------------------------------------------

    def _bind(self, kind: int, address: str, name: str, hwm: int, *, mandatory: bool = False) -> Any:
        zmq = self._zmq
        socket = self._context.socket(kind)
        socket.set(zmq.SNDHWM, hwm)
        socket.set(zmq.LINGER, int(CLOSE_S * 1000))
        if mandatory:  # a queue that is full is an error, not silence
            socket.set(zmq.ROUTER_MANDATORY, 1)
        mask = os.umask(0o177)  # of ipc: only this user may connect
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"kv_events_config: {name}: {address!r} cannot be bound: {error.strerror.lower()}; name another one",
                field="kv_events_config",
            ) from error
        finally:
            os.umask(mask)
        return socket

    def _run(self) -> None:
        zmq = self._zmq
        encoder = msgspec.msgpack.Encoder()
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        if self._missers is not None:
            poller.register(self._missers, zmq.POLLIN)
        until_s: float | None = None
        while True:
            for ready, _ in poller.poll():
                if ready == self._woken:
                    os.read(self._woken, 4096)
                else:
                    self._answer()
            if self._closing and until_s is None:
                until_s = time.monotonic() + CLOSE_S
            while self._queue and (until_s is None or time.monotonic() < until_s):
                number, time_s, events = self._queue.popleft()
                told = events if self._config.encoding == "array" else [_as_map(event) for event in events]
                batch = encoder.encode((time_s, told, _RANK))
                name = number.to_bytes(8, "big")
                self._subscribers.send_multipart((self._topic, name, batch))
                self._kept.append((name, batch))
            if until_s is not None:
                self._context.destroy(linger=int(CLOSE_S * 1000))
                return

    def _answer(self) -> None:
        """One who missed something gets it; one who asks wrongly, or reads too slowly, gets no end."""
        zmq = self._zmq
        assert self._missers is not None
        request = self._missers.recv_multipart()
        if len(request) != 3 or request[1] or len(request[2]) != 8:
            return
        peer, _, first = request
        as_since = self._config.encoding == "map"
        with suppress(zmq.ZMQError):
            for name, batch in self._kept:
                if name >= first:
                    frames = (self._topic, name, batch) if as_since else (name, batch)
                    self._missers.send_multipart((peer, b"", *frames), zmq.NOBLOCK)
            frames = (b"", END, b"") if as_since else (END, b"")
            self._missers.send_multipart((peer, b"", *frames), zmq.NOBLOCK)


def _as_map(event: KVEvent) -> dict[str, Any]:
    return {"type": type(event).__name__} | msgspec.structs.asdict(event)
