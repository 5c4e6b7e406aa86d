"""What a simulated run leaves behind: columns of numbers, a few tens of bytes per request."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.core.events import Decision, EngineStats
from penstock.measure.cost import Price
from penstock.measure.energy import Power
from penstock.sim.timeline import Series

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def _nothing() -> Floats:
    return np.empty(0)


@dataclass(frozen=True)
class RequestColumns:
    """One entry per served request, in order of arrival. Times in seconds on the virtual clock; lengths in tokens.

    `cached`: prompt tokens its first admission found in the prefix cache. `tenant`: index into `SimResult.tenants`.
    `quality`: of the stream to its reader, 0 to 1 (`core.qoe`); empty where nobody has followed it.
    """

    arrival_s: Floats
    scheduled_s: Floats
    first_token_s: Floats
    finish_s: Floats
    num_prompt: Ints
    num_output: Ints
    cached: Ints
    preemptions: Ints
    tenant: Ints
    quality: Floats = field(default_factory=_nothing)

    def __len__(self) -> int:
        return len(self.arrival_s)

    def without(self, rows: Collection[int]) -> RequestColumns:
        """All but these."""
        if not rows:
            return self
        kept = np.setdiff1d(np.arange(len(self)), np.array(sorted(rows), np.int64))
        return RequestColumns(**{f.name: getattr(self, f.name)[kept] for f in fields(self)})


@dataclass(frozen=True)
class Charges:
    """What a run is charged with, as far as it is known. `carbon`: grams of CO2 per kWh, and where that comes from.
    `warmup_s`: seconds that steady rates leave out; None: `measure.steady` finds them.
    """

    price: Price | None = None
    power: Power | None = None
    carbon: tuple[float, str] = (0.0, "")
    warmup_s: float | None = None


@dataclass(frozen=True)
class SimResult:
    """One run.

    Attributes:
        gaps_s, gap_counts: times between tokens of one request and how many there were of each (tokens of one step
            share theirs, so this is all of them in a fraction of the room).
        levels: names of the columns of `series.levels`: running and waiting sequences, then the parts of the pool.
        counters: names of the columns of `series.counts`.
        memory: time-weighted mean of each part of the pool; `kv_peak` is the largest share in use.
        refused: reason -> requests that were refused because they could never fit. `truncated`: shortened to fit.
        failed: requests that ended in an error.
        span_s: from the first arrival to the last token. `busy_s`: seconds in which the device worked.
        wall_s: what the simulation itself took.
        digest: identity of the whole schedule; empty if nobody asked.
    """

    label: str
    workload: str
    requests: RequestColumns
    tenants: tuple[str, ...]
    gaps_s: Floats
    gap_counts: Ints
    series: Series
    levels: tuple[str, ...]
    counters: tuple[str, ...]
    memory: dict[str, float]
    kv_peak: float
    kv_tokens: int
    refused: dict[str, int]
    truncated: int
    failed: int
    stats: EngineStats
    span_s: float
    busy_s: float
    wall_s: float
    digest: str = ""
    skipped_lines: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    decisions: tuple[Decision, ...] = ()
    bill: Charges = Charges()
    alone_s: Floats | None = None
    """By request: what it would have taken alone (`sim.alone`); None if nobody asked."""
    hits: dict[str, int] = field(default_factory=dict)
    """Prompt tokens that were found, by the tier that had them; every admission counts, also those after preemptions.
    "queried": tokens of all prompts that looked."""
    tokens: tuple[tuple[int, ...], ...] = ()
    """Of each request, where they were computed: runs on a real engine."""
