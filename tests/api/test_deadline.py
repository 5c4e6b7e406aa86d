"""Deadlines: a request that cannot make it is refused at once; one that does not make it ends with what it used."""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx
import pytest

from penstock.config import serve_from_kwargs
from penstock.server.live import LiveServer
from tests.api.conftest import bundled
from tests.api.test_disconnect import ask

ASK = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def one_place() -> Iterator[LiveServer]:
    config = serve_from_kwargs(
        model=bundled(), port=0, ops="blas", engine_in_process=True, max_model_len=512, num_gpu_blocks_override=256,
        max_num_seqs=1, max_num_batched_tokens=32,
    )  # fmt: skip
    with LiveServer(config) as server:
        yield server


@pytest.fixture
def client(one_place: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=one_place.url, timeout=30) as client:
        yield client


def check(answer: httpx.Response) -> dict[str, int]:
    assert answer.status_code == 408
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("timeout_error", "timeout")
    usage: dict[str, int] = answer.json()["usage"]
    assert usage["prompt_tokens"] > 0
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    return usage


@pytest.mark.parametrize("how", ["header", "field"])
def test_a_millisecond_is_not_enough(client: httpx.Client, how: str) -> None:
    """Row 53."""
    if how == "header":
        answer = client.post("/v1/completions", json=ASK, headers={"x-request-timeout": "0.001"})
    else:
        answer = client.post("/v1/completions", json=ASK | {"timeout": 0.001})
    check(answer)


def test_a_deadline_in_the_middle_tells_what_was_used(client: httpx.Client) -> None:
    began = time.monotonic()
    usage = check(client.post("/v1/completions", json=ASK, headers={"x-request-timeout": "0.4"}))
    assert time.monotonic() - began < 10
    assert usage["completion_tokens"] < 400


def test_a_deadline_in_the_queue(one_place: LiveServer, client: httpx.Client) -> None:
    """The only place is taken: a request that waits is given up in time, or refused as soon as it is clear."""
    held = [ask(one_place, stream=True, max_tokens=480) for _ in range(6)]
    assert held[0].recv(64).startswith(b"HTTP/1.1 200")
    began = time.monotonic()
    usage = check(client.post("/v1/completions", json=ASK, headers={"x-request-timeout": "0.1"}))
    assert time.monotonic() - began < 10
    assert usage["completion_tokens"] == 0
    for sock in held:
        sock.close()


def test_a_deadline_that_is_far_changes_nothing(client: httpx.Client) -> None:
    ask = {"prompt": "Once", "max_tokens": 5, "temperature": 0}
    plain = client.post("/v1/completions", json=ask).json()["choices"]
    assert client.post("/v1/completions", json=ask, headers={"x-request-timeout": "60"}).json()["choices"] == plain


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon", ""])
def test_what_is_no_time_is_refused(client: httpx.Client, value: str) -> None:
    answer = client.post("/v1/completions", json=ASK, headers={"x-request-timeout": value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "X-Request-Timeout"
