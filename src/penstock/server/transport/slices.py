"""Long work on the event loop, in slices: everybody else gets their turn between two of them.

Whoever has work that may take more than some milliseconds awaits `pause()` every millisecond or so:

    work = server.slices.work(tenant)
    for item in many:
        await work.pause()
        ...

A thread would not do: Python's lock would still be held, by whoever has it, for as long as one call takes.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Generator
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from penstock.server.call import Tenant

T = TypeVar("T")

SLICE_S = 0.005
"""Seconds after which work pauses when it is asked to: far below the 50 ms that nothing may exceed."""


class Slices:
    """Lets one slice pass per round of the event loop. Tenants take turns, whatever number of slices each waits for."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[asyncio.Future[None]]] = {}
        self._turning = False

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def work(self, tenant: Tenant) -> Work:
        return Work(self, tenant.name)

    async def turn(self, name: str) -> None:
        """Wait for a round of the loop that is `name`'s."""
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self._lines.setdefault(name, deque()).append(turn)
        if not self._turning:
            self._turning = True
            loop.call_soon(self._next)
        await turn

    def _next(self) -> None:
        while self._lines:
            name, line = next(iter(self._lines.items()))
            del self._lines[name]
            turn = line.popleft()
            if line:
                self._lines[name] = line  # behind everybody else
            if not turn.done():  # otherwise its client has gone
                turn.set_result(None)
                asyncio.get_running_loop().call_soon(self._next)
                return
        self._turning = False


class Work:
    """One piece of long work: it goes on for a slice, then waits for its tenant's next turn."""

    def __init__(self, slices: Slices, name: str) -> None:
        self._slices = slices
        self._name = name
        self._until_s = 0.0

    async def pause(self) -> None:
        """Go on at once while the slice lasts; behind any other wait a new one begins with a turn."""
        if time.perf_counter() >= self._until_s:
            await self._slices.turn(self._name)
            self._until_s = time.perf_counter() + SLICE_S

    async def run(self, steps: Generator[None, None, T]) -> T:
        """What `steps` returns; it yields where it may be interrupted."""
        while True:
            await self.pause()
            try:
                next(steps)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]


def whole(steps: Generator[None, None, T]) -> T:
    """What `steps` returns, without a pause."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
