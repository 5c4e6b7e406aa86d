"""Row D31: layers that are skipped to draft either pay or are switched off, on the virtual clock.

What a skip set is worth follows from two numbers: the share of a step that a draft costs, and how often it is right.
"""

from __future__ import annotations

import random

import pytest
from benchmarks.speculation.controller import HUGE, half_billion, law

from penstock.config import from_kwargs
from penstock.core.protocols import DraftController
from penstock.plan.resolve import resolve
from penstock.sched.drafts.adaptive import AdaptiveDrafts
from penstock.sim.drafts import LENGTH, DraftRun, Marks, SettledText, draft_engine, plain_requests, run_drafts

BASE_S, TOKEN_S = 0.040, 0.001
COSTS = law(base_s=BASE_S, token_s=TOKEN_S)


def run(share: float, right: float, batch: int, drafts: DraftController | None) -> DraftRun:
    """`share`: what a draft of every row costs, of a plain step of them all."""

    def marks(rng: random.Random) -> Marks:
        return bytearray(rng.random() < right for _ in range(LENGTH)), bytearray(b"\1" * LENGTH)

    spec = half_billion()
    config = from_kwargs(
        model="(simulated)", max_num_seqs=batch, max_num_batched_tokens=1024, enable_prefix_caching=False,
        max_model_len=4096,
    )  # fmt: skip
    text = SettledText(3, marks, lambda room, num_rows: share * (BASE_S + TOKEN_S * num_rows) * room / num_rows)
    core = draft_engine(config, spec, resolve(config, spec, HUGE), COSTS, text, drafts)
    return run_drafts(core, plain_requests(batch, 16, 700))


def worth(share: float, right: float) -> float:
    """Tokens per second of the best number of drafts, of those without any, by the formula; one sequence."""
    plain_s = BASE_S + TOKEN_S
    return max(
        (sum(right**i for i in range(k + 1)) / (plain_s + k * (share * plain_s + TOKEN_S))) * plain_s
        for k in range(1, 16)
    )


@pytest.mark.parametrize("share", [0.4, 0.62, 0.75])
@pytest.mark.parametrize("right", [0.0, 0.4, 0.7, 0.9])
def test_D31_a_skip_set_is_used_where_it_pays_and_switched_off_where_it_does_not(share: float, right: float) -> None:
    off = run(share, right, 1, None)
    ours = run(share, right, 1, AdaptiveDrafts(4, 63, timer=COSTS))
    expected = worth(share, right)
    ratio, steps = ours.tokens_per_s / off.tokens_per_s, ours.num_draft_steps / ours.num_steps
    print(f"worth {expected:.2f}, got {ratio:.3f}, drafts in {steps:.1%} of the steps")
    assert ratio >= 0.98
    if expected < 0.9:
        assert steps < 0.05, "it is not switched off"
    if expected > 1.1:
        assert ratio > 1.04, "it is switched off although it pays"
        assert steps > 0.5
