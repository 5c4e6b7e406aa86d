"""A tenant's part of the KV memory: kept while others wait, no limit while nobody does."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

import msgspec
import pytest

from penstock.core.request import Request
from tests.engine.policy_sim import LinearTimer, ask, play, poisson, quantile

SLOW = LinearTimer(0.02, 0.0002)
MACHINE = {"num_blocks": 200, "block_size": 16, "max_num_seqs": 8, "budget": 256, "timer": SLOW}


def of(tenant: str, share: float, load: Seq[Request]) -> list[Request]:
    return [msgspec.structs.replace(r, tenant=tenant, kv_share=share, namespace=tenant.encode()) for r in load]


def heavy_flood(seed: int) -> tuple[list[Request], list[Request]]:
    """One tenant floods with prompts of which four fill the memory; another asks now and then, also with long ones."""
    rng = random.Random(seed)
    flood = [ask(rng, 0.05 * i, 700, 100) for i in range(30)]
    quiet = [ask(rng, t, rng.choice([300, 700]), 20) for t in poisson(rng, 1, 12)]
    return of("flood", 0.5, flood), of("quiet", 0.5, quiet)


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_part_of_the_memory_is_there_for_who_holds_less_than_its_part(policy: str, seed: int) -> None:
    flood, quiet = heavy_flood(seed)
    both = sorted(flood + quiet, key=lambda r: r.arrival_s)
    alone = quantile(play(policy, quiet, **MACHINE).ttft_s(quiet), 0.9)
    kept = quantile(play(policy, both, **MACHINE).ttft_s(quiet), 0.9)
    free = quantile(play(policy, both, shares=False, **MACHINE).ttft_s(quiet), 0.9)
    print(policy, seed, f"p90 TTFT alone {alone:.3f}, with shares {kept:.3f}, without {free:.3f} s")
    assert kept < free / 2
    assert kept < 3 * alone


def test_alone_a_tenant_has_everything() -> None:
    """Nobody else waits: shares change nothing, not one step."""
    flood, quiet = heavy_flood(3)
    late = [msgspec.structs.replace(r, arrival_s=r.arrival_s + 1000) for r in quiet]
    load = [*flood, *late]
    assert play("fcfs", load, **MACHINE).steps == play("fcfs", load, shares=False, **MACHINE).steps


def test_parts_are_those_of_tenants_that_are_there() -> None:
    """A twentieth each by the keys file, and two of them present: half of the memory each, and nobody starves."""
    flood, quiet = heavy_flood(4)
    small = [msgspec.structs.replace(r, kv_share=0.05) for r in sorted(flood + quiet, key=lambda r: r.arrival_s)]
    large = sorted(flood + quiet, key=lambda r: r.arrival_s)
    assert play("fcfs", small, **MACHINE).steps == play("fcfs", large, **MACHINE).steps


def test_one_request_above_its_part_runs_and_is_never_thrown_out() -> None:
    rng = random.Random(5)
    large = of("large", 0.1, [ask(rng, 0.0, 1500, 60)])
    others = of("others", 0.9, [ask(rng, 0.1 + 0.02 * i, 600, 40) for i in range(12)])
    played = play("fcfs", [*large, *others], **MACHINE)
    assert played.end_s[large[0].request_id] < 8
