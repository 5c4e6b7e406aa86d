"""Priority scheduling with ageing: smaller `Request.priority` first, order of arrival within a class.

A request gains one level per `ageing_s` seconds since its arrival: effective priority = priority - age / ageing_s. Two
requests age alike, so their order never changes, and it is that of the fixed key priority * ageing_s + arrival_s: a
virtual arrival time. Hence nobody starves (only finitely many requests can ever have a smaller key), the queues stay
sorted, and no clock is read here.

Decodes still run first (a prefill of any class stalls no stream); prefills and waiting requests follow by key. Who
needs memory takes it from the largest key. A waiting request displaces running ones only of a worse class that also
have a larger key: those that have aged past it keep what they have, so two requests never displace each other in turn.
The price of ageing: in an overload longer than (levels between two classes) * ageing_s, old requests of the worse class
go before new ones of the better class, which then waits too. Set it longer than the overloads to be shielded from.
Sources: Paella, SOSP 2023 (a software scheduler, not the hardware queue, picks the next unit of work); vLLM's
`--scheduling-policy priority` (meaning of the numbers).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Seq

from penstock.base.errors import ConfigError
from penstock.core.sequence import Sequence
from penstock.sched.policy.fcfs import Fcfs


class Priority(Fcfs):
    """Args: ageing_s: seconds of age that make up for one level of priority, > 0."""

    name = "priority"
    displaces = True

    def __init__(self, ageing_s: float = 60.0) -> None:
        if not ageing_s > 0:
            raise ConfigError(f"ageing_s is {ageing_s}; without ageing, low priority can starve", field="ageing_s")
        self._ageing_us = round(ageing_s * 1e6)

    def key(self, seq: Sequence) -> tuple[int, ...]:
        """(virtual arrival in microseconds, arrival, sample)."""
        request = seq.request
        virtual_us = request.priority * self._ageing_us + round(request.arrival_s * 1e6)
        return (virtual_us, seq.arrival, seq.index)

    def order(self, running: Seq[Sequence], waiting: Seq[Sequence]) -> list[Sequence]:
        ordered = [s for s in running if s.is_decoding]
        done = 0
        if len(ordered) < len(running):
            for seq in running:
                if not seq.is_decoding:
                    ahead = bisect_left(waiting, self.key(seq), lo=done, key=self.key)
                    ordered += waiting[done:ahead]
                    ordered.append(seq)
                    done = ahead
        ordered += waiting[done:]
        return ordered

    def displaced(self, running: Seq[Sequence], newcomer: Sequence) -> Sequence | None:
        """The running sequence with the largest key among those of a worse class than `newcomer`'s."""
        mine = self.key(newcomer)
        for seq in reversed(running):
            if self.key(seq) < mine:
                return None
            if seq.request.priority > newcomer.request.priority and seq.num_inflight == 0 and seq.tables:
                return seq
        return None
