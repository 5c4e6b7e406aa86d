"""K20: MLPerf's scenarios: the load, the rules, and the arithmetic of early stopping."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest

from penstock.base.errors import ConfigError
from penstock.bench import mlperf, serve
from penstock.bench.metrics import Outcome
from penstock.bench.mlperf import Rules, drive, enough, judge, needed, poisson_times, stopping_estimate
from penstock.bench.prompts import Sample
from penstock.bench.serve import Target

TARGET = Target(backend="openai", endpoint="/v1/completions", model="m")
SAMPLES = [Sample(f"p{i}", 1, 4) for i in range(3)]


def answered(at_s: float = 0.0, latency_s: float = 0.1, ttft_s: float = 0.05, tokens: int = 11) -> Outcome:
    return Outcome(
        due_s=at_s, ready_s=at_s, sent_s=at_s, ok=True, output_tokens=tokens, ttft_s=ttft_s, latency_s=latency_s
    )


class FakeServer:
    """Takes `took_s` for each request, and remembers what it was asked, when, and with how many others."""

    def __init__(self, took_s: float) -> None:
        self.took_s = took_s
        self.asked: list[bytes] = []
        self.at_once = self.most = 0

    async def one(self, client: Any, path: str, body: bytes, expected_len: int = 0) -> Outcome:
        self.asked.append(body)
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        await asyncio.sleep(self.took_s)
        self.at_once -= 1
        return answered(latency_s=self.took_s, ttft_s=self.took_s / 2)


def driven(rules: Rules, took_s: float, monkeypatch: pytest.MonkeyPatch) -> tuple[FakeServer, list[Outcome], float]:
    fake = FakeServer(took_s)
    monkeypatch.setattr(serve, "one", fake.one)
    outcomes, duration_s = asyncio.run(drive(None, TARGET, SAMPLES, rules, seed=1))  # type: ignore[arg-type]
    return fake, outcomes, duration_s


def test_K20_single_stream_asks_one_after_the_other_until_both_minima_are_met(monkeypatch: pytest.MonkeyPatch) -> None:
    by_time = Rules(scenario="single-stream", min_duration_s=0.2, min_query_count=2)
    fake, outcomes, duration_s = driven(by_time, 0.02, monkeypatch)
    assert fake.most == 1
    assert duration_s >= 0.2
    assert 2 < len(outcomes) <= 11
    assert fake.asked[0] == fake.asked[3] != fake.asked[1]  # the samples come again
    by_count = Rules(scenario="single-stream", min_duration_s=0.01, min_query_count=12)
    _, outcomes, _ = driven(by_count, 0.005, monkeypatch)
    assert len(outcomes) == 12


def test_K20_offline_asks_everything_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = Rules(scenario="offline", min_duration_s=2.0, min_query_count=5, target_qps=10)
    fake, outcomes, _ = driven(rules, 0.01, monkeypatch)
    assert len(outcomes) == rules.num_samples == 22  # a tenth more than the rate needs
    assert fake.most == 22
    assert {o.due_s for o in outcomes} == {0.0}
    assert Rules(scenario="offline", min_duration_s=2.0, target_qps=10).num_samples == 24_576


def test_K20_server_is_poisson_until_both_minima_are_met(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = Rules(scenario="server", min_duration_s=600.0, target_qps=20)
    times = np.array(poisson_times(rules, 3))
    assert times[-1] >= 600 > times[-2]
    gaps = np.diff(times, prepend=0.0)
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, rel=0.05)
    assert (gaps > 2 / 20).mean() == pytest.approx(math.exp(-2), rel=0.05)
    many = poisson_times(Rules(scenario="server", min_duration_s=0.1, min_query_count=500, target_qps=20), 3)
    assert len(many) == 500
    assert many == times[:500].tolist()
    short = Rules(scenario="server", min_duration_s=0.2, min_query_count=4, target_qps=40)
    fake, outcomes, _ = driven(short, 0.1, monkeypatch)
    assert fake.most > 1  # nobody waits for an answer
    assert [o.due_s for o in outcomes] == poisson_times(short, 1)


def test_K20_early_stopping_has_loadgen_s_numbers() -> None:
    """mlperf.conf and the rules name 64 for p90 and 662 for p99 with one sample over; 459 with none."""
    assert needed(1, 0.9) == 64
    assert needed(1, 0.99) == 662
    assert needed(0, 0.99) == 459 == math.ceil(math.log(0.01) / math.log(0.99))
    assert enough(459, 0, 0.99)
    assert not enough(458, 0, 0.99)
    assert needed(100, 0.99) == pytest.approx(100 / 0.01, rel=0.3)
    for over in (0, 1, 5, 20):
        for num in (over + 1, 60, 400):
            exact = sum(math.comb(num, k) * 0.1**k * 0.9 ** (num - k) for k in range(over + 1))
            assert mlperf.chance_of(over, num, 0.1) == pytest.approx(exact)
    assert not enough(3, 3, 0.9)


def test_K20_the_estimate_is_never_below_the_plain_percentile() -> None:
    values = np.random.default_rng(0).lognormal(0, 1, 500).tolist()
    estimate = stopping_estimate(values, 0.9)
    assert estimate is not None
    assert np.quantile(values, 0.9) < estimate < max(values)
    over = sum(v >= estimate for v in values)
    assert enough(500, over, 0.9)
    assert not enough(500, over + 1, 0.9)
    assert stopping_estimate(values[:63], 0.9) is None
    assert stopping_estimate(values[:64], 0.9) == max(values[:64])


SHORT = {"min_duration_s": 10.0, "min_query_count": 10}


def test_K20_a_result_is_valid_or_says_why_not() -> None:
    rules = Rules(scenario="server", target_qps=50, **SHORT)  # type: ignore[arg-type]
    good = [answered(i * 0.02) for i in range(600)]
    found = judge(rules, good, 12.0)
    assert (found["result"], found["why_invalid"]) == ("VALID", [])
    assert (found["metric"], found["metric_value"]) == ("samples_per_s", 50.0)
    assert found["tokens_per_s"] == 550.0
    assert all(found["checks"].values())
    cases = {
        "min duration: 1.0 of 10 s": (good[:51], 1.1),
        "min queries: 9 of 10": ([answered(i * 2.0) for i in range(9)], 20.0),
        "p99 TTFT: 3.000 s, more than 2 s": (good[:-9] + [answered(12, ttft_s=3.0)] * 9, 12.0),
        "p99 TPOT: 0.250 s, more than 0.2 s": (good[:-9] + [answered(12, 2.55)] * 9, 12.0),
        "early stopping: 2 of 600 samples": (good[:-2] + [answered(12, ttft_s=3.0)] * 2, 12.0),
        "all samples answered: 1 of 600 failed": ([*good[:-1], Outcome(due_s=12.0)], 12.0),
    }
    for said, (outcomes, duration_s) in cases.items():
        found = judge(rules, outcomes, duration_s)
        assert found["result"] == "INVALID"
        assert not found["valid"]
        assert any(sentence.startswith(said) for sentence in found["why_invalid"]), (said, found["why_invalid"])
    # One sample over is carried by 662 and more; without early stopping the percentile alone decides.
    tight = [*good[:-1], answered(12, ttft_s=3.0)]
    assert not judge(rules, tight, 12.0)["valid"]
    assert judge(Rules(scenario="server", early_stopping=False, **SHORT), tight, 12.0)["valid"]  # type: ignore[arg-type]
    assert not judge(rules, [], 0.0)["valid"]


def test_K20_offline_and_single_stream_have_their_own_metrics() -> None:
    offline = judge(Rules(scenario="offline", **SHORT), [answered(latency_s=20.0)] * 30, 20.0)  # type: ignore[arg-type]
    assert (offline["result"], offline["metric_value"]) == ("VALID", 1.5)
    assert not judge(Rules(scenario="offline", **SHORT), [answered()] * 30, 9.0)["valid"]  # type: ignore[arg-type]
    outcomes = [answered(i * 0.1, latency_s=0.1 + 0.001 * i) for i in range(120)]
    single = judge(Rules(scenario="single-stream", **SHORT), outcomes, 12.0)  # type: ignore[arg-type]
    assert single["valid"]
    assert (single["metric"], single["metric_value"]) == ("p90_latency_s", pytest.approx(0.208))
    assert single["early_stopping_latency_s"] > 0.208
    few = judge(Rules(scenario="single-stream", **SHORT), outcomes[:20], 12.0)  # type: ignore[arg-type]
    assert any("ask 64 at least" in sentence for sentence in few["why_invalid"])


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"scenario": "multi-stream"}, "--scenario must be one of offline, server, single-stream"),
        ({"min_duration_s": 0.0}, "--min-duration must be above 0"),
        ({"target_qps": float("inf")}, "--target-qps must be above 0 and finite"),
        ({"min_query_count": 0}, "--min-query-count must be at least 1"),
    ],
)
def test_senseless_rules_are_one_sentence(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Rules(**({"scenario": "server"} | wrong))
