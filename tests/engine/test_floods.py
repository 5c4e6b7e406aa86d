"""One tenant floods: what another one waits for its first tokens stays within 1.5 times what it waits alone.

Policy `fair` and parts of the memory, on the virtual clock. Steps are short beside a prompt, as on one GPU or with a
small model: what is measured is the order, not the length of a step.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from statistics import fmean

import msgspec
import pytest

from penstock.core.request import Request
from tests.engine.policy_sim import LinearTimer, ask, play, poisson, quantile

TIMER = LinearTimer(0.010, 0.0002)
FAIR = "fair:burst=1000"
MACHINE = {"num_blocks": 400, "block_size": 16, "max_num_seqs": 16, "budget": 128, "timer": TIMER}


def of(tenant: str, load: Seq[Request]) -> list[Request]:
    return [msgspec.structs.replace(r, tenant=tenant, kv_share=0.5, namespace=tenant.encode()) for r in load]


def floods(kind: str, rng: random.Random) -> list[Request]:
    match kind:
        case "many":  # far more requests than there are places
            return [ask(rng, 0.02 * n, 60, 60) for n in range(300)]
        case "long prompts":  # six of them fill the memory
            return [ask(rng, 0.1 * n, 1000, 60) for n in range(60)]
        case "long answers":
            return [ask(rng, 0.1 * n, 30, 600) for n in range(60)]
    return [ask(rng, 5.0 * burst + 0.002 * n, 300, 40) for burst in range(4) for n in range(40)]  # it comes and goes


@pytest.mark.parametrize("kind", ["many", "long prompts", "long answers", "returning"])
def test_a_flood_leaves_first_tokens_of_others_within_one_and_a_half_times_idle(kind: str) -> None:
    rng = random.Random(kind)
    quiet = of("quiet", [ask(rng, t, rng.choice([300, 500, 700]), 10) for t in poisson(rng, 0.8, 20)])
    flood = of("flood", floods(kind, rng))
    both = sorted(flood + quiet, key=lambda r: r.arrival_s)
    alone = play(FAIR, quiet, **MACHINE).ttft_s(quiet)
    beside = play(FAIR, both, **MACHINE).ttft_s(quiet)
    plain = play("fcfs", both, shares=False, **MACHINE).ttft_s(quiet)
    print(f"{kind}: mean {fmean(alone):.3f} alone, {fmean(beside):.3f} beside it ({fmean(plain):.3f} without); "
          f"p90 {quantile(alone, 0.9):.3f}, {quantile(beside, 0.9):.3f} ({quantile(plain, 0.9):.3f})")  # fmt: skip
    assert fmean(beside) <= 1.5 * fmean(alone)
    assert quantile(beside, 0.9) <= 1.5 * quantile(alone, 0.9)
    assert fmean(plain) > 3 * fmean(alone), "no flood"
