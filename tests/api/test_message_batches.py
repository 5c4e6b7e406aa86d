"""/v1/messages/batches with the official client: Anthropic's batches over the machinery of all batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic.types.messages import MessageBatch

from penstock.server.live import LiveServer
from tests.api.test_batches import live_server

WORDS = "I would like to order a pizza."


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("batches")) as live:
        yield live


@pytest.fixture
def client(server: LiveServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def asked(custom_id: str, **params: Any) -> dict[str, Any]:
    params = {"model": "nano", "max_tokens": 4, "temperature": 0, "messages": [{"role": "user", "content": WORDS}],
              **params}  # fmt: skip
    return {"custom_id": custom_id, "params": params}


def create(client: anthropic.Anthropic, *requests: dict[str, Any]) -> MessageBatch:
    return client.messages.batches.create(requests=list(requests))  # type: ignore[arg-type]


def wait(client: anthropic.Anthropic, batch_id: str, until: Callable[[MessageBatch], bool]) -> MessageBatch:
    deadline = time.monotonic() + 60
    while not until(batch := client.messages.batches.retrieve(batch_id)):
        assert time.monotonic() < deadline, batch
        time.sleep(0.1)
    return batch


def ended(batch: MessageBatch) -> bool:
    return batch.processing_status == "ended"


def test_every_request_has_a_result(client: anthropic.Anthropic) -> None:
    made = create(client, asked("one"), asked("two", max_tokens=2), asked("bad", temperature=-1))
    assert made.id.startswith("msgbatch_")
    assert made.request_counts.processing == 3
    assert made.results_url is None
    batch = wait(client, made.id, ended)
    assert batch.request_counts.model_dump() == {
        "processing": 0, "succeeded": 2, "errored": 1, "canceled": 0, "expired": 0
    }  # fmt: skip
    assert batch.ended_at is not None
    assert batch.ended_at >= batch.created_at
    results = {entry.custom_id: entry.result for entry in client.messages.batches.results(made.id)}
    params = asked("one")["params"]
    alone = client.messages.create(extra_body={"temperature": params.pop("temperature")}, **params)
    one: Any = results["one"]
    assert one.type == "succeeded"
    assert one.message.content == alone.content
    assert one.message.stop_reason == "max_tokens"
    bad: Any = results["bad"]
    assert (bad.type, bad.error.error.type) == ("errored", "invalid_request_error")
    assert "temperature" in bad.error.error.message


def test_a_list_and_what_is_deleted(client: anthropic.Anthropic, server: LiveServer) -> None:
    ids = [wait(client, create(client, asked(f"x{i}")).id, ended).id for i in range(3)]
    time.sleep(0.2)
    page = client.messages.batches.list(limit=2)
    assert page.has_more
    found = [batch.id for batch in client.messages.batches.list(limit=2)]  # all pages
    assert set(ids) <= set(found)
    assert len(found) == len(set(found))
    behind = httpx.get(server.url + "/v1/messages/batches", params={"after_id": found[0], "limit": 1}).json()
    assert behind["data"][0]["id"] == found[1]
    before = httpx.get(server.url + "/v1/messages/batches", params={"before_id": found[1], "limit": 1}).json()
    assert before["data"][0]["id"] == found[0]
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none") as other:
        files = {file.id for file in other.files.list()}
        assert client.messages.batches.delete(ids[0]).type == "message_batch_deleted"
        assert len(files - {file.id for file in other.files.list()}) == 2  # its input and its answers
    with pytest.raises(anthropic.NotFoundError, match="no batch"):
        client.messages.batches.retrieve(ids[0])


def test_what_was_not_answered_is_canceled(client: anthropic.Anthropic) -> None:
    many = [asked(f"r{i}", max_tokens=200, ignore_eos=True) for i in range(60)]
    made = create(client, *many)
    with pytest.raises(anthropic.NotFoundError, match="not ended"):
        client.get(f"/v1/messages/batches/{made.id}/results", cast_to=httpx.Response)
    with pytest.raises(anthropic.ConflictError, match="cancel it"):
        client.messages.batches.delete(made.id)
    told = client.messages.batches.cancel(made.id)
    assert told.processing_status in ("canceling", "ended")
    batch = wait(client, made.id, ended)
    assert batch.cancel_initiated_at is not None
    assert batch.request_counts.canceled > 0
    assert batch.request_counts.canceled + batch.request_counts.succeeded == 60
    kinds = [entry.result.type for entry in client.messages.batches.results(made.id)]
    assert len(kinds) == 60
    assert kinds.count("canceled") == batch.request_counts.canceled


def stored(server: LiveServer) -> tuple[list[str], list[str]]:
    files = httpx.get(server.url + "/v1/files", params={"limit": 10_000}).json()["data"]
    batches = httpx.get(server.url + "/v1/batches", params={"limit": 100}).json()["data"]
    return [file["id"] for file in files], [batch["id"] for batch in batches]


@pytest.mark.parametrize(
    ("requests", "said"),
    [
        ([], "1 to 10000 are possible"),
        ([{"custom_id": f"x{i}", "params": {}} for i in range(10_001)], "requests has 10001 entries; 1 to 10000"),
        ([asked("a b")], "requests[0].custom_id is 'a b'; 1 to 64 letters, digits, _ and - are possible"),
        ([asked("")], "requests[0].custom_id is ''"),
        ([asked("a\n")], "requests[0].custom_id is"),
        ([asked("a"), asked("b" * 65)], "requests[1].custom_id has 65 characters"),
        ([asked("a"), asked("b"), asked("a")], "requests[2].custom_id is 'a', as is that of requests[0]"),
        ([{"custom_id": 1, "params": {}}], "requests[0].custom_id"),
        ([{"params": {}}], "custom_id is missing"),
        ([asked("a", stream=True)], "stream"),
        ([{"custom_id": "a"}], "params is missing"),
        ([{"custom_id": "a", "params": []}], "requests[0].params"),
        ({"custom_id": "a"}, "requests"),
        ([{"custom_id": "a", "params": {"messages": [{}] * 30_000}}], "30000 lists and objects"),
    ],
)
def test_bad_batches(server: LiveServer, requests: Any, said: str) -> None:
    before = stored(server)
    answer = httpx.post(server.url + "/v1/messages/batches", json={"requests": requests})
    assert answer.status_code == 400
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert said in answer.json()["error"]["message"]
    assert stored(server) == before


def test_a_body_that_is_too_long(server: LiveServer) -> None:
    before = stored(server)
    whole = asked("a", system="x" * (17 << 20))
    answer = httpx.post(server.url + "/v1/messages/batches", json={"requests": [whole]})
    assert answer.status_code == 413
    assert answer.json()["error"]["type"] == "request_too_large"
    assert answer.json()["error"]["message"] == "the body has more than 16777216 bytes"
    assert stored(server) == before


@pytest.mark.parametrize("custom_id", ["a" * 64, "_-9Z"])
def test_an_id_of_every_allowed_form(client: anthropic.Anthropic, custom_id: str) -> None:
    made = create(client, asked(custom_id))
    wait(client, made.id, ended)
    assert [entry.custom_id for entry in client.messages.batches.results(made.id)] == [custom_id]


def test_batches_of_other_paths_are_none_of_messages(client: anthropic.Anthropic, server: LiveServer) -> None:
    made = wait(client, create(client, asked("a")).id, ended)
    ours = "batch_" + made.id.removeprefix("msgbatch_")
    assert httpx.get(server.url + "/v1/batches/" + ours).json()["endpoint"] == "/v1/messages"
    failed = wait(client, create(client, asked("b", temperature=-1)).id, ended)
    lines = httpx.get(server.url + "/v1/batches/batch_" + failed.id.removeprefix("msgbatch_")).json()
    told = httpx.get(server.url + f"/v1/files/{lines['error_file_id']}/content").json()["error"]
    assert told["code"] == "invalid_request_error"
    assert "temperature" in told["message"]
    for name in (ours, "msgbatch_" + "0" * 24, "msgbatch_../x"):
        assert httpx.get(server.url + "/v1/messages/batches/" + name).status_code == 404
