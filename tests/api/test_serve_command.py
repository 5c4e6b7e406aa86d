"""`penstock serve` as a process: how it starts, what it refuses at once, how it ends."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.conftest import bundled

SMALL = ("--ops", "blas", "--max-model-len", "512", "--num-gpu-blocks-override", "128")


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "penstock.cli.main", "serve", *args]


class Running:
    """`url` is where it listens; `said` is its standard output until it was ready."""

    def __init__(self, process: subprocess.Popen[str], said: str) -> None:
        self.process = process
        self.said = said
        self.url = re.findall(r"on (https?://\S+)", said)[0]

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60)


@contextmanager
def serving(*args: str, stderr: Any = None, environment: dict[str, str] | None = None) -> Iterator[Running]:
    process = subprocess.Popen(
        command(*args, *SMALL), stdout=subprocess.PIPE, stderr=stderr, text=True, env=os.environ | (environment or {})
    )
    try:
        assert process.stdout is not None
        said = ""
        while "browser" not in said:
            line = process.stdout.readline()
            assert line, f"it ended with {process.wait()} after saying {said!r}"
            said += line
        yield Running(process, said)
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def refused(*args: str, within_s: float = 5.0, **environment: str) -> str:
    """What it says when it ends with an error; the limit is generous for a loaded machine."""
    began = time.monotonic()
    run = subprocess.run(
        command(*args), capture_output=True, text=True, timeout=60, env=os.environ | environment, check=False
    )
    assert run.returncode not in (0, None)
    assert time.monotonic() - began < within_s
    assert "Traceback" not in run.stderr
    return run.stderr


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serving("--port", "0") as server:
        yield server


def test_what_it_prints_can_be_tried(running: Running) -> None:
    """The bundled model is the default, and the curl it prints works as it stands."""
    assert "penstock serves nano" in running.said
    line = running.said.split("try:")[1].split("or open")[0].replace("\\\n", " ")
    words = shlex.split(line)
    assert words[0] == "curl"
    answer = subprocess.run([*words, "-s", "--max-time", "50"], capture_output=True, text=True, check=True).stdout
    assert '"choices"' in answer
    assert '"finish_reason"' in answer


def test_settings_that_cannot_work_are_refused_at_once_with_the_fix(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert "choose another with --port" in refused("--port", str(port))
    assert "did you mean --max-num-seqs?" in refused("--max-num-seq", "3")
    assert "unrecognized arguments" in refused("--nothing-like-this")
    assert "cannot listen on 192.0.2.1" in refused("--host", "192.0.2.1", "--port", "0")
    assert "is not TOML" in refused("--config", str(write(tmp_path / "bad.toml", "[model")))
    assert "is gone" in refused("--best-of", "2")
    assert "tool_call_parser is 'nobody'" in refused("--tool-call-parser", "nobody", "--port", "0")


def test_what_does_not_fit_is_refused_with_the_smallest_change_that_fits() -> None:
    said = refused("--kv-cache-memory-bytes", "100", "--port", "0")
    assert re.search(r"use kv_cache_memory_bytes \d+", said), said


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_explain_says_what_was_decided_and_ends() -> None:
    run = subprocess.run(command("--explain", *SMALL), capture_output=True, text=True, timeout=60, check=True)
    assert "max_num_batched_tokens = " in run.stdout
    assert "block_size" not in run.stdout, "nobody has set it"


def test_the_engines_process_has_the_settings_of_the_command(tmp_path: Path) -> None:
    """One configuration is resolved, by the command; engine and rank read neither environment nor file again."""
    file = write(tmp_path / "engine.toml", '[cache]\nblock_size = 8\n[execution]\nexecutor = "multiproc"\n')
    environment = {"PENSTOCK_BLOCK_SIZE": "16", "PENSTOCK_MAX_NUM_SEQS": "5", "PENSTOCK_API_KEY": "sk-1"}
    for more, size in (((), 16), (("--block-size", "64"), 64)):
        with serving("nano", "--config", str(file), "--port", "0", *more, environment=environment) as server:
            assert f"blocks of {size} tokens" in server.said, "as the engine's process says"
            processes = [p for p in descendants(server.process.pid) if b"_process" in command_line(p)]
            assert sum(b"rank_process" in command_line(p) for p in processes) == 1, "the file was not read"
            with httpx.Client(base_url=server.url, headers={"authorization": "Bearer sk-1"}) as client:
                metrics = client.get("/metrics").text
                asked = {"prompt": "Once", "max_tokens": 2}
                assert client.post("/v1/completions", json=asked).status_code == 200
                for path in ("/props", "/version", "/metrics", "/v1/models"):
                    assert "sk-1" not in client.get(path).text
            assert f'block_size="{size}"' in metrics
            assert httpx.get(server.url + "/v1/models").status_code == 401


def test_a_wrong_variable_is_one_sentence() -> None:
    said = refused("nano", PENSTOCK_MAX_NUM_SEQS="many")
    assert (
        said
        == "penstock: error: PENSTOCK_MAX_NUM_SEQS: 'many' is not an integer such as 4096, 4k (4000) or 4K (4096)\n"
    )


@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8])
def test_an_interrupt_while_it_starts_is_one_line_at_most(after_s: float) -> None:
    process = subprocess.Popen(
        command("nano", "--port", "0"), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    while not descendants(process.pid):  # its engine's process has just begun
        time.sleep(0.001)
    time.sleep(after_s)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=20)
    assert "Traceback" not in said
    assert len([line for line in said.splitlines() if "INFO" not in line and "no MODEL" not in line]) <= 1, said
    assert process.returncode in (0, 130, -signal.SIGINT)


def test_a_reader_that_goes_away_is_no_error() -> None:
    shown = f"{shlex.join([sys.executable, '-m', 'penstock', 'serve', '--help'])} | head -1"
    run = subprocess.run(["bash", "-o", "pipefail", "-c", shown], capture_output=True, text=True, check=False)
    assert run.stderr == ""
    assert run.stdout.startswith("usage: penstock serve")


def test_a_unix_socket_is_served_privately_and_taken_away(tmp_path: Path) -> None:
    path = tmp_path / "penstock.sock"
    path_left = socket.socket(socket.AF_UNIX)
    path_left.bind(str(path))  # what a killed server leaves behind
    path_left.close()
    with serving("--uds", str(path)) as server:
        assert path.stat().st_mode & 0o777 == 0o600
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost") as client:
            assert client.get("/health").status_code == 200
        assert "another server listens" in refused("--uds", str(path))
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0
    assert not path.exists()


def test_sigterm_lets_fifty_streams_end_and_takes_nothing_new() -> None:
    with serving("--port", "0") as server, server.client() as client:
        asked = {"prompt": "Once upon a time", "max_tokens": 150, "temperature": 0, "ignore_eos": True}
        whole = client.post("/v1/completions", json=asked).json()["choices"][0]["text"]
        texts: list[str] = []
        started = threading.Semaphore(0)

        def read() -> None:
            with server.client() as mine, mine.stream("POST", "/v1/completions", json=asked | {"stream": True}) as s:
                text = ""
                for line in s.iter_lines():
                    if line.startswith("data: {"):
                        if not text:
                            started.release()
                        text += "".join(c["text"] for c in httpx.Response(200, content=line[6:]).json()["choices"])
                texts.append(text)

        readers = [threading.Thread(target=read) for _ in range(50)]
        for reader in readers:
            reader.start()
        for _ in readers:
            assert started.acquire(timeout=30)
        server.process.send_signal(signal.SIGTERM)
        # Existing connections still get answers; what they ask for anew is refused.
        deadline = time.monotonic() + 5
        while client.get("/ready").status_code != 503:
            assert time.monotonic() < deadline
        refusal = client.post("/v1/completions", json=asked)
        assert refusal.status_code == 503
        assert refusal.json()["error"]["code"] == "shutting_down"
        assert int(refusal.headers["retry-after"]) > 0
        for reader in readers:
            reader.join(60)
        assert texts == [whole] * 50
        assert server.process.wait(20) == 0


def test_a_second_signal_ends_it_at_once_and_nothing_stays_behind() -> None:
    with serving("--port", "0") as server, server.client() as client:
        asked = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=asked) as stream:
            next(stream.iter_lines())
            before = descendants(server.process.pid)
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.1)
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(10) == 0
        assert_gone(before)


def test_an_engine_that_is_stopped_is_not_ready_and_goes_on_unchanged(tmp_path: Path) -> None:
    """FEATURES row 56: stopped for ten seconds; 503 within five, stacks on resume, the stream unchanged."""
    log, stacks = tmp_path / "log", tmp_path / "folder" / "stacks.log"
    options = ("--port", "0", "--log-file", str(stacks))
    with log.open("w") as stderr, serving(*options, stderr=stderr) as server, server.client() as client:
        asked = {"prompt": "Once upon a time", "max_tokens": 300, "temperature": 0, "ignore_eos": True}
        whole = client.post("/v1/completions", json=asked).json()["choices"][0]["text"]
        (engine,) = [p for p in descendants(server.process.pid) if b"engine_process" in command_line(p)]
        with client.stream("POST", "/v1/completions", json=asked | {"stream": True}) as stream:
            lines = stream.iter_lines()
            read = [next(lines)]
            os.kill(engine, signal.SIGSTOP)
            stopped = time.monotonic()
            try:
                with server.client() as other:
                    while other.get("/ready").status_code == 200:
                        assert time.monotonic() - stopped < 5
                        time.sleep(0.1)
                    assert other.get("/health").status_code == 200
                time.sleep(max(0.0, stopped + 10 - time.monotonic()))
            finally:
                os.kill(engine, signal.SIGCONT)
            read += list(lines)
        chunks = [httpx.Response(200, content=line[6:]).json() for line in read if line.startswith("data: {")]
        assert "".join(c["text"] for chunk in chunks for c in chunk["choices"]) == whole
        assert client.get("/ready").status_code == 200
        assert [p for p in descendants(server.process.pid) if b"engine_process" in command_line(p)] == [engine]
    said = log.read_text()
    assert "Thread 0x" in stacks.read_text()
    assert stacks.stat().st_mode & 0o077 == 0
    assert "Thread 0x" not in said, "a terminal is for people"
    assert f"its stacks are in {stacks}" in said


def command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def test_a_disk_that_is_full_is_told_and_survived(tmp_path: Path) -> None:
    """FEATURES row 63. No file of the server may grow beyond a few KB, as if there were no more room."""
    limited = ["bash", "-c", 'ulimit -f 16; exec "$@"', "bash", *command("--port", "0", *SMALL)]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    with subprocess.Popen(limited, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            url = re.findall(r"on (http://\S+)", process.stdout.readline())[0]
            with httpx.Client(base_url=url, timeout=30) as client:
                form = {"file": ("batch.jsonl", b"x" * 100_000)}
                answer = client.post("/v1/files", files=form, data={"purpose": "batch"})
                assert answer.status_code in (500, 503, 507)
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
                assert str(tmp_path) not in answer.text
                assert client.get("/v1/files").json()["data"] == []
                assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
        finally:
            process.kill()


def test_the_engine_dies_with_a_server_that_is_killed() -> None:
    with serving("--port", "0") as server:
        before = descendants(server.process.pid)
        assert before, "the engine is a process of its own"
        server.process.kill()
        server.process.wait()
        assert_gone(before)


def descendants(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
            if parent == pid:
                found += [int(entry.name), *descendants(int(entry.name))]
    return found


def assert_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 5
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "a process stayed behind"
        time.sleep(0.05)


def test_few_files_a_full_home_and_no_network_are_no_obstacle(tmp_path: Path) -> None:
    """FEATURES row 63: 64 file descriptors, a home that cannot be written, no network."""
    home = tmp_path / "home"
    home.mkdir(mode=0o500)
    limited = ["bash", "-c", 'ulimit -n 64; exec "$@"', "bash", *command("--port", "0", *SMALL)]
    environment = os.environ | {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"), "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(limited, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            url = re.findall(r"on (http://\S+)", said)[0]
            clients = [httpx.Client(base_url=url, timeout=30) for _ in range(58)]
            answers = []
            for client in clients:
                try:
                    answers.append(client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code)
                except httpx.TransportError:
                    answers.append(0)  # more connections than files
            assert answers[0] == 200
            for client in clients:
                client.close()
            with httpx.Client(base_url=url, timeout=30) as client:
                assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
        finally:
            process.kill()


def test_the_model_can_be_another(tmp_path: Path) -> None:
    with serving(bundled(), "--port", "0", "--served-model-name", "mine,also") as server, server.client() as client:
        names = [model["id"] for model in client.get("/v1/models").json()["data"]]
        assert names == ["mine", "also"]
