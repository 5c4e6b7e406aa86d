"""A server of layers: keeps keys and values of clients' sequences, and runs their rows. Source: Petals, section 2.1."""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from dataclasses import dataclass, field

import msgspec
import numpy as np

from penstock.base.bf16 import F32
from penstock.base.errors import UnsupportedError
from penstock.kv.block_pool import BlockPool
from penstock.ops.plan import I32, Planes
from penstock.runner.block_wire import Channel, PeerError
from penstock.runner.storage import filled, planes_of
from penstock.swarm.model import Layers
from penstock.swarm.serving import FRAME_S, Acceptor
from penstock.swarm.wire import (
    ANNOUNCE,
    ANNOUNCE_S,
    CLOSE,
    DIRECTORY,
    DONE,
    FACTS,
    LAYERS,
    OPEN,
    REFUSED,
    ROWS,
    SAID,
    STEP,
    Facts,
    Opening,
    SwarmOffer,
    asked,
    connect,
    hung_up,
    read,
    step_of,
)

BLOCK = 32
"""Tokens of a block."""
MOST_SEQUENCES = 64
"""That a server has at once."""
_WEIGHT = 0.1
"""Of a new measurement in what a row takes."""
_log = logging.getLogger("penstock.swarm")


@dataclass
class _Sequence:
    """`at`: tokens that its layers have seen. `blocks`, `slot`: what it has of each pool."""

    layers: tuple[int, int]
    num_tokens: int
    blocks: list[int]
    slot: int
    at: int = 0
    tables: tuple[I32, ...] = field(default=())


