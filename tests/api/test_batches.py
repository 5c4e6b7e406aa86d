"""/v1/batches with the official client: every line answered once, whatever the other lines are."""

from __future__ import annotations

import io
import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch

from penstock.config import serve_from_kwargs
from penstock.server.batches.work import EngineGate
from penstock.server.live import LiveServer
from tests.api.conftest import bundled

END = ("completed", "failed", "expired", "cancelled")


def live_server(folder: Path, **settings: Any) -> LiveServer:
    return LiveServer(
        serve_from_kwargs(
            model=bundled(), port=0, ops="blas", max_model_len=256, num_gpu_blocks_override=128, max_num_seqs=2,
            served_model_name="nano", files_dir=str(folder), **settings,
        )
    )  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("batches")) as live:
        yield live


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def line(custom_id: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    body = {"model": "nano", "prompt": f"{custom_id}", "max_tokens": 4, "temperature": 0} | body
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def start(client: openai.OpenAI, lines: list[Any], endpoint: Any = "/v1/completions", **more: Any) -> Batch:
    data = "\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines).encode()
    file = client.files.create(file=("in.jsonl", io.BytesIO(data)), purpose="batch")
    more.setdefault("completion_window", "24h")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, **more)


def wait(client: openai.OpenAI, batch_id: str, until: Callable[[Batch], bool]) -> Batch:
    """Gives up once nothing has been heard of the batch for a minute; how long a line takes is the machine's affair."""
    seen: Any = None
    deadline = 0.0
    while not until(batch := client.batches.retrieve(batch_id)):
        if (batch.status, batch.request_counts) != seen:
            seen, deadline = (batch.status, batch.request_counts), time.monotonic() + 60
        assert time.monotonic() < deadline, batch
        time.sleep(0.1)  # asking costs the server, which is in this process, more than a line does
    return batch


def let_in(few: int, patch: pytest.MonkeyPatch) -> None:
    """Servers in this process take so many lines of batches, and then no more: however slow whoever looks is, a batch
    that is longer has not ended when they act."""
    enter, entered = EngineGate.enter, itertools.count(1)

    async def counted(gate: EngineGate) -> None:
        await enter(gate)
        if next(entered) >= few:
            patch.setattr(EngineGate, "is_open", lambda _: False)

    patch.setattr(EngineGate, "enter", counted)


def ended(batch: Batch) -> bool:
    return batch.status in END


def results(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    return [json.loads(x) for x in client.files.content(file_id).text.splitlines()]


def test_every_line_is_answered_as_if_it_had_been_asked(client: openai.OpenAI) -> None:
    made = start(client, [line(f"q{i}") for i in range(12)], metadata={"who": "test"})
    assert (made.object, made.status, made.endpoint) == ("batch", "validating", "/v1/completions")
    batch = wait(client, made.id, ended)
    assert batch.status == "completed"
    assert batch.metadata == {"who": "test"}
    assert batch.error_file_id is None
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 12, "completed": 12, "failed": 0}
    answers = {x["custom_id"]: x for x in results(client, batch.output_file_id)}
    assert sorted(answers) == sorted(f"q{i}" for i in range(12))
    for name in ("q0", "q11"):
        alone = client.completions.create(model="nano", prompt=name, max_tokens=4, temperature=0)
        response = answers[name]["response"]
        assert response["status_code"] == 200
        assert response["body"]["choices"][0]["text"] == alone.choices[0].text
        assert answers[name]["error"] is None


def test_decisions_in_a_batch(client: openai.OpenAI) -> None:
    asked: Any = [{"type": "predicate", "instructions": "Is it?"}]
    body = {"model": "nano", "input": "A fox.", "questions": asked, "min_label_mass": 0}
    made = start(client, [{"custom_id": "d", "method": "POST", "url": "/v1/decisions", "body": body}], "/v1/decisions")
    (found,) = results(client, wait(client, made.id, ended).output_file_id)
    alone = client.decisions.create(model="nano", input="A fox.", questions=asked, extra_body={"min_label_mass": 0})
    (answer,) = found["response"]["body"]["answers"]
    assert (answer["type"], answer["probability"]) == (
        "predicate",
        pytest.approx(alone.answers[0].probability, abs=1e-6),
    )  # type: ignore[union-attr]


