"""The poison rule (DESIGN 3.8): which requests may have crashed the engine, and how that is found out.

Those in the step that crashed are suspects. The next engine is given each of them alone, until it has yielded a token;
only then everything that lives. A suspect with which the engine dies a second time, alone, is guilty. Suspicion ends
after some more tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

CLEAR_AFTER = 16
"""Tokens that clear a suspect."""


class Suspects:
    """`trial`: who runs alone now, if anybody."""

    def __init__(self) -> None:
        self.trial: str | None = None
        self._strikes: dict[str, int] = {}
        self._queue: list[str] = []

    def crashed(self, working_on: Collection[str]) -> str | None:
        """The engine died while it worked on these. Returns the request that is guilty of it, if that is certain."""
        guilty = self.trial if self.trial is not None and set(working_on) == {self.trial} else None
        for request_id in working_on:
            self._strikes[request_id] = 0
        self.trial = None
        if guilty is not None:
            del self._strikes[guilty]
        return guilty

    def begin(self, live: Iterable[str]) -> None:
        """A new engine is there: those of `live` with a strike will be tried, in this order."""
        self._queue = [request_id for request_id in live if request_id in self._strikes][::-1]

    def next(self) -> str | None:
        """The next one to try alone; None when all have been."""
        self.trial = self._queue.pop() if self._queue else None
        return self.trial

    def committed(self, request_id: str, num_tokens: int) -> None:
        if request_id in self._strikes:
            self._strikes[request_id] += num_tokens
            if self._strikes[request_id] >= CLEAR_AFTER:
                del self._strikes[request_id]

    def forget(self, request_id: str) -> None:
        """It has ended."""
        self._strikes.pop(request_id, None)

    def has_strike(self, request_id: str) -> bool:
        return request_id in self._strikes
