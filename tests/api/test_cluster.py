"""H04: engines of a running server over HTTP and by `penstock cluster`; who may, what is refused, what metrics say."""

from __future__ import annotations

import json
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from penstock.config import serve_from_kwargs
from penstock.server.live import LiveServer
from tests.api.conftest import bundled
from tests.api.test_replicas import asked
from tests.command import penstock

ADMIN, KEY = {"Authorization": "Bearer sk-admin"}, ("--key", "sk-admin")
USUAL: dict[str, Any] = {
    "model": bundled(), "port": 0, "max_model_len": 256, "num_gpu_blocks_override": 64, "request_log": False,
    "admin_api_key": "sk-admin",
}  # fmt: skip


def metric(url: str, name: str) -> dict[str, float]:
    """Of each engine."""
    lines = [line for line in httpx.get(url + "/metrics").text.splitlines() if line.startswith(f"penstock:{name}{{")]
    found = {}
    for line in lines:
        number = re.search(r'replica="(\d+)"', line)
        assert number is not None, line
        state = re.search(r'state="(\w+)"', line)
        found[number[1] + (f" {state[1]}" if state else "")] = float(line.rsplit(" ", 1)[1])
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="engines are processes that signals end")
def test_H04_engines_come_and_go_over_http_while_streams_run() -> None:
    with LiveServer(serve_from_kwargs(**USUAL, max_replicas=2)) as live, ThreadPoolExecutor(6) as pool:
        where = live.url + "/internal/replicas"
        want = [asked(live.url, n, "") for n in range(6)]

        def act(number: int | str, **body: Any) -> httpx.Response:
            return httpx.post(f"{where}/{number}", json=body, headers=ADMIN, timeout=60)

        # who may
        for answer in (httpx.get(where), httpx.post(where), httpx.post(where + "/0", json={"action": "remove"})):
            assert answer.status_code == 401
        assert httpx.get(where, headers=ADMIN).json()["most"] == 2
        answer = act(0, action="remove")
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "last_replica")
        # another one, and away with the first under load
        answers = [pool.submit(asked, live.url, n, "") for n in range(6)]
        assert httpx.post(where, headers=ADMIN, timeout=60).json() == {"object": "replica", "number": 1, "done": True}
        answer = httpx.post(where, headers=ADMIN, timeout=60)
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "too_many_replicas")
        answers += [pool.submit(asked, live.url, n, "") for n in range(6)]
        assert act(0, action="remove", timeout=0.0).json()["done"]
        assert [answer.result() for answer in answers] == want + want
        assert list(metric(live.url, "replica_up")) == ["1"]
        total = httpx.get(live.url + "/metrics").text
        counted = [
            float(x.rsplit(" ", 1)[1]) for x in total.splitlines() if x.startswith("vllm:generation_tokens_total")
        ]
        assert counted == [18 * 60.0], "what a removed engine has done stays counted"
        # what is wrong is said
        for body, says in (
            ({"action": "explode"}, "action: 'explode' is none of drain, resume, remove, restart"),
            ({"action": "drain", "timeout": -1}, "timeout must be a number of seconds from 0"),
            ({}, "action"), ({"action": "drain", "soon": 1}, "soon"),
        ):  # fmt: skip
            answer = act(1, **body)
            assert answer.status_code == 400
            assert says in answer.json()["error"]["message"]
        assert act("one", action="drain").status_code == 400
        answer = act(0, action="resume")
        assert (answer.status_code, answer.json()["error"]["message"]) == (404, "there is no engine 0; there are: 1")
        # whoever asks may leave: it is done all the same
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(where, headers=ADMIN, timeout=0.1)
        until = time.monotonic() + 30
        while list(metric(live.url, "replica_up").values()) != [1.0, 1.0] and time.monotonic() < until:
            time.sleep(0.05)
        assert metric(live.url, "replica_up") == {"1": 1.0, "2": 1.0}
        assert act(2, action="remove").status_code == 200
        # restarted alone: streams wait
        answers = [pool.submit(asked, live.url, n, "") for n in range(6)]
        assert httpx.post(where + "/restart", headers=ADMIN, timeout=60).json()["away_s"]["1"] > 0
        assert [answer.result() for answer in answers] == want


