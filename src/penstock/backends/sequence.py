"""A whole model on one of several ranks that share out the rows of every step: reference operations, all weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.backends.program import BoundCall, Program
from penstock.base.bf16 import F32
from penstock.base.errors import ConfigError
from penstock.model.graph import Graph
from penstock.ops.plan import I32, StepPlan
from penstock.ops.ref import REF
from penstock.ops.table import OpTable
from penstock.parallel.messages import Messages
from penstock.parallel.sequence import SEQUENCE_METHODS
from penstock.parallel.sequence.attention import SequenceAttention, check_graph
from penstock.parallel.sequence.passing import RankWork
from penstock.parallel.sequence.shares import LAYOUTS, HeldKv, Holders, SeqShare


class CountedProgram(Program):
    """A program that knows how many bytes its results have taken at once.

    Attributes:
        peak_bytes: of arrays between operations, at most; what an operation takes for itself is not in it.
    """

    peak_bytes = 0

    def _execute(self, code: Sequence[BoundCall], registers: list[Any]) -> None:
        for call in code:
            super()._execute((call,), registers)
            floats = (_root(x) for x in registers if isinstance(x, np.ndarray) and x.dtype == np.float32)
            self.peak_bytes = max(self.peak_bytes, sum({id(x): x.nbytes for x in floats}.values()))


def _root(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The array whose memory a view shows."""
    while isinstance(x.base, np.ndarray):
        x = x.base
    return x


