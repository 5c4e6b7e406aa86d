"""What one rate of a search came to: whether a server keeps what is promised at it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from penstock.bench.metrics import Outcome, is_good
from penstock.measure.search import backlog_growth

GROWTH = 0.1
"""A queue grows if more than this share of what arrives stays behind: less cannot be told from chance."""


@dataclass(frozen=True)
class RateTrial:
    """`attainment`: share within the limits, None without any; `growth`: `measure.search.backlog_growth`."""

    rate: float
    kept: bool
    attainment: float | None
    growth: float
    failed: int

    @property
    def line(self) -> str:
        within = "" if self.attainment is None else f"{self.attainment:.1%} within the limits, "
        failed = f", {self.failed} failed" if self.failed else ""
        told = f"{within}{max(0.0, self.growth):.1%} of the arrivals stay behind{failed}"
        return f"{self.rate:.3g} requests/s: {'kept' if self.kept else 'missed'} ({told})"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def trial(rate: float, outcomes: Sequence[Outcome], goodput: dict[str, float], share: float) -> RateTrial:
    """With limits the share within them decides, without any whether requests pile up or fail."""
    due = np.array([o.due_s for o in outcomes])
    finish = np.array([o.sent_s + o.latency_s if o.ok else np.nan for o in outcomes])
    growth, failed = backlog_growth(due, finish), sum(not o.ok for o in outcomes)
    if not goodput:
        return RateTrial(rate, growth <= GROWTH and not failed, None, growth, failed)
    attainment = sum(is_good(o, goodput) for o in outcomes) / max(1, len(outcomes))
    return RateTrial(rate, attainment >= share, attainment, growth, failed)
