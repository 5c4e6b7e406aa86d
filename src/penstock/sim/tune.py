"""Which settings serve a load best within limits: searched on the calibrated simulator, tried on the real engine.

A coordinate descent from the settings that are given: one knob at a time takes the value that is best while the others
stay, until a whole round changes nothing. Better is a larger share of requests within the limits; of shares that are
alike, a shorter mean time to a request's last token; of those alike, less memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.base.errors import CapacityError, ConfigError
from penstock.sim.metrics import Slo, within
from penstock.sim.result import SimResult

ALIKE_SHARE = 0.005
ALIKE_TIME = 0.02
ROUNDS = 3
KNOBS: Mapping[str, Sequence[Any]] = {
    "scheduling_policy": ("fcfs", "prefill-first", "splitfuse", "slo", "fastserve", "andes"),
    "max_num_batched_tokens": (64, 128, 256, 512, 1024, 2048),
    "long_prefill_token_threshold": (0, 64, 128, 256),
    "max_num_seqs": (4, 8, 16, 32, 64),
}
KV_SHARES = (0.25, 0.5, 0.75)
"""Of the KV memory that there is: it is taken only if nothing is lost."""
DRAFTS: Sequence[Any] = ('{"method": "ngram"}', '{"method": "suffix"}')
"""What is tried on the real engine only: how many drafts are right is no matter of time."""


@dataclass(frozen=True)
class LoadScore:
    """`attained`: share of the requests within the limits; `mean_s`: from arrival to the last token."""

    attained: float
    mean_s: float

    @classmethod
    def of(cls, result: SimResult, slo: Slo) -> LoadScore:
        requests = result.requests
        if not len(requests):
            return cls(0.0, float("inf"))
        refused = sum(result.refused.values())
        attained = float(within(result, slo).sum()) / (len(requests) + refused)
        mean_s = float(np.nanmean(requests.finish_s - requests.arrival_s))
        return cls(attained, mean_s)

    def beats(self, other: LoadScore) -> bool:
        if abs(self.attained - other.attained) > ALIKE_SHARE:
            return self.attained > other.attained
        return self.mean_s < other.mean_s * (1 - ALIKE_TIME)

    def __str__(self) -> str:
        return f"{self.attained:.1%} within the limits, {self.mean_s:.3g} s on average"


@dataclass(frozen=True)
class Tried:
    """One value of a knob; `score` None: it is not possible, and `why`."""

    value: Any
    score: LoadScore | None
    why: str = ""


@dataclass
class TunedSettings:
    """`settings`: those chosen; `reasons`: for each knob, what its values came to when it was looked at last."""

    settings: dict[str, Any]
    score: LoadScore
    first: LoadScore
    reasons: dict[str, list[Tried]] = field(default_factory=dict)
    num_runs: int = 0


Run = Callable[[Mapping[str, Any]], SimResult]


def tune(
    run: Run, slo: Slo, given: Mapping[str, Any], kv_bytes: int, *, rounds: int = ROUNDS,
    say: Callable[[str], None] = lambda line: None,
) -> TunedSettings:  # fmt: skip
    """`run(settings)` simulates the load. Knobs in `given` stay what the user made them; `kv_bytes`: KV memory that
    there is. Raises as `run` for the settings that are given."""
    known: dict[tuple[tuple[str, Any], ...], Tried] = {}
    chosen: dict[str, Any] = {}

    def score(settings: dict[str, Any], value: Any) -> Tried:
        key = tuple(sorted(settings.items()))
        if key not in known:
            try:
                known[key] = Tried(value, LoadScore.of(run(settings), slo))
            except (ConfigError, CapacityError) as error:
                known[key] = Tried(value, None, str(error))
        return Tried(value, known[key].score, known[key].why)

    first = LoadScore.of(run({}), slo)
    best = first
    reasons: dict[str, list[Tried]] = {}
    knobs = {name: values for name, values in KNOBS.items() if name not in given}
    for number in range(rounds):
        moved = False
        for name, values in knobs.items():
            say(f"round {number + 1}: {name}, {best}")
            reasons[name] = tried = [score(chosen | {name: value}, value) for value in values]
            for one in tried:
                if one.score is not None and one.score.beats(best):
                    best, moved = one.score, moved or chosen.get(name) != one.value
                    chosen[name] = one.value
        if not moved:
            break
    if "kv_cache_memory_bytes" not in given:
        sizes = [int(kv_bytes * share) for share in KV_SHARES]
        reasons["kv_cache_memory_bytes"] = tried = [
            score(chosen | {"kv_cache_memory_bytes": size}, size) for size in sizes
        ]
        enough = [one for one in tried if one.score is not None and not best.beats(one.score)]
        if enough:
            chosen["kv_cache_memory_bytes"] = enough[0].value
    return TunedSettings(chosen, best, first, reasons, len(known) + 1)
