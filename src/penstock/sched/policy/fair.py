"""Fair share among tenants: whoever has received least service goes next, whatever the others send.

A counter per tenant counts the service it has received: prompt tokens, and generated tokens twice, divided by its
weight. Waiting requests and unfinished prefills are taken from the tenant with the smallest counter, first come, first
served within a tenant. A tenant that comes back to the queue is lifted to the smallest counter there: being away earns
no credit. Service is counted as it happens, so nobody has to draft the length of an output. Tokens found in the prefix
cache, and what is computed a second time after a preemption, cost nothing.

Decodes of all tenants run in every step. Long ones of one tenant may hold all places: then a newcomer of a tenant with
a smaller share of the places takes one, as long as it does not end with the larger share itself, so two tenants never
displace each other in turn. Memory is taken in the same way. With one tenant this is `fcfs`.
Source: Sheng et al., Fairness in Serving Large Language Models (VTC), OSDI 2024, section 4, algorithm 2; taking places
from running requests is ours (the paper leaves preemption to future work, section 6).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from itertools import islice
from typing import Any

from penstock.base.errors import ConfigError
from penstock.core.sequence import Sequence, Status
from penstock.sched.policy.fcfs import Fcfs

MAX_TENANTS = 4096


@dataclass
class Share:
    """A tenant's counter (weighted tokens), and whether it had somebody waiting in the last step."""

    weight: float = 1.0
    counter: float = 0.0
    queued: bool = False


