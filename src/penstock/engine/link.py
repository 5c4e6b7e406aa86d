"""How a front end reaches an engine: one asyncio interface for a thread of this process and for a child process."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.base.errors import EngineError
from penstock.core.messages import EngineInfo, Outputs
from penstock.core.request import Intake
from penstock.core.weight_swap import WeightsOrder


class HostAwayError(EngineError):
    """The host of a `LateLink` is not there, and nobody knows when it will be."""


@dataclass(frozen=True)
class Down:
    """The engine is gone. `suspects`: the requests that it was working on (`blackbox.handle_of`); empty if unknown.

    `fatal`: it will not come back (`reason` says why, in one sentence). `from_outside`: somebody else may have killed
    it. `away`: its host is out of reach, and nobody knows for how long; with `fatal`, for so long that nothing is to
    wait for it any more, though it may still come.
    """

    reason: str
    suspects: tuple[int, ...] = ()
    fatal: bool = False
    from_outside: bool = False
    away: bool = False


class Listener(Protocol):
    """What a link tells its owner, in the event loop's thread."""

    def on_up(self, info: EngineInfo, epoch: int) -> None:
        """An engine is ready. What the last one was given is unknown to this one."""
        ...

    def on_outputs(self, message: Outputs) -> None: ...

    def on_down(self, down: Down) -> Collection[int]:
        """Nothing sent from now on arrives, until `on_up`.

        Returns the engines, by number, whose deaths are the work of a request that has been found guilty now: they say
        nothing against the engine. A link that gives the engine up says so with a second call (`fatal`).
        """
        ...

    def on_loading(self, done: int, total: int) -> None: ...

    def refuses(self, info: EngineInfo) -> str:
        """Why an engine of another host that is like this cannot be one of the owner's, in a sentence; "": it can."""
        ...


class Link(Protocol):
    """One engine. `send` never blocks; it may be called only between `on_up` and `on_down`."""

    weights: WeightsOrder | None
    """What an engine that follows takes up before its first request; None: what it starts with."""

    async def start(self, listener: Listener) -> None:
        """Returns when the engine is ready. Raises what keeps it from starting, with its own class and sentence."""
        ...

    def send(self, items: Sequence[Intake]) -> None: ...

    def progress_age_s(self) -> float:
        """Seconds since the engine last showed that its loop moves; small while it is idle and alive."""
        ...

    async def close(self) -> None:
        """End the engine at once and free everything. May be called twice."""
        ...


class LateLink(Link, Protocol):
    """To one engine on another host, which comes when it comes, goes, and comes again. `start` is for a host that is
    there already: it raises HostAwayError without one."""

    def begin(self, listener: Listener) -> None:
        """Wait for its host from now on, and have an engine there whenever there is one. Not awaited."""
        ...

    def dismiss(self, problem: str) -> None:
        """Its host is to leave, and not to come again: `problem` tells it why. After `close`."""
        ...