def _close(one: Any, other: Any) -> bool:
    """Equal, numbers up to what the other chunks of offline prompts change (`ops` blas)."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_close(one[name], other[name]) for name in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_close, one, other))
    return bool(one == pytest.approx(other, rel=1e-5, abs=1e-6)) if isinstance(one, float) else bool(one == other)


def test_scores_and_ranks_in_a_batch(client: openai.OpenAI) -> None:
    """Routes of hidden states, in one batch that names no endpoint of its own lines but the first."""
    for url, body in (
        ("/v1/rerank", {"query": "A fox.", "documents": ["A mill.", "A fox!"]}),
        ("/v1/score", {"text_1": "A fox.", "text_2": "A mill."}), ("/pooling", {"input": "A fox."}),
    ):  # fmt: skip
        made = start(client, [{"custom_id": "r", "method": "POST", "url": url, "body": {"model": "nano", **body}}], url)
        (found,) = results(client, wait(client, made.id, ended).output_file_id)
        alone = client.post("../" * url.startswith("/pooling") + url.removeprefix("/v1").strip("/"), body=body,
                            cast_to=object)  # fmt: skip
        for fields in (found["response"]["body"], alone):
            for name in ("id", "created"):
                fields.pop(name, None)  # type: ignore[attr-defined]
        assert _close(found["response"]["body"], alone)


def test_bad_lines_harm_only_themselves(client: openai.OpenAI) -> None:
    """Row 69: one error per bad line, with its number; the same check as by HTTP; a duplicate is the later one."""
    lines = [
        line("good"), "{not json", "[1]", "", json.dumps({"url": "/v1/completions", "body": {}}), line("good"),
        line("url", url="/v1/chat/completions"), line("method") | {"method": "GET"}, line("body") | {"body": 3},
        line("stream", stream=True), line("range", temperature=-1), line("model", model="other"),
        json.dumps(line("deep")).replace('"deep", "max', "[" * 500 + "]" * 500 + ', "max'), "x" * 100, line("last"),
    ]  # fmt: skip
    batch = wait(client, start(client, lines).id, ended)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 14, "completed": 2, "failed": 12}
    assert sorted(x["custom_id"] for x in results(client, batch.output_file_id)) == ["good", "last"]
    errors = results(client, batch.error_file_id)
    by_id = {x["custom_id"]: x for x in errors if x["custom_id"] is not None}
    assert sorted(by_id) == ["body", "deep", "good", "method", "model", "range", "stream", "url"]
    assert by_id["good"]["error"]["code"] == "duplicate_custom_id"
    assert "line 6" in by_id["good"]["error"]["message"]
    assert by_id["range"]["response"]["status_code"] == 400
    assert by_id["model"]["response"]["status_code"] == 404
    assert "temperature" in by_id["range"]["error"]["message"]
    assert sum(x["custom_id"] is None for x in errors) == 4
    assert len({x["id"] for x in errors}) == len(errors)


def test_cancelling_keeps_what_is_done_and_frees_the_rest(
    client: openai.OpenAI, server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_in(30, monkeypatch)
    made = start(client, [line(f"q{i}", max_tokens=8, ignore_eos=True) for i in range(400)])
    wait(client, made.id, lambda b: b.request_counts is not None and b.request_counts.completed >= 3)
    assert client.batches.cancel(made.id).status in ("cancelling", "cancelled")
    batch = wait(client, made.id, ended)
    assert batch.status == "cancelled"
    assert batch.cancelled_at is not None
    assert batch.request_counts is not None
    done = results(client, batch.output_file_id)
    assert 3 <= len(done) == batch.request_counts.completed <= 30
    assert max(Counter(x["custom_id"] for x in done).values()) == 1
    assert server.server is not None
    deadline = time.monotonic() + 60
    while server.server.client.num_live:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert client.batches.cancel(made.id).status == "cancelled"


def test_what_is_not_done_in_time_expires(client: openai.OpenAI) -> None:
    lines = [line(f"q{i}", max_tokens=60, ignore_eos=True) for i in range(600)]
    batch = wait(client, start(client, lines, completion_window="1s").id, ended)
    assert batch.status == "expired"
    late = [x for x in results(client, batch.error_file_id) if x["error"]["code"] == "batch_expired"]
    assert late
    assert len(late) + len(results(client, batch.output_file_id)) == 600


def test_a_batch_s_files_can_be_read_but_not_deleted_under_it(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_in(5, monkeypatch)
    made = start(client, [line(f"q{i}", max_tokens=40, ignore_eos=True) for i in range(200)])
    with pytest.raises(openai.ConflictError):
        client.files.delete(made.input_file_id)
    client.batches.cancel(made.id)
    wait(client, made.id, ended)
    client.files.delete(made.input_file_id)


@pytest.mark.parametrize(
    ("change", "param", "status"),
    [({"input_file_id": "file-" + "0" * 24}, "input_file_id", 404), ({"endpoint": "/v1/models"}, "endpoint", 400),
     ({"completion_window": "soon"}, "completion_window", 400), ({"metadata": {"k": "v" * 600}}, "metadata", 400)],
)  # fmt: skip
def test_bad_batches_are_errors(client: openai.OpenAI, change: dict[str, Any], param: str, status: int) -> None:
    file = client.files.create(file=("in.jsonl", io.BytesIO(b"{}")), purpose="batch")
    wanted: Any = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h"} | change
    with pytest.raises(openai.APIStatusError) as refused:
        client.batches.create(**wanted)
    assert (refused.value.status_code, refused.value.body["param"]) == (status, param)  # type: ignore[index]
    with pytest.raises(openai.NotFoundError):
        client.batches.retrieve("batch_" + "0" * 24)


def test_lists_are_newest_first_and_chat_works(client: openai.OpenAI) -> None:
    chat = line("c", "/v1/chat/completions", messages=[{"role": "user", "content": "hello"}])
    del chat["body"]["prompt"], chat["body"]["model"]
    made = start(client, [chat], "/v1/chat/completions")
    batch = wait(client, made.id, ended)
    (answer,) = results(client, batch.output_file_id)
    assert answer["response"]["body"]["choices"][0]["message"]["role"] == "assistant"
    assert made.id in [b.id for b in client.batches.list(limit=50)]


def test_a_server_that_is_started_again_goes_on(tmp_path: Path) -> None:
    """No line is lost, and none that was answered is answered again."""
    with pytest.MonkeyPatch.context() as patch:
        let_in(30, patch)
        with live_server(tmp_path) as first, openai.OpenAI(base_url=first.url + "/v1", api_key="x") as client:
            made = start(client, [line(f"q{i}", max_tokens=1, ignore_eos=True) for i in range(400)])
            wait(client, made.id, lambda b: b.request_counts is not None and b.request_counts.completed >= 10)
    (tenant,) = tmp_path.iterdir()
    kept = tenant / json.loads((tenant / f"{made.id}.json").read_bytes())["output_id"]
    before = kept.read_bytes()
    assert 10 <= before.count(b"\n") <= 30
    # As a crash would leave it: a line cut off in the middle.
    kept.write_bytes(before + b'{"id":"batch_req_0')
    with live_server(tmp_path) as second, openai.OpenAI(base_url=second.url + "/v1", api_key="x") as client:
        batch = wait(client, made.id, ended)
        assert batch.status == "completed"
        text = client.files.content(batch.output_file_id or "").read()
        assert text.startswith(before)
        counts = Counter(json.loads(x)["custom_id"] for x in text.splitlines())
        assert counts == {f"q{i}": 1 for i in range(400)}
