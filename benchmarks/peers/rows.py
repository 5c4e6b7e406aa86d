"""From cells to rows of a report: medians, spreads, ratios with intervals, shares of the memory's limit."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from benchmarks.peers.engines import BITS
from benchmarks.peers.measure import FIGURES, is_rate
from benchmarks.peers.results import Entry, latest

OURS = "penstock"
RESAMPLES = 4000


@dataclass
class Row:
    """One engine on one workload in one group. `values`: figure -> repeat -> value; `probes`: bytes/s around each.

    `errors`: of the repeats that failed. `check`: the verdict on its tokens, None if there is none.
    """

    group: str
    engine: str
    precision: str
    model: str
    workload: str
    version: str = ""
    weight_bytes: int = 0
    probe: str = ""
    values: dict[str, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    probes: dict[int, float] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    check: bool | None = None

    @property
    def name(self) -> str:
        return f"{self.engine}:{self.precision}"

    def of(self, figure: str) -> list[float]:
        return list(self.values.get(figure, {}).values())

    def median(self, figure: str) -> float | None:
        values = self.of(figure)
        return statistics.median(values) if values else None

    def limit_share(self) -> float | None:
        """Decoding, as a share of what the memory allowed at that moment: the median over repeats of tokens/s times
        bytes of weights over the bytes/s around the repeat. None if the bytes or the memory's speed are not known."""
        rates = self.values.get("decode_tps", {})
        if self.workload != "W1" or not self.weight_bytes or self.probe != "native" or not rates:
            return None
        return statistics.median(rate * self.weight_bytes / self.probes[n] for n, rate in rates.items())


@dataclass(frozen=True)
class Ratio:
    """Ours against the best peer: above 1 we are faster. `low`, `high`: 95 % interval, None with fewer than 3 pairs."""

    peer: str
    value: float
    low: float | None
    high: float | None
    pairs: int


def rows(entries: Sequence[Entry]) -> list[Row]:
    """In the order in which they were first measured."""
    verdicts: dict[tuple[str, str, str], bool | None] = {}
    for entry in latest(list(entries), "check").values():
        who = entry["engine"], entry["precision"], entry["model"]
        verdicts[who] = entry["ok"] if who not in verdicts or entry["ok"] is False else verdicts[who]
    found: dict[tuple[str, ...], Row] = {}
    for entry in latest(list(entries), "cell").values():
        key = tuple(entry[k] for k in ("group", "engine", "precision", "model", "workload"))
        group, engine, precision, model, work = key
        check = verdicts.get((engine, precision, model))
        row = found.setdefault(key, Row(group, engine, precision, model, work, check=check))
        row.version = entry.get("version", row.version)
        row.weight_bytes = entry.get("weight_bytes", row.weight_bytes)
        if "error" in entry:
            row.errors.append(entry["error"])
            continue
        row.probe = entry["probe"]
        row.probes[entry["repeat"]] = (entry["probe_before"] + entry["probe_after"]) / 2
        for figure, value in entry["figures"].items():
            row.values[figure][entry["repeat"]] = value
    return list(found.values())


def headline(workload: str) -> str:
    return FIGURES[workload][0]


def best_peer(row: Row, all_rows: Sequence[Row], figure: str) -> Row | None:
    """Of the same group, model, workload and bits, the fastest that is not ours and not known to be wrong."""
    peers = [
        r for r in all_rows
        if (r.group, r.model, r.workload) == (row.group, row.model, row.workload) and r.engine != OURS
        and BITS[r.precision] == BITS[row.precision] and r.check is not False and r.of(figure)
    ]  # fmt: skip
    if not peers:
        return None
    sign = 1 if is_rate(figure) else -1
    return max(peers, key=lambda r: sign * statistics.median(r.of(figure)))


def ratio(row: Row, all_rows: Sequence[Row], figure: str) -> Ratio | None:
    """Of our row; None for others, and where there is nobody to compare with."""
    peer = best_peer(row, all_rows, figure) if row.engine == OURS else None
    if peer is None or not row.of(figure):
        return None
    return compare(row.values[figure], peer.values[figure], peer.name, rate=is_rate(figure))


def compare(ours: dict[int, float], theirs: dict[int, float], peer: str, *, rate: bool, seed: int = 0) -> Ratio:
    """Ratio of medians over the repeats that both have, and a bootstrap over those repeats.

    Repeats are drawn as pairs: both engines of a repeat ran within minutes, so what the machine did to one it did to
    the other, and only what is left counts as noise.
    """
    both = sorted(set(ours) & set(theirs))
    if not both:
        both_ours, both_theirs = list(ours.values()), list(theirs.values())
        value = statistics.median(both_ours) / statistics.median(both_theirs)
        return Ratio(peer, value if rate else 1 / value, None, None, 0)
    a, b = np.array([ours[n] for n in both]), np.array([theirs[n] for n in both])
    if not rate:
        a, b = b, a
    value = float(np.median(a) / np.median(b))
    if len(both) < 3:
        return Ratio(peer, value, None, None, len(both))
    draws = np.random.default_rng(seed).integers(0, len(both), (RESAMPLES, len(both)))
    drawn = np.median(a[draws], axis=1) / np.median(b[draws], axis=1)
    low, high = np.percentile(drawn, [2.5, 97.5])
    return Ratio(peer, value, float(low), float(high), len(both))


def summary(all_rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Everything a report shows, as plain data."""
    out = []
    for row in all_rows:
        figures = {}
        for figure in FIGURES[row.workload]:
            values = row.of(figure)
            if not values:
                continue
            r = ratio(row, all_rows, figure)
            figures[figure] = {
                "median": statistics.median(values), "low": min(values), "high": max(values), "n": len(values),
                "ratio": None if r is None else {"peer": r.peer, "value": r.value, "low": r.low, "high": r.high},
            }  # fmt: skip
        out.append({
            "group": row.group, "engine": row.engine, "precision": row.precision, "model": row.model,
            "workload": row.workload, "version": row.version, "check": row.check, "errors": row.errors,
            "weight_bytes": row.weight_bytes, "figures": figures, "limit_share": row.limit_share(),
            "probe": statistics.median(row.probes.values()) if row.probes else None,
        })  # fmt: skip
    return out
