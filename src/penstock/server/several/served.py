"""One of several models: its engine, whether that is there, and what it takes while it is."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from penstock.base.errors import RefusedError
from penstock.server.distribution import REQUEST_S, Distribution

if TYPE_CHECKING:
    from penstock.engine.frontend import EngineClient

AWAKE, DOZING, GONE = 0, 1, 2
"""Levels of sleep, vLLM's numbers: the engine with its KV; the engine without; no engine."""


class ServedModel:
    """`names`: by which requests call it now, its adapters among them. `place`: whose memory it takes. Units: bytes,
    seconds."""

    def __init__(
        self, name: str, client: EngineClient, weight_bytes: int, kv_bytes: int, place: str = "", *,
        keep_alive_s: float = 0.0, names: Callable[[], Iterable[str]] = tuple, max_waiting: int = 0,
        max_wait_s: float = 0.0, grows: bool = True,
    ) -> None:  # fmt: skip
        """`keep_alive_s`: infinite for ever. `max_waiting`: requests that may wait for its start, `max_wait_s`: for how
        long they may wait for memory; 0: no limit. `grows`: its KV takes memory as it is used, and can give it back
        while its engine stays."""
        self.name, self.client, self.place, self.names = name, client, place, names
        self.weight_bytes, self.kv_bytes = weight_bytes, kv_bytes
        self._dozing_bytes = weight_bytes if grows else weight_bytes + kv_bytes
        self.default_keep_alive_s = self.keep_alive_s = keep_alive_s
        self.max_waiting, self.max_wait_s = max_waiting, max_wait_s
        self.level = GONE if client.state == "asleep" else AWAKE
        self.used_s = 0.0
        """When it was last asked for, or a request of it ended."""
        self.coming: asyncio.Task[None] | None = None
        self.leaving: asyncio.Task[None] | None = None
        self.in_line = False
        """Its start waits for memory."""
        self.num_waiting = 0
        self.failed_s: float | None = None
        """When its engine was given up."""
        self.refused_until_s = 0.0
        """A start has failed; the next is not tried before."""
        self.num_starts = 0
        self.stops: Counter[str] = Counter({"idle": 0, "memory": 0, "asked": 0, "failed": 0})
        self.start_s = Distribution(REQUEST_S)

    @property
    def num_bytes(self) -> int:
        """With all that it may take."""
        return self.weight_bytes + self.kv_bytes

    @property
    def held_bytes(self) -> int:
        """Now."""
        return {AWAKE: self.num_bytes, DOZING: self._dozing_bytes, GONE: 0}[self.level]

    @property
    def is_gone(self) -> bool:
        return self.level == GONE

    @property
    def is_up(self) -> bool:
        return self.level == AWAKE and self.coming is None and self.leaving is None

    @property
    def is_idle(self) -> bool:
        """It can leave now."""
        begins = not self.in_line and (self.coming is not None or self.num_waiting > 0)
        return not (self.num_at_work or begins or self.leaving is not None)

    @property
    def num_at_work(self) -> int:
        """Requests that have to end before it can leave. Those of one that dozes wait for their turn and wait on."""
        return 0 if self.level == DOZING else self.client.num_live

    @property
    def state(self) -> str:
        """For people: absent, waiting (for memory), starting, leaving, sleeping (level 1), or what its client says."""
        if self.leaving is not None:
            return "leaving"
        if self.coming is not None:
            return "waiting" if self.in_line else "starting"
        return {GONE: "absent", DOZING: "sleeping"}.get(self.level, self.client.state)

    def refusal(self, why: str, retry_after_s: float, code: str) -> RefusedError:
        return RefusedError(
            f"the model {self.name} {why}", status=503, code=code, retry_after_s=max(1.0, retry_after_s)
        )
