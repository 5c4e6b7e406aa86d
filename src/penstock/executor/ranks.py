"""One model over several ranks, each in a process of its own.

Every rank is given every step and decides everything by itself: who is sampled, which drafts are right, what is kept.
All of them compute with the same numbers (`parallel.shard`), so all decide the same; what they say is compared, and
ranks that differ are an error, not two opinions. The lead, rank 0, speaks for them.
"""

from __future__ import annotations

import select
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from penstock.base.errors import ConfigError, EngineError, PenstockError
from penstock.core.batch import SchedulerOutput, StepOutput
from penstock.core.protocols import Executor
from penstock.engine.blackbox import BlackBox
from penstock.executor.multiproc import COMMAND, MultiprocExecutor
from penstock.executor.rank import Progress, Rank, RankFactory, RankSpec
from penstock.parallel.links import Wires

if TYPE_CHECKING:
    from penstock.executor.nodes import Nodes


class Said(NamedTuple):
    """What all ranks must say of a step alike."""

    sampled: object
    verified: object
    errors: object
    ended: object
    selected: object

    @classmethod
    def of(cls, output: StepOutput) -> Said:
        return cls(output.sampled, output.verified, output.errors, output.ended, output.selected)


class Moves:
    """Ranks write and read at their own pace: the end of a load is told when all ranks have told it, and it was good if
    it was for all."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._told: dict[int, list[bool]] = {}

    def ended(self, said: Sequence[StepOutput]) -> dict[int, bool]:
        """Of what all ranks say of a step, what has ended for all of them."""
        for output in said:
            for move, good in output.moves.items():
                self._told.setdefault(move, []).append(good)
        whole = [move for move, goods in self._told.items() if len(goods) == self._size]
        return {move: all(self._told.pop(move)) for move in whole}


class Exchanged:
    """What ranks count of their exchanges, step by step."""

    def __init__(self, wires: Wires, nodes: Nodes | None = None) -> None:
        """`nodes`: other hosts."""
        self._wires, self._nodes, self._had = wires, nodes, (0, 0, 0, 0.0)

    def told(self, result: StepOutput) -> StepOutput:
        """The result with those of its step."""
        on_wire = 0 if self._nodes is None else self._nodes.wire_bytes
        now, had = (*self._wires.given(), on_wire, sum(self._wires.waited_s())), self._had
        self._had = now
        return replace(result, ranks=(now[0] - had[0], now[1] - had[1], now[2] - had[2], now[3] - had[3]))


class RanksExecutor(Executor):
    """See `multiproc.MultiprocExecutor`; `spec` is the lead's, and its settings say how many ranks there are.

    `wires`: what they share, for whoever counts.

    The end of one rank is the end of all: the others would wait for it. With `nnodes` hosts the ranks of node_rank 0
    are here; the others' come over `nodes.Nodes`.
    """

    def __init__(
        self, spec: RankSpec, build: RankFactory | None = None, *, depth: int = 1, loading: Progress | None = None,
        box: BlackBox | None = None, command: Sequence[str] = COMMAND,
    ) -> None:  # fmt: skip
        self.wires = wires = wires_of(spec)
        self.depth, size = depth, wires.size
        self._moves = Moves(size)
        self._nodes: Nodes | None = None

        def start(rank: int) -> MultiprocExecutor:
            own, spawned = replace(spec, rank=rank, world_size=size, links=wires.of(rank)), None
            inherits = own.links.descriptors
            if self._nodes is not None and not self._nodes.is_here(rank):
                own, spawned = self._nodes.rank(own)
            return MultiprocExecutor(
                own, depth=depth, loading=loading if rank == 0 else None, box=box if rank == 0 else None,
                command=command, inherits=inherits, spawned=spawned,
            )  # fmt: skip

        try:
            if spec.config.get("nnodes", 1) > 1:
                self._nodes = nodes_of(spec, wires.of(0).everyone, box)
                self._end_nodes = weakref.finalize(self, self._nodes.close)
            self._exchanged = Exchanged(wires, self._nodes)
            self._ranks = _together(start, size)
        except BaseException:
            self._close_nodes()
            raise
        finally:
            wires.close()
        self.packed_file = self._ranks[0].packed_file

    def submit(self, output: SchedulerOutput) -> None:
        for rank in self._ranks:
            rank.submit(output)

    def collect(self) -> StepOutput:
        """Raises also EngineError if ranks say different things."""
        try:
            self._await_all()
            said = [rank.collect() for rank in self._ranks]
            result = replace(agreed(said), moves=self._moves.ended(said))
        except PenstockError:
            self.close()
            raise
        return self._exchanged.told(result)

    def _await_all(self) -> None:
        """Until every rank has answered. Raises what broke one of them: the others would wait for it for ever."""
        poll, waiting = select.poll(), {rank.fileno(): rank for rank in self._ranks}
        for fd in waiting:
            poll.register(fd, select.POLLIN)
        if self._nodes is not None:
            poll.register(self._nodes, select.POLLIN)
        for fd, rank in list(waiting.items()):
            if rank.has_answer:
                poll.unregister(fd)
                del waiting[fd]
        while waiting:
            for fd, _ in poll.poll():
                if fd not in waiting:
                    assert self._nodes is not None
                    self._nodes.check()
                elif waiting[fd].hear():
                    poll.unregister(fd)
                    del waiting[fd]

    def back(self, num_slabs: Sequence[int]) -> None:
        for rank in self._ranks:
            rank.back(num_slabs)

    def holds(self, grammar: str) -> bool:
        return False

    def prepare(self, grammar: str, param: str = "structured_outputs") -> None:
        for rank in self._ranks:
            rank.prepare(grammar, param)

    def spoil(self) -> None:
        for rank in self._ranks:
            rank.spoil()

    def check(self) -> None:
        for rank in self._ranks:
            rank.check()
        if self._nodes is not None:
            self._nodes.check()

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()
        self._close_nodes()

    def _close_nodes(self) -> None:
        if self._nodes is not None:
            self._end_nodes()

    @property
    def processes(self) -> Sequence[int]:
        return tuple(pid for rank in self._ranks for pid in rank.processes)


class ThreadRanks(Executor):
    """Ranks in threads of this process, of a model that is in its memory (tests, tools). A rank that fails leaves the
    others waiting: what must be ended lives in processes."""

    depth = 1

    def __init__(self, spec: RankSpec, build: RankFactory, *, box: BlackBox | None = None, **_: object) -> None:
        if spec.config.get("nnodes", 1) > 1:
            raise ConfigError(
                "nnodes: the weights are arrays in the memory of this process, and other hosts need them on disk; use "
                "1, or a model on disk",
                field="nnodes",
            )
        self.wires = wires = wires_of(spec)
        size = wires.size
        self._threads = [ThreadPoolExecutor(1, f"penstock-rank-{rank}") for rank in range(size)]
        self._exchanged, self._moves = Exchanged(wires), Moves(size)
        try:
            begun = [
                thread.submit(build, replace(spec, rank=rank, world_size=size, links=wires.of(rank)), None)
                for rank, thread in enumerate(self._threads)
            ]
            self.runners: list[Rank] = [future.result() for future in begun]
        finally:
            wires.close()
        if box is not None:
            self.runners[0].watch(box.progress_address)
        self._running: list[Future[StepOutput]] = []
        self.packed_file = self.runners[0].packed_file

    @property
    def runner(self) -> Rank:
        """The lead."""
        return self.runners[0]

    def submit(self, output: SchedulerOutput) -> None:
        assert not self._running, "a step is in flight"
        pairs = zip(self._threads, self.runners, strict=True)
        self._running = [thread.submit(rank.execute, output) for thread, rank in pairs]

    def collect(self) -> StepOutput:
        running, self._running = self._running, []
        said = [future.result() for future in running]
        return self._exchanged.told(replace(agreed(said), moves=self._moves.ended(said)))

    def back(self, num_slabs: Sequence[int]) -> None:
        for rank in self.runners:
            rank.back(num_slabs)

    def holds(self, grammar: str) -> bool:
        return all(rank.holds(grammar) for rank in self.runners)

    def prepare(self, grammar: str, param: str = "structured_outputs") -> None:
        for rank in self.runners:
            rank.prepare(grammar, param)

    def spoil(self) -> None:
        for rank in self.runners:
            rank.spoil(-1)

    def close(self) -> None:
        for thread in self._threads:
            thread.shutdown()


def nodes_of(spec: RankSpec, memory: int, box: BlackBox | None) -> Nodes:
    """The other hosts, when they have come. Raises as `nodes.Nodes`."""
    from penstock.executor.node_wire import alike  # one host needs no other
    from penstock.executor.nodes import Nodes

    assert spec.model is not None
    config = spec.config
    return Nodes(spec, memory, alike(spec.model, config["tensor_parallel_size"], config["nnodes"]), box)


def wires_of(spec: RankSpec) -> Wires:
    """What the ranks of these settings share."""
    return Wires(spec.config.get("pipeline_parallel_size", 1), spec.config["tensor_parallel_size"])


def agreed(said: Sequence[StepOutput]) -> StepOutput:
    """What all ranks say of a step. Raises EngineError if they say different things."""
    lead, *others = said
    first = Said.of(lead)
    for number, other in enumerate(others, 1):
        if Said.of(other) != first:
            name = next(name for name, a, b in zip(Said._fields, first, Said.of(other), strict=True) if a != b)
            raise EngineError(f"ranks 0 and {number} differ at step {lead.step}: {name}")
    return lead


def _together(start: Callable[[int], MultiprocExecutor], size: int) -> list[MultiprocExecutor]:
    """All ranks, started at once. Raises what kept one of them from starting; none of them is left then."""
    with ThreadPoolExecutor(size, "penstock-ranks") as pool:
        begun = [pool.submit(start, rank) for rank in range(size)]
    failed = [future.exception() for future in begun]
    problem = next((error for error in failed if error is not None), None)
    if problem is None:
        return [future.result() for future in begun]
    for future, error in zip(begun, failed, strict=True):
        if error is None:
            future.result().close()
    raise problem
