"""Which requests move to another engine while they run or wait: Llumnix' rescheduling, in whole numbers.

An engine where somebody waits for memory has less than no room (those who wait count with what they want), and is
paired with the one that has most. Who waits goes over if the other has the room now: that costs nothing. Else somebody
who runs goes, so that the one who waits fits where it is, although free memory lies in pieces on several engines
(de-fragmentation). An engine with an urgent request keeps a headroom beside it, so others leave it sooner.
Source: Sun et al., Llumnix, arXiv 2406.03243, sections 4.3 and 4.4 (pairs of the least and the most free; who moves is
of low priority, and short).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.route.router import EngineLoad
from penstock.route.virtual_usage import HEADROOM_PERMILLE


@dataclass(frozen=True)
class Movable:
    """A request of an engine. `num_tokens`: known of its text, prompt and generated; `waits`: it has no token yet.
    `priority`: the lower, the sooner. `stays`: it counts, and cannot be moved."""

    name: str
    num_tokens: int
    waits: bool = False
    priority: int = 0
    stays: bool = False


@dataclass(frozen=True)
class EngineMove:
    """Request `name` goes from engine `source` to engine `target`, by number."""

    name: str
    source: int
    target: int


class Rescheduler:
    """Deterministic, and without a memory of its own. `spare_permille`: of the memory of who takes somebody in, what
    has to be left then: requests grow, and one that has just been moved shall not move back."""

    def __init__(self, spare_permille: int = 100) -> None:
        self.spare_permille = spare_permille

    def moves(self, loads: Sequence[EngineLoad], held: Mapping[int, Sequence[Movable]]) -> list[EngineMove]:
        """At most one from each engine and to each; `held`: what each has, by its number, in order of arrival."""
        by_room = sorted(loads, key=lambda load: (self.room(load, held[load.number]), load.number))
        out = []
        while len(by_room) > 1:
            source, target = by_room[0], by_room.pop()
            if self.room(source, held[source.number]) >= 0:
                break
            spare = memory_of(target) * self.spare_permille // 1000
            chosen = self._chosen(held[source.number], self.room(target, held[target.number]) - spare)
            if chosen is not None:
                out.append(EngineMove(chosen.name, source.number, target.number))
                by_room.pop(0)
        return out

    def room(self, load: EngineLoad, held: Sequence[Movable]) -> int:
        """Tokens for which it has memory that nobody has or wants; below 0: somebody waits, or will."""
        memory = memory_of(load)
        kept = memory * HEADROOM_PERMILLE // 1000 if any(one.priority < 0 for one in held) else 0
        return memory - kept - sum(one.num_tokens for one in held)

    def _chosen(self, held: Sequence[Movable], room: int) -> Movable | None:
        fitting = [one for one in held if one.num_tokens <= room and not one.stays]
        waiting = [one for one in fitting if one.waits]
        if waiting:
            return min(waiting, key=lambda one: one.priority)  # of equals, who came first
        return min(fitting, key=lambda one: (-one.priority, one.num_tokens), default=None)


def memory_of(load: EngineLoad) -> int:
    """Tokens for which an engine has KV memory."""
    return (load.kv_blocks or 1 << 16) * load.block_size