class LayerServer:
    """`sock` listens already. Threads: one, one for each connection, one that announces. Steps go one after the other.

    `delay_s`: it waits so long before every answer, as if it were far away: for experiments.
    """

    def __init__(
        self, sock: socket.socket, secret: bytes, layers: Layers, *, num_tokens: int, delay_s: float = 0.0
    ) -> None:
        """`num_tokens`: for which it has room, of all sequences together. Memory for them is taken now."""
        self.serving = Acceptor(sock, secret, LAYERS, self._serve)
        self.name = secrets.token_hex(8)
        self._layers, self._secret, self._delay_s = layers, secret, delay_s
        num = -(-num_tokens // BLOCK)
        self._blocks, self._slots = BlockPool(num, 1), BlockPool(MOST_SEQUENCES, 1)
        self._planes: list[Planes] = [
            planes_of(g, (num if g.spec.per_token else MOST_SEQUENCES) * g.pages_per_slab, BLOCK, False, filled)
            for g in layers.groups
        ]
        self._lock = threading.Lock()  # of the pools and of the program
        self._over = threading.Event()
        self._row_s = self._measured()

    def facts(self) -> Facts:
        own = self._layers
        free = self._blocks.num_free * BLOCK
        return Facts(self.name, own.model.identity, own.first, own.last, self._row_s, free)

    def close(self) -> None:
        self._over.set()
        self.serving.close()

    def announce(self, directory: str, address: str) -> None:
        """Until `close`: tell the directory, again and again, and find it again when it is gone."""
        channel: Channel | None = None
        well = True
        while not self._over.is_set():
            try:
                channel = channel or connect(directory, self._secret, DIRECTORY, FRAME_S)
                asked(channel, ANNOUNCE, SwarmOffer(address, self.facts()))
                if not well:
                    _log.warning("the directory at %s is there again", directory)
                well = True
            except PeerError as error:
                if channel is not None:
                    hung_up(channel)
                channel = None
                if well:
                    _log.warning("the directory at %s: %s; it is tried again", directory, error)
                well = False
            self._over.wait(ANNOUNCE_S if well else ANNOUNCE_S / 4)
        if channel is not None:
            hung_up(channel)

    # -- a connection ----------------------------------------------------------------------------------------------

    def _serve(self, channel: Channel) -> None:
        own: dict[int, _Sequence] = {}
        try:
            while True:
                kind, payload = channel.receive()
                if self._delay_s:
                    self._over.wait(self._delay_s)
                self._answer(channel, own, kind, payload)
        finally:
            for sequence in own.values():
                self._release(sequence)

    def _answer(self, channel: Channel, own: dict[int, _Sequence], kind: int, payload: bytearray) -> None:
        if kind == FACTS and not payload:
            channel.send(SAID, msgspec.msgpack.encode(self.facts()))
        elif kind == OPEN:
            opening: Opening = read(payload, Opening)
            problem = self._open(own, opening)
            channel.send(REFUSED, problem.encode()) if problem else channel.send(DONE)
        elif kind == STEP:
            number, start, rows = step_of(payload, self._layers.model.width)
            found = self._step(own, number, start, rows)
            if isinstance(found, str):
                channel.send(REFUSED, found.encode())
            else:
                channel.send(ROWS, np.ascontiguousarray(found, "<f4").data.cast("B"))
        elif kind == CLOSE:
            number = read(payload, int)
            if number in own:
                self._release(own.pop(number))
            channel.send(DONE)
        else:
            raise PeerError("frame", f"a server of layers is not asked for {kind}")

    def _open(self, own: dict[int, _Sequence], opening: Opening) -> str:
        """Why not, in a sentence; "": it is open."""
        layers = self._layers
        if opening.identity != layers.model.identity:
            return "it has another model, other settings or another build; give all of a swarm the same"
        if not layers.first <= opening.first < opening.last <= layers.last:
            return f"it has layers {layers.first} to {layers.last - 1}, not {opening.first} to {opening.last - 1}"
        if opening.session in own:
            return f"session {opening.session} is open already"
        if not 0 < opening.num_tokens <= layers.model.max_model_len:
            return f"a sequence has 1 to {layers.model.max_model_len} tokens, not {opening.num_tokens}"
        try:
            with self._lock:
                layers.part(opening.first, opening.last)
                slots = self._slots.alloc_slabs(1)
                blocks = None if slots is None else self._blocks.alloc_slabs(-(-opening.num_tokens // BLOCK))
                if slots is None or blocks is None:
                    self._slots.unref_slabs(slots or ())
                    return f"there is no room for {opening.num_tokens} tokens more"
                self._clear(blocks, slots[0])
        except UnsupportedError as error:
            return str(error)
        table, slot = np.array([blocks], np.int32), np.array([slots], np.int32)
        tables = tuple(table if g.spec.per_token else slot for g in layers.groups)
        own[opening.session] = _Sequence(
            (opening.first, opening.last), opening.num_tokens, blocks, slots[0], tables=tables
        )
        return ""

    def _step(self, own: dict[int, _Sequence], number: int, start: int, rows: F32) -> F32 | str:
        """Rows through the layers, or why not."""
        sequence = own.get(number)
        if sequence is None:
            return f"session {number} is not open"
        if start != sequence.at or start + len(rows) > sequence.num_tokens:
            has = f"{sequence.at} of {sequence.num_tokens} tokens"
            return f"session {number} has {has}, and is given {len(rows)} at {start}"
        num_blocks = -(-(start + len(rows)) // BLOCK)
        tables = tuple(
            t[:, :num_blocks] if g.spec.per_token else t
            for g, t in zip(self._layers.groups, sequence.tables, strict=True)
        )
        with self._lock:
            began_s = time.perf_counter()
            found = self._layers.run(sequence.layers, rows, start, tables, self._planes, BLOCK)
            first, last = sequence.layers
            took_s = (time.perf_counter() - began_s) / (len(rows) * (last - first))
            self._row_s += _WEIGHT * (took_s - self._row_s)
        sequence.at = start + len(rows)
        return found

    def _release(self, sequence: _Sequence) -> None:
        with self._lock:
            self._blocks.unref_slabs(sequence.blocks)
            self._slots.unref_slabs([sequence.slot])

    def _clear(self, blocks: list[int], slot: int) -> None:
        """What one client has left another one never sees."""
        for group, planes in zip(self._layers.groups, self._planes, strict=True):
            width = group.pages_per_slab
            for array in planes.values():
                for slab in blocks if group.spec.per_token else [slot]:
                    array[slab * width : (slab + 1) * width] = 0

    def _measured(self) -> float:
        """Seconds that a row takes in one layer, of a row of zeros: what clients choose by before anybody has come."""
        layers = self._layers
        tables = tuple(np.zeros((1, 1), np.int32) for _ in layers.groups)
        rows = np.zeros((1, layers.model.width), np.float32)
        least = min(self._timed(rows, tables) for _ in range(3))
        self._clear([0], 0)
        return least / (layers.last - layers.first)

    def _timed(self, rows: F32, tables: tuple[I32, ...]) -> float:
        began_s = time.perf_counter()
        self._layers.run((self._layers.first, self._layers.last), rows, 0, tables, self._planes, BLOCK)
        return time.perf_counter() - began_s
