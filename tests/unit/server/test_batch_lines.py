"""Batch files line by line: bounded memory, exact resumption, nothing twice (FEATURES 4.3, row 69)."""

from __future__ import annotations

import asyncio
import codecs
import errno
import json
import math
import tempfile
import tracemalloc
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.server.batches import job as batch_job
from penstock.server.batches.files import FileStore
from penstock.server.batches.job import Job, OpenGate
from penstock.server.batches.lines import IdSet, LineReader, Results, read_lines
from penstock.server.call import ANYONE
from penstock.server.transport.inner import Answer
from tests.unit.server.faulty_disk import failing

KEYS = st.lists(st.integers(1, 2**64 - 1) | st.integers(1, 40).map(lambda i: i << 20), max_size=3000)


@settings(max_examples=30)
@given(KEYS)
def test_an_id_set_is_a_set(keys: list[int]) -> None:
    ours, theirs = IdSet(), set()
    for key in keys:
        assert (key in ours) == (key in theirs)
        assert ours.add(key) == (key not in theirs)
        theirs.add(key)
    assert len(ours) == len(theirs)
    assert all(key in ours for key in theirs)


def write(path: Path, num: int) -> None:
    with path.open("w") as file:
        for i in range(num):
            body = {"prompt": "x" * 100}
            file.write(json.dumps({"custom_id": f"q{i}", "url": "/v1/completions", "body": body}) + "\n")


def job(source: Path, out: Path, most: int, asked: list[str] | None = None) -> tuple[Job, Results]:
    flying = 0

    async def ask(path: str, body: bytes, request_id: str) -> Answer:
        nonlocal flying
        flying += 1
        assert flying <= most
        if asked is not None:
            asked.append(request_id.split("-")[1])
        await asyncio.sleep(0)
        flying -= 1
        return Answer(200, {}, b'{"ok": 1}')

    results = Results(out, out)
    results.open()
    return Job(LineReader(source, None, 4096), results, ask, OpenGate(most), "job"), results


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    write(tmp_path / "in", 6_000)
    work, results = job(tmp_path / "in", tmp_path / "out", 16)
    tracemalloc.start()
    try:
        asyncio.run(work.run())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        results.close()
    assert results.completed == 6_000
    # Only two sets of ids grow, at most 24 bytes a line each. The file is 1 MB, its lines in memory are 3.
    assert peak < 1_200_000


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 100), st.binary(max_size=5))
def test_wherever_the_output_is_cut_off_the_rest_is_done_and_only_that(percent: int, noise: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder) / "in", Path(folder) / "out"
        write(source, 12)
        work, results = job(source, out, 4)
        asyncio.run(work.run())
        results.close()
        whole = out.read_bytes()
        left = whole[: len(whole) * percent // 100] + noise.replace(b"\n", b"")
        out.write_bytes(left)
        kept = left[: left.rfind(b"\n") + 1]
        asked: list[str] = []
        work, results = job(source, out, 4, asked)
        asyncio.run(work.run())
        results.close()
        assert out.read_bytes().startswith(kept)
        assert len(asked) == 12 - kept.count(b"\n")
        assert Counter(json.loads(x)["custom_id"] for x in out.read_bytes().splitlines()) == {
            f"q{i}": 1 for i in range(12)
        }


@pytest.mark.parametrize("ending", [b"\n", b"\r\n"])
def test_lines_longer_than_the_limit_are_skipped_whole(tmp_path: Path, ending: bytes) -> None:
    path = tmp_path / "in"
    path.write_bytes(ending.join([b"a" * 10, b"", b"b" * 11, b"   ", b"c" * 1_000_000, b"d"]))
    found = [(number, None if raw is None else raw.strip()) for number, raw in read_lines(path, 10)]
    assert found == [(1, b"a" * 10), (3, None), (5, None), (6, b"d")]


def test_not_now_is_asked_again_and_an_expired_line_is_told(tmp_path: Path) -> None:
    write(tmp_path / "in", 1)
    answers = [Answer(429, {"retry-after": "0.001"}), Answer(503, {"retry-after": "0.001"}), Answer(200, {}, b"{}")]

    async def ask(path: str, body: bytes, request_id: str) -> Answer:
        return answers.pop(0)

    for expires_in_s, error in ((5.0, None), (0.0, "batch_expired")):
        out = tmp_path / f"out{expires_in_s}"
        results = Results(out, out)
        results.open()
        work = Job(LineReader(tmp_path / "in", None, 4096), results, ask, OpenGate(1), "j", expires_in_s=expires_in_s)
        asyncio.run(work.run())
        results.close()
        told = json.loads(out.read_text())["error"]
        assert (told["code"] if told else None) == error
    assert not answers


@pytest.fixture
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_job, "_RETRY_S", (0.001, 0.01))


@pytest.mark.usefixtures("no_patience")
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS])
@pytest.mark.parametrize("times", [1, 2, 9])
def test_whichever_write_fails_the_answer_waits_and_is_there_once(tmp_path: Path, code: int, times: int) -> None:
    """Also where half of a line was written, and where taking it back fails too (the next change after a write)."""
    write(tmp_path / "in", 8)
    for nth in range(8):
        told: list[Exception | None] = []
        asked: list[str] = []
        work, results = job(tmp_path / "in", tmp_path / f"out{nth}", 2, asked)
        work._on_stuck = told.append
        with failing(tmp_path, code, nth, times=times, kinds=("write", "ftruncate")):
            asyncio.run(work.run())
        results.close()
        assert isinstance(told[0], OSError)
        assert told[-1] is None
        assert Counter(json.loads(x)["custom_id"] for x in (tmp_path / f"out{nth}").read_bytes().splitlines()) == {
            f"q{i}": 1 for i in range(8)
        }
        assert (results.completed, results.failed, len(asked)) == (8, 0, 8), "nothing is asked twice"


