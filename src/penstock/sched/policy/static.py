"""Request-level batching: a batch is formed once and runs until its longest member ends. The baseline of A03 and A05.

Source: the FasterTransformer behaviour described in Orca, OSDI 2022, section 3 (early-finished and late-joining).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from penstock.core.sequence import Sequence
from penstock.sched.policy.fcfs import Fcfs


class Static(Fcfs):
    """Admits only into an empty engine; once the first batch member has decoded, nobody joins."""

    name = "static"

    def order(self, running: Seq[Sequence], waiting: Seq[Sequence]) -> list[Sequence]:
        return super().order(running, [] if running else waiting)
