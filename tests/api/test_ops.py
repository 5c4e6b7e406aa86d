"""/health, /ready, /version, /load: what probes, load balancers and autoscalers are told, and that it is true."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

import penstock
from penstock.server.live import LiveServer
from tests.api.watch import COMPLETIONS, Endings, on_loop, scrape, small

KEY = {"authorization": "Bearer sesame"}


@pytest.fixture(scope="module")
def keyed() -> Iterator[LiveServer]:
    with small(api_key="sesame", max_num_seqs=2) as server:
        yield server


@pytest.fixture
def user(keyed: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=keyed.url, headers=KEY, timeout=60) as client:
        yield client


def unready(live: LiveServer) -> dict[str, Any]:
    """The error of /ready, of which the form is checked. /health is not impressed."""
    assert httpx.get(live.url + "/health").status_code == 200
    answer = httpx.get(live.url + "/ready")
    assert answer.status_code == 503
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "overloaded_error"
    return error


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_probes_need_no_key(keyed: LiveServer, path: str) -> None:
    assert httpx.get(keyed.url + path).status_code == 200


@pytest.mark.parametrize("path", ["/metrics", "/version", "/load", "/props", "/slots", "/internal/state"])
def test_everything_else_does(keyed: LiveServer, user: httpx.Client, path: str) -> None:
    assert httpx.get(keyed.url + path).status_code == 401
    assert user.get(path).status_code == 200


def test_a_server_that_drains_is_alive_but_not_ready(keyed: LiveServer) -> None:
    server = keyed.server
    assert server is not None
    on_loop(keyed, lambda: setattr(server, "draining", True))
    try:
        assert unready(keyed)["code"] == "shutting_down"
    finally:
        on_loop(keyed, lambda: setattr(server, "draining", False))
    assert httpx.get(keyed.url + "/ready").status_code == 200


def test_an_engine_that_does_not_move_is_not_ready(keyed: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert keyed.server is not None
    link = keyed.server.client.link
    monkeypatch.setattr(link, "progress_age_s", lambda: 3.9)
    assert httpx.get(keyed.url + "/ready").status_code == 200
    monkeypatch.setattr(link, "progress_age_s", lambda: 4.1)
    error = unready(keyed)
    assert error["code"] == "engine_stalled"
    assert "4 s" in error["message"]


@pytest.mark.parametrize("state", ["restarting", "failed", "stopped", "starting"])
def test_an_engine_that_is_away_is_not_ready(keyed: LiveServer, monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    assert keyed.server is not None
    client = keyed.server.client
    monkeypatch.setattr(client, "state", state)
    monkeypatch.setattr(client, "reason", "the engine was killed by signal 9")
    error = unready(keyed)
    assert error["code"] == ("loading" if state == "starting" else f"engine_{state}")
    assert state == "starting" or "signal 9" in error["message"]
    assert scrape(keyed.url, **KEY)[f"penstock:engine_state{{state={state}}}"] == 1


def test_version(user: httpx.Client) -> None:
    assert user.get("/version").json() == {"version": penstock.__version__}


def test_load_tells_what_runs(keyed: LiveServer, user: httpx.Client) -> None:
    idle = user.get("/load").json()
    assert idle["server_load"] == idle["running"] == idle["waiting"] == 0
    assert idle["saturation"] == 0
    endings = Endings(keyed)
    body = {"model": "nano", "prompt": "Once", "max_tokens": 500, "ignore_eos": True, "stream": True, "n": 2}
    with user.stream("POST", COMPLETIONS, json=body) as answer:
        lines = answer.iter_lines()
        while (busy := user.get("/load").json())["running"] < 2:
            next(lines)
        slots = user.get("/slots").json()
        no_slot = user.get("/slots?fail_on_no_slot=1").status_code
        state = user.get("/internal/state").json()
    endings.wait()
    assert busy["server_load"] == 1
    assert busy["saturation"] == 1, "both places are taken"
    assert 0 < busy["kv_cache_usage"] < 1
    assert busy["predicted_wait_s"] >= 0
    assert busy["predicted_ttft_s"] >= busy["predicted_wait_s"]
    assert [slot["is_processing"] for slot in slots] == [True, True]
    assert no_slot == 503
    assert state["load"]["running"] == 2
    assert state["kv"]["used"] > 0


def test_props_are_llama_servers(user: httpx.Client) -> None:
    props = user.get("/props").json()
    assert props["total_slots"] == 2
    assert props["default_generation_settings"]["n_ctx"] == 512
    assert "{%" in props["chat_template"]


def test_the_state_for_the_page_has_history_and_requests_but_no_text(user: httpx.Client) -> None:
    words = "plum canary " * 40
    for _ in range(2):
        answer = user.post(COMPLETIONS, json={"model": "nano", "prompt": words, "max_tokens": 8, "temperature": 0})
        assert answer.status_code == 200
    state = user.get("/internal/state?points=5")
    assert "canary" not in state.text
    assert answer.json()["choices"][0]["text"].strip() not in state.text
    found = state.json()
    assert found["state"] == "ready"
    assert found["unready"] is None
    last = found["recent"][-1]
    assert last["generated_tokens"] == answer.json()["usage"]["completion_tokens"]
    assert last["cached_tokens"] >= 32
    assert last["ending"] in ("stop", "length")
    assert 0 < last["queue_s"] < last["ttft_s"] <= last["e2e_s"]
    blocks = answer.json()["usage"]["prompt_tokens"] // found["engine"]["block_size"]
    depth, length, _ = found["prefix"]["tree"][0]
    assert depth == 0
    assert length <= blocks <= sum(n for _, n, _ in found["prefix"]["tree"])
    assert found["prefix"]["hits"] >= 32
    assert len(found["history"]) <= 5
    assert user.get("/internal/state?points=x").status_code == 200
