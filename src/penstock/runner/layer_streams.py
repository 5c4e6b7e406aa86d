"""Layers that are away come and go between the layers of a run (`kv.layerkv`)."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from penstock.core.page_ops import HOST, StreamOp
from penstock.model.forward import LayeredForward
from penstock.ops.plan import I32
from penstock.runner.host_pages import HostPages
from penstock.runner.storage import Storage


class LayerStreams:
    """Carries out the StreamOps of a step while `forward` runs it. A thread copies: what a layer needs is read while
    those before it compute, and written while those behind it do.

    `storage` keeps what is away in its host tier. The group's layers are all of the model's, in order.
    """

    def __init__(self, forward: LayeredForward, storage: Storage) -> None:
        host: object = storage.tiers[HOST]
        assert isinstance(host, HostPages), "layers wait in host memory"
        self._forward, self._storage, self._host = forward, storage, host
        self._thread = ThreadPoolExecutor(1, "penstock-layers")
        self._coming: dict[int, list[Future[None]]] = {}  # by layer
        self._turns: dict[int, list[tuple[_Stream, int]]] = {}
        self._last: Future[None] | None = None
        self._active = False

    def begin(self) -> None:
        """A step is about to run."""
        ops = self._storage.streams
        if not ops:
            if self._active:
                self._forward.pause(None)
                self._active = False
            return
        self._coming, self._turns, self._last = {}, {}, None
        streams = [_Stream(op, self._storage, self._host) for op in ops]
        for stream in streams:
            for turn, layer in enumerate(stream.op.layers):
                self._turns.setdefault(layer, []).append((stream, turn))
        for turn in range(2):
            for stream in streams:
                self._fetch(stream, turn)
        self._forward.pause(self._between)
        self._active = True

    def _fetch(self, stream: _Stream, turn: int) -> None:
        if turn < len(stream.op.layers):
            work = self._thread.submit(stream.fetch, turn)
            self._coming.setdefault(stream.op.layers[turn], []).append(work)

    def _between(self, n: int) -> None:
        """Before layer n, and behind layer n - 1."""
        for stream, turn in self._turns.get(n - 1, ()):
            self._last = self._thread.submit(stream.keep, turn)
            self._fetch(stream, turn + 2)  # behind it: it writes the same pages
        for work in self._coming.get(n, ()):
            work.result()
        if n == self._forward.num_layers and self._last is not None:
            self._last.result()


class _Stream:
    """One operation, with its pages as arrays."""

    def __init__(self, op: StreamOp, storage: Storage, host: HostPages) -> None:
        self.op = op
        self._sets: list[I32] = [np.array(pages, np.int32) for pages in op.sets]
        self._homes = np.array(op.homes, np.int32)
        self._planes = [(plane, host.planes[op.group][name]) for name, plane in storage.planes[op.group].items()]
        self._host = host

    def fetch(self, turn: int) -> None:
        """The layer whose turn it is comes into its pages. Others have those from `old` on as they were handed out, or
        with entries of the very tokens that this layer is about to write."""
        op, pages, old = self.op, self._sets[turn % 2], self.op.old
        homes = self._homes[:old] + op.layers[turn]
        assert self._host.is_good(op.group, homes.tolist()), f"layer {op.layers[turn]} is not what was stored"
        for plane, kept in self._planes:
            plane[pages[:old]] = kept[homes]

    def keep(self, turn: int) -> None:
        """What the step has written of the layer goes to where it is kept."""
        op = self.op
        pages = self._sets[turn % 2][op.first : op.last]
        homes = self._homes[op.first : op.last] + op.layers[turn]
        for plane, kept in self._planes:
            kept[homes] = plane[pages]
        self._host.sum_up(op.group, homes)
