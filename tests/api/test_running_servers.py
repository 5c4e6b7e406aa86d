"""`penstock ps`, `stop`, `list` and `rm` beside servers that run, end, and are killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from penstock.base.errors import ModelError
from penstock.config import serve_from_kwargs
from penstock.launch.running import (
    RunningServer,
    announce_running,
    find_running,
    memory_bytes,
    running,
    started,
    stop_running,
)
from penstock.launch.store import ModelStore
from penstock.server.live import LiveServer
from tests.api.conftest import bundled
from tests.api.test_serve_command import serving
from tests.command import penstock


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Names and running servers of this test only; the model "mine:1" is a copy of the bundled one."""
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    shutil.copytree(bundled(), tmp_path / "copy")
    assert penstock("pull", str(tmp_path / "copy"), "--name", "mine:1").returncode == 0
    return tmp_path


def entries(place: Path) -> list[Path]:
    return list((place / "penstock").glob("*.json"))


def engine_of(pid: int) -> int:
    """The process of a server's engine."""
    (engine,) = [
        int(path.parent.name) for path in Path("/proc").glob("[0-9]*/stat")
        if path.read_text().rpartition(")")[2].split()[1] == str(pid)
    ]  # fmt: skip
    return engine


def test_a_server_is_found_used_and_stopped_by_name(place: Path) -> None:
    with serving("mine:1", "--port", "0") as server:
        assert "penstock serves mine:1" in server.said
        port = server.url.rpartition(":")[2]
        (entry,) = running()
        assert (entry.pid, entry.model, str(entry.port), entry.names) == (
            server.process.pid,
            "mine:1",
            port,
            ["mine:1"],
        )
        shown = penstock("ps").stdout
        assert all(word in shown for word in ("mine:1", f"127.0.0.1:{port}", str(server.process.pid), "MB", "idle"))
        assert all(len(line) <= 80 for line in shown.splitlines())
        (told,) = json.loads(penstock("ps", "--json").stdout)["servers"]
        assert told.pop("memory_bytes") > 1e7
        assert told == {
            "model": "mine:1", "names": ["mine:1"], "where": f"127.0.0.1:{port}", "port": int(port),
            "pid": server.process.pid, "since_s": entry.since_s, "num_requests": 0, "models": {},
        }  # fmt: skip
        (listed,) = json.loads(penstock("list", "--json").stdout)["models"]
        assert listed["state"] == "in_use"
        assert (place / "penstock").stat().st_mode & 0o777 == 0o700
        assert "in use" in penstock("list").stdout
        refusal = penstock("rm", "mine:1")
        assert refusal.returncode == 1
        assert "mine:1 is in use; stop what runs it first (penstock ps, penstock stop mine:1)" in refusal.stderr
        os.kill(engine_of(server.process.pid), signal.SIGKILL)
        for _ in range(20):
            assert ModelStore().in_use("mine:1"), "also while its engine is begun again"
            time.sleep(0.01)
        with server.client() as http:
            assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["mine:1"]
        stopped = penstock("stop", "mine:1")
        assert (stopped.returncode, stopped.stdout) == (0, f"stopped mine:1 ({port})\n")
        assert server.process.wait(10) == 0
    assert entries(place) == []
    assert "No server of yours runs" in penstock("ps").stdout
    assert penstock("rm", "mine:1").returncode == 0
    assert (place / "copy" / "config.json").is_file()


def test_a_server_that_was_killed_is_forgotten_and_holds_nothing(place: Path) -> None:
    with serving("mine:1", "--port", "0") as server:
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
        assert len(entries(place)) == 1
        assert running() == []
        assert entries(place) == []
        assert penstock("stop", "mine:1").stderr == ("penstock: error: no server of yours runs 'mine:1'; none runs\n")
        deadline_s = time.monotonic() + 20
        while ModelStore().in_use("mine:1"):  # its engine ends by itself
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        assert penstock("rm", "mine:1").returncode == 0


