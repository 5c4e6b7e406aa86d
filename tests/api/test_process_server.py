"""A whole server over HTTP whose engine process is killed under it."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.base.errors import ConfigError
from penstock.config import serve_from_kwargs
from penstock.engine.process_link import ProcessLink
from penstock.engine.thread_link import ThreadLink
from penstock.server.assembly import make_link
from penstock.server.live import LiveServer
from tests.api.conftest import bundled

MARKER = 4000
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="engines are stopped and killed by signals")


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    config = serve_from_kwargs(
        model=bundled(), port=0, ops="ref", max_model_len=256, num_gpu_blocks_override=256, request_log=False,
        max_restarts_per_minute=20, fault=f"step:poison:{MARKER}",
    )  # fmt: skip
    with LiveServer(config) as live:
        yield live


def link_of(live: LiveServer) -> ProcessLink:
    assert live.server is not None
    link = live.server.client.link
    assert isinstance(link, ProcessLink)
    return link


CLIENT = httpx.Client(timeout=60, limits=httpx.Limits(max_connections=None))
"""One for all streams: a client of its own takes each longer to make than a short answer takes."""


def stream(live: LiveServer, i: int) -> str:
    """The text of one streamed completion, from its pieces."""
    body: dict[str, Any] = {
        "prompt": f"Once there was a child of {i} years who", "max_tokens": 120, "stream": True, "seed": i,
        "temperature": 0.0 if i % 2 else 1.0, "ignore_eos": True,
    }  # fmt: skip
    pieces: list[str] = []
    with CLIENT.stream("POST", live.url + "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                event = json.loads(line[6:])
                assert "error" not in event, event
                pieces += [choice["text"] for choice in event["choices"]]
    return "".join(pieces)


def until_ready(live: LiveServer) -> None:
    began = time.monotonic()
    while httpx.get(live.url + "/ready").status_code != 200:
        assert time.monotonic() - began < 30
        time.sleep(0.01)


def test_twenty_streams_do_not_notice_that_the_engine_is_killed(server: LiveServer) -> None:
    """Row 55, over HTTP."""
    link = link_of(server)
    with ThreadPoolExecutor(20) as pool:
        calm = list(pool.map(lambda i: stream(server, i), range(20)))
        wild = [pool.submit(stream, server, i) for i in range(20)]
        assert server.server is not None
        while server.server.client.num_live < 20:
            assert not any(future.done() for future in wild), "some ended before all had begun: make them longer"
            time.sleep(0.005)
        for _ in range(2):
            pid = link.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            began = time.monotonic()
            while httpx.get(server.url + "/ready").status_code == 200:
                assert time.monotonic() - began < 5, "ready without an engine"
            assert httpx.get(server.url + "/health").status_code == 200
            until_ready(server)
        assert [future.result() for future in wild] == calm
    assert all(len(text) > 20 for text in calm)


def test_poison_is_an_error_without_insides_and_the_server_lives(server: LiveServer) -> None:
    until_ready(server)
    body = {"prompt": [5, MARKER, 9], "max_tokens": 4}
    answer = httpx.post(server.url + "/v1/completions", json=body, timeout=60)
    assert answer.status_code == 500
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "SIGKILL" not in error["message"]
    assert "process" not in error["message"]
    until_ready(server)
    assert stream(server, 1)


def test_streams_do_not_notice_that_a_rank_or_its_engine_is_killed() -> None:
    config = serve_from_kwargs(
        model=bundled(), port=0, ops="ref", max_model_len=256, num_gpu_blocks_override=256, request_log=False,
        max_restarts_per_minute=20, executor="multiproc", depth=2,
    )  # fmt: skip
    with LiveServer(config) as live, ThreadPoolExecutor(4) as pool:
        link = link_of(live)
        calm = list(pool.map(lambda i: stream(live, i), range(4)))
        wild = [pool.submit(stream, live, i) for i in range(4)]
        assert live.server is not None
        while live.server.client.num_live < 4:
            assert not any(future.done() for future in wild), "some ended before all had begun: make them longer"
            time.sleep(0.005)
        for whom in ("rank", "engine"):
            pid = link.pid
            assert pid is not None
            rank = int(Path(f"/proc/{pid}/task/{pid}/children").read_text())
            os.kill(rank if whom == "rank" else pid, signal.SIGKILL)
            began = time.monotonic()
            while httpx.get(live.url + "/ready").status_code == 200:
                assert time.monotonic() - began < 5, "ready without an engine"
            until_ready(live)
        assert [future.result() for future in wild] == calm
    assert all(len(text) > 20 for text in calm)


def test_which_link_a_configuration_makes() -> None:
    def link(**settings: Any) -> object:
        return make_link(serve_from_kwargs(model=bundled(), **settings))

    assert isinstance(link(), ProcessLink)
    assert isinstance(link(engine_in_process=True), ThreadLink)
    with pytest.raises(ConfigError, match="step:kill"):
        link(fault="step:kil:3")
    with pytest.raises(ConfigError, match="number from 1"):
        link(fault="load:kill:1,step:kill:0")
    with pytest.raises(ConfigError, match="along"):
        link(fault="step:kill:3", engine_in_process=True)
