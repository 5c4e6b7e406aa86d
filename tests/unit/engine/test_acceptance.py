"""Speculation's numbers: one definition, from counters, from another server's metrics, and from the steps' seconds."""

from __future__ import annotations

import pytest

from penstock.bench.drafts import read, since
from penstock.bench.report import draft_rows
from penstock.core.acceptance import Acceptance
from penstock.core.batch import Sampled, ScheduledRow, SchedulerOutput, StepOutput, Verified
from penstock.core.events import EngineStats
from penstock.engine.gain import Gain

STATS = EngineStats(
    num_drafts=4, num_draft_tokens=12, num_accepted_tokens=6, num_spec_steps=5, draft_s=0.5, spec_step_s=2.0,
    spec_compared_s=2.0, spec_plain_s=3.0, accepted_at=[3, 2, 1],
)  # fmt: skip


def test_K12_every_figure_is_what_the_page_says() -> None:
    a = Acceptance.of(STATS.counters())
    assert a.rate == 0.5
    assert a.mean_length == 1 + 6 / 4
    assert a.per_position == (0.75, 0.5, 0.25)
    assert sum(a.per_position) == pytest.approx(a.mean_length - 1)
    assert (a.draft_share, a.verify_share, a.verify_s) == (0.25, 0.75, 1.5)
    assert a.speedup == 1.5
    assert a.figures() == {
        "spec_decode_num_drafts": 4, "spec_decode_draft_tokens": 12, "spec_decode_accepted_tokens": 6,
        "spec_decode_acceptance_rate": 50.0, "spec_decode_acceptance_length": 2.5,
        "spec_decode_per_position_acceptance_rates": [0.75, 0.5, 0.25], "spec_decode_draft_share": 0.25,
        "spec_decode_verify_share": 0.75, "spec_decode_speedup": 1.5,
    }  # fmt: skip


def test_without_drafts_there_are_no_rates() -> None:
    a = Acceptance()
    assert (a.rate, a.mean_length, a.draft_share, a.verify_share, a.speedup) == (None,) * 5
    assert a.per_position == ()
    assert len(draft_rows(a.figures())) == 3  # the counts


def test_positions_beyond_the_ninth_stay_in_order() -> None:
    stats = EngineStats(num_drafts=20, accepted_at=list(range(20, 8, -1)))
    assert Acceptance.of(stats.counters()).accepted_at == tuple(range(20, 8, -1))


def test_the_difference_is_what_has_come_since() -> None:
    before = Acceptance(num_drafts=1, num_draft_tokens=3, num_accepted_tokens=1, accepted_at=(1,))
    d = Acceptance.of(STATS.counters()) - before
    assert (d.num_drafts, d.num_draft_tokens, d.num_accepted_tokens) == (3, 9, 5)
    assert d.accepted_at == (2, 2, 1)
    assert d - d == Acceptance(accepted_at=(0.0, 0.0, 0.0))


# -- another server's words --------------------------------------------------------------------------------------

VLLM = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 4.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 12.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 6.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 3.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 2.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 1.0
"""
OURS = """\
penstock:spec_decode_num_drafts_total{engine="0"} 4.0
penstock:spec_decode_steps_total{engine="0"} 5.0
penstock:spec_decode_draft_seconds_total{engine="0"} 0.5
penstock:spec_decode_verify_seconds_total{engine="0"} 1.5
penstock:spec_decode_compared_seconds_total{engine="0"} 2.0
penstock:spec_decode_plain_seconds_total{engine="0"} 3.0
"""


def test_metrics_of_vllm_and_ours_are_read_back() -> None:
    theirs = read(VLLM)
    assert theirs is not None
    assert (theirs.mean_length, theirs.rate, theirs.per_position) == (2.5, 0.5, (0.75, 0.5, 0.25))
    assert theirs.draft_share is None
    assert read(VLLM + OURS) == Acceptance.of(STATS.counters()), "nothing is counted twice"
    both = read(VLLM + VLLM.replace('engine="0"', 'engine="1"'))
    assert both is not None
    assert (both.num_drafts, both.accepted_at) == (8, (6, 4, 2)), "engines are added up"
    assert read("vllm:generation_tokens_total 5\n") is None
    assert since(None, None) == {}
    assert since(theirs, both)["spec_decode_accepted_tokens"] == 6


# -- what drafting gains -----------------------------------------------------------------------------------------


def step(n: int, seconds: float, tokens: int | None = None, *, prompt: bool = False, draft_s: float = 0.0) -> tuple:
    """A step of n sequences; `tokens`: drafts were made, and so many tokens came of it."""
    rows = [ScheduledRow(i, 9, 1, 1, num_drafts=0 if tokens is None else 3) for i in range(n)]
    if prompt:
        rows.append(ScheduledRow(n, 0, 8, 1))
    if tokens is None:
        result = StepOutput(0, [Sampled(i, [5]) for i in range(n)], duration_s=seconds, draft_s=draft_s)
    else:
        verified = [Verified(i, [5], 3 if i == 0 else 0, 1) for i in range(n)]
        result = StepOutput(0, duration_s=seconds, verified=verified, draft_s=draft_s)
    return SchedulerOutput(0, scheduled=rows), result, tokens or n


def test_of_plain_steps_the_gain_looks_at_one_in_eight() -> None:
    stats = EngineStats()
    gain = Gain(stats)
    for seconds in (1.0, *[9.0] * 7, 1.0):
        gain.observe(*step(1, seconds))
    gain.observe(*step(1, 1.5, 3))
    assert (stats.spec_compared_s, stats.spec_plain_s) == (1.5, 3.0)


@pytest.fixture
def every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engine.gain.EVERY", 1)


@pytest.mark.usefixtures("every_step")
def test_the_gain_compares_steps_of_equal_width_only() -> None:
    stats = EngineStats()
    gain = Gain(stats)
    gain.observe(*step(1, 1.5, 4))
    assert stats.spec_compared_s == 0, "nothing is known of plain steps yet"
    gain.observe(*step(1, 1.0))
    gain.observe(*step(1, 1.5, 3))
    assert (stats.spec_compared_s, stats.spec_plain_s) == (1.5, 3.0)
    gain.observe(*step(2, 9.0, 4))  # no plain step of two
    gain.observe(*step(1, 9.0, 3, prompt=True))  # a prompt runs along
    gain.observe(*step(1, 50.0, prompt=True))
    assert (stats.spec_compared_s, stats.spec_plain_s) == (1.5, 3.0)
    gain.observe(*step(2, 4.0))
    gain.observe(*step(2, 6.0, 6))  # three plain steps' tokens
    assert (stats.spec_compared_s, stats.spec_plain_s) == (7.5, 15.0)
    assert Acceptance.of(stats.counters()).speedup == 2.0


def test_a_step_whose_drafter_found_nothing_is_a_plain_one_without_its_seconds() -> None:
    stats = EngineStats()
    gain = Gain(stats)
    output, result, _ = step(1, 1.25, draft_s=0.25)
    empty = StepOutput(0, duration_s=1.25, draft_s=0.25, verified=[Verified(0, [5], 0, 1)])
    gain.observe(output, empty, 1)
    gain.observe(*step(1, 1.0, 3))
    assert (stats.spec_compared_s, stats.spec_plain_s) == (1.0, 3.0)
    del result