class SequenceModel:
    """One rank's end of a model. All ranks run the same steps, and each gets all logits that are asked for.

    Attributes:
        held: the keys and values that this rank keeps.
        program: what it runs its rows on.
    """

    def __init__(
        self, graph: Graph, comm: Messages, method: str, *, layout: str = "", capacity: int | None = None,
        table: OpTable = REF,
    ) -> None:  # fmt: skip
        """`method`: of `SEQUENCE_METHODS`. `layout`: of `LAYOUTS`; the method's own if none is given. `capacity`:
        tokens that each rank has room for.

        Raises: UnsupportedError for a model with operations that need other rows; ConfigError for an unknown method or
        layout, or heads that the method cannot share out.
        """
        check_method(graph, method, comm.size)
        self._traits = SEQUENCE_METHODS.traits(method)
        layout = layout or self._traits.layout
        if layout not in LAYOUTS:
            raise ConfigError(f"unknown layout {layout!r}; choose one of: {', '.join(LAYOUTS)}", field="layout")
        self.held = HeldKv()
        self._comm, self._method, self._layout = comm, method, LAYOUTS[layout]
        self._attention = SequenceAttention(comm, SEQUENCE_METHODS.get(method)(), self.held)
        self._holders = Holders(comm.size, capacity, self._traits.by_heads)
        self.program = CountedProgram(
            graph, table.replaced("sequence", {"write_kv": self._attention.write_kv}), self._attention
        )

    @property
    def work(self) -> RankWork:
        return self._attention.work

    @property
    def given(self) -> Counter[str]:
        """Bytes that this rank has given to others: kv, q, partials, attended, logits."""
        return self._comm.given

    def holders(self, seq: Any) -> list[int]:
        """The ranks that keep something of a sequence."""
        return self._holders.ranks(seq)

    def run(
        self, work: Mapping[Any, tuple[Sequence[int], Sequence[int]]], *, ranks: Sequence[int] | None = None,
        keep: Sequence[int] | None = None,
    ) -> dict[Any, F32]:  # fmt: skip
        """One step: of each sequence the tokens to append, and which of them (indices) give logits [., V].

        `ranks`: those that compute the new rows (None: all). Ranks that keep something of a sequence take part as well.
        `keep`: those that keep the new keys and values, if not those that compute them: they take them from what comes
        by (Wu et al., LoongServe, arXiv 2404.09526, section 4.1), so nothing more is sent.

        Raises: ConfigError for ranks that the method cannot run so, CapacityError, on all ranks, if one has no room.
        """
        computing = list(range(self._comm.size)) if ranks is None else sorted(set(ranks))
        keeping = computing if keep is None else sorted(set(keep))
        self._check_ranks(work, computing, keeping)
        shares = [
            self._holders.share(seq, len(ids), computing, keeping, self._turned(n))
            for n, (seq, (ids, _)) in enumerate(work.items())
        ]
        self._holders.check_room(shares)
        group = sorted({*computing, *keeping, *(rank for share in shares for rank in self._holders.ranks(share.seq))})
        logits = np.zeros((0, self.program.vocab_size), np.float32)
        if self._comm.rank in group:
            self._attention.begin(shares, group)
            logits = self.program.run(self._plan(work, shares), ())
            self._attention.finish(self._traits.by_heads)
        self._holders.keep(shares)
        return self._gathered(work, shares, logits)

    def forget(self, seq: Any) -> None:
        """A sequence has ended."""
        self._holders.forget(seq)
        self.held.forget(seq)

    def _turned(self, n: int) -> Any:
        """The layout, with single tokens of the n-th sequence on another rank than those of the one before."""
        return lambda first, count, size: self._layout(first + (n if count < size else 0), count, size)

    def _check_ranks(self, work: Mapping[Any, Any], computing: list[int], keeping: list[int]) -> None:
        if not computing or not keeping or not {*computing, *keeping} <= set(range(self._comm.size)):
            raise ConfigError(
                f"ranks: {computing} compute and {keeping} keep; they must be some of 0 to {self._comm.size - 1}",
                field="ranks",
            )
        if keeping != computing and not self._traits.passes_kv:
            raise ConfigError(
                f"keep: with {self._method} keys and values do not come by other ranks; use ring, striped, "
                "burst, pass_kv or gather", field="keep",
            )  # fmt: skip
        others = [seq for seq in work if self._holders.ranks(seq) not in ([], computing)]
        if self._traits.by_heads and others:
            raise ConfigError(
                f"ranks: {self._method} keeps a sequence's heads on the ranks that it began with; use another method "
                "to change them", field="ranks",
            )  # fmt: skip

    def _plan(self, work: Mapping[Any, tuple[Sequence[int], Sequence[int]]], shares: Sequence[SeqShare]) -> StepPlan:
        """This rank's rows of the step."""
        tokens: list[int] = []
        positions: list[int] = []
        starts, wanted = [0], []
        for share, (given, some) in zip(shares, work.values(), strict=True):
            own, first = share.rows[self._comm.rank].tolist(), share.end - len(given)
            asked = {first + i for i in some}
            wanted += [len(tokens) + i for i, position in enumerate(own) if position in asked]
            tokens += [given[position - first] for position in own]
            positions += own
            starts.append(len(tokens))
        ends = [share.end for share in shares]
        ids, at, bounds, lens, rows = (np.array(x, np.int32) for x in (tokens, positions, starts, ends, wanted))
        return StepPlan(ids, at, bounds, lens, rows, ())

    def _gathered(
        self, work: Mapping[Any, tuple[Sequence[int], Sequence[int]]], shares: Sequence[SeqShare], own: F32
    ) -> dict[Any, F32]:
        """All ranks' logits, in the order in which they were asked for."""
        size = self._comm.size
        found = self._comm.gather((own,), range(size), "logits")
        out: dict[Any, F32] = {}
        at = [0] * size
        for share, (seq, (ids, some)) in zip(shares, work.items(), strict=True):
            rows: dict[int, F32] = {}
            for rank in range(size):
                asked: I32 = np.intersect1d(share.rows[rank], np.array(some, np.int32) + (share.end - len(ids)))
                for position in asked.tolist():
                    rows[position - share.end + len(ids)] = found[rank][0][at[rank]]
                    at[rank] += 1
            out[seq] = np.array([rows[i] for i in some], np.float32).reshape(len(some), own.shape[1])
        return out


def check_method(graph: Graph, method: str, size: int) -> None:
    """Raises UnsupportedError for operations that need other rows, and ConfigError for an unknown method, or, with the
    sizes that do, for heads that `size` ranks cannot share out evenly by it."""
    by_heads = SEQUENCE_METHODS.traits(method).by_heads
    check_graph(graph)
    for node in graph.nodes if by_heads else ():
        if node.op not in ("write_kv", "attention"):
            continue
        for heads in (value.heads for value in node.inputs if value.heads):
            whole = heads % size == 0 or (node.op == "write_kv" and size % heads == 0)
            if not whole:
                fit = [n for n in range(1, heads + 1) if heads % n == 0]
                raise ConfigError(
                    f"ranks: {size} ranks cannot share out {heads} heads of layer {node.layer} evenly; use one of "
                    f"{', '.join(map(str, fit))}, or another method than ulysses", field="ranks",
                )  # fmt: skip
