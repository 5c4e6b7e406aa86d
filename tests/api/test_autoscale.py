"""I09: a server with `--autoscale`: engines come with the load and leave after it, and streams are unharmed."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from penstock.config import serve_from_kwargs
from penstock.server.live import LiveServer
from tests.api.test_replicas import USUAL, asked, numbers


def until(true: object, seconds: float = 120.0) -> None:
    assert callable(true)
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


@pytest.mark.skipif(sys.platform != "linux", reason="engines are processes")
def test_I09_engines_come_with_the_load_and_leave_after_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "penstock.server")
    config = serve_from_kwargs(
        **USUAL, max_replicas=3, autoscale="reactive:target=3,up_s=1,down_s=2", route_policy="least-requests"
    )  # fmt: skip
    with LiveServer(config) as live:
        want = [asked(live.url, n, "") for n in range(9)]  # one at a time: one engine
        assert live.server is not None
        client, texts = live.server.client, list[list[str]]()
        assert numbers(live.url, "replica_up") == {"0": 1.0}
        used: set[int] = set()

        def load() -> None:
            with ThreadPoolExecutor(9) as pool:
                while len([r for r in client.replicas if r.state == "ready"]) < 3 or len(texts) < 2:
                    texts.append(list(pool.map(lambda n: asked(live.url, n, ""), range(9))))
                    used.update(r.number for r in client.replicas)

        load()
        assert all(found == want for found in texts), "whoever had it, and whoever came meanwhile"
        assert {0, 1, 2} <= used
        until(lambda: len(client.replicas) == 1)
        assert asked(live.url, 0, "") == want[0]
        state = httpx.get(live.url + "/internal/state").json()["autoscale"]
        metrics = httpx.get(live.url + "/metrics").text
    steps = [(one["had"], one["wanted"]) for one in state["decisions"]]
    assert steps[0][0] == 1
    assert max(wanted for _, wanted in steps) == 3, "how many at a look depends on when it comes"
    assert steps[-1][1] == 1
    assert (state["least"], state["most"], state["wanted"]) == (1, 3, 1)
    for had, wanted in steps:
        assert f"autoscale: {had} -> {wanted} engines" in caplog.text
    assert 'penstock:autoscale_decisions_total{engine="0",kind="up",' in metrics
    assert "penstock:autoscale_wanted_replicas{" in metrics
    assert "# HELP penstock:autoscale_wanted_replicas Engines that autoscale wants." in metrics
