"""Requests of real engines move as a policy says, again and again (`route.rescheduling`)."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from penstock.base.errors import EngineGoneError, InputError
from penstock.core.replica_roles import PREFILL
from penstock.route.rescheduling import EngineMove, Movable, Rescheduler
from penstock.route.router import EngineLoad

if TYPE_CHECKING:
    from penstock.engine.frontend import EngineClient
    from penstock.engine.replica import Replica

EVERY_S = 0.2
"""Between two looks: engines tell of their memory ten times a second."""
_log = logging.getLogger("penstock.engine")


class Rescheduling:
    """Of the engines of one client that decode; all methods belong to the event loop's thread."""

    def __init__(self, client: EngineClient, policy: Rescheduler, every_s: float = EVERY_S) -> None:
        self._client, self._policy, self._every_s = client, policy, every_s
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def end(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            await asyncio.gather(*(self._move(one) for one in self.wanted()))

    async def _move(self, move: EngineMove) -> None:
        try:
            await self._client.handover.migrate(move.name, move.target)
        except (InputError, EngineGoneError) as error:
            _log.info("request %s stays with engine %d: %s", move.name, move.source, error)

    def wanted(self) -> list[EngineMove]:
        """What the policy says now."""
        info = self._client.info
        engines = [r for r in self._client.replicas if r.state == "ready" and r.role != PREFILL and not r.draining]
        if info is None or len(engines) < 2:
            return []
        loads = [EngineLoad(r.number, kv_blocks=r.snapshot.kv_total, block_size=info.block_size) for r in engines]
        return self._policy.moves(loads, {replica.number: self._held(replica) for replica in engines})

    def _held(self, replica: Replica) -> list[Movable]:
        out = []
        for name in replica.streams:
            if (found := self._client.find(name)) is None:
                continue
            stream, live = found
            made = sum(len(sample.token_ids) for sample in live.samples)
            stays = not self._client.handover.can_move(stream)
            num_tokens = len(stream.request.prompt_token_ids) + made
            out.append(Movable(name, num_tokens, not made, stream.request.priority, stays))
        return out
