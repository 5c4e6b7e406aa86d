"""Work that is done when the engine has time left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class SpareWork(Protocol):
    """Called by the engine's loop, in its thread, between steps. It never changes a token, and raises nothing."""

    def rest(self, called: Callable[[], bool]) -> bool:
        """There is nothing else to do: work until `called`, or for a moment. False: there is no such work either."""
        ...

    def counters(self) -> dict[str, float]:
        """For the engine's metrics, by their names there."""
        ...

    def between(self, step_s: float) -> None:
        """A step that took so long is over, and another one will follow: work for a small share of that time."""
        ...
