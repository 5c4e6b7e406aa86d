"""Quality of experience in an overload: who gains most of it next (andes) against order of arrival."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from benchmarks.policies.case import Case
from benchmarks.policies.loads import drawn, trace

from penstock.sim.metrics import distributions
from penstock.sim.result import SimResult


def figures(result: SimResult) -> Mapping[str, float]:
    found = distributions(result)
    quality = found["quality"]
    return {
        "QoE mean": quality.mean,
        "QoE p10": quality.percentile(10),
        "share of QoE > 0.95": float(np.mean(result.requests.quality > 0.95)),
        "output tokens/s": float(result.requests.num_output.sum()) / result.span_s,
        "TTFT p50, s": found["ttft"].percentile(50),
        "TTFT max, s": found["ttft"].percentile(100),
        "places given up per request": result.stats.num_preemptions / len(result.requests),
    }


CASE = Case(
    name="andes",
    title="Andes against order of arrival, in an overload",
    goal="Mean QoE is higher than that of fcfs at the same throughput (within 5 %).",
    variants={
        "fcfs": {"scheduling_policy": "fcfs"},
        "fair": {"scheduling_policy": "fair"},
        "andes": {"scheduling_policy": "andes"},
        "andes, no swapping": {"scheduling_policy": "andes", "swap_space": 0.0},
    },
    settings={"max_num_seqs": 8, "swap_space": 1.0},
    loads={
        "heavy tail": drawn(prompt=128, prompt_cv=1.0, output=96, output_cv=1.5),
        "Azure": trace("azure2023_conv.csv"),
    },
    figures=figures,
    share=1.3,
    requests=48,
)
