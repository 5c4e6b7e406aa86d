"""H04: a server with several engines of its model, over HTTP, while one of them is killed; what it does not take."""

from __future__ import annotations

import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from penstock import LLM
from penstock.base.errors import ConfigError
from penstock.config import serve_from_kwargs
from penstock.config.server import FurtherModel
from penstock.server.further import Further
from penstock.server.live import LiveServer
from tests.api.conftest import bundled

USUAL: dict[str, Any] = {
    "model": bundled(), "port": 0, "ops": "ref", "max_model_len": 256, "num_gpu_blocks_override": 256,
    "request_log": False,
}  # fmt: skip


def asked(url: str, n: int, session: str) -> str:
    body = {
        "prompt": f"Once there was a child of {n} years who",
        "max_tokens": 60,
        "temperature": 0,
        "ignore_eos": True,
    }
    answer = httpx.post(url + "/v1/completions", json=body, headers={"x-session-id": session}, timeout=60)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def numbers(url: str, name: str) -> dict[str, float]:
    """Of each engine."""
    lines = [line for line in httpx.get(url + "/metrics").text.splitlines() if line.startswith(f"penstock:{name}{{")]
    return {line.split('replica="')[1][0]: float(line.rsplit(" ", 1)[1]) for line in lines}


@pytest.mark.skipif(sys.platform != "linux", reason="engines are killed by signals")
def test_H04_L13_a_server_goes_on_with_one_engine_and_sessions_stay_together() -> None:
    with LiveServer(serve_from_kwargs(**USUAL)) as one:
        want = [asked(one.url, n, "") for n in range(6)]
    config = serve_from_kwargs(**USUAL, data_parallel_size=2, route_policy="session", max_restarts_per_minute=20)
    with LiveServer(config) as live:
        assert live.server is not None
        client, pool = live.server.client, ThreadPoolExecutor(6)
        inner, chosen = client.submit, dict[str, set[int]]()

        def submit(*given: Any, **more: Any) -> Any:
            stream = inner(*given, **more)
            chosen.setdefault(more["session"], set()).add(stream.replica.number)
            return stream

        client.submit = submit  # type: ignore[method-assign]
        assert numbers(live.url, "replica_up") == {"0": 1.0, "1": 1.0}
        answers = [pool.submit(asked, live.url, n, f"session {n % 4}") for n in range(6)]
        while not any(replica.snapshot.num_running for replica in client.replicas):
            time.sleep(0.005)
        busy = max(client.replicas, key=lambda replica: len(replica.streams))
        os.kill(busy.link.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        assert [answer.result() for answer in answers] == want
        assert all(len(found) == 1 for found in chosen.values()), "when they came, both were there"
        until = time.monotonic() + 30
        while numbers(live.url, "replica_up") != {"0": 1.0, "1": 1.0} and time.monotonic() < until:
            time.sleep(0.05)
        assert numbers(live.url, "replica_restarts_total")[str(busy.number)] == 1.0
        assert httpx.get(live.url + "/ready").status_code == 200


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"route_policy": "guess"}, "unknown route_policy 'guess'; choose one of: least-kv"),
        ({"engine_in_process": True}, "engine_in_process: it does not go together with several engines"),
        ({"keep_alive": "5m"}, "keep_alive: it does not go together"),
        ({"tensor_parallel_size": 2, "nnodes": 2}, "nnodes: engines of one server do not share it yet"),
    ],
)
def test_what_does_not_go_together_with_several_engines_is_refused(more: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says), LiveServer(serve_from_kwargs(**USUAL, **more, data_parallel_size=2)):
        pytest.fail("it was started")


def test_a_program_and_a_server_of_several_models_have_one_engine_of_each() -> None:
    with pytest.raises(ConfigError, match="data_parallel_size: a program has one engine of its own"):
        LLM(bundled(), data_parallel_size=2)
    for first, other in ((2, 1), (1, 2)):
        config = serve_from_kwargs(**USUAL, data_parallel_size=first)
        further = FurtherModel(name="other", config=serve_from_kwargs(**USUAL, data_parallel_size=other))
        with pytest.raises(ConfigError, match="data_parallel_size: a server of several models has one engine of each"):
            Further.of(type(config)(engine=config.engine, server=config.server, models=(further,)))
