"""B15: who is refused before a prompt is spent, and when it may come again."""

from __future__ import annotations

import random
from heapq import heapreplace

import pytest

from penstock.route.early import NOW, PREDICTED, PoolForecast, PoolRequest, PoolSpeed

SPEED = PoolSpeed(
    prefills=1,
    decodes=1,
    slots=4,
    kv_tokens=100_000,
    prompt_token_ns=1_000_000,
    step_us=lambda width: 10_000 + 500 * width,
)
NEW = PoolRequest(1000, 1000, 2000)
"""A second of prompt, and some ten of answer."""


def test_B15_a_wave_on_its_way_is_seen_before_it_arrives() -> None:
    """Nobody decodes yet: by the load as it is all are taken on, and the fifth would find no place."""
    forecast = PoolForecast(SPEED, [NEW] * 4, [])
    assert forecast.judge(NEW, mode=NOW).retry_us is None
    verdict = forecast.judge(NEW, mode=PREDICTED)
    assert verdict.retry_us is not None
    assert "beside 4 others, and there is room for 4" in verdict.why
    assert verdict.ready_us == 5_000_000


def test_B15_who_will_have_left_by_then_takes_no_place() -> None:
    forecast = PoolForecast(SPEED, [], [PoolRequest(0, 20, 1000)] * 4)
    assert forecast.judge(NEW, mode=PREDICTED).retry_us is None
    assert forecast.judge(NEW, mode=NOW).retry_us == 20 * 12_000


def test_memory_pace_and_first_tokens_count_too() -> None:
    one = PoolRequest(0, 1000, 99_000)
    assert "tokens of memory" in PoolForecast(SPEED, [], [one]).judge(NEW).why
    slow = PoolForecast(SPEED, [], [PoolRequest(0, 1000, 10)] * 2)
    assert "a token would take about 0.0115 s" in slow.judge(NEW, tpot_us=11_400).why
    assert slow.judge(NEW, tpot_us=11_500).retry_us is None
    queue = PoolForecast(SPEED, [NEW] * 2, [])
    late = queue.judge(NEW, ttft_us=1_500_000)
    assert late.retry_us == 1_500_000
    assert "first token would take about 3 s" in late.why
    assert queue.judge(NEW, ttft_us=3_000_000).retry_us is None


def test_engines_with_nothing_to_do_take_whatever_comes() -> None:
    giant = PoolRequest(10**6, 10**6, 10**7, width=9)
    assert PoolForecast(SPEED, [], []).judge(giant, ttft_us=1, tpot_us=1).retry_us is None


@pytest.mark.parametrize("mode", [NOW, PREDICTED])
def test_B15_who_comes_again_when_told_is_taken_on(mode: str) -> None:
    """Played forward by as long as the refusal said, with nobody else coming, over random states."""
    rng, refused = random.Random(3), 0
    for _ in range(400):
        pace_us = 12_000
        speed = PoolSpeed(
            rng.randint(1, 3), 1, rng.randint(1, 6), rng.randint(3000, 12_000), 1_000_000, lambda w: 12_000
        )
        waiting = [PoolRequest(rng.randint(1, 2000), rng.randint(1, 400), 1500) for _ in range(rng.randint(0, 4))]
        decoding = [PoolRequest(0, rng.randint(1, 400), 1500) for _ in range(rng.randint(0, 6))]
        new = PoolRequest(rng.randint(1, 2000), 100, 1500)
        ttft_us = rng.choice([None, 2_500_000])
        verdict = PoolForecast(speed, waiting, decoding).judge(new, mode=mode, ttft_us=ttft_us)
        if verdict.retry_us is None:
            continue
        refused += 1
        later_us, free = verdict.retry_us + 1, [0] * speed.prefills
        left, there = [], []
        for one in waiting:
            begun_us = heapreplace(free, free[0] + 1000 * one.prompt)
            done_us = later_us - (begun_us + 1000 * one.prompt)
            if done_us < 0:
                computed = max(0, later_us - begun_us) // 1000
                left.append(PoolRequest(max(1, one.prompt - computed), one.out, one.held))
            elif done_us < one.out * pace_us:
                there.append(PoolRequest(0, one.out - done_us // pace_us, one.held))
        there += [
            PoolRequest(0, one.out - later_us // pace_us, one.held) for one in decoding if later_us < one.out * pace_us
        ]
        again = PoolForecast(speed, left, there).judge(new, mode=mode, ttft_us=ttft_us)
        slack = again.retry_us is not None and again.retry_us <= 3 * pace_us
        assert again.retry_us is None or slack, (verdict, again, waiting, decoding, new)
    assert refused > 100
