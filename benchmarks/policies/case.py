"""A scheduling policy against its baseline: which loads, which settings, which figures decide.

One file for each case in this folder, with a `CASE`; `python -m benchmarks.policies CASE` runs it on the virtual clock
with the measured step times of this machine, and with `--engine MODEL` on the real engine as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.sim.result import SimResult
from penstock.sim.workload import Workload

Load = Callable[[float, int, int], Workload]
"""(requests per second on average, seed, number of requests) -> the requests, in order of arrival."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is compared.

    `loads`: by name; at least one with a heavy tail, and one from a trace. Lengths must suit a model of 0.5B on two
    cores: prompts of at most 1,024 tokens, outputs of at most 256.
    `variants`: by name, the settings of an engine as `LLM` takes them; the first one is the baseline.
    `figures`: what is told of a run, by name with its unit (`mean_jct_s`).
    `share`: the rate of arrivals, of the rate at which the baseline's finished requests per second are as many as
    possible (found with all of them there at the start).
    `requests`: how many in one run on the real engine; about a minute.
    `goal`: the sentence to be shown.
    """

    name: str
    title: str
    loads: Mapping[str, Load]
    variants: Mapping[str, Mapping[str, Any]]
    figures: Callable[[SimResult], Mapping[str, float]]
    share: float = 0.9
    requests: int = 64
    goal: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of all variants."""
