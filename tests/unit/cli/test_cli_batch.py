"""`penstock batch`: every line exactly once, also after a kill; exit codes; what is refused before it begins."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from penstock.base.errors import InputError
from penstock.cli.main import main
from penstock.launch.bundled import bundled_model
from tests.unit.server.faulty_disk import failing

FLAGS = ["--model", str(bundled_model("nano")), "--ops", "blas", "--max-model-len", "256",
         "--num-gpu-blocks-override", "128", "--max-num-seqs", "2"]  # fmt: skip


def line(custom_id: str, **body: Any) -> str:
    given = {"prompt": custom_id, "max_tokens": 3, "temperature": 0, "ignore_eos": True} | body
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": given})


def answers(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def test_one_bad_line_harms_only_itself_and_a_second_run_does_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join([line("a"), "{", line("b", temperature=-1), line("a"), line("c")]))
    assert main(["batch", str(source), "-o", str(out), *FLAGS]) == 0
    assert "5 requests answered, 3 with errors" in capsys.readouterr().err
    first = out.read_bytes()
    good = {x["custom_id"]: x for x in answers(out) if x["error"] is None}
    assert sorted(good) == ["a", "c"]
    assert len(good["a"]["response"]["body"]["choices"][0]["text"]) > 0
    source.write_text(source.read_text() + "\n" + line("d"))
    assert main(["run-batch", "-i", str(source), "-o", str(out), *FLAGS]) == 0
    assert "6 requests answered (5 of them before), 3 with errors" in capsys.readouterr().err
    assert out.read_bytes().startswith(first)
    assert [x["custom_id"] for x in answers(out)].count("d") == 1


def test_if_all_failed_the_exit_status_says_so(tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(line("a", max_tokens=-1))
    assert main(["batch", str(source), "-o", str(out), *FLAGS]) == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_after_a_kill_every_line_is_there_exactly_once(tmp_path: Path, number: signal.Signals) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(line(f"q{i}", max_tokens=16) for i in range(150)))
    command = [sys.executable, "-m", "penstock.cli.main", "batch", str(source), "-o", str(out), *FLAGS]
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}  # two threads wait for each other on a busy machine
    # A shell's background job ignores Ctrl-C, and so do its children: as if a person had started it.
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not out.exists() or out.read_bytes().count(b"\n") < 5:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.005)
    os.kill(process.pid, number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == (-9 if number == signal.SIGKILL else 130), said
    assert "Traceback" not in said
    before = out.read_bytes()
    whole = before[: before.rfind(b"\n") + 1]
    assert 5 <= whole.count(b"\n") < 150
    out.write_bytes(whole + b'{"id":"batch_req_00')  # the worst that a kill can leave
    source.write_text("\n".join(line(f"q{i}", max_tokens=1) for i in range(150)))  # the rest, quickly
    again = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert again.returncode == 0, again.stderr
    assert out.read_bytes().startswith(whole)
    assert Counter(x["custom_id"] for x in answers(out)) == {f"q{i}": 1 for i in range(150)}


@pytest.mark.parametrize("most", [0, 1, 40])
def test_a_full_disk_is_a_sentence_and_the_next_run_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], most: int
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(line(f"q{i}", max_tokens=1) for i in range(60)))
    with failing(tmp_path, errno.ENOSPC, most, times=math.inf, kinds=("write", "ftruncate", "fsync")):
        assert main(["batch", str(source), "-o", str(out), *FLAGS]) == 1
    said = capfd.readouterr().err
    assert "No space left on device; the answers before that are whole" in said
    assert "Traceback" not in said
    before = out.read_bytes()
    whole = before[: before.rfind(b"\n") + 1]
    assert main(["batch", str(source), "-o", str(out), *FLAGS]) == 0
    assert out.read_bytes().startswith(whole)
    assert Counter(x["custom_id"] for x in answers(out)) == {f"q{i}": 1 for i in range(60)}


def test_two_processes_never_write_one_file(tmp_path: Path) -> None:
    import fcntl

    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(line("a"))
    with out.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert main(["batch", str(source), "-o", str(out), *FLAGS]) == 1
    assert out.read_bytes() == b""


@pytest.mark.parametrize("wrong", [["-o", "o"], ["x", "-i", "y", "-o", "o"], ["nowhere", "-o", "o"]])
def test_what_cannot_be_is_said_before_a_model_is_loaded(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["batch", *wrong, "--model", "no-such-model"]) == 1
    assert "file" in capsys.readouterr().err
    assert issubclass(InputError, ValueError)
