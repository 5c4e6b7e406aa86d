"""What `penstock bench serve` makes of outcomes and of a server's counters."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.base.errors import ConfigError
from penstock.bench import alone, counters
from penstock.bench.bill import Bill
from penstock.bench.metrics import Outcome, detail, is_good, summarize
from penstock.bench.rates import trial
from penstock.bench.report import bill_rows, print_result, steady_rows


def outcome(at_s: float, ttft_s: float = 0.1, gap_s: float = 0.02, tokens: int = 11, **more: float) -> Outcome:
    gaps = [gap_s] * (tokens - 1)
    return Outcome(due_s=at_s, ready_s=at_s, sent_s=at_s, ok=True, prompt_tokens=50, output_tokens=tokens,
                   ttft_s=ttft_s, latency_s=ttft_s + sum(gaps), itls_s=gaps, **more)  # type: ignore[arg-type]  # fmt: skip


def test_K01_what_the_server_does_not_account_for_is_the_network() -> None:
    told = outcome(0.0, ttft_s=0.1, queue_s=0.03, prefill_s=0.05)
    assert told.network_s == pytest.approx(0.02)
    assert outcome(0.0, ttft_s=0.1, queue_s=0.08, prefill_s=0.05).network_s == 0.0  # clocks are read apart
    assert outcome(0.0).network_s is None
    found = summarize([told, outcome(1.0, ttft_s=0.2, queue_s=0.05, prefill_s=0.05), outcome(2.0)], 3.0)
    for part in ("queue", "prefill", "network"):
        assert {f"{p}_{part}_ms" for p in ("p50", "p90", "p99")} <= found.keys()
    assert found["mean_network_ms"] == pytest.approx(60)
    assert found["mean_queue_ms"] == pytest.approx(40)
    assert "mean_network_ms" not in summarize([outcome(0.0)], 1.0)
    assert detail([told])["network_times"] == [pytest.approx(0.02)]


def test_K02_the_longest_gap_the_tail_and_the_mean_are_told_apart() -> None:
    jumpy = outcome(0.0, tokens=101)
    jumpy.itls_s[50] = 1.02
    jumpy.latency_s += 1.0
    found = summarize([jumpy], 3.0)
    assert found["mean_tpot_ms"] == pytest.approx(30)
    assert found["max_itl_ms"] == pytest.approx(1020)
    assert found["p99_itl_ms"] < 100
    assert summarize([], 1.0)["max_itl_ms"] == 0.0


def run_of(rate: float, num: int = 200) -> list[Outcome]:
    return [outcome(i / rate, queue_s=0.0, prefill_s=0.08) for i in range(num)]


def test_K03_K04_rates_of_the_steady_part_and_the_residual_are_told_and_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    good = run_of(10.0)
    straggler = outcome(20.0, tokens=1501)
    found = summarize([*good, straggler], 20.0 + straggler.latency_s, goodput={"ttft": 150, "tpot": 30})
    part = found["steady"]
    assert part["settled"]
    assert part["end_s"] <= 20.2
    assert part["output_tokens_per_s"] == pytest.approx(110, rel=0.05)
    assert part["input_tokens_per_s"] == pytest.approx(500, rel=0.05)
    assert part["requests_per_s"] == pytest.approx(10, rel=0.05)
    assert found["output_throughput"] < 100  # the whole run is longer
    assert found["input_throughput"] == pytest.approx(201 * 50 / found["duration"])
    assert abs(found["decomposition"]["residual"]) < 1e-9
    assert abs(found["decomposition"]["residual_all_tokens"]) < 0.1
    labels = [label for label, _ in steady_rows(found)]
    assert "Mean latency beyond TTFT + TPOT x tokens" in labels
    print_result(found, ["ttft"])
    shown = capsys.readouterr().out
    assert "Steady part" in shown
    assert "Longest gap" in shown
    assert summarize([*good, straggler], 51.0, warmup_s=5.0)["steady"]["start_s"] == pytest.approx(5.0, abs=0.3)
    nothing = summarize([], 1.0)
    assert nothing["steady"]["method"] is None
    assert steady_rows(nothing) == []


def test_K04_a_rate_is_kept_by_its_limits_or_by_a_queue_that_does_not_grow() -> None:
    limits = {"ttft": 150.0, "tpot": 30.0}
    good = run_of(10.0, 100)
    slow = [outcome(i / 10, ttft_s=0.2) for i in range(100)]
    assert trial(10.0, good, limits, 0.9).kept
    mixed = trial(10.0, good[:85] + slow[85:], limits, 0.9)
    assert (mixed.kept, mixed.attainment) == (False, 0.85)
    assert trial(10.0, good[:85] + slow[85:], {}, 0.9).kept  # without limits nothing piles up
    piling = [outcome(i / 10, ttft_s=0.1 + i * 0.1) for i in range(100)]
    found = trial(10.0, piling, {}, 0.9)
    assert not found.kept
    assert found.growth == pytest.approx(0.5, abs=0.06)
    assert "stay behind" in found.line
    failing = trial(10.0, [*good[:-1], Outcome(due_s=9.9)], {}, 0.9)
    assert (failing.kept, failing.failed) == (False, 1)
    assert not is_good(Outcome(), limits)
    assert is_good(outcome(0.0, tokens=1), limits)


def test_K06_a_line_through_requests_alone_says_what_the_others_would_have_taken() -> None:
    rng = np.random.default_rng(0)
    prompt, more = rng.integers(1, 2000, 8).astype(float), rng.integers(0, 200, 8).astype(float)
    line = alone.fitted(prompt, more, 0.03 + 0.0004 * prompt + 0.02 * more)
    assert line.tolist() == pytest.approx([0.03, 0.0004, 0.02])
    assert (alone.fitted(prompt, more, 5 - 0.001 * prompt) >= 0).all()
    good = [outcome(0.0, ttft_s=1.0, gap_s=0.0, tokens=1), outcome(0.0, ttft_s=0.1, gap_s=0.1, tokens=21)]
    found = alone.slow_figures(good, np.array([0.05, 0.001, 0.05]))
    small, large = found["classes"]
    assert small["mean"] == pytest.approx(1.0 / 0.1)
    assert large["mean"] == pytest.approx(2.1 / 1.1)
    assert found["mean"] == pytest.approx((10 + 2.1 / 1.1) / 2)
    with pytest.raises(ConfigError, match="3 requests at least"):
        alone.check(2)


TEXT = """# HELP penstock:prefill_seconds_total Seconds.
penstock:prefill_seconds_total{engine="0",model_name="a"} 3.0
penstock:prefill_seconds_total{engine="0",model_name="b"} 1.0
penstock:decode_seconds_total{engine="0",model_name="a"} 6.5
penstock:energy_joules_total{engine="0",model_name="a",source="rapl"} 120.5
"""


def test_K09_K10_a_server_s_counters_become_prices_and_joules() -> None:
    before = counters.Counters(TEXT.replace("3.0", "2.0").replace("120.5", "20.5"))
    told = counters.since(before, counters.Counters(TEXT))
    assert told == {"phases_s": (1.0, 0.0), "energy": ("rapl", 100.0)}
    nothing = counters.since(counters.Counters(""), counters.Counters(""))
    assert nothing == {"phases_s": None, "energy": None}
    bill = Bill.of("3.6", None, "1000")
    found = bill.figures({"phases_s": (1.0, 3.0), "energy": ("rapl", 100.0)}, 1000.0, 4_000_000, 1_000_000)
    assert found["cost"]["per_million_input"] == pytest.approx(1.0 * 0.25 / 4)
    assert found["cost"]["per_million_output"] == pytest.approx(0.75)
    assert found["energy"]["energy_source"] == "rapl"
    assert found["energy"]["joules_per_output_token"] == pytest.approx(1e-4)
    assert found["energy"]["grams_co2"] == pytest.approx(100 / 3600)
    rows = dict(bill_rows(found))
    assert rows["Price of a million input tokens"] == "0.0625 USD"
    assert rows["Energy (J, rapl)"] == "100.0"
    given = Bill.of(None, "10:30", "0").figures({"phases_s": (1.0, 3.0), "energy": ("rapl", 1.0)}, 10.0, 1, 1)
    assert given["cost"] is None
    assert given["energy"]["energy_source"] == "model"
    assert given["energy"]["joules"] == pytest.approx(10 * 10 + 20 * 4)
    busy = Bill.of(None, "10:30", "0").figures(nothing, 10.0, 1, 1)
    assert busy["energy"]["joules"] == pytest.approx(300)
    assert Bill.of(None, None, "world").figures(nothing, 10.0, 1, 1)["energy"] is None