def test_nothing_new_begins_while_an_answer_waits(tmp_path: Path) -> None:
    write(tmp_path / "in", 50)
    asked: list[str] = []
    work, results = job(tmp_path / "in", tmp_path / "out", 4, asked)
    work._on_stuck = lambda error: None

    async def run() -> None:
        with failing(tmp_path, errno.ENOSPC, 3, times=math.inf, kinds=("write",)):
            running = asyncio.create_task(work.run())
            await asyncio.wait([running], timeout=0.5)
            assert len(asked) <= 3 + 2 * 4
        await running

    asyncio.run(run())
    results.close()
    assert results.completed == 50


def test_a_time_that_is_over_ends_what_waits_for_room(tmp_path: Path) -> None:
    """What was answered is there; of the rest it is told how many lines have nothing."""
    write(tmp_path / "in", 50)
    work, results = job(tmp_path / "in", tmp_path / "out", 4)
    work._on_stuck, work._expires_in_s = (lambda error: None), 2.0
    with failing(tmp_path, errno.ENOSPC, 3, times=math.inf, kinds=("write",)):
        asyncio.run(work.run())
    results.close()
    assert work.expired
    assert results.completed == 3 == (tmp_path / "out").read_bytes().count(b"\n")
    assert work.num_unwritten == 47


def test_an_answer_that_can_never_fit_is_an_error_of_its_line(tmp_path: Path) -> None:
    write(tmp_path / "in", 3)

    async def ask(path: str, body: bytes, request_id: str) -> Answer:
        return Answer(200, {}, json.dumps({"x": "y" * (5000 if "-2-" in request_id else 5)}).encode())

    store = FileStore(tmp_path / "files", 4000)
    folder = store.make_folder(ANYONE)
    good, bad = folder / store.new_id(), folder / store.new_id()
    results = Results(good, bad, partial(store.append, folder))
    results.open()
    lines = LineReader(tmp_path / "in", None, 4096)
    asyncio.run(Job(lines, results, ask, OpenGate(2), "j", on_stuck=lambda error: None).run())
    results.close()
    assert (results.completed, results.failed) == (2, 1)
    told = json.loads(bad.read_text())["error"]
    assert told["code"] == "answer_too_large"
    assert "line 2" in told["message"]


def encoded_file(path: Path, text: str, encoding: str) -> Path:
    path.write_bytes(text.encode(encoding))
    return path


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("end", ["", "\n", "\n\n \n"])
def test_no_line_is_lost_to_how_the_file_was_saved(tmp_path: Path, encoding: str, newline: str, end: str) -> None:
    asks = [{"custom_id": f"Zoë\U0001f98a{i}", "url": "/v1/completions", "body": {"prompt": "ü"}} for i in range(3)]
    asks[1]["body"] = {"prompt": "\u0a0d\u0d0a"}  # their bytes in UTF-16 are those of line ends
    text = "\n\n".join(json.dumps(ask, ensure_ascii=False) for ask in asks) + end
    path = encoded_file(tmp_path / "in", text.replace("\n", newline), encoding)
    lines = list(LineReader(path, None, 4096))
    assert [(line.number, line.custom_id, line.error) for line in lines] == [
        (2 * i + 1, ask["custom_id"], None) for i, ask in enumerate(asks)
    ]
    assert [json.loads(line.body) for line in lines] == [ask["body"] for ask in asks]


def test_a_mark_between_files_that_were_joined_is_no_part_of_a_line(tmp_path: Path) -> None:
    ask = b'{"custom_id": "%d", "url": "/v1/completions", "body": {}}\r\n'
    (tmp_path / "in").write_bytes(b"".join(codecs.BOM_UTF8 + ask % i for i in range(3)) + codecs.BOM_UTF8 + b"\r\n")
    assert [(line.custom_id, line.error) for line in LineReader(tmp_path / "in", None, 999)] == [
        (str(i), None) for i in range(3)
    ]


def test_what_is_broken_in_utf_16_is_an_error_of_its_line(tmp_path: Path) -> None:
    good = '{"custom_id": "%s", "url": "/v1/completions", "body": {}}\n'
    data = codecs.BOM_UTF16_LE + (good % "a").encode("utf-16-le") + (good % "X").encode("utf-16-le")
    data = data.replace(b"X\0", b"\x00\xd8") + (good % "b").encode("utf-16-le") + b"{"
    (tmp_path / "in").write_bytes(data)
    found = [line.error and line.error.code for line in LineReader(tmp_path / "in", None, 999)]
    assert found == [None, "invalid_json_line", None, "invalid_json_line"]
    text = "x" * 5000 + good % "a" + "\n" + good % "b"
    (tmp_path / "in").write_bytes(codecs.BOM_UTF16_LE + text.encode("utf-16-le"))
    found = [line.error and line.error.code for line in LineReader(tmp_path / "in", None, 999)]
    assert found == ["line_too_long", None]
