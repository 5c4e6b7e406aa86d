"""Published traces through a real engine over real files and through the simulator: the same hits of each tier."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.serving import tier_traces

from tests.shared import shared


@pytest.mark.parametrize(
    ("trace", "sizes"), [("mooncake", (200, 400, 4000)), ("azure", (130, 130, 1200))], ids=lambda v: str(v)
)
def test_a_minute_of_a_trace(trace: str, sizes: tuple[int, int, int], tmp_path: Path) -> None:
    """Tiers so small that all are hit within a minute; more than enough comes for the disk to be full."""
    traces = shared("data", "traces")
    args = tier_traces.parser().parse_args([])
    args.device_blocks, args.host_blocks, args.disk_blocks = sizes
    minute = [r for r in tier_traces.load(trace, traces, 2000, 1.0, 1) if r.arrival_s < 60]
    args.requests = len(minute)
    found = tier_traces.compare(trace, traces, args, str(tmp_path))
    assert found["real"]["requests"] == found["sim"]["requests"] == len(minute) > 100
    assert found["most_apart"] <= 2.0, found
    percent = found["real"]["percent"]
    assert percent["disk"] > 0.5, percent
    assert percent["device"] + percent["host"] > 0.5, percent
