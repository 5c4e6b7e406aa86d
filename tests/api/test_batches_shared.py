"""Batches whose servers die, stop or share a folder, and whose disk or quota is full: nothing finished is lost."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch

from penstock.server.batches.runner import LOOK_S, MAX_RUNNING
from tests.api.test_batches import END, line, live_server, results, start, wait
from tests.api.test_serve_command import Running, command


@contextmanager
def at(url: str, key: str = "none") -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url + "/v1", api_key=key, max_retries=0) as client:
        yield client


@contextmanager
def process(folder: Path, *more: str, name: str = "nano") -> Iterator[tuple[Running, openai.OpenAI]]:
    """A server that can be killed; with native operations, unlike those inside this process."""
    flags = ("--port", "0", "--files-dir", str(folder), "--served-model-name", name, "--threads", "1",
             "--max-model-len", "256", "--num-gpu-blocks-override", "128", "--max-num-seqs", "4", *more)  # fmt: skip
    started = subprocess.Popen(command(*flags), stdout=subprocess.PIPE, text=True)
    try:
        assert started.stdout is not None
        running = Running(started, started.stdout.readline())
        with at(running.url) as client:
            yield running, client
    finally:
        started.kill()
        started.communicate()


def ended(batch: Batch) -> bool:
    return batch.status in END


def some_done(batch: Batch, num: int = 5) -> bool:
    return batch.request_counts is not None and batch.request_counts.completed >= num


def reason(batch: Batch) -> str | None:
    return batch.errors.data[0].code if batch.errors and batch.errors.data else None


def names(client: openai.OpenAI, file_id: str | None) -> Counter[str]:
    return Counter(x["custom_id"] for x in results(client, file_id))


NUM = 140
"""Lines of a batch that takes some seconds also where nothing else runs."""


def test_whoever_lives_goes_on_with_what_a_dead_server_had(tmp_path: Path) -> None:
    """And while both live, either shows, keeps and protects what one of them runs."""
    with process(tmp_path) as (owner, one), process(tmp_path) as (_, other):
        made = start(one, [line(f"q{i}", max_tokens=230 if i < NUM - 20 else 2, ignore_eos=True) for i in range(NUM)])
        seen = wait(other, made.id, some_done)
        assert seen.status == "in_progress"
        readable = results(other, seen.output_file_id)
        assert 5 <= len(readable) < NUM
        for file_id in (made.input_file_id, seen.output_file_id):
            with pytest.raises(openai.ConflictError, match="a batch is still"):
                other.files.delete(file_id or "")
        owner.process.send_signal(signal.SIGSTOP)
        time.sleep(3 * LOOK_S)
        stopped = other.batches.retrieve(made.id).request_counts
        time.sleep(2 * LOOK_S)
        assert other.batches.retrieve(made.id).request_counts == stopped, "a stopped server keeps its batches"
        owner.process.kill()
        batch = wait(other, made.id, ended)
        assert batch.status == "completed"
        assert batch.output_file_id == seen.output_file_id
        assert results(other, batch.output_file_id)[: len(readable)] == readable
        assert names(other, batch.output_file_id) == {f"q{i}": 1 for i in range(NUM)}
        assert batch.request_counts is not None
        assert batch.request_counts.model_dump() == {"total": NUM, "completed": NUM, "failed": 0}
        other.files.delete(made.input_file_id)
        assert not [path.name for path in tmp_path.glob("*/*") if path.suffix in (".lock", ".cancel")]


def test_either_server_cancels_and_the_dead_one_s_too(tmp_path: Path) -> None:
    """The second server serves another model: it never runs these lines, but it ends a batch that nobody owns."""
    lines = [line(f"q{i}", max_tokens=100, ignore_eos=True) for i in range(200)]
    with process(tmp_path) as (owner, one), process(tmp_path, name="another") as (_, other):
        made = start(one, lines)
        wait(one, made.id, some_done)
        assert other.batches.cancel(made.id).status == "cancelling"
        batch = wait(one, made.id, ended)
        assert batch.status == "cancelled"
        assert batch.request_counts is not None
        assert len(results(other, batch.output_file_id)) == batch.request_counts.completed < 200

        made = start(one, lines)
        wait(one, made.id, some_done)
        owner.process.kill()
        owner.process.wait()
        before = other.batches.retrieve(made.id)
        time.sleep(3 * LOOK_S)
        assert other.batches.retrieve(made.id) == before, "it has not that model"
        (kept,) = tmp_path.glob(f"*/{before.output_file_id}")
        kept.write_bytes(kept.read_bytes() + b'{"id":"batch_req_0')  # the worst that a kill can leave
        assert other.batches.cancel(made.id).status == "cancelling"
        batch = wait(other, made.id, ended)
        assert batch.status == "cancelled"
        assert batch.request_counts is not None
        assert len(results(other, batch.output_file_id)) == batch.request_counts.completed >= 5


def test_a_batch_waits_at_the_quota_and_goes_on_when_there_is_room(tmp_path: Path) -> None:
    """Logprobs and several samples make much of little; four batches that wait leave their places to other keys."""
    quota = 400_000
    keys = tmp_path / "keys"
    keys.write_text('[a]\nkey = "key-aaaaaaaa"\n[b]\nkey = "key-bbbbbbbb"\n')
    with ExitStack() as stack:
        flags = ("--max-files-bytes", str(quota), "--api-keys-file", str(keys))
        running, _ = stack.enter_context(process(tmp_path / "files", *flags))
        client = stack.enter_context(at(running.url, "key-aaaaaaaa"))
        other = stack.enter_context(at(running.url, "key-bbbbbbbb"))
        ballast = client.files.create(file=("a", io.BytesIO(b"x" * 300_000)), purpose="batch")
        lines = [line(f"q{i}", max_tokens=4, n=2, logprobs=20, ignore_eos=True) for i in range(40)]
        data = "\n".join(map(json.dumps, lines)).encode()
        # All inputs first: what the first batch writes takes the room of the next upload.
        inputs = [client.files.create(file=("in", io.BytesIO(data)), purpose="batch").id for _ in range(MAX_RUNNING)]
        asked: Any = {"endpoint": "/v1/completions", "completion_window": "24h"}
        made = [client.batches.create(input_file_id=name, **asked).id for name in inputs]
        for batch_id in made:
            wait(client, batch_id, lambda batch: reason(batch) == "files_full")
        waiting = [client.batches.retrieve(batch_id) for batch_id in made]
        assert {batch.status for batch in waiting} == {"in_progress"}
        sizes = [file.bytes for file in client.files.list()]
        assert sum(sizes) <= quota
        assert sum(sizes) > quota - 20_000, "what cannot be written waits; what can is"
        assert sum(len(results(client, batch.output_file_id)) for batch in waiting) >= 4
        with pytest.raises(openai.APIStatusError, match="would take more than") as refused:
            client.files.create(file=("a", io.BytesIO(b"x" * 20_000)), purpose="batch")
        assert refused.value.status_code == 413

        mine = wait(other, start(other, lines[:3]).id, ended)
        assert mine.status == "completed"
        assert len(results(other, mine.output_file_id)) == 3

        for batch_id in made[1:]:  # what they have stays, and takes room
            client.batches.cancel(batch_id)
            left = wait(client, batch_id, ended)
            assert (left.status, left.errors) == ("cancelled", None)
        client.files.delete(ballast.id)
        batch = wait(client, made[0], ended)
        assert (batch.status, batch.errors) == ("completed", None)
        assert names(client, batch.output_file_id) == {f"q{i}": 1 for i in range(40)}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("a disk of its own needs root and the right to mount one")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(ballast: Path) -> None:
    with ballast.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass


def test_a_batch_waits_on_a_full_disk_and_goes_on_also_after_a_restart(small_disk: Path) -> None:
    files, ballast = small_disk / "files", small_disk / "ballast"
    with process(files) as (running, client):
        made = start(client, [line(f"q{i}", max_tokens=60, logprobs=5, ignore_eos=True) for i in range(60)])
        wait(client, made.id, some_done)
        fill(ballast)
        batch = wait(client, made.id, lambda batch: reason(batch) is not None)
        assert (batch.status, reason(batch)) == ("in_progress", "insufficient_storage")
        readable = results(client, batch.output_file_id)
        assert len(readable) >= 5
        before = sorted(path.name for path in files.glob("*/*"))
        with pytest.raises(openai.InternalServerError, match="disk is full") as refused:
            client.files.create(file=("a", io.BytesIO(b"x" * 100_000)), purpose="batch")
        assert refused.value.status_code == 507
        assert sorted(path.name for path in files.glob("*/*")) == before
        assert client.completions.create(model="nano", prompt="a", max_tokens=1).choices
        running.process.kill()
    with process(files) as (_, client):
        batch = wait(client, made.id, lambda batch: reason(batch) is not None)
        assert batch.status == "in_progress"
        assert results(client, batch.output_file_id) == readable
        ballast.unlink()
        batch = wait(client, made.id, ended)
        assert (batch.status, batch.errors) == ("completed", None)
        assert results(client, batch.output_file_id)[: len(readable)] == readable
        assert names(client, batch.output_file_id) == {f"q{i}": 1 for i in range(60)}
        client.files.create(file=("a", io.BytesIO(b"x" * 100_000)), purpose="batch")


def test_growing_answers_end_with_a_whole_line(tmp_path: Path) -> None:
    with live_server(tmp_path) as live, at(live.url) as client:
        made = start(client, [line(f"q{i}", max_tokens=12, ignore_eos=True) for i in range(100)])
        batch: Any = None
        for _ in range(30):
            batch = client.batches.retrieve(made.id)
            for answer in results(client, batch.output_file_id):
                assert answer["response"]["status_code"] == 200
        assert json.loads(batch.to_json())["object"] == "batch"
        client.batches.cancel(made.id)
        wait(client, made.id, ended)


def test_a_slice_of_the_campaign(tmp_path: Path) -> None:
    """`tools/batch_soak.py` in short: servers are killed and stopped, the disk is filled, every line is right once."""
    tool = Path(__file__).parents[2] / "tools" / "batch_soak.py"
    out = tmp_path / "result.json"
    subprocess.run([sys.executable, str(tool), "--seconds", "8", "--apart", "1", "--out", str(out)], check=True)
    told = json.loads(out.read_text())
    assert told["lines"] == told["lines_answered_once_and_right"] > 0
    assert told["faulty"] == 0
