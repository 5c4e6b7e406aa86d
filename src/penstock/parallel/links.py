"""All memory that the ranks of one model share: made by whoever starts them, joined by each of them."""

from __future__ import annotations

import os
from collections.abc import Sequence

from penstock.core.links import Links
from penstock.parallel.comm import Pipe, SharedComm, shared_memory
from penstock.parallel.pipe import SharedChannel, channel_memory


class Wires:
    """Of `num_stages` stages of `per_stage` ranks each; rank = stage * per_stage + rank in the stage."""

    def __init__(self, num_stages: int, per_stage: int) -> None:
        self._per_stage, size = per_stage, num_stages * per_stage
        self.size = size
        self._everyone = shared_memory(size)
        apart = num_stages > 1 and per_stage > 1
        self._stages = [shared_memory(per_stage) for _ in range(num_stages)] if apart else []
        self._cuts = [channel_memory() for _ in range(size - per_stage)]
        self._all = SharedComm(self._everyone, 0, size)
        self._inner = [SharedComm(fd, 0, per_stage) for fd in self._stages]
        self._channels = [SharedChannel(fd) for fd in self._cuts]

    def of(self, rank: int) -> Links:
        """Descriptors of this process, for one rank."""
        per = self._per_stage
        return Links(
            self._everyone, self._stages[rank // per] if self._stages else -1,
            self._cuts[rank - per] if rank >= per else -1, self._cuts[rank] if rank < len(self._cuts) else -1,
        )  # fmt: skip

    def close(self) -> None:
        """The descriptors; ranks that have joined, and the counts, stay."""
        for fd in (self._everyone, *self._stages, *self._cuts):
            os.close(fd)

    def given(self) -> tuple[int, int]:
        """Exchanges so far, and bytes that ranks gave each other, once for each that got them."""
        exchanges, num_bytes = 0, 0
        for comm in (self._all, *self._inner):
            counts = [comm.exchange.given(rank) for rank in range(comm.size)]
            exchanges += counts[0][0]
            num_bytes += sum(given for _, given in counts)
        sent = [channel.sent for channel in self._channels]
        return exchanges + sum(s.pieces for s in sent), num_bytes + sum(s.num_bytes for s in sent)

    def waited_s(self) -> list[float]:
        """[ranks]: seconds that each has waited for others so far, in gathers and at channels."""
        per, found = self._per_stage, [self._all.exchange.waited_s(rank) for rank in range(self.size)]
        for rank in range(self.size):
            if self._inner:
                found[rank] += self._inner[rank // per].exchange.waited_s(rank % per)
            if rank >= per:
                found[rank] += self._channels[rank - per].received.waited_s
            if rank < len(self._channels):
                found[rank] += self._channels[rank].sent.waited_s
        return found


def joined(links: Links, rank: int, size: int, starts: Sequence[int] = (), parts: int = 0) -> SharedComm:
    """A rank's end of all that it shares. `starts`, `parts`: see `Pipe`; nothing: every rank has a part of all layers.

    The descriptors stay the caller's."""
    if not starts:
        return SharedComm(links.everyone, rank, size)
    per = size // (len(starts) - 1)
    inner = SharedComm(links.stage, rank % per, per) if per > 1 else None
    before, behind = (SharedChannel(fd) if fd >= 0 else None for fd in (links.before, links.behind))
    return SharedComm(
        links.everyone, rank, size, pipe=Pipe(rank // per, tuple(starts), inner, before, behind, parts)
    )  # fmt: skip
