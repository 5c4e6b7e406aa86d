"""`--autoscale`: engines are added and removed with the load, by the scalers of `route.scale`.

Looks once a second, orders, and goes on looking: an engine that starts, or ends what it has, keeps nobody waiting.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from penstock.base.errors import ConfigError, PenstockError
from penstock.route.scale import make_scaler
from penstock.route.scale.scaler import FleetView, Scaler

if TYPE_CHECKING:
    from penstock.base.clock import Clock
    from penstock.config import ServeConfig
    from penstock.engine.frontend import EngineClient
    from penstock.engine.membership import ReplicaFacts, ReplicaSet
    from penstock.server.context import Server

log = logging.getLogger("penstock.server")
LOOK_S = 1.0
DRAIN_S = 30.0
"""What an engine has that is to go may run so long there; then it goes on with the others, with the same tokens."""
AGAIN_S = 30.0
"""After an engine that could not be started, none is ordered for so long."""
KEPT = 32
"""Decisions that are remembered for the page."""
_US = 1_000_000


@dataclass(frozen=True)
class ScaleDecision:
    """At `at_s` (the client's clock) `wanted` engines were wanted where `had` were ready or starting."""

    at_s: float
    had: int
    wanted: int
    why: str


class Autoscaling:
    """`scaler` over `group`, from `start` to `close`. All methods belong to the event loop's thread.

    Args:
        requests: those that are not finished. arrived: all that ever came.
        start_s: how long an engine took to start; what is seen later counts from then on.

    Attributes:
        wanted: engines; decisions: the last ones; counts: "up", "down", and "failed" starts.
    """

    def __init__(
        self, group: ReplicaSet, scaler: Scaler, least: int, most: int, clock: Clock, *,
        requests: Callable[[], int], arrived: Callable[[], int], start_s: float = 0.0,
    ) -> None:  # fmt: skip
        self._group, self._scaler, self.least, self.most, self._clock = group, scaler, least, most, clock
        self._requests, self._arrived, self._start_s = requests, arrived, start_s
        self._arrived_before = arrived()
        self._not_before_s = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._removing: set[int] = set()
        self._adding = 0
        self.wanted = 0
        self.decisions: deque[ScaleDecision] = deque(maxlen=KEPT)
        self.counts: Counter[str] = Counter({"up": 0, "down": 0, "failed": 0})

    def start(self) -> None:
        self._begin(self._run())

    async def close(self) -> None:
        """Nothing more is ordered. What was begun is whoever's who does it."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def look(self) -> None:
        """See how things are, and order what is wanted."""
        ready = self._free()
        view = self._view(len(ready))
        size = self._scaler.decide(view)
        self.wanted = size.engines
        more, fewer = size.engines - view.engines, min(view.engines - size.engines, len(ready) - 1)
        if more > 0 and self._clock.now() >= self._not_before_s:
            self._note("up", view.engines, size.engines, size.why)
            for _ in range(more):
                self._adding += 1
                self._begin(self._add())
        elif fewer > 0:
            self._note("down", view.engines, view.engines - fewer, size.why)
            for facts in sorted(ready, key=lambda one: (one.requests, -one.number))[:fewer]:
                self._removing.add(facts.number)
                self._begin(self._remove(facts.number))

    def _free(self) -> list[ReplicaFacts]:
        """Engines that work and are to stay."""
        return [
            one for one in self._group.describe()
            if one.state == "ready" and not one.draining and one.number not in self._removing
        ]  # fmt: skip

    def _view(self, ready: int) -> FleetView:
        coming = sum(one.state == "restarting" and not one.draining for one in self._group.describe())
        arrived, before = self._arrived(), self._arrived_before
        self._arrived_before = arrived
        return FleetView(
            round(self._clock.now() * _US), ready, coming + self._adding, self._requests(), arrived - before,
            round(self._start_s * _US), self.least, self.most,
        )  # fmt: skip

    def _note(self, direction: str, had: int, wanted: int, why: str) -> None:
        self.counts[direction] += 1
        self.decisions.append(ScaleDecision(self._clock.now(), had, wanted, why))
        log.info("autoscale: %d -> %d engines: %s", had, wanted, why)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                self.look()
            except Exception:  # a look that fails must not be the last one
                log.exception("autoscale: a look failed")

    async def _add(self) -> None:
        began_s = self._clock.now()
        try:
            await self._group.add()
            self._start_s = self._clock.now() - began_s
        except (PenstockError, OSError) as error:
            self.counts["failed"] += 1
            self._not_before_s = self._clock.now() + AGAIN_S
            log.error("autoscale: an engine could not be added, and none is for %g s: %s", AGAIN_S, error)
        finally:
            self._adding -= 1

    async def _remove(self, number: int) -> None:
        try:
            await self._group.remove(number, DRAIN_S)
        except (PenstockError, OSError) as error:
            self.counts["failed"] += 1
            log.error("autoscale: engine %d stays: %s", number, error)
        finally:
            self._removing.discard(number)


def check_autoscale(config: ServeConfig) -> None:
    """What of the settings makes no sense together, before anything starts. Raises ConfigError."""
    server, run = config.server, config.engine.execution
    if server.autoscale is None:
        if server.min_replicas is not None:
            raise ConfigError(
                "min_replicas: engines leave by themselves only with autoscale; give autoscale, or leave min_replicas "
                "away",
                field="min_replicas",
            )
        return
    make_scaler(server.autoscale)
    least, size, most = server.min_replicas or run.data_parallel_size, run.data_parallel_size, run.most_replicas
    if most == 1:
        raise ConfigError(
            "autoscale: there may be one engine and no more; give max_replicas, 2 or more", field="autoscale"
        )
    if least > most:
        raise ConfigError(
            f"min_replicas: {least} are more than max_replicas {most}; give {most} or fewer", field="min_replicas"
        )
    if least > size:
        raise ConfigError(
            f"min_replicas: {least} are more than the engines that the server begins with; give data_parallel_size "
            f"{least}",
            field="min_replicas",
        )
    if least == most:
        raise ConfigError(
            f"autoscale: between min_replicas {least} and max_replicas {most} there is nothing to scale; leave "
            "autoscale away, or give max_replicas more",
            field="autoscale",
        )


def add_scaling(server: Server, config: ServeConfig) -> None:
    """Over the server's `ReplicaSet`, if it is wanted; `check_autoscale` has looked."""
    if config.server.autoscale is None:
        return
    run, client = config.engine.execution, server.client
    scaling = server.parts["autoscale"] = Autoscaling(
        server.parts["replicas"], make_scaler(config.server.autoscale),
        config.server.min_replicas or run.data_parallel_size, run.most_replicas, client.clock,
        requests=lambda: client.num_live, arrived=arrivals_of(client), start_s=_start_s(client),
    )  # fmt: skip
    scaling.start()
    server.closers.append(scaling.close)


def autoscale_shown(server: Server) -> dict[str, Any] | None:
    """What it wants, and its last decisions; None where engines do not come and go by themselves."""
    scaling: Autoscaling | None = server.parts.get("autoscale")
    if scaling is None:
        return None
    return {
        "policy": server.config.autoscale, "least": scaling.least, "most": scaling.most, "wanted": scaling.wanted,
        "counts": dict(scaling.counts), "decisions": [asdict(one) for one in scaling.decisions],
    }  # fmt: skip


def arrivals_of(client: EngineClient) -> Callable[[], int]:
    """Counts all requests that ever came: those that live, and those that have ended from now on."""
    ended = 0

    def on_finish(*_: object) -> None:
        nonlocal ended
        ended += 1

    client.on_finish.append(on_finish)
    return lambda: ended + client.num_live


def _start_s(client: EngineClient) -> float:
    info = client.info
    return 0.0 if info is None else sum(took_s for _, took_s in info.start_parts) or info.load_s
