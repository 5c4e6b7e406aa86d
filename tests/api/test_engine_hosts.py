"""H04: a server whose second engine is on another host, over HTTP, by command and in metrics; what it does not take."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock import LLM
from penstock.base.errors import ConfigError
from penstock.config import serve_from_kwargs
from penstock.config.server import FurtherModel
from penstock.server.further import Further
from penstock.server.live import LiveServer
from tests.api.test_cluster import ADMIN, KEY
from tests.api.test_replicas import USUAL, asked
from tests.command import penstock
from tests.engine.hosts import EngineHost, beside, free_port

NAME = f"{socket.gethostname()} (127.0.0.1)"
SPREAD: dict[str, Any] = {"data_parallel_size": 2, "data_parallel_size_local": 1}


def listed(url: str) -> list[tuple[int, str, str]]:
    data = httpx.get(url + "/internal/replicas", headers=ADMIN).json()["data"]
    return [(one["number"], one["state"], one["host"]) for one in data]


def until(url: str, want: list[tuple[int, str, str]]) -> None:
    until_s = time.monotonic() + 120
    while (found := listed(url)) != want:
        assert time.monotonic() < until_s, found
        time.sleep(0.05)


@pytest.mark.skipif(sys.platform != "linux", reason="engines are killed by signals")
def test_H04_a_server_goes_on_without_its_other_host_and_has_it_again(tmp_path: Path) -> None:
    port = free_port()
    config = serve_from_kwargs(
        **USUAL, **SPREAD, data_parallel_rpc_port=port, admin_api_key="sk-admin", route_policy="round-robin"
    )  # fmt: skip
    host = EngineHost(str(USUAL["model"]), port, tmp_path / "log")
    with LiveServer(config) as live, ThreadPoolExecutor(6) as pool, beside(host):
        want = [asked(live.url, n, "") for n in range(6)]
        assert listed(live.url) == [(0, "ready", ""), (1, "away", "")]
        host.start()
        until(live.url, [(0, "ready", ""), (1, "ready", NAME)])
        answers = [pool.submit(asked, live.url, n, "") for n in range(6)]
        assert live.server is not None
        while not live.server.client.replicas[1].snapshot.num_running:
            time.sleep(0.005)
        os.kill(host.pid, signal.SIGKILL)
        assert [answer.result() for answer in answers] == want
        until(live.url, [(0, "ready", ""), (1, "away", NAME)])
        assert httpx.get(live.url + "/ready").status_code == 200
        host.kill()
        host.start()
        until(live.url, [(0, "ready", ""), (1, "ready", NAME)])
        text = httpx.get(live.url + "/metrics").text
        assert re.search(rf'^penstock:replica_host_info{{.*host="{re.escape(NAME)}",.*replica="1".*}} 1.0$', text, re.M)
        assert re.search(r'^penstock:replica_state{.*replica="1".*state="away".*} 0.0$', text, re.M)
        assert re.search(r'^penstock:replica_restarts_total{.*replica="1".*} 1.0$', text, re.M)
        out = penstock("cluster", "status", live.url, *KEY).stdout
        assert f"\n1: on {NAME}\n2 of at most 2, " in out, out
        shown = httpx.get(live.url + "/internal/state").json()["replicas"]
        assert [one["host"] for one in shown] == ["", socket.gethostname()], "addresses are for operators"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"autoscale": "reactive", "max_replicas": 3}, "autoscale: it starts and ends engines of this host"),
        ({"enable_lora": True}, "enable_lora: it names files that engines on other hosts would not have"),
        ({"data_parallel_size_local": 3}, "data_parallel_size_local: 3 engines here are more than the 2 of"),
        ({"data_parallel_start_rank": 1}, "data_parallel_start_rank: engines of the server's own host begin at 0"),
        ({"data_parallel_address": "0.0.0.0"}, "ranks_secret_file: other hosts can reach 0.0.0.0"),
        ({"nnodes": 2, "tensor_parallel_size": 2}, "nnodes: engines of one server do not share it yet"),
        ({"keep_alive": "5m"}, "keep_alive: it does not go together with several engines"),
        ({"replica_roles": "prefill=1,decode=1"}, "replica_roles: keys and values go from engine to engine by a store"),
        ({"replica_roles": "prefill=1,decode=1", "kv_offload": "disk:STORE"}, "replica_roles: keys and values go from"),
    ],
)
def test_what_does_not_go_together_is_said(more: dict[str, Any], says: str, tmp_path: Path) -> None:
    if "kv_offload" in more:
        more = more | {"kv_offload": f"disk:{tmp_path}/store"}
    settings = USUAL | SPREAD | {"data_parallel_rpc_port": free_port()} | more
    with pytest.raises(ConfigError, match=re.escape(says)), LiveServer(serve_from_kwargs(**settings)):
        pass


def test_programs_and_servers_of_several_models_have_no_engines_elsewhere() -> None:
    alone: dict[str, Any] = {"data_parallel_size_local": 0}
    with pytest.raises(ConfigError, match="a program has one engine of its own"):
        LLM(str(USUAL["model"]), **alone)
    further = FurtherModel(name="other", config=serve_from_kwargs(**USUAL))
    config = serve_from_kwargs(**USUAL, **alone)
    from dataclasses import replace

    with pytest.raises(ConfigError, match="a server of several models has one engine of each"):
        Further.of(replace(config, models=(further,)))
