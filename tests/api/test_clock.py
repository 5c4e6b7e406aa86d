"""FEATURES row 63: the wall clock jumps by an hour, and nobody notices but time stamps."""

from __future__ import annotations

import time

import httpx
import pytest

from penstock.config import serve_from_kwargs
from penstock.server.live import LiveServer
from tests.api.conftest import bundled


def test_a_clock_that_jumps_changes_time_stamps_only(monkeypatch: pytest.MonkeyPatch) -> None:
    config = serve_from_kwargs(
        model=bundled(), port=0, engine_in_process=True, max_model_len=128, num_gpu_blocks_override=32,
        response_store_ttl=600.0, request_timeout=30.0,
    )  # fmt: skip
    real = time.time
    ask = {"prompt": "Once upon a time", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    with LiveServer(config) as live, httpx.Client(base_url=live.url, timeout=30) as http:
        before = http.post("/v1/completions", json=ask).json()
        stored = http.post("/v1/responses", json={"input": "a", "max_output_tokens": 4}).json()["id"]
        for jump_s in (3600.0, -3600.0):
            monkeypatch.setattr(time, "time", lambda jump_s=jump_s: real() + jump_s)
            after = http.post("/v1/completions", json=ask).json()
            assert after["choices"] == before["choices"]
            assert after["usage"]["total_tokens"] == before["usage"]["total_tokens"]
            assert after["created"] - before["created"] == pytest.approx(jump_s, abs=30)
            assert http.get("/ready").status_code == 200
            assert http.get(f"/v1/responses/{stored}").status_code == 200, "what is kept ages by another clock"
            text = http.get("/metrics").text
            slow = [line for line in text.splitlines() if line.startswith("vllm:e2e_request_latency_seconds_sum")]
            assert 0 <= float(slow[0].split()[-1]) < 60
