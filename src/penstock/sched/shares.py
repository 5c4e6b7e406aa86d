"""No tenant holds more than its part of the KV memory while others wait for it: a scheduling policy around another.

A tenant's part is its `Request.kv_share` among those of all tenants that run or wait now. While requests of another
tenant wait, one whose tenant would hold more than its part is passed over, and for a waiting request whose tenant stays
within its own part the youngest of the tenant that is furthest above its part gives way. Alone, or while nobody else
waits, a tenant may hold everything. Whatever its part, a tenant may have one sequence at a time.

Only blocks of running sequences count, those that several of them share once for their tenant: what the prefix cache
keeps of ended ones is given up for whoever needs room. Without shares this does nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from typing import Any, Protocol

from penstock.core.protocols import SchedulingPolicy
from penstock.core.sequence import Sequence


class TenantQueues(Protocol):
    """The scheduler, as far as shares concern it."""

    @property
    def running(self) -> Seq[Sequence]: ...

    @property
    def waiting(self) -> Seq[Sequence]: ...


class WithShares:
    """See `core.protocols.SchedulingPolicy`; all else is as the policy `inner` has it. Units: blocks."""

    def __init__(self, inner: SchedulingPolicy) -> None:
        self.inner = inner
        self.name, self.displaces = inner.name, inner.displaces
        self.queues: TenantQueues | None = None
        """The scheduler, once there is one."""
        self._parts: dict[str, float] = {}
        """Blocks that each tenant may hold; empty: nobody has to give anything up."""
        self._held: Counter[str] = Counter()
        self._num: Counter[str] = Counter()
        self._waits: set[str] = set()
        self._block_size, self._group = 1, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def take(self, inner: SchedulingPolicy) -> None:
        """Another policy from the next step on."""
        self.inner = inner
        self.name, self.displaces = inner.name, inner.displaces or bool(self._parts)

    def begin_step(self, now_s: float, kv: Any) -> None:
        self.inner.begin_step(now_s, kv)
        if self._parts:
            self._parts, self.displaces = {}, self.inner.displaces
        queues = self.queues
        # All tenants have a share, or none has (`Request.kv_share`), so that one look is enough.
        if queues is None or kv is None or not queues.waiting or not queues.waiting[0].request.kv_share:
            return
        waiting = {seq.request.tenant: seq.request.kv_share for seq in queues.waiting if not (seq.held or seq.offline)}
        shares = waiting | {seq.request.tenant: seq.request.kv_share for seq in queues.running}
        whole = sum(shares.values())
        if len(shares) < 2 or not waiting or not whole:
            return
        self._block_size, self._group = kv.block_size, kv.main_group or 0
        self._count(queues.running)
        total = kv.stats().groups[self._group].total
        self._parts = {tenant: total * share / whole for tenant, share in shares.items()}
        self._waits = set(waiting)
        self.displaces = True

    def _count(self, running: Seq[Sequence]) -> None:
        blocks: dict[str, set[int]] = {}
        self._num.clear()
        for seq in running:
            if seq.tables:
                blocks.setdefault(seq.request.tenant, set()).update(seq.tables[self._group].ids)
                self._num[seq.request.tenant] += 1
        self._held = Counter({tenant: len(ids) for tenant, ids in blocks.items()})

    def order(self, running: Seq[Sequence], waiting: Seq[Sequence]) -> list[Sequence]:
        if not self._parts:
            return self.inner.order(running, waiting)
        self._count(running)  # some may have given way
        held, num = Counter(self._held), Counter(self._num)
        found = self.inner.order(running, waiting)
        if all(seq.held for seq in running):
            return found  # whoever has memory waits for somebody or something: nobody else can go on
        own = {seq.seq_id for seq in waiting}
        out = []
        for seq in found:
            if seq.seq_id in own and not seq.held:
                tenant = seq.request.tenant
                need = self._need(seq)
                if self._others_wait(tenant) and num[tenant] and held[tenant] + need > self._parts.get(tenant, 0.0):
                    continue
                held[tenant] += need
                num[tenant] += 1
            out.append(seq)
        return out

    def claims(self, waiting: Seq[Sequence]) -> Seq[Sequence]:
        """First those for whom somebody above its part gives way: the first one of each tenant."""
        claims = list(self.inner.claims(waiting))
        if not self._parts or self.queues is None:
            return claims
        first: dict[str, Sequence] = {}
        for seq in waiting:
            if not seq.held:
                first.setdefault(seq.request.tenant, seq)
        running = self.queues.running
        mine = [s for s in first.values() if self._is_within(s) and self._youngest_above(running, s) is not None]
        return [*mine, *(seq for seq in claims if seq not in mine)]

    def displaced(self, running: Seq[Sequence], newcomer: Sequence) -> Sequence | None:
        if self._parts:
            self._count(running)
        if self._parts and self._is_within(newcomer):
            found = self._youngest_above(running, newcomer)
            if found is not None:
                return found
        return self.inner.displaced(running, newcomer) if self.inner.displaces else None

    # -- parts ---------------------------------------------------------------------------------------------------

    def _need(self, seq: Sequence) -> int:
        return -(-seq.num_known // self._block_size) + 1

    def _others_wait(self, tenant: str) -> bool:
        return len(self._waits) > (tenant in self._waits)

    def _is_within(self, seq: Sequence) -> bool:
        """Whether its tenant, with it, holds no more than its part."""
        tenant = seq.request.tenant
        return self._held[tenant] + self._need(seq) <= self._parts.get(tenant, 0.0)

    def _youngest_above(self, running: Seq[Sequence], newcomer: Sequence) -> Sequence | None:
        """Of the tenant that holds most above its part; never its only one."""
        above = {
            tenant: held - self._parts[tenant]
            for tenant, held in self._held.items()
            if self._num[tenant] > 1 and tenant != newcomer.request.tenant and held > self._parts.get(tenant, 0.0)
        }
        for tenant in sorted(above, key=lambda t: (-above[t], t)):
            for seq in reversed(running):
                if seq.request.tenant == tenant and seq.num_inflight == 0 and seq.tables:
                    return seq
        return None
