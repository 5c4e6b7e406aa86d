"""Engines that come and go behind one client: added, drained, removed, restarted while streams run.

An engine that is drained is given nothing new; what it has runs to its end or, when time is up, goes on with the others
with the same tokens, as it does when an engine dies. Numbers are never used again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from penstock.base.errors import CapacityError, EngineError, PenstockError, RefusedError
from penstock.base.version import __version__
from penstock.engine.capacity import capacity_of
from penstock.engine.link import Down, HostAwayError, Link

if TYPE_CHECKING:
    from penstock.engine.frontend import EngineClient
    from penstock.engine.replica import Replica

log = logging.getLogger("penstock.engine")
_POLL_S = 0.01
OTHERS_READY_S = 60.0
"""How long a restart waits for another engine to be ready before it ends this one."""
Done = TypeVar("Done")


class ReplicaFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One engine as people and scalers see it.

    `state`: starting, ready, restarting, away (its host is out of reach, or has not come yet), stopped or failed;
    `draining`: it is given nothing new; `host`: name and address of its machine, "" for the server's. Units: requests,
    tokens and KV blocks as named; `for_s` seconds since its engine was ready. `hit_tokens` of `query_tokens` of its
    prompts were cached; counters are over all engines that it has had.
    """

    number: int
    state: str
    draining: bool = False
    reason: str = ""
    host: str = ""
    pid: int = 0
    version: str = __version__
    for_s: float = 0.0
    restarts: int = 0
    requests: int = 0
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    kv_used: int = 0
    kv_total: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    generated_tokens: int = 0


class ReplicaSet(Protocol):
    """What a scaler needs of a server. Raises RefusedError, with one sentence, for what cannot be done now."""

    async def add(self) -> int:
        """One engine more; its number, once it is ready. Raises also what keeps it from starting."""
        ...

    async def remove(self, number: int, timeout_s: float | None = None) -> None:
        """Drain it, then end it. `timeout_s`: what it has then goes on with the others; None: however long it takes."""
        ...

    def describe(self) -> list[ReplicaFacts]:
        """All engines, those that are starting among them, by number."""
        ...


