"""Response Length Perception (row A15): batches of similar predicted lengths, against batches in order of arrival."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.policies.case import Case
from benchmarks.policies.loads import drawn, trace
from benchmarks.policies.predicted import predicted

from penstock.sim.metrics import distributions
from penstock.sim.result import SimResult

HEAVY = drawn(prompt=96, prompt_cv=0.5, output=48, output_cv=1.5)
AZURE = trace("azure2023_conv.csv")


def figures(result: SimResult) -> Mapping[str, float]:
    steps = max(1, result.stats.num_steps)
    return {
        "requests/s": len(result.requests) / result.span_s,
        "output tokens per step": float(result.requests.num_output.sum()) / steps,
        "completion mean, s": distributions(result)["jct"].mean,
        "preemptions": float(result.stats.num_preemptions),
    }


CASE = Case(
    name="length-aware",
    title="Batches of similar predicted lengths against batches in order of arrival",
    goal="Less of a batch waits for its longest member, with exact and with wrong lengths: more requests per second.",
    variants={
        "in order": {"scheduling_policy": "static:size=8"},
        "by length": {"scheduling_policy": "length-aware:size=8"},
        "by length, not collected": {"scheduling_policy": "length-aware:size=8,collect=0"},
        "by length, variable": {"scheduling_policy": "length-aware:size=16,tokens=1024"},
        "continuous": {"max_num_seqs": 8},
    },
    loads={
        "heavy tail exact": predicted(HEAVY),
        "heavy tail wrong": predicted(HEAVY, 0.4),
        "Azure wrong": predicted(AZURE, 0.4),
    },
    figures=figures,
    share=2.0,
    requests=64,
)
