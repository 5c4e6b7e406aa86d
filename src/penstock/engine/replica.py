"""One of the engines behind a client: its link, what is known of it, and what it has been given."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from penstock.core.messages import BlocksTold, EngineInfo, EngineSnapshot, Outputs
from penstock.core.replica_roles import MIXED
from penstock.core.request import FENCED, Abort, Control, Intake, Request
from penstock.engine.link import Down, LateLink, Link
from penstock.engine.replay import Replay, resumed

if TYPE_CHECKING:
    from penstock.base.clock import Clock
    from penstock.core.output import EngineOutput
    from penstock.engine.client import OutputProcessor
    from penstock.engine.stream import Stream
    from penstock.route.router import RoutePolicy


_fences = itertools.count()
MOVED = "moved"
"""Finish reason of a request that another engine goes on with. It never reaches a client."""


class ReplicaOwner(Protocol):
    """The client that a replica belongs to; `frontend.EngineClient` is one."""

    info: EngineInfo | None
    paused: bool
    clock: Clock

    def went_down(self, replica: Replica, down: Down) -> Collection[int]: ...

    def take_in(self, replica: Replica, message: Outputs) -> None: ...

    def given(self, replica: Replica, request: Request) -> Request: ...

    def leave_soon(self, replica: Replica) -> None: ...

    def came_back(self, replica: Replica) -> None: ...

    def refuses(self, info: EngineInfo) -> str: ...


class Placing(Protocol):
    """Chooses between replicas, and counts what each has; `placement.EnginePlacement` is one."""

    router: RoutePolicy
    block_secret: bytes

    def follow(self, info: EngineInfo) -> None: ...

    def told(self, replica: Replica, blocks: BlocksTold) -> None: ...

    def choose(self, stream: Stream, replicas: Sequence[Replica]) -> Replica: ...

    def placed(self, stream: Stream, replica: Replica) -> None: ...

    def progressed(self, request_ids: Sequence[str], replica: Replica) -> None: ...

    def ended(self, request_id: str, replica: Replica) -> None: ...

    def left(self, replica: Replica) -> None: ...


class RunsBeside(Protocol):
    """Goes on while engines live (`engine.rescheduling`)."""

    def begin(self) -> None: ...

    def end(self) -> None: ...


class Replica:
    """A `link.Listener`. `streams`: everything that lives and is its. `late`: its link, if its engine is on another
    host, which comes and goes."""

    def __init__(
        self, owner: ReplicaOwner, number: int, link: Link, processor: OutputProcessor, late: LateLink | None = None
    ) -> None:
        self._owner, self.number, self.link, self._processor, self.late = owner, number, link, processor, late
        self.streams: dict[str, Stream] = {}
        self.role = MIXED
        """What it is for (`core.replica_roles`)."""
        self.snapshot = EngineSnapshot()
        self.state = "starting" if late is None else "away"
        self.reason = "" if late is None else "its host has not come yet"
        self.missed = late is not None
        """Its host has been away for so long that nobody waits for it; it may come all the same."""
        self.loading = (0, 0)
        self.num_restarts = 0
        self.epoch = 0
        self.draining = False
        """It is given nothing new."""
        self.leaving: dict[str, str] = {}
        """Requests that were moved away while the engine lives; what it says of them before this fence is nobody's."""
        self.noticed = False
        """Its engine's process was told that it will be ended."""
        self.info: EngineInfo | None = None
        self.since_s = 0.0
        """When its engine was ready, on the client's clock."""
        self._before: dict[str, float] = {}
        """Counters of its engines that have ended."""
        self.replay = Replay(processor, link.send, self.all_clear)

    def on_up(self, info: EngineInfo, epoch: int) -> None:
        if self.late is None or self._owner.info is None:
            self._owner.info = info
        self.num_restarts += self.state == "restarting" or (self.state == "away" and self.info is not None)
        self.info, self.epoch, self.missed = info, epoch, False
        self.since_s = self._owner.clock.now()
        self.leaving.clear()
        if self.noticed:
            self.noticed = self.draining = False
        self._before = _added([self._before, self.snapshot.counters])
        self.snapshot = EngineSnapshot()
        if self.state == "away":
            self.state = "restarting"
        self.reason = "requests that may have crashed the engine are tried one by one"
        self.replay.begin(stream.request for stream in list(self.streams.values()))

    def all_clear(self) -> None:
        """The engine may be given everything that lives and is its."""
        if self.state not in ("starting", "restarting"):
            return
        self.state, self.reason = "ready", ""
        if self._owner.paused:
            self.link.send([Control(kind="hold")])
        again = [resumed(s.request, self._processor.live(s.request_id)) for s in self.streams.values()]
        items: list[Intake] = [self._owner.given(self, request) for request in again if request is not None]
        if items:
            self.link.send(items)
        self._owner.came_back(self)

    @property
    def is_hopeless(self) -> bool:
        """Nothing may wait for it."""
        return self.state == "failed" or (self.state == "away" and self.missed)

    def refuses(self, info: EngineInfo) -> str:
        """See `link.Listener`."""
        return self._owner.refuses(info)

    def let_go(self, stream: Stream) -> None:
        """Another goes on with `stream`. What this engine still says of it is nobody's."""
        del self.streams[stream.request_id]
        if self.state != "ready":
            return
        fence = self.leaving[stream.request_id] = f"fence-{next(_fences)}"
        self.link.send([Abort(request_id=stream.request_id, reason=MOVED), Control(kind="fence", request_id=fence)])

    def without_left(self, outputs: list[EngineOutput], living: Mapping[str, Stream]) -> list[EngineOutput]:
        """What is news of its own requests, and of such as nobody has any more."""
        found = []
        for out in outputs:
            if out.finish_reason == FENCED:
                self.leaving = {name: fence for name, fence in self.leaving.items() if fence != out.request_id}
            elif out.request_id in self.leaving:
                continue
            elif out.request_id in self.streams or out.request_id not in living:
                found.append(out)
        return found

    @property
    def counted(self) -> EngineSnapshot:
        """What it said last, with counters over all engines that it has had."""
        return msgspec.structs.replace(self.snapshot, counters=_added([self._before, self.snapshot.counters]))

    def on_loading(self, done: int, total: int) -> None:
        self.loading = (done, total)

    def on_down(self, down: Down) -> Collection[int]:
        self.reason = down.reason
        return self._owner.went_down(self, down)

    def on_outputs(self, message: Outputs) -> None:
        if message.epoch == self.epoch:
            self._owner.take_in(self, message)
            if message.snapshot is not None and message.snapshot.leaving and not self.noticed:
                self._owner.leave_soon(self)


_LARGEST = ("time_s", "step", "step_s", "prefill_token_s")
"""Of a snapshot, what is not added up: the largest counts."""


def summed(snapshots: Sequence[EngineSnapshot]) -> EngineSnapshot:
    """What several engines say, as of one: counts are added, times are the longest, lists are the first one's."""
    first, *others = snapshots
    if not others:
        return first
    changed: dict[str, object] = {}
    for name in EngineSnapshot.__struct_fields__:
        values = [getattr(snapshot, name) for snapshot in snapshots]
        if isinstance(values[0], dict) and name in ("counters", "memory_bytes"):
            changed[name] = _added(values)
        elif name in _LARGEST:
            changed[name] = max(values)
        elif isinstance(values[0], bool):
            changed[name] = any(values)
        elif isinstance(values[0], int | float):
            changed[name] = sum(values)
    return msgspec.structs.replace(first, **changed)


def _added(values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for value in values:
        for key, number in value.items():
            total[key] = total.get(key, 0) + number
    return total