class Fair(Fcfs):
    """Args:
    output_cost: what a generated token counts, in prompt tokens.
    window: waiting requests offered to one step.
    burst: credit, in prompt tokens, that a tenant may bring back from an absence. It puts so much of a newcomer before
        a flood, and by so much more than the paper's bound two tenants' services may differ.
    """

    name = "fair"
    displaces = True

    def __init__(self, output_cost: float = 2.0, window: int = 64, burst: int = 0) -> None:
        if not output_cost > 0:
            raise ConfigError(f"output_cost is {output_cost}; it must be above 0", field="output_cost")
        if window < 1:
            raise ConfigError(f"window is {window}; it must be at least 1", field="window")
        if burst < 0:
            raise ConfigError(f"burst is {burst}; it must not be negative", field="burst")
        self.output_cost = output_cost
        self.burst = burst
        self.window = window
        self._shares: dict[str, Share] = {}
        self._followed: dict[int, tuple[Sequence, int]] = {}
        """Sequences that ran or were offered in the last step, and the position up to which they have been charged."""
        self._floor = 0.0
        self._places: Counter[str] = Counter()

    def counter(self, tenant: str) -> float:
        """Service received, in prompt tokens per unit of weight; only differences mean something."""
        return self._shares[tenant].counter if tenant in self._shares else self._floor

    def order(self, running: Seq[Sequence], waiting: Seq[Sequence]) -> list[Sequence]:
        self._charge(running)
        ordered = [s for s in running if len(s.token_ids) - s.num_computed == 1 and s.num_computed > 0]
        queues: dict[str, list[Sequence]] = {}
        if len(ordered) < len(running):
            for seq in running:
                if not seq.is_decoding:
                    queues.setdefault(seq.request.tenant, []).append(seq)
        for seq in waiting:
            queues.setdefault(seq.request.tenant, []).append(seq)
        self._lift(queues)
        self._places, _ = _places(running)
        offered = self._merge(queues, len(running))
        for seq in islice(offered, len(running) + self.window):
            self._followed.setdefault(seq.seq_id, (seq, _charged_from(seq)))
        return ordered + offered

    def claims(self, waiting: Seq[Sequence]) -> Seq[Sequence]:
        """Those who may take a place of somebody else: the first of each tenant, fewest places first."""
        heads: dict[str, Sequence] = {}
        for seq in waiting:
            if not seq.held:
                heads.setdefault(seq.request.tenant, seq)
        held, counter = self._places, self.counter

        def rank(seq: Sequence) -> tuple[Any, ...]:
            tenant = seq.request.tenant
            return (held[tenant] / seq.request.weight, counter(tenant), self.key(seq))

        return sorted(heads.values(), key=rank)

    def displaced(self, running: Seq[Sequence], newcomer: Sequence) -> Sequence | None:
        """The youngest of the tenant with most places for its weight, if that one still has as many afterwards."""
        tenant = newcomer.request.tenant
        places, weights = _places(running)
        mine = (places[tenant] + 1) / newcomer.request.weight
        larger = {t for t, n in places.items() if t != tenant and (n - 1) / weights[t] >= mine}
        # Otherwise the victim would go first and take its place back.
        return _youngest(running, {t for t in larger if self.counter(tenant) <= self.counter(t)})

    def victim(self, running: Seq[Sequence], needy: Sequence) -> Sequence | None:
        """Somebody of a tenant with more places; else somebody younger, of `needy`'s own tenant or one with as many.

        The oldest sequence of all is never taken: its tenant has another one that is younger, or no surplus.
        """
        tenant = needy.request.tenant
        places, weights = _places(running)
        mine = places[tenant] / needy.request.weight
        larger = {t for t, n in places.items() if t != tenant and (n - 1) / weights[t] >= mine}
        found = _youngest(running, larger, needy)
        if found is not None:
            return found
        equal = {t for t, n in places.items() if t == tenant or n / weights[t] >= mine}
        found = _youngest(running, equal, needy)
        return found if found is not None and self.key(found) > self.key(needy) else None

    # -- counters ------------------------------------------------------------------------------------------------

    def _charge(self, running: Seq[Sequence]) -> None:
        """Charge what has been computed and generated since the last step."""
        followed, self._followed = self._followed, {}
        for seq in running:
            self._followed[seq.seq_id] = followed.pop(seq.seq_id, (seq, -1))
        for seq_id, (seq, charged) in list(self._followed.items()):
            start = _charged_from(seq) if charged < 0 else max(charged, _found(seq) if seq.index == 0 else 0)
            self._followed[seq_id] = (seq, self._count(seq, start, seq.num_computed + seq.num_inflight))
        for seq_id, (seq, charged) in followed.items():  # it waits again, or has ended
            if seq.status is Status.FINISHED and seq.num_generated:
                self._count(seq, max(0, charged), len(seq.token_ids))
            elif seq.status is Status.WAITING:
                self._followed[seq_id] = (seq, charged)

    def _count(self, seq: Sequence, start: int, end: int) -> int:
        """Charge positions [start, end) of a sequence; returns up to where it is charged now."""
        if end <= start:
            return start
        share = self._share(seq)
        prompt = max(0, min(end, seq.prompt_len) - start)
        share.counter += (prompt + self.output_cost * (end - start - prompt)) / share.weight
        return end

    def _share(self, seq: Sequence) -> Share:
        share = self._shares.get(seq.request.tenant)
        if share is None:
            share = self._shares[seq.request.tenant] = Share(counter=self._floor - self.burst)
        share.weight = max(1e-6, seq.request.weight)
        return share

    def _lift(self, queues: dict[str, list[Sequence]]) -> None:
        """Whoever comes back to the queue begins where those in it are; all alone, where the last one left it."""
        present = [share.counter for name, share in self._shares.items() if share.queued and name in queues]
        left = [share.counter for share in self._shares.values() if share.queued]
        if present:
            self._floor = min(present)
        elif left:
            self._floor = max(left)
        for queue in queues.values():
            share = self._share(queue[0])
            if not share.queued:
                share.counter = max(share.counter, self._floor - self.burst)
            share.queued = True
        for name, share in list(self._shares.items()):
            if name not in queues:
                share.queued = False
                if len(self._shares) > MAX_TENANTS and share.counter <= self._floor - self.burst:
                    del self._shares[name]  # it would be lifted to the same

    def _merge(self, queues: dict[str, list[Sequence]], num_running: int) -> list[Sequence]:
        """Always the next one of the tenant with the smallest counter, counting what this step would give it."""
        if len(queues) == 1:
            (queue,) = queues.values()
            return queue
        heap = [
            (self.counter(t), self._places[t] / self._shares[t].weight, self.key(q[0]), t, 0) for t, q in queues.items()
        ]
        heapify(heap)
        out: list[Sequence] = []
        most = self.window + num_running
        while heap and len(out) < most:
            counter, held, _, tenant, n = heap[0]
            queue = queues[tenant]
            seq = queue[n]
            out.append(seq)
            if n + 1 == len(queue):
                heappop(heap)
                continue
            weight = self._shares[tenant].weight
            heapreplace(
                heap, (counter + max(0, seq.lag) / weight, held + 1 / weight, self.key(queue[n + 1]), tenant, n + 1)
            )
        return out


def _charged_from(seq: Sequence) -> int:
    """First position that is charged: what was cached is free, and a fork's prompt is its leader's."""
    return _found(seq) if seq.index == 0 else seq.prompt_len


def _found(seq: Sequence) -> int:
    """What was cached, as far as it has come."""
    return min(seq.num_cached, seq.num_computed)


def _places(running: Seq[Sequence]) -> tuple[Counter[str], dict[str, float]]:
    places: Counter[str] = Counter()
    weights: dict[str, float] = {}
    for seq in running:
        places[seq.request.tenant] += 1
        weights[seq.request.tenant] = max(1e-6, seq.request.weight)
    return places, weights


def _youngest(running: Seq[Sequence], tenants: set[str], needy: Any = None) -> Sequence | None:
    """The youngest sequence of these tenants that no step works on; `running` comes in order of arrival."""
    if tenants:
        for seq in reversed(running):
            if seq is not needy and seq.request.tenant in tenants and seq.num_inflight == 0 and seq.tables:
                return seq
    return None
