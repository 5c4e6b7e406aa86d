"""What request-level batching wastes, counted: slots that stay empty because their member ended before the batch."""

from __future__ import annotations


class SlotUse:
    """Follows an engine step by step; call `step` after each schedule that yields work.

    Attributes (units: slots times steps):
        used: slots with a sequence in them.
        wasted: slots that had a sequence earlier in this batch, have none now, and are wanted by a request that waits.
        idle: the same, with nobody waiting: the end of a load, no fault of the policy.

    A batch is what runs between two moments at which nothing ran. Source: Orca, OSDI 2022, section 3 (early-finished
    and late-joining requests).
    """

    def __init__(self) -> None:
        self.used = 0
        self.wasted = 0
        self.idle = 0
        self._slots = 0

    def step(self, num_running: int, num_waiting: int, *, new_batch: bool = False) -> None:
        """`new_batch`: nothing ran before this step."""
        if new_batch:
            self._slots = 0
        self._slots = max(self._slots, num_running)
        empty = self._slots - num_running
        wanted = min(empty, num_waiting)
        self.used += num_running
        self.wasted += wanted
        self.idle += empty - wanted

    @property
    def wasted_share(self) -> float:
        """Of all slot-steps while somebody could have used them."""
        return self.wasted / (self.used + self.wasted) if self.wasted else 0.0
