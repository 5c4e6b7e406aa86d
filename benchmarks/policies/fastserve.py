"""FastServe's multi-level queue against first come, first served, where memory holds few and some are long."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from benchmarks.policies.case import Case
from benchmarks.policies.loads import drawn, trace

from penstock.sim.result import SimResult

SWAPS = {"swap_space": 1.0, "preemption_mode": "swap"}
VARIANTS: dict[str, dict[str, object]] = {
    "fcfs": {**SWAPS, "scheduling_policy": "fcfs"},
    "fcfs, nothing set aside": {**SWAPS, "scheduling_policy": "fcfs", "schedule_conservativeness": 0.0},
    "fastserve": {**SWAPS, "scheduling_policy": "fastserve"},
    "fastserve, recomputed": {"scheduling_policy": "fastserve", "preemption_mode": "recompute"},
}
PAUSING: dict[str, dict[str, object]] = {
    "4 in a step": {**SWAPS, "scheduling_policy": "fastserve:batch=4"},
    "4 in a step, none ahead": {**SWAPS, "scheduling_policy": "fastserve:batch=4,spare=0"},
}
BLOCK_BYTES = 16 * 24 * 2 * 2 * 64 * 4
"""Of Qwen2.5 0.5B: 16 tokens, 24 layers, keys and values of two heads of 64, float32."""
GOAL = "Mean completion time at most 0.7 of that of fcfs at 90 % load, with the throughput kept and nobody starving."


def figures(result: SimResult) -> Mapping[str, float]:
    rows = result.requests
    jct_s = rows.finish_s - rows.arrival_s
    length = rows.num_prompt + rows.num_output
    short, long = np.quantile(length, 0.5), np.quantile(length, 0.9)
    return {
        "JCT mean, s": float(jct_s.mean()),
        "JCT p50, s": float(np.median(jct_s)),
        "JCT p99, s": float(np.quantile(jct_s, 0.99)),
        "JCT of the shorter half, s": float(jct_s[length <= short].mean()),
        "JCT of the longest tenth, s": float(jct_s[length >= long].mean()),
        "longest time to a token, s": float(max(result.gaps_s.max(), (rows.first_token_s - rows.arrival_s).max())),
        "output tokens/s": float(rows.num_output.sum()) / result.span_s,
        "copied out": float(result.stats.num_swaps),
    }


CASES = [
    Case(
        name="fastserve",
        title="FastServe: few requests much longer than most, two at a time",
        goal=GOAL,
        settings={"kv_cache_memory_bytes": 40 * BLOCK_BYTES, "block_size": 16, "max_model_len": 320, "max_num_seqs": 2},
        variants=VARIANTS,
        loads={"heavy tail": drawn(prompt=16, prompt_cv=0.5, output=16, output_cv=3.0)},
        figures=figures,
        requests=64,
    ),
    Case(
        name="fastserve-memory",
        title="FastServe: few requests much longer than most, memory for 320 tokens",
        goal=GOAL,
        settings={
            "kv_cache_memory_bytes": 20 * BLOCK_BYTES, "block_size": 16, "max_model_len": 320, "max_num_seqs": 16
        },
        variants=VARIANTS | PAUSING,
        loads={"heavy tail": drawn(prompt=16, prompt_cv=0.5, output=16, output_cv=3.0)},
        figures=figures,
        requests=64,
    ),
    Case(
        name="fastserve-azure",
        title="FastServe where no tail is heavy: a tenth of the lengths of Azure, memory for 640 tokens",
        goal=GOAL,
        settings={
            "kv_cache_memory_bytes": 40 * BLOCK_BYTES, "block_size": 16, "max_model_len": 640, "max_num_seqs": 16
        },
        variants=VARIANTS
        | {
            "fastserve, priced": {**SWAPS, "scheduling_policy": "fastserve:prompt_s=0.02"},
            "fastserve, 1 s": {**SWAPS, "scheduling_policy": "fastserve:quantum_s=1"},
        },
        loads={"Azure": trace("azure2023_conv.csv", scale=0.1)},
        figures=figures,
        requests=48,
    ),
]  # fmt: skip