class Membership:
    """A `ReplicaSet` over `client`. All methods belong to the event loop's thread.

    Args:
        make_link: reaches a further engine, which it starts.
        most: engines at once; memory and cores were shared out among so many.
        start_tries: how often one that dies while it is started is started in all.
    """

    def __init__(self, client: EngineClient, make_link: Callable[[], Link], most: int, *, start_tries: int = 3) -> None:
        self._client, self._make_link, self.most, self._tries = client, make_link, most, start_tries
        self._next = len(client.replicas)
        self._joining: list[Replica] = []
        self._busy: dict[int, str] = {}
        """Engines that something is being done with, and what."""
        self._tasks: set[asyncio.Task[Any]] = set()

    # -- what may be done ----------------------------------------------------------------------------------------

    async def add(self) -> int:
        """See `ReplicaSet`. Raises RefusedError (409) where there are as many as were planned for."""
        have = len(self._client.replicas) + len(self._joining)
        if have >= self.most:
            raise RefusedError(
                f"there are {have} engines, and memory and cores were shared out among {self.most}; remove one, or "
                f"start the server with --max-replicas {have + 1} or more",
                status=409, code="too_many_replicas",
            )  # fmt: skip
        return await self._whole(self._add())

    async def drain(self, number: int, timeout_s: float | None = None) -> None:
        """Nothing new for it. Returns once it has nothing left; it stays, until `resume` or `remove`."""
        replica = self._claimed(number, "drained", needs_others=True)
        replica.draining = True
        await self._whole(self._release_after(replica, self._empty(replica, timeout_s)))

    async def remove(self, number: int, timeout_s: float | None = None) -> None:
        """See `ReplicaSet`. The last one is refused (409)."""
        replica = self._claimed(number, "removed", needs_others=True)
        replica.draining = True
        await self._whole(self._release_after(replica, self._remove(replica, timeout_s)))

    async def restart(self, number: int, timeout_s: float | None = 0.0) -> float:
        """End its engine and start another in its place; the seconds in which it was away.

        The others go on with what it has after `timeout_s`; without others everything waits for the new engine. Raises
        what keeps that from starting: then it has failed, and may be restarted again, or removed.
        """
        replica = self._claimed(number, "restarted")
        return await self._whole(self._release_after(replica, self._restart(replica, timeout_s)))

    async def restart_all(self, timeout_s: float | None = 0.0) -> dict[int, float]:
        """One after the other; seconds in which each was away. The first that fails ends it: the others serve on."""
        away: dict[int, float] = {}
        for replica in list(self._client.replicas):
            if replica in self._client.replicas and replica.state != "away":  # it will be new when it comes
                away[replica.number] = await self.restart(replica.number, timeout_s)
        return away

    def resume(self, number: int) -> None:
        """It may be given something new again."""
        replica = self._found(number)
        if self._busy.get(number, "drained") != "drained":
            raise self._is_busy(number)
        replica.draining = False

    def describe(self) -> list[ReplicaFacts]:
        replicas = sorted([*self._client.replicas, *self._joining], key=lambda replica: replica.number)
        return [facts_of(replica, self._client.clock.now()) for replica in replicas]

    async def close(self) -> None:
        """Whatever is being done ends, and engines that were about to join with it."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- how it is done ------------------------------------------------------------------------------------------

    async def _add(self) -> int:
        number, self._next = self._next, self._next + 1
        replica = self._client.replica_of(number, self._make_link())
        self._joining.append(replica)
        before = self._client.info
        try:
            await _start(replica, self._tries)
            self._check(replica)
        except BaseException:
            self._client.info = before
            await replica.link.close()
            raise
        finally:
            self._joining.remove(replica)
        self._client.replicas.append(replica)
        log.info("engine %d serves: %d in all", number, len(self._client.replicas))
        return number

    def _check(self, replica: Replica) -> None:
        """Raises CapacityError where it cannot hold what requests were told that they may ask for."""
        new, old = replica.info, next((one.info for one in self._client.replicas if one.info is not None), None)
        if new is None or old is None:
            return
        there, needed = capacity_of(new), capacity_of(old)
        if there < needed:
            raise CapacityError(
                f"a further engine would have memory for {there} tokens of a request, and requests may have {needed}; "
                "free memory, or start the server with a smaller max_model_len", field="max_model_len",
            )  # fmt: skip

    async def _empty(self, replica: Replica, timeout_s: float | None) -> None:
        """Returns when it has nothing left to work on."""
        client, until_s = self._client, None if timeout_s is None else self._client.clock.now() + timeout_s
        while client.unfinished(replica):
            if not replica.draining:  # it was resumed
                return
            if replica.state == "away" or (until_s is not None and client.clock.now() >= until_s):
                client.move_all(replica)
                if not client.unfinished(replica):
                    return
            await asyncio.sleep(_POLL_S)

    async def _remove(self, replica: Replica, timeout_s: float | None) -> None:
        try:
            await self._empty(replica, timeout_s)
        except BaseException:
            replica.draining = False
            raise
        replica.state, replica.reason = "stopped", "it is being removed"
        await replica.link.close()
        if replica.late is not None:
            replica.late.dismiss(
                f"engine {replica.number} was removed at the server; nobody can be it until that is started again"
            )
        self._client.leaves(replica)
        log.info("engine %d was removed: %d serve", replica.number, len(self._client.replicas))

    async def _restart(self, replica: Replica, timeout_s: float | None) -> float:
        client = self._client
        if self._others(replica):
            await self._other_ready(replica)
            replica.draining = True
            await self._empty(replica, timeout_s)
        began_s = client.clock.now()
        replica.state, replica.reason = "starting", "its engine is being replaced"
        try:
            await replica.link.close()
            client.lost_cache(replica)
            await _start(replica, self._tries)
        except (PenstockError, OSError) as error:
            why = f"engine {replica.number} could not be started again: {error}"
            client.went_down(replica, Down(why, fatal=True, away=replica.late is not None))
            replica.reason = str(error)
            if replica.late is not None:  # its host may come again
                replica.late.begin(replica)
            raise
        finally:
            replica.draining = False
        return client.clock.now() - began_s

    async def _other_ready(self, replica: Replica) -> None:
        until_s = self._client.clock.now() + OTHERS_READY_S
        while not any(other.state == "ready" for other in self._others(replica)):
            if self._client.clock.now() >= until_s:
                raise RefusedError(
                    f"engine {replica.number} was not restarted: no other one is ready, and nobody would answer "
                    "meanwhile; try again when one is",
                    status=409, code="no_ready_replica",
                )  # fmt: skip
            await asyncio.sleep(_POLL_S)

    def _others(self, replica: Replica) -> list[Replica]:
        """That could be given what it has."""
        gone = ("failed", "stopped", "away")
        return [r for r in self._client.replicas_open if r is not replica and r.state not in gone]

    def _found(self, number: int) -> Replica:
        for replica in self._client.replicas:
            if replica.number == number:
                return replica
        there = ", ".join(str(replica.number) for replica in self._client.replicas)
        raise RefusedError(f"there is no engine {number}; there are: {there}", status=404, code="not_found")

    def _claimed(self, number: int, what: str, *, needs_others: bool = False) -> Replica:
        replica = self._found(number)
        if number in self._busy:
            raise self._is_busy(number)
        if replica.state == "asleep":
            raise RefusedError(
                f"engine {number} is asleep: it starts anew with the next request, or with /wake_up",
                status=409, code="replica_asleep",
            )  # fmt: skip
        if what == "restarted" and replica.state == "away":
            raise RefusedError(
                f"engine {number} is out of reach: {replica.reason}; it starts anew when its host comes",
                status=409, code="replica_away",
            )  # fmt: skip
        if needs_others and not self._others(replica):
            raise RefusedError(
                f"engine {number} is the last one that takes requests; add one first, or end the server",
                status=409, code="last_replica",
            )  # fmt: skip
        self._busy[number] = what
        return replica

    def _is_busy(self, number: int) -> RefusedError:
        return RefusedError(
            f"engine {number} is being {self._busy[number]}; try again when that is done",
            status=409, code="replica_busy", retry_after_s=1.0,
        )  # fmt: skip

    async def _release_after(self, replica: Replica, work: Coroutine[Any, Any, Done]) -> Done:
        try:
            return await work
        finally:
            self._busy.pop(replica.number, None)

    async def _whole(self, work: Coroutine[Any, Any, Done]) -> Done:
        """Whoever asked may leave: what was begun is ended."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)


