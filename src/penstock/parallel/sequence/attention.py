"""An attention backend and a `write_kv` for programs whose rows are shared out over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.base.bf16 import F32
from penstock.base.errors import UnsupportedError
from penstock.model.graph import Graph, Node
from penstock.ops.step import Step
from penstock.parallel.messages import Messages
from penstock.parallel.sequence.passing import LayerView, Passing, Planes, RankWork, Scoring
from penstock.parallel.sequence.shares import HeldKv, SeqShare


class SequenceAttention:
    """An AttentionBackend (core.protocols) over what `held` and the other ranks have; planes of a step are not read.

    Attributes:
        work: what has been computed on this rank.
    """

    name, online = "sequence", True

    def __init__(self, comm: Messages, method: Passing, held: HeldKv) -> None:
        self._comm, self._method, self._held = comm, method, held
        self.work = RankWork()
        self._shares: Sequence[SeqShare] = ()
        self._group: Sequence[int] = ()
        self._fresh: dict[tuple[int, int], tuple[Planes, tuple[str, str]]] = {}
        self._views: dict[tuple[int, int], LayerView] = {}

    def begin(self, shares: Sequence[SeqShare], group: Sequence[int]) -> None:
        """What the next run of the program is about."""
        self._shares, self._group = shares, group
        self._fresh, self._views = {}, {}

    def write_kv(
        self, step: Step, a: F32, b: F32, group: int, layer: int, names: tuple[str, str], *, bounds: Any = ()
    ) -> None:  # fmt: skip
        """Both planes of this rank's rows, until `finish`."""
        self._fresh[group, layer] = (a, b), names

    def attend(
        self, q: F32, step: Step, group: int, layer: int, *, keys: tuple[str, ...], value: str, scale: float,
        window: int | None = None, chunk: int | None = None, soft_cap: float | None = None, slopes: F32 | None = None,
        sinks: F32 | None = None, rotation: Any = None, kept: Any = None, pages: Any = None, chosen: Any = None,
    ) -> F32:  # fmt: skip
        """See `core.protocols.AttentionBackend.attend`. `check_graph` has refused what is not looked at here."""
        where = (group, layer)
        fresh, names = self._fresh[where]
        new = where not in self._views
        view = LayerView(self._comm, self._group, self._shares, where, fresh, self._held, self.work, new)
        self._views.setdefault(where, view)
        rule = Scoring(
            tuple(names.index(key) for key in keys), names.index(value), scale, window, chunk, soft_cap, slopes, sinks
        )
        return self._method.attend(view, q, rule)

    def finish(self, by_heads: bool) -> None:
        """Keep what this rank is to keep of the step's rows. `by_heads`: the method has done it."""
        for where, view in self._views.items():
            own = view.split(view.fresh, self._comm.rank, rows=True)
            for n, share in enumerate(self._shares if not by_heads else ()):
                found = [(share.rows[self._comm.rank], own[n]), *view.picked.get(n, ())]
                positions = np.concatenate([at for at, _ in found])
                wanted = share.kept[self._comm.rank]
                if not len(wanted):
                    continue
                order = np.argsort(positions)
                order = order[np.isin(positions[order], wanted)]
                assert len(order) == len(wanted), "whatever is kept has come by"
                a, b = (np.concatenate([planes[i] for _, planes in found])[order] for i in range(2))
                self._held.add(share.seq, where, (a, b))
        self._fresh, self._views = {}, {}


def check_graph(graph: Graph) -> None:
    """Raises UnsupportedError, naming it, if an operation needs rows that another rank may have, attention apart."""
    for node in graph.nodes:
        if (why := _why_not(node)) is not None:
            place = f"layer {node.layer}" if node.layer >= 0 else "the model"
            raise UnsupportedError(f"{place}: {why}; such a model cannot have its sequence shared out over ranks")


def _why_not(node: Node) -> str | None:
    if node.op == "write_kv":
        return "bounds of pages are kept" if node.named.get("bounds") else None
    if node.op == "attention":
        unread = [name for name in ("rotation", "kept", "pages", "chosen") if node.named.get(name) is not None]
        return f"attention reads its cache in another way ({', '.join(unread)})" if unread else None
    if node.op == "gather":
        return "its products are shared out already"
    if node.takes is not None and node.takes[0] == "step":
        return f"{node.op} reads other rows of the step, or a state that they leave"
    return None