@pytest.mark.skipif(sys.platform != "linux", reason="engines are processes that signals end")
def test_H04_the_command_the_metrics_and_the_page_of_engines() -> None:
    with LiveServer(serve_from_kwargs(**USUAL, data_parallel_size=2)) as live:
        asked(live.url, 1, "")

        def cluster(action: str, *more: str) -> tuple[int, str]:
            done = penstock("cluster", action, live.url, *more)
            return done.returncode, done.stdout + done.stderr

        code, out = cluster("status", *KEY, "--json")
        found = json.loads(out)["data"]
        assert code == 0
        assert [(one["number"], one["state"], one["draining"]) for one in found] == [
            (0, "ready", False), (1, "ready", False),
        ]  # fmt: skip
        assert sum(one["generated_tokens"] for one in found) == 60
        assert cluster("drain", "0", *KEY) == (0, "engine 0 has nothing left, and gets nothing new\n")
        code, out = cluster("status", *KEY)
        assert code == 0
        assert re.search(r"^ ?0 +draining ", out, re.M)
        assert "2 of at most 2, routed by prefix" in out
        assert metric(live.url, "replica_draining") == {"0": 1.0, "1": 0.0}
        states = metric(live.url, "replica_state")
        assert states["0 ready"] == states["1 ready"] == 1.0
        assert states["0 failed"] == 0.0
        assert sum(metric(live.url, "replica_generation_tokens_total").values()) == 60
        assert set(metric(live.url, "replica_waiting")) == set(metric(live.url, "replica_prefix_hit_tokens_total")) == {
            "0", "1",
        }  # fmt: skip
        code, out = cluster("drain", "1", *KEY)
        assert code == 1
        assert "engine 1 is the last one that takes requests; add one first" in out
        assert cluster("resume", "0", *KEY) == (0, "engine 0 gets requests again\n")
        code, out = cluster("restart", "0", "--timeout", "1", *KEY)
        assert code == 0
        assert "engine 0 was away for" in out
        code, out = cluster("status")
        assert code == 1
        assert "an API key is needed" in out
        state = httpx.get(live.url + "/internal/state").json()
        assert [one["state"] for one in state["replicas"]] == ["ready", "ready"]
        assert "pid" not in state["replicas"][0], "for whoever has a key of the server, not for operators alone"


def test_without_an_admin_key_there_is_nothing_and_without_a_server_a_sentence() -> None:
    done = penstock("cluster", "status", "http://127.0.0.1:9")
    assert done.returncode == 1
    assert "there is no answer" in done.stderr
    config = serve_from_kwargs(**USUAL | {"admin_api_key": None, "engine_in_process": True})
    with LiveServer(config) as live:
        assert httpx.get(live.url + "/internal/replicas").status_code == 404
        done = penstock("cluster", "status", live.url)
        assert "start it with --admin-api-key" in done.stderr


def test_H04_another_key_may_not_and_an_engine_within_the_server_is_restarted_too() -> None:
    user = {"Authorization": "Bearer sk-user"}
    with LiveServer(serve_from_kwargs(**USUAL, api_key="sk-user", engine_in_process=True)) as live:
        where = live.url + "/internal/replicas"
        for method, path in (("GET", ""), ("POST", ""), ("POST", "/restart"), ("POST", "/0")):
            answer = httpx.request(method, where + path, headers=user)
            assert (answer.status_code, answer.json()["error"]["message"]) == (403, "this needs the admin key")
        answer = httpx.post(where + "/restart", headers=ADMIN, timeout=60)
        assert answer.json()["done"], answer.text
        body = {"prompt": "Once", "max_tokens": 4}
        assert httpx.post(live.url + "/v1/completions", json=body, headers=user, timeout=60).status_code == 200
