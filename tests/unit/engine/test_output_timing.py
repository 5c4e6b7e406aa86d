"""Row A02: the time to the first token and that between tokens, per request, on a clock that the test moves."""

from __future__ import annotations

import pytest

from penstock.base.clock import VirtualClock
from penstock.core.output import EngineOutput, RequestMetrics
from penstock.core.sampling import SamplingParams
from penstock.engine.client import OutputProcessor
from tests.engine.harness import request


def test_A02_each_request_has_its_own_ttft_and_tpot() -> None:
    """Two requests in turn: the second arrives later, begins later and has two samples, one of which ends early."""
    clock = VirtualClock()
    processor = OutputProcessor(None, clock)
    arrivals = {"a": 1.0, "b": 1.5}
    for name, n in (("a", 1), ("b", 2)):
        processor.add(
            request([5], request_id=name, n=n, max_tokens=4, arrival_s=arrivals[name]), SamplingParams(n=n), ""
        )
    metrics = {name: processor.live(name).metrics for name in arrivals}
    news = [  # time, request, sample, tokens, whether it is the last
        (2.0, "a", 0, 1, False), (2.5, "a", 0, 1, False), (2.75, "b", 1, 1, False), (3.0, "b", 0, 1, False),
        (3.0, "b", 1, 1, True), (4.0, "a", 0, 2, True), (6.75, "b", 0, 3, True),
    ]  # fmt: skip
    for now, name, index, count, last in news:
        clock.advance_to(now)
        reason = "length" if last else None
        processor.process(
            [EngineOutput(request_id=name, index=index, token_ids=[7] * count, finish_reason=reason, scheduled_s=1.75)]
        )
        if name == "b" and now < 6:
            assert metrics["b"].finished_s is None, "one of its samples still runs"
    assert metrics["a"].ttft_s == pytest.approx(2.0 - 1.0)
    assert metrics["a"].tpot_s(4) == pytest.approx((4.0 - 2.0) / 3)
    assert metrics["b"].ttft_s == pytest.approx(2.75 - 1.5)
    assert metrics["b"].tpot_s(5) == pytest.approx((6.75 - 2.75) / 4)


def test_A02_what_has_not_happened_has_no_time() -> None:
    assert RequestMetrics(arrival_s=1.0).ttft_s is None
    assert RequestMetrics(arrival_s=1.0, first_token_s=2.0).tpot_s(5) is None
    assert RequestMetrics(arrival_s=1.0, first_token_s=2.0, finished_s=2.0).tpot_s(1) is None
