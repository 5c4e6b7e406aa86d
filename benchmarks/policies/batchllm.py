"""A batch whose prompts share beginnings, with a cache that holds some of them: BatchLLM against order of arrival."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

from benchmarks.policies.case import Case, Load
from benchmarks.policies.loads import trace

from penstock.sim.result import SimResult
from penstock.sim.workload import TimedRequest, Workload, from_list

SHARED = 96
"""Tokens of a piece that prompts share."""


def families(rate: float, seed: int, n: int) -> Workload:
    """All there at the start: families of six with two pieces each, some of whom generate ten times what others do."""
    rng = random.Random(seed)
    made = []
    for i in range(n):
        family = i // 6
        much = (8, 24, 80)[family % 3]
        made.append(
            TimedRequest(
                0.0, 2 * SHARED + rng.choice((16, 48, 96)), max(2, round(much * rng.uniform(0.5, 1.5))),
                blocks=(2 * family, 2 * family + 1),
            )
        )  # fmt: skip
    rng.shuffle(made)
    return from_list("families", made, block_tokens=SHARED)


def in_families(load: Load) -> Load:
    """Its lengths, behind two pieces that six of them share; all there at the start."""

    def made(rate: float, seed: int, n: int) -> Workload:
        found = [
            replace(
                r, arrival_s=0.0, num_prompt=2 * SHARED + min(r.num_prompt, 256),
                blocks=(2 * (i // 6), 2 * (i // 6) + 1),
            )
            for i, r in enumerate(load(1.0, seed, n))
        ]  # fmt: skip
        random.Random(seed).shuffle(found)
        return from_list("lengths of Azure in families", found, block_tokens=SHARED)

    return made


def figures(result: SimResult) -> Mapping[str, float]:
    prompts = float(result.requests.num_prompt.sum())
    return {
        "makespan, s": result.span_s,
        "share of prompts found": float(result.requests.cached.sum()) / prompts,
        "steps": float(result.stats.num_steps),
        "output tokens/s": float(result.requests.num_output.sum()) / result.span_s,
    }


CASE = Case(
    name="batchllm",
    title="Groups that share a beginning, run together (BatchLLM)",
    goal="No shared beginning is computed twice; the makespan is shorter than in order of arrival with an LRU cache.",
    variants={
        "fcfs": {"scheduling_policy": "fcfs"},
        "depth first": {"scheduling_policy": "cache-aware:order=dfs"},
        "batchllm": {"scheduling_policy": "batchllm"},
    },
    loads={"families": families, "Azure": in_families(trace("azure2023_conv.csv"))},
    figures=figures,
    requests=48,
    settings={"kv_cache_memory_bytes": 32 << 20, "max_num_seqs": 8, "block_size": 16},
)