def test_stop_waits_for_what_was_begun_and_ps_tells_of_it(place: Path) -> None:
    with serving("mine:1", "--port", "0") as server, server.client() as http:
        engine = engine_of(server.process.pid)
        body = {"prompt": "Once", "max_tokens": 40, "ignore_eos": True, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            pieces = answer.iter_lines()
            next(pieces)
            os.kill(engine, signal.SIGSTOP)  # so that the answer is under way for as long as it is looked at
            try:
                deadline_s = time.monotonic() + 20
                while "1 request" not in penstock("ps").stdout:
                    assert time.monotonic() < deadline_s
                    time.sleep(0.1)
                stop = subprocess.Popen(
                    [sys.executable, "-m", "penstock", "stop", server.url.rpartition("/")[2]], text=True,
                    stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                )  # fmt: skip
                with pytest.raises(subprocess.TimeoutExpired):
                    stop.wait(1.5)
            finally:
                os.kill(engine, signal.SIGCONT)
            assert list(pieces)[-2] == "data: [DONE]"
        out, told = stop.communicate(timeout=60)
        assert (stop.returncode, told) == (0, "mine:1 ends what it has begun (1 request)\n")
        assert out.startswith("stopped mine:1")
        assert server.process.wait(10) == 0


def test_another_process_of_the_same_number_is_none_of_ours(tmp_path: Path) -> None:
    me = RunningServer(
        pid=os.getpid(),
        started="another start",
        model="m",
        names=["m"],
        where="127.0.0.1:9",
        port=9,
        since_s=time.time(),
    )
    announce_running(me, tmp_path)
    with pytest.raises(ModelError, match="has ended already"):
        stop_running(me)
    assert running(tmp_path) == []
    assert list(tmp_path.iterdir()) == []
    me.started = started(me.pid) or ""
    announce_running(me, tmp_path)
    assert [entry.pid for entry in running(tmp_path)] == [os.getpid()]
    assert memory_bytes(os.getpid()) > 10_000_000


def test_servers_are_named_by_model_port_socket_or_pid() -> None:
    def server(pid: int, where: str, port: int) -> RunningServer:
        return RunningServer(
            pid=pid, started="", model="path/m", names=["m", "alias"], where=where, port=port, since_s=0.0
        )

    both = [server(5, "127.0.0.1:8000", 8000), server(6, "/run/x.sock", 0)]
    for text, pid in (("8000", 5), ("127.0.0.1:8000", 5), ("5", 5), ("6", 6), ("/run/x.sock", 6)):
        assert find_running(text, both).pid == pid
    for text in ("m", "alias", "path/m"):
        with pytest.raises(ModelError, match=r"2 servers answer as .*name a port \(8000, /run/x.sock\)"):
            find_running(text, both)
        assert find_running(text, both[:1]).pid == 5
    with pytest.raises(ModelError, match=r"runs 'x'; there are path/m \(8000\), path/m \(/run/x.sock\)"):
        find_running("x", both)


def test_any_name_of_a_model_is_answered_where_that_is_set() -> None:
    config = serve_from_kwargs(
        model=bundled(), port=0, ops="blas", max_model_len=256, num_gpu_blocks_override=64, any_model_name=True,
        engine_in_process=True,
    )  # fmt: skip
    message = [{"role": "user", "content": "Hi"}]
    with LiveServer(config) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        for path, body in (
            ("/v1/chat/completions", {"messages": message}), ("/v1/completions", {"prompt": "Hi"}),
            ("/v1/messages", {"messages": message}), ("/v1/responses", {"input": "Hi"}),
            ("/v1/embeddings", {"input": "Hi"}), ("/tokenize", {"prompt": "Hi"}),
        ):  # fmt: skip
            size = {"max_output_tokens": 16} if "responses" in path else {"max_tokens": 4}
            asked = body | ({} if path in ("/v1/embeddings", "/tokenize") else size)
            answer = http.post(path, json=asked | {"model": "gpt-4o-mini"})
            assert answer.status_code == 200, answer.text
            assert answer.json().get("model", "nano") == "nano"
        assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["nano"]
        assert http.get("/v1/models/gpt-4o-mini").status_code == 404
