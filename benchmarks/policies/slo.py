"""Goodput in an overload: earliest deadline first as far as deadlines can be met (slo) against order of arrival."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.policies.case import Case
from benchmarks.policies.loads import drawn, trace

from penstock.sim.metrics import Slo, distributions, tpots, within
from penstock.sim.result import SimResult

PROMISED = Slo(ttft_s=2.0, tpot_s=0.15)


def figures(result: SimResult) -> Mapping[str, float]:
    r, found = result.requests, distributions(result)
    good = within(result, PROMISED)
    return {
        "share in time": float(good.mean()),
        "goodput, requests/s": float(good.sum()) / result.span_s,
        "share TTFT in time": float(((r.first_token_s - r.arrival_s) <= PROMISED.ttft_s).mean()),
        "share TPOT in time": float((~(tpots(result) > PROMISED.tpot_s)).mean()),
        "output tokens/s": float(r.num_output.sum()) / result.span_s,
        "TTFT p50, s": found["ttft"].percentile(50),
        "TTFT p99, s": found["ttft"].percentile(99),
    }


CASE = Case(
    name="slo",
    title="Deadlines against order of arrival, in an overload",
    goal="A larger share of requests has its first token in 2 s and 0.15 s per token than with fcfs, at 95 % of its "
    "throughput.",
    variants={
        "fcfs": {"scheduling_policy": "fcfs"},
        "slo": {"scheduling_policy": f"slo:ttft_s={PROMISED.ttft_s},tpot_s={PROMISED.tpot_s}"},
        "slo, patient": {"scheduling_policy": f"slo:ttft_s={PROMISED.ttft_s},tpot_s={PROMISED.tpot_s},patience_s=60"},
    },
    settings={"max_num_seqs": 16},
    loads={
        "heavy tail": drawn(prompt=128, prompt_cv=1.5, output=48, output_cv=1.0),
        "Azure": trace("azure2023_conv.csv"),
    },
    figures=figures,
    share=1.5,
    requests=64,
)
