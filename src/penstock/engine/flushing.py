"""Orders to flush: whoever hands a request to another engine has to know that its blocks are in the store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.core.output import EngineOutput
from penstock.core.request import FLUSHED

if TYPE_CHECKING:
    from penstock.kv.manager import KVManager


class Flushing:
    """A part of `EngineCore`. An order waits for the blocks that are to be written when it comes, and for no others.

    Mutates: `emitted`, and `kv.swaps.stores_awaited`, by which steps without rows are due while nothing else runs.
    """

    def __init__(self, kv: KVManager, emitted: list[EngineOutput]) -> None:
        self._kv, self._emitted = kv, emitted
        self._orders: dict[str, set[int]] = {}
        if kv.stored is not None:
            kv.stored.reported = self._reported

    def ask(self, name: str) -> None:
        self._orders[name] = set() if self._kv.stored is None else set(self._kv.stored.writing)
        self._reported(-1)

    def _reported(self, move: int) -> None:
        """A step has said what became of it: orders that nothing is left of are answered."""
        for name, moves in list(self._orders.items()):
            moves.discard(move)
            if not moves:
                del self._orders[name]
                self._emitted.append(EngineOutput(request_id=name, index=0, finish_reason=FLUSHED))
        self._kv.swaps.stores_awaited = bool(self._orders)
