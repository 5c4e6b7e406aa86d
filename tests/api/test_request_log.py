"""One line per request, however it ended, and never a word of what was said."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from penstock.base.clock import VirtualClock
from penstock.core.messages import EngineSnapshot
from penstock.core.output import CompletionOutput, RequestOutput
from penstock.server.errors import WireError
from penstock.server.live import LiveServer
from penstock.server.observation.request_log import RequestLog, Throughput
from tests.api.watch import CHAT, COMPLETIONS, Endings, on_loop, small

CANARY = "xyzzy-7f3a"
FIELDS = {
    "event", "id", "request_id", "tenant", "endpoint", "model", "stream", "n", "status", "ending", "finish_reasons",
    "prompt_tokens", "cached_tokens", "generated_tokens", "max_tokens", "queue_ms", "ttft_ms", "tpot_ms", "e2e_ms",
    "preemptions", "replays", "client_gone",
}  # fmt: skip


@pytest.fixture(scope="module")
def logged() -> Iterator[LiveServer]:
    with small() as server:
        yield server


@pytest.fixture(autouse=True)
def _everything(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "penstock")


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [json.loads(r.getMessage()) for r in caplog.records if r.name == "penstock.request"]


def test_a_finished_request_is_one_line_with_its_figures(logged: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    body = {"model": "nano", "prompt": "The quick brown fox", "max_tokens": 6, "n": 2, "ignore_eos": True}
    answer = httpx.post(logged.url + COMPLETIONS, json=body, headers={"x-request-id": "mine-1"}, timeout=60)
    assert answer.status_code == 200
    (line,) = lines(caplog)
    assert set(line) >= FIELDS
    usage = answer.json()["usage"]
    assert line["event"] == "request"
    assert line["id"].startswith("cmpl-")
    assert line["request_id"] == "mine-1"
    assert (line["tenant"], line["model"], line["stream"], line["n"]) == ("default", "nano", False, 2)
    assert (line["status"], line["ending"], line["finish_reasons"]) == (200, "length", ["length", "length"])
    assert line["prompt_tokens"] == usage["prompt_tokens"]
    assert line["generated_tokens"] == usage["completion_tokens"] == 12
    assert 0 <= line["queue_ms"] <= line["ttft_ms"] <= line["e2e_ms"]
    assert line["ttft_ms"] + 5 * line["tpot_ms"] == pytest.approx(line["e2e_ms"], abs=0.1)
    assert not line["client_gone"]


def test_nothing_that_was_said_is_logged(logged: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    common = {"model": "nano", "max_tokens": 12, "user": CANARY, "stop": [CANARY]}
    chat = {**common, "messages": [{"role": "system", "content": CANARY}, {"role": "user", "content": CANARY}]}
    answers = [
        httpx.post(logged.url + CHAT, json=chat, timeout=60).json()["choices"][0]["message"]["content"],
        httpx.post(logged.url + COMPLETIONS, json={**common, "prompt": CANARY, "ignore_eos": True}, timeout=60)
        .json()["choices"][0]["text"],
    ]  # fmt: skip
    assert httpx.post(logged.url + COMPLETIONS, json={**common, "prompt": CANARY, "model": CANARY}).status_code == 404
    assert httpx.post(logged.url + CHAT, json={**chat, "temperature": CANARY}).status_code == 400
    assert httpx.post(logged.url + CHAT, json={**chat, "response_format": {"type": CANARY}}).status_code == 400
    assert len(lines(caplog)) == 5
    everything = "\n".join(str(r.__dict__) for r in caplog.records if r.name.startswith("penstock"))
    assert CANARY not in everything
    for text in answers:
        assert len(text.strip()) < 4 or text.strip() not in everything


def test_a_refused_request_is_a_line_with_its_reason(logged: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    httpx.post(logged.url + COMPLETIONS, json={"model": "no", "prompt": "x"}, headers={"x-request-id": "mine-2"})
    httpx.post(logged.url + COMPLETIONS, json={"model": "nano", "prompt": "x", "max_tokens": -1})
    first, second = lines(caplog)
    assert (first["event"], first["status"], first["reason"]) == ("refused", 404, "model_not_found")
    assert (first["request_id"], first["endpoint"]) == ("mine-2", COMPLETIONS)
    assert (second["status"], second["param"]) == (400, "max_tokens")


def test_a_client_that_goes_away_has_a_line_too(logged: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    endings = Endings(logged)
    body = {"model": "nano", "prompt": "Once", "stream": True, "max_tokens": 500, "ignore_eos": True}
    with httpx.stream("POST", logged.url + COMPLETIONS, json=body, timeout=30) as answer:
        next(answer.iter_lines())
    endings.wait()
    on_loop(logged, lambda: None)
    (line,) = lines(caplog)
    assert line["client_gone"]
    assert (line["status"], line["ending"]) == (499, "client_gone")
    assert 0 < line["generated_tokens"] < 500


def test_a_request_that_runs_out_of_time_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with small(request_timeout=0.3) as server:
        endings = Endings(server)
        body = {"model": "nano", "prompt": "Once", "max_tokens": 500, "ignore_eos": True}
        assert httpx.post(server.url + COMPLETIONS, json=body, timeout=30).status_code == 408
        endings.wait()
        on_loop(server, lambda: None)
        (line,) = lines(caplog)
    assert (line["status"], line["ending"], line["client_gone"]) == (408, "timeout", False)
    assert line["e2e_ms"] == pytest.approx(300, abs=250)


def test_it_can_be_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    with small(request_log=False) as server:
        httpx.post(server.url + COMPLETIONS, json={"model": "nano", "prompt": "x", "max_tokens": 1}, timeout=30)
        httpx.post(server.url + COMPLETIONS, json={"model": "no", "prompt": "x"})
    assert lines(caplog) == []


def test_a_failed_request_is_not_reported_again_as_refused(caplog: pytest.LogCaptureFixture) -> None:
    log = RequestLog("m")
    call: Any = SimpleNamespace(facts={"http_request_id": "r1"}, tenant=SimpleNamespace(name="t"), endpoint="chat",
                                stream=False, params=None)  # fmt: skip
    stream: Any = SimpleNamespace(call=call, request_id="a", num_replays=2, request=SimpleNamespace(n=1, max_tokens=4))
    sample = CompletionOutput(0, "secret", [1, 2], finish_reason="error")
    log.on_finish(stream, RequestOutput("a", None, [1, 2, 3], None, [sample], True, error="the row failed"))
    scope: Any = {"method": "POST", "path": CHAT, "state": {"request_id": "r1"}}
    log.on_refused(scope, 500, WireError(500, "the row failed", code="engine_error"))
    (line,) = lines(caplog)
    assert (line["status"], line["ending"], line["error"], line["replays"]) == (500, "error", "the row failed", 2)
    log.on_refused(scope, 500, WireError(500, "another with the same id", code="engine_error"))
    assert [each["event"] for each in lines(caplog)] == ["request", "refused"]


def test_the_throughput_line_comes_while_there_is_work(caplog: pytest.LogCaptureFixture) -> None:
    clock = VirtualClock()
    client = SimpleNamespace(snapshot=EngineSnapshot(num_running=3, num_waiting=1, kv_total=100, kv_used=25))
    stats: Any = SimpleNamespace(
        clock=clock, client=client, num_generation_tokens=0, num_prompt_tokens=0, num_cached_tokens=0,
        counter=lambda name: {"num_prefix_queries_tokens": 200.0, "num_prefix_hit_tokens": 50.0}[name] * clock.now(),
    )  # fmt: skip
    throughput = Throughput(stats, every=10)

    def pass_ten_seconds() -> list[str]:
        caplog.clear()
        for _ in range(10):
            clock.advance(1.0)
            throughput.tick()
        return [r.getMessage() for r in caplog.records if r.name == "penstock.throughput"]

    stats.num_generation_tokens, stats.num_prompt_tokens, stats.num_cached_tokens = 500, 300, 100
    assert pass_ten_seconds() == [
        "Avg prompt throughput: 20.0 tokens/s, Avg generation throughput: 50.0 tokens/s, Running: 3 reqs, "
        "Waiting: 1 reqs, KV cache usage: 25.0%, Prefix cache hit rate: 25.0%"
    ]
    client.snapshot = EngineSnapshot(kv_total=100)
    assert len(pass_ten_seconds()) == 1, "it has become quiet"
    assert pass_ten_seconds() == []
