"""Chunks of prompts beside decodes, against whole prompts first: what a token waits for."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.policies.case import Case
from benchmarks.policies.loads import drawn, trace

from penstock.sim.metrics import distributions
from penstock.sim.result import SimResult


def figures(result: SimResult) -> Mapping[str, float]:
    found = distributions(result)
    return {
        "TTFT p50, s": found["ttft"].percentile(50),
        "TTFT p99, s": found["ttft"].percentile(99),
        "TBT p99, s": found["tbt"].percentile(99),
        "TPOT p99, s": found["tpot"].percentile(99),
        "output tokens/s": float(result.requests.num_output.sum()) / result.span_s,
    }


CASE = Case(
    name="splitfuse",
    title="Chunked prefill and SplitFuse against prefill-first",
    goal="The p99 of times between tokens falls, and throughput does not.",
    variants={
        "prefill-first": {"scheduling_policy": "prefill-first"},
        "fcfs": {"scheduling_policy": "fcfs"},
        "splitfuse": {"scheduling_policy": "splitfuse"},
    },
    loads={
        "heavy tail": drawn(prompt=256, prompt_cv=1.5, output=32, output_cv=1.0),
        "Azure": trace("azure2023_conv.csv"),
    },
    figures=figures,
    share=0.8,
    requests=48,
)
