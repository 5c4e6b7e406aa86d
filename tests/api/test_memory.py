"""What a server with default settings holds of the machine's memory, and what it says of it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from penstock.config import serve_from_kwargs
from penstock.engine.loop import IDLE_SNAPSHOT_S
from penstock.kv.backing import AHEAD_BYTES
from penstock.server.live import LiveServer
from tests.api.conftest import bundled

MB = 1_000_000
BASE = 110 * MB
"""Interpreter, libraries and the weights of the bundled model: what is held beside KV (90 were measured)."""
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    config = serve_from_kwargs(model=bundled(), port=0, threads=1, request_log=False)
    with LiveServer(config) as live:
        yield live


def held(live: LiveServer) -> int:
    """Bytes of the engine's process that are its own."""
    assert live.server is not None
    info = live.server.client.info
    assert info is not None
    status = Path(f"/proc/{info.pid}/status").read_text("utf-8")
    return int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1]) * 1024


def test_memory_is_bounded_by_use_not_by_the_pool(server: LiveServer) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        kv = client.get("/internal/state").json()["kv"]
        assert kv["limit_bytes"] > 3 * AHEAD_BYTES, "else there is nothing to see"
        started = held(server)
        assert started < BASE + AHEAD_BYTES
        for i in range(50):
            body = {"prompt": f"{i} was the number of " * 20, "max_tokens": 4, "ignore_eos": True}
            client.post("/v1/completions", json=body).raise_for_status()
        assert server.server is not None
        info = server.server.client.info
        assert info is not None
        tokens = info.num_blocks * info.block_size
        used = 50 * 160 * kv["limit_bytes"] // tokens
        assert held(server) < started + AHEAD_BYTES // 2 + 2 * used


def test_a_server_says_what_it_holds_and_why(server: LiveServer) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        client.post("/v1/completions", json={"prompt": "Once", "max_tokens": 4}).raise_for_status()
        time.sleep(IDLE_SNAPSHOT_S + 0.5)
        kv = client.get("/internal/state").json()["kv"]
        text = client.get("/metrics").text
    assert 0 < kv["held_bytes"] <= AHEAD_BYTES + AHEAD_BYTES // 2
    assert kv["refusals"] == 0
    assert "64 sequences of" in kv["why"]
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    at = {name: float(value) for name, value in lines.items() if "penstock" in name}
    assert any("memory_bytes" in name and 'subsystem="kv"' in name and v == kv["held_bytes"] for name, v in at.items())
    assert any("memory_bytes" in n and 'subsystem="kv_limit"' in n and v == kv["limit_bytes"] for n, v in at.items())
    assert any(name.startswith("penstock:kv_growths") and v >= 1 for name, v in at.items()), at
    assert any(name.startswith("penstock:kv_refusals") and v == 0 for name, v in at.items())
