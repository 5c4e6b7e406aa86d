"""Stored responses: bounded by number, bytes and age, and each tenant sees only its own."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from penstock.base.clock import Clock
    from penstock.server.call import Tenant
    from penstock.server.context import Server

MAX_BYTES = 64 << 20
OVERHEAD = 512
"""Bytes that an entry takes besides its contents, about."""


@dataclass(frozen=True)
class Stored:
    """A finished response, encoded.

    Attributes:
        response: the object as JSON.
        items: the whole conversation up to and with its output, a JSON list of items.
        num_input: how many of `items` came before the output.
        frames: the events of its stream, if it was streamed.
        output_ids: the ids of the items of its output, by which requests may refer to them.
    """

    id: str
    response: bytes
    items: bytes
    num_input: int
    frames: tuple[bytes, ...] = ()
    output_ids: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        return OVERHEAD + len(self.response) + len(self.items) + sum(map(len, self.frames)) + 64 * len(self.frames)


class Running(Protocol):
    """A response that is being made."""

    id: str
    tenant: Tenant

    def cancel(self) -> Awaitable[None]: ...


class ResponseStore:
    """The oldest goes first. Units: `ttl_s` seconds from the end of a response.

    `num_bytes` counts the encoded contents; what is larger than `max_bytes` by itself is not kept.
    """

    def __init__(self, size: int, ttl_s: float, clock: Clock, *, max_bytes: int = MAX_BYTES) -> None:
        self.size = size
        self.ttl_s = ttl_s
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.running: dict[str, Running] = {}
        self._clock = clock
        self._entries: OrderedDict[tuple[str, str], tuple[float, Stored]] = OrderedDict()
        self._makers: dict[tuple[str, str], str] = {}
        """By tenant and item: the response that has it in its output."""

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, tenant: Tenant, entry: Stored) -> bool:
        """Whether it is kept. Mutates: what is too old or too much goes."""
        self.prune()
        if self.size == 0 or entry.num_bytes > self.max_bytes:
            return False
        self.delete(tenant, entry.id)
        self._entries[tenant.name, entry.id] = (self._clock.now() + self.ttl_s, entry)
        self.num_bytes += entry.num_bytes
        self._makers |= {(tenant.name, item_id): entry.id for item_id in entry.output_ids}
        while len(self._entries) > self.size or self.num_bytes > self.max_bytes:
            self._pop_oldest()
        return True

    def get(self, tenant: Tenant, response_id: str) -> Stored | None:
        self.prune()
        found = self._entries.get((tenant.name, response_id))
        return None if found is None else found[1]

    def get_maker(self, tenant: Tenant, item_id: str) -> Stored | None:
        """The response whose output has this item."""
        return self.get(tenant, self._makers.get((tenant.name, item_id), ""))

    def get_running(self, tenant: Tenant, response_id: str) -> Running | None:
        found = self.running.get(response_id)
        return found if found is not None and found.tenant.name == tenant.name else None

    def delete(self, tenant: Tenant, response_id: str) -> bool:
        """Whether it was there."""
        found = self._entries.pop((tenant.name, response_id), None)
        if found is not None:
            self._forget(tenant.name, found[1])
        return found is not None

    def _forget(self, tenant: str, entry: Stored) -> None:
        self.num_bytes -= entry.num_bytes
        for item_id in entry.output_ids:
            self._makers.pop((tenant, item_id), None)

    def prune(self) -> None:
        """Drop what is too old. All live equally long, so the oldest are the first."""
        now = self._clock.now()
        while self._entries and next(iter(self._entries.values()))[0] <= now:
            self._pop_oldest()

    def _pop_oldest(self) -> None:
        (tenant, _), (_, entry) = self._entries.popitem(last=False)
        self._forget(tenant, entry)

    async def close(self) -> None:
        """End what runs, and forget everything."""
        for run in list(self.running.values()):
            await run.cancel()
        self._entries.clear()
        self._makers.clear()
        self.num_bytes = 0


PRUNE_S = 60.0


def _every(seconds: float, f: Callable[[], None]) -> Callable[[], None]:
    """Call `f` regularly until the returned function is called."""
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle

    def again() -> None:
        nonlocal timer
        f()
        timer = loop.call_later(seconds, again)

    timer = loop.call_later(seconds, again)
    return lambda: timer.cancel()


async def install(server: Server) -> None:
    """Add this part to a server that is being built; its engine is ready."""
    config = server.config
    store = ResponseStore(config.response_store_size, config.response_store_ttl, server.service.clock)
    server.parts["store"] = store
    server.closers += [_every(PRUNE_S, store.prune), store.close]
