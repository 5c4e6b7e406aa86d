"""S3 (row A14): memory packed by predicted lengths, against memory reserved for the longest possible sequence.

Memory holds eight sequences of the longest kind; requests come twice as fast as the baseline can serve them, so that
what counts is how many run at once. `max_tokens` is the true length here: the arm that reserves it is what a perfect
predictor would do, without packing.
"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.policies.case import Case
from benchmarks.policies.loads import drawn, trace
from benchmarks.policies.predicted import predicted

from penstock.sim.metrics import distributions
from penstock.sim.result import SimResult

HEAVY = drawn(prompt=128, prompt_cv=1.0, output=48, output_cv=1.5)
AZURE = trace("azure2023_conv.csv")


def figures(result: SimResult) -> Mapping[str, float]:
    return {
        "output tokens/s": float(result.requests.num_output.sum()) / result.span_s,
        "tokens per step": result.stats.num_scheduled_tokens / max(1, result.stats.num_steps),
        "sequences at once": float(result.stats.peak_running),
        "preemptions": float(result.stats.num_preemptions),
        "completion mean, s": distributions(result)["jct"].mean,
    }


CASE = Case(
    name="s3",
    title="Packing by predicted lengths (S3) against reserving the longest",
    goal="At least 1.5 times as many run at once as with max-length reservation, and throughput rises.",
    variants={
        "longest reserved": {"kv_allocator": "contiguous"},
        "max_tokens reserved": {"kv_allocator": "contiguous-oracle"},
        "S3, runs": {"scheduling_policy": "s3", "kv_allocator": "contiguous-predicted"},
        "S3, blocks": {"scheduling_policy": "s3"},
        "blocks": {},
    },
    loads={
        "heavy tail exact": predicted(HEAVY),
        "heavy tail wrong": predicted(HEAVY, 0.4),
        "Azure wrong": predicted(AZURE, 0.4),
    },
    figures=figures,
    share=2.0,
    requests=48,
    settings={"max_model_len": 1280, "kv_cache_memory_bytes": 120 << 20, "max_num_seqs": 32},
)
