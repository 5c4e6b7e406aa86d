"""Layers that are away come and go between the layers of a run (`kv.layerkv`)."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, runtime_checkable

import numpy as np

from penstock.core.page_ops import HOST, StreamOp
from penstock.model.forward import LayeredForward
from penstock.ops.plan import I32, Planes
from penstock.runner.storage import Storage


@runtime_checkable
class LayerStore(Protocol):
    """A `PageStore` that also takes pages of single layers. `threads` may move some at once.

    Raises: EngineError.
    """

    threads: int

    def read(self, group: int, pages: I32, planes: Planes, into: I32) -> bool:
        """Its `pages` become those of `planes`. False: one is not what was stored."""
        ...

    def write(self, group: int, pages: I32, planes: Planes, source: I32) -> None:
        """Pages of `planes` become its `pages`."""
        ...


class LayerStreams:
    """Carries out the StreamOps of a step while `forward` runs it. Threads copy: what a layer needs is read while
    those before it compute, and written while those behind it do.

    `storage` keeps what is away in its host tier. The group's layers are all of the model's, in order.
    """

    def __init__(self, forward: LayeredForward, storage: Storage) -> None:
        host: object = storage.tiers[HOST]
        assert isinstance(host, LayerStore), "layers wait where single ones can be read"
        self._forward, self._storage, self._host = forward, storage, host
        self._threads = ThreadPoolExecutor(host.threads, "penstock-layers")
        self._moving: dict[int, list[Future[None]]] = {}
        """By the layer that has to wait for it."""
        self._streams: list[_Stream] = []
        self._active = False

    def begin(self) -> None:
        """A step is about to run."""
        ops = self._storage.streams
        if not ops:
            if self._active:
                self._forward.pause(None)
                self._active = False
            return
        self._streams = [_Stream(op, self._storage, self._host) for op in ops]
        self._moving = {}
        for turn in range(2):
            self._share([(stream, -1, turn) for stream in self._streams])
        self._forward.pause(self._between)
        self._active = True

    def _share(self, moves: Sequence[_Move]) -> None:
        """Threads carry these out: who keeps a layer fetches another into the same pages behind it."""
        count = min(len(moves), self._host.threads)
        for k in range(count):
            own = moves[k::count]
            work = self._threads.submit(_carry_out, own)
            # What is kept has to be there before the next step reads it.
            first = min(stream.layer(fetched, self._forward.num_layers) for stream, _, fetched in own)
            self._moving.setdefault(first, []).append(work)

    def _between(self, n: int) -> None:
        """Before layer n, and behind layer n - 1."""
        moves = [(s, turn, turn + 2) for s in self._streams if (turn := s.turns.get(n - 1, -1)) >= 0]
        self._share(moves)
        for work in self._moving.pop(n, ()):
            work.result()


class _Stream:
    """One operation, with its pages as arrays."""

    def __init__(self, op: StreamOp, storage: Storage, host: LayerStore) -> None:
        self.op = op
        self.turns = {layer: turn for turn, layer in enumerate(op.layers)}
        self._sets: list[I32] = [np.array(pages, np.int32) for pages in op.sets]
        self._homes = np.array(op.homes, np.int32)
        self._planes, self._host = storage.planes[op.group], host

    def layer(self, turn: int, last: int) -> int:
        """Whose turn it is; `last` behind them all."""
        return self.op.layers[turn] if turn < len(self.op.layers) else last

    def fetch(self, turn: int) -> None:
        """The layer whose turn it is comes into its pages. Others have those from `old` on as they were handed out, or
        with entries of the very tokens that this layer is about to write."""
        op, old = self.op, self.op.old
        homes = self._homes[:old] + op.layers[turn]
        good = self._host.read(op.group, homes, self._planes, self._sets[turn % 2][:old])
        assert good, f"layer {op.layers[turn]} is not what was stored"

    def keep(self, turn: int) -> None:
        """What the step has written of the layer goes to where it is kept."""
        op = self.op
        homes = self._homes[op.first : op.last] + op.layers[turn]
        self._host.write(op.group, homes, self._planes, self._sets[turn % 2][op.first : op.last])


_Move = tuple[_Stream, int, int]
"""A sequence, the turn of the layer that it keeps (-1: none), and of the one that it fetches (if there is one)."""


def _carry_out(moves: Sequence[_Move]) -> None:
    for stream, kept, fetched in moves:
        if kept >= 0:
            stream.keep(kept)
        if fetched < len(stream.op.layers):
            stream.fetch(fetched)