async def _start(replica: Replica, tries: int) -> None:
    """Raises what keeps its engine from starting. One that dies of something else meanwhile is started once more."""
    for left in reversed(range(tries)):
        try:
            await replica.link.start(replica)
            return
        except EngineError as error:
            if not left or isinstance(error, HostAwayError):
                raise
            log.warning("engine %d: %s; it is started once more", replica.number, error)
            await replica.link.close()


def facts_of(replica: Replica, now_s: float) -> ReplicaFacts:
    said, counters = replica.snapshot, replica.counted.counters
    works = replica.state == "ready" and replica.info is not None
    return ReplicaFacts(
        number=replica.number, state=replica.state, draining=replica.draining, reason=replica.reason,
        host="" if replica.info is None else replica.info.host,
        pid=replica.info.pid if works and replica.info is not None else 0,
        for_s=round(now_s - replica.since_s, 3) if works else 0.0,
        restarts=replica.num_restarts, requests=len(replica.streams), running=said.num_running,
        waiting=said.num_waiting, waiting_tokens=said.waiting_tokens, kv_used=said.kv_used, kv_total=said.kv_total,
        query_tokens=int(counters.get("num_prefix_queries_tokens", 0)),
        hit_tokens=int(counters.get("num_prefix_hit_tokens", 0)),
        generated_tokens=int(counters.get("num_sampled_tokens", 0)),
    )  # fmt: skip
