"""What an engine's prefix cache holds, as changes from step to step, for the router of its server.

The events are those for subscribers (`kv.events`), brought down to names: whoever routes wants to know whether a block
is there, on the device or in the host's tier, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.core.kv_events import DEVICE, HOST, BlockRemoved, BlockStored, KVEvent
from penstock.core.messages import BlocksTold

_BITS = {DEVICE: 1, HOST: 2}
Tell = Callable[[list[KVEvent]], bool]


class BlockNews:
    """Goes where `EngineCore.tell_events` is. `beside`: hears the same events."""

    def __init__(self, beside: Tell | None = None) -> None:
        self._beside = beside
        self._places: dict[int, int] = {}
        self._changed: dict[int, None] = {}
        self._cleared = False

    def __call__(self, events: list[KVEvent]) -> bool:
        places = self._places
        for event in events:
            if isinstance(event, BlockStored | BlockRemoved):
                bit = _BITS.get(event.medium or DEVICE, 0)
                if not bit:
                    continue  # a store has it, which all engines read
                for name in event.block_hashes:
                    now = places.get(name, 0)
                    places[name] = now | bit if isinstance(event, BlockStored) else now & ~bit
                    self._changed[name] = None
            else:
                places.clear()
                self._changed.clear()
                self._cleared = True
        return True if self._beside is None else self._beside(events)

    def take(self) -> BlocksTold | None:
        """What has changed since this was last asked; never more names than the cache has had blocks meanwhile."""
        if not (self._changed or self._cleared):
            return None
        stored, removed = list[int](), list[int]()
        for name in self._changed:
            if self._places.get(name):
                stored.append(name)
            else:
                self._places.pop(name, None)
                removed.append(name)
        told = BlocksTold(self._cleared, stored, removed)
        self._changed.clear()
        self._cleared = False
        return told
