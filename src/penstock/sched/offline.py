"""Offline work in what online requests leave: a scheduling policy around another.

Online requests are scheduled as `inner` has it, as if there were nobody else; offline ones follow, in the order of a
policy of their own, and take no more than this:

- while a prompt of an online request waits or is computed: nothing;
- beside online decodes: so many tokens that the step takes `slowdown` longer at most;
- alone: so many that the step takes `step_s` at most, or as long as two of one token if that is longer (a shorter one
  would have few tokens for its time). So long at most does an online request that comes then wait for the end of a step
  that it has no part in (for each step that may be in flight).

What tokens take is measured (`sched.pace`), so a replay decides the same. Places and memory of offline work belong to
whoever comes online: the newest gives way, at once. Its full blocks stay in the prefix cache, and in the tiers behind
it, until somebody needs the room, and are found there again. Work that has been offline for as long as its request says
(`Request.offline_s`) is online from then on: nobody waits for ever.
Sources: ConServe, arXiv 2410.01228, section 4 (a step's offline tokens fit the online objectives; offline work yields
to arrivals; its cache is checkpointed as it grows). It does not yield between layers here: a step alone is short.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence as Seq
from math import inf
from typing import TYPE_CHECKING, Any, Protocol

from penstock.core.sequence import NEVER, Sequence, Status
from penstock.sched.shares import WithShares

if TYPE_CHECKING:
    from penstock.core.events import EngineStats
    from penstock.core.protocols import SchedulingPolicy
    from penstock.sched.pauses import Pauses

SHORTEST = 2
"""Steps of one token that a step alone may always be as long as."""
LOOK_S = 1.0
"""How often offline work is looked through for whose time as such is over."""
GROWTH, FORGETTING = 2, 0.98
"""A step with offline work has at most so many times the tokens of the largest of late: what larger ones take is not
known. How much of the largest counts a step later."""


class OfflineQueues(Protocol):
    """The scheduler, as far as offline work concerns it."""

    pauses: Pauses
    stats: EngineStats
    waiting: list[Sequence]
    running: list[Sequence]
    block_size: int
    max_num_batched_tokens: int


class WithOffline:
    """See `core.protocols.SchedulingPolicy`; online work is as the policy `inner` has it, offline work as `own` has."""

    def __init__(self, inner: SchedulingPolicy, own: SchedulingPolicy, *, step_s: float, slowdown: float) -> None:
        """`step_s`: seconds of a step without online work; `slowdown`: a share, 0.1 for a tenth."""
        self._inner, self._own = inner, own
        self._step_s, self._slowdown = step_s, slowdown
        self._now_s = self._looked_s = 0.0
        self._largest = 0.0
        self._counted = 0
        """Tokens of the largest step of late; those of all steps."""
        self._limit = 0
        """Tokens that this step may come to with offline work."""
        self._held_back = self._gives_way = self._waits = False
        self.queues: OfflineQueues | None = None
        """The scheduler, once there is one."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def take(self, inner: SchedulingPolicy) -> None:
        """Another policy for online work from the next step on: the innermost one is replaced."""
        if isinstance(self._inner, WithShares):
            self._inner.take(inner)
        else:
            self._inner = inner

    # -- one step ------------------------------------------------------------------------------------------------

    def begin_step(self, now_s: float, kv: Any) -> None:
        self._now_s = now_s
        self._inner.begin_step(now_s, kv)
        self._own.begin_step(now_s, kv)
        if self.queues is None:
            return
        total = self.queues.stats.num_scheduled_tokens
        self._largest = max(FORGETTING * self._largest, total - self._counted)
        self._counted = total
        if now_s >= self._looked_s + LOOK_S:
            self._looked_s = now_s
            self._promote(self.queues)

    def _promote(self, queues: OfflineQueues) -> None:
        for queue in (queues.waiting, queues.running):
            for seq in queue[online(queue) :]:
                if self._now_s >= seq.request.arrival_s + (seq.request.offline_s or 0.0):
                    queue.remove(seq)
                    seq.offline = False
                    insort(queue, seq, key=self.key)

    def key(self, seq: Sequence) -> tuple[int, ...]:
        """All that is offline behind all that is online."""
        return (NEVER, *self._own.key(seq)) if seq.offline else self._inner.key(seq)

    def not_before_s(self, running: Seq[Sequence], waiting: Seq[Sequence]) -> float | None:
        """Who waits for company does not keep offline work from running meanwhile."""
        r, w = online(running), online(waiting)
        until_s = self._inner.not_before_s(running[:r], waiting[:w])
        self._waits = until_s is not None and self._now_s < until_s
        offline = any(not seq.held for seq in (*running[r:], *waiting[w:]))
        return None if offline else until_s

    def order(self, running: Seq[Sequence], waiting: Seq[Sequence]) -> list[Sequence]:
        self._held_back = False
        r, w = online(running), online(waiting)
        if r == len(running) and w == len(waiting):
            return self._inner.order(running, waiting)
        first = self._inner.order(running[:r], [] if self._waits else waiting[:w])
        room = self._room(running[:r], waiting[:w])
        if room <= 0:
            self._held_back = True
            return first
        return first + self._offered(running[r:], waiting[w:], room)

    def _room(self, running: Seq[Sequence], waiting: Seq[Sequence]) -> int:
        """Tokens that offline work may have beside these online sequences."""
        gives_way, self._gives_way = self._gives_way, False
        at_work = [s for s in running if not s.held and s.status is Status.RUNNING and s.lag + s.num_inflight > 0]
        prompts = any(not s.is_decoding for s in at_work) or (not self._waits and any(not s.held for s in waiting))
        if prompts and not gives_way:
            self._limit = 0
            return 0
        decodes = len(at_work)
        if decodes:
            pace = self.queues.pauses.pace if self.queues is not None else None
            most = None if pace is None else pace.tokens_within((1 + self._slowdown) * pace.compute_s(decodes))
            self._limit = decodes if most is None else self._known(most)
        else:
            self._limit = max(1, self._alone())
        return self._limit - decodes

    def _alone(self) -> int:
        if self.queues is None:
            return NEVER
        pace = self.queues.pauses.pace
        most = pace.tokens_within(max(self._step_s, SHORTEST * pace.compute_s(1)))
        return self.queues.block_size if most is None else self._known(most)

    def _known(self, most: int) -> int:
        """At most as many as what is known of the pace is good for."""
        assert self.queues is not None
        return min(most, max(self.queues.block_size, int(GROWTH * self._largest)))

    def _offered(self, running: Seq[Sequence], waiting: Seq[Sequence], room: int) -> list[Sequence]:
        """The first in `own`'s order: as many decodes as have room, and those that wait if not all of it is taken."""
        out, decodes = [], 0
        full = sum(not seq.held for seq in running) >= room
        for seq in self._own.order(running, waiting):
            if seq.status is Status.WAITING:
                if full:
                    break
            elif seq.is_decoding:
                decodes += 1
                if decodes > room:
                    continue
            out.append(seq)
        return out

    def num_tokens(self, seq: Sequence, lag: int, budget_left: int) -> int:
        if not seq.offline:
            return self._inner.num_tokens(seq, lag, budget_left)
        used = 0 if self.queues is None else self.queues.max_num_batched_tokens - budget_left
        return max(0, min(self._own.num_tokens(seq, lag, budget_left), self._limit - used))

    def leaves(self, running: Seq[Sequence], waiting: Seq[Sequence]) -> Seq[Sequence]:
        return self._inner.leaves(running[: online(running)], waiting[: online(waiting)])

    def next_run_s(self, seqs: Seq[Sequence]) -> list[float]:
        """Offline work: nobody knows when."""
        known = iter(self._inner.next_run_s([seq for seq in seqs if not seq.offline]))
        return [inf if seq.offline else next(known) for seq in seqs]

    def outranks(self, seq: Sequence, other: Sequence) -> bool:
        if seq.offline != other.offline:
            return other.offline
        return (self._own if seq.offline else self._inner).outranks(seq, other)

    def give_way(self) -> bool:
        """Nobody could run. Whether offline work was held back, for once in vain: then it may run now."""
        self._gives_way, self._held_back = self._held_back, False
        return self._gives_way

    # -- whose memory and places ---------------------------------------------------------------------------------

    @property
    def displaces(self) -> bool:
        queues = self.queues
        yields = queues is not None and bool(queues.running) and queues.running[-1].offline
        return self._inner.displaces or self._own.displaces or (yields and online(queues.waiting) > 0)  # type: ignore[union-attr]

    def claims(self, waiting: Seq[Sequence]) -> Seq[Sequence]:
        w = online(waiting)
        claims = list(self._inner.claims(waiting[:w]))
        if self._own.displaces and w < len(waiting):
            claims += self._own.claims(waiting[w:])
        return claims

    def displaced(self, running: Seq[Sequence], newcomer: Sequence) -> Sequence | None:
        r = online(running)
        if newcomer.offline:
            return self._own.displaced(running[r:], newcomer)
        return _newest(running[r:]) or self._inner.displaced(running[:r], newcomer)

    def victim(self, running: Seq[Sequence], needy: Sequence) -> Sequence | None:
        r = online(running)
        if needy.offline:
            return self._own.victim(running[r:], needy)
        return _newest(running[r:]) or self._inner.victim(running[:r], needy)


def online(queue: Seq[Sequence]) -> int:
    """How many of a queue are online: they come first."""
    if not queue or not queue[-1].offline:
        return len(queue)
    return bisect_left(queue, True, key=lambda seq: seq.offline)


def _newest(running: Seq[Sequence]) -> Sequence | None:
    """The newest that no step works on."""
    return next((seq for seq in reversed(running) if seq.num_inflight == 0 and seq.tables), None)
