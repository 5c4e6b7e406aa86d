"""Asks the machine for KV memory, a little ahead of use, and leaves what others need.

What it is told depends on whoever else runs on the machine, so it is an input of the engine like a request: it is
logged with the intake, and a replay takes it from the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from penstock.core.events import PoolGrowth
from penstock.kv.backing import RETRY_S, Backing
from penstock.plan.probe import Free

REST_S = 30.0
"""An engine that has had nothing to do for so long gives memory back, ..."""
REST_BYTES = 16 << 20
"""... if it is more than this."""
LAST_BYTES = 64 << 20
"""Left to others even if that means that nobody here can go on, or if all memory was asked for."""
MOST_BYTES = 512 << 20
_LEFT_SHARE = 20
_LOG = logging.getLogger("penstock")


def left_bytes(memory_bytes: int) -> int:
    """What growth leaves free of a machine's memory: a twentieth, within bounds."""
    return max(LAST_BYTES, min(MOST_BYTES, memory_bytes // _LEFT_SHARE))


class Grower:
    """`ask`: what is free now. `back`: takes memory for so many slabs of each group, or gives back what is beyond.

    `takes_all`: somebody said how much KV may take, so no more is left than what keeps the machine alive.
    """

    def __init__(self, ask: Callable[[], Free], back: Callable[[Sequence[int]], None], *, takes_all: bool) -> None:
        self._ask = ask
        self._back = back
        self._takes_all = takes_all
        self._again_s = self._busy_s = float("-inf")
        self._rested = self._was_told = False

    def begin(self, backing: Backing) -> None:
        """Take what the first step will ask for, while nobody waits for it."""
        growth = backing.grown(self._free_bytes(stuck=False))
        if growth is not None:
            self._back(growth.num_slabs)

    def look(self, backing: Backing, waits: bool, now_s: float) -> list[PoolGrowth]:
        """What the machine says if the engine needs more, or was refused some time ago; empty: nothing new.

        `waits`: nobody runs.
        """
        self._busy_s, self._rested = now_s, False
        if backing.is_enough or now_s < self._again_s:
            return []
        free_bytes = self._free_bytes(stuck=waits and backing.is_short)
        growth = backing.grown(free_bytes)
        is_short = backing.is_short if growth is None else growth.is_short
        self._again_s = now_s + RETRY_S if is_short else float("-inf")
        if is_short and not self._was_told:
            self._was_told = True
            _LOG.warning(
                "the machine has too little memory for KV to grow beyond %d MiB now: %d MiB are free beside what is "
                "left to others; requests wait, or are preempted, until it has more (said once; the metric "
                "kv_refusals counts)",
                (backing.num_bytes + max(0, free_bytes)) >> 20, max(0, free_bytes) >> 20,
            )  # fmt: skip
        return [] if growth is None else [growth]

    def rest(self, backing: Backing, now_s: float) -> list[PoolGrowth]:
        """There is nothing to do; called again and again. Once that has lasted, what is worth it is given back."""
        if backing.gives_all:
            return [backing.rested()]
        if self._rested or now_s < self._busy_s + REST_S:
            return []
        self._rested = True
        return [backing.rested()] if backing.spare_bytes >= REST_BYTES else []

    def _free_bytes(self, *, stuck: bool) -> int:
        """What may be taken; below zero if others lack memory already."""
        free = self._ask()
        left = LAST_BYTES if stuck or self._takes_all else left_bytes(free.memory_bytes)
        return free.available_bytes - left

    def follow(self, backing: Backing) -> None:
        """The machine's memory does what the books say."""
        self._back(backing.num_slabs)
