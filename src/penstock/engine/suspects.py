"""The poison rule: which requests may have crashed the engine, and how that is found out.

Those in the step that crashed are suspects. The next engine is given each of them alone, until it has yielded a token,
only then everything that lives. A suspect with which an engine dies again, alone, is guilty: at once where the engine
died of itself (a signal of its own, an exception, a hung step); at the second such death where somebody outside may
have killed it (SIGKILL: an operator, the kernel out of memory). Between the two it comes first, in an engine that has
done nothing else. Suspicion ends after some more tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

CLEAR_AFTER = 16
"""Tokens that clear a suspect."""


class Verdict(NamedTuple):
    """`explained`: the engines that died with the guilty request in their step, by number."""

    guilty: str | None = None
    explained: frozenset[int] = frozenset()


class Suspects:
    """`trial`: who runs alone now, if anybody."""

    def __init__(self) -> None:
        self.trial: str | None = None
        self._strikes: dict[str, int] = {}
        """Suspects: tokens since the last death."""
        self._deaths: dict[str, set[int]] = {}
        """Engines that died with a suspect in their step."""
        self._died_alone: set[str] = set()
        """With whom an engine died alone, perhaps killed from outside."""
        self._passed: set[str] = set()
        """Suspects that have been tried since the last death with them in the step."""
        self._queue: list[str] = []

    def crashed(
        self, working_on: Collection[str], engine: int = 0, *, from_outside: bool = False, yielded: bool = False
    ) -> Verdict:
        """Engine number `engine` died while it worked on these. `yielded`: whoever is on trial had shown a token."""
        alone = self.trial if self.trial is not None and set(working_on) == {self.trial} and not yielded else None
        self.trial = None
        for request_id in working_on:
            self._strikes[request_id] = 0
            self._deaths.setdefault(request_id, set()).add(engine)
            self._passed.discard(request_id)
        if alone is None:
            return Verdict()
        if from_outside and alone not in self._died_alone:
            self._died_alone.add(alone)
            return Verdict()
        explained = frozenset(self._deaths[alone])
        self.forget(alone)
        return Verdict(alone, explained)

    def begin(self, live: Iterable[str]) -> None:
        """A new engine is there: those of `live` that are still to be tried will be, in this order.

        So one with whom the last engine died alone comes first: whoever was tried before it has passed.
        """
        self._queue = [r for r in live if r in self._strikes and r not in self._passed][::-1]

    def next(self) -> str | None:
        """The next one to try alone; None when all have been. Who was tried until now has passed."""
        if self.trial is not None and self.trial in self._strikes:
            self._passed.add(self.trial)
            self._died_alone.discard(self.trial)
        self.trial = self._queue.pop() if self._queue else None
        return self.trial

    @property
    def num_waiting(self) -> int:
        """Suspects that have not been tried yet, the one on trial among them."""
        return len(self._queue) + (self.trial is not None)

    def committed(self, request_id: str, num_tokens: int) -> None:
        if request_id in self._strikes:
            self._strikes[request_id] += num_tokens
            if self._strikes[request_id] >= CLEAR_AFTER:
                self.forget(request_id)

    def forget(self, request_id: str) -> None:
        """It has ended, or is a suspect no more."""
        self._strikes.pop(request_id, None)
        self._deaths.pop(request_id, None)
        self._died_alone.discard(request_id)
        self._passed.discard(request_id)

    def has_strike(self, request_id: str) -> bool:
        return request_id in self._strikes

    def is_tried(self, request_id: str) -> bool:
        """Whether it runs alone now or still has to."""
        return request_id == self.trial or request_id in self._queue
