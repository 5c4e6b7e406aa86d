"""A whole server whose engine dies of some requests, whatever is asked of them: nobody else pays for it."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from penstock.config import serve_from_kwargs
from penstock.server.live import LiveServer
from tests.api.conftest import bundled

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="engines die of signals")
DIES, KILLED, RAISES, COMPILES = 4000, 4001, 4002, 4003
"""Tokens that no text here has: a step with them dies of itself, is killed, raises; compiling beside it dies."""
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "prefill": ("/v1/completions", {"prompt": [5, DIES, 7]}),
    "second chunk": ("/v1/completions", {"prompt": [*range(10, 400), DIES]}),
    "killed": ("/v1/completions", {"prompt": [5, KILLED, 7]}),
    "raises": ("/v1/completions", {"prompt": [5, RAISES, 7], "stream": True}),
    "prompt_logprobs": ("/v1/completions", {"prompt": [6, DIES], "prompt_logprobs": 2}),
    "n": ("/v1/completions", {"prompt": [5, DIES, 8], "n": 2, "temperature": 1.0}),
    "embeddings": ("/v1/embeddings", {"input": [5, DIES, 9]}),
    "structured": ("/v1/completions", {"prompt": [5, DIES, 6], "structured_outputs": {"regex": "[a-z]{3,9}"}}),
    "compiling": ("/v1/completions", {"prompt": [5, COMPILES, 6], "structured_outputs": {"regex": "[a-z]{3,8}"}}),
}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    """Three deaths a minute that nobody explains are too many; here come dozens."""
    faults = f"step:poison:{DIES},step:poison-kill:{KILLED},step:poison-exception:{RAISES},prepare:poison:{COMPILES}"
    config = serve_from_kwargs(
        model=bundled(), port=0, max_model_len=512, num_gpu_blocks_override=256, max_num_batched_tokens=64,
        request_log=False, fault=faults, threads=1,
    )  # fmt: skip
    with LiveServer(config) as live:
        yield live


def until_ready(live: LiveServer) -> None:
    began = time.monotonic()
    while httpx.get(live.url + "/ready").status_code != 200:
        assert time.monotonic() - began < 30
        time.sleep(0.01)


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """Of an answer, or of the last event of a stream."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return answer.json()["error"]  # type: ignore[no-any-return]
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    return events[-1]["error"]  # type: ignore[no-any-return]


def counted(live: LiveServer, name: str) -> float:
    lines = httpx.get(live.url + "/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"penstock:{name}_total"))


def test_every_kind_of_poison_is_convicted_and_nobody_else_pays(server: LiveServer) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 200, "ignore_eos": True, "temperature": 1.0}

    def innocent(i: int) -> str:
        return str(httpx.post(server.url + "/v1/completions", json=body | {"seed": i}, timeout=60).json())

    def text(answer: str) -> str:
        return answer.split("'text': ")[1].split("'logprobs'")[0]

    calm = [text(innocent(i)) for i in range(3)]
    ended, wild = threading.Event(), [""] * 3
    pauses: list[str] = []

    def again_and_again(i: int) -> None:
        while not ended.is_set():
            wild[i] = text(innocent(i))
            pauses.append(wild[i])
            assert wild[i] == calm[i]

    threads = [threading.Thread(target=again_and_again, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    try:
        for name, (path, asked) in KINDS.items():
            answer = httpx.post(server.url + path, json=asked, timeout=60)
            assert error_of(answer)["code"] == "request_convicted", (name, answer.text)
            if "stream" not in asked:
                assert (answer.status_code, answer.headers["x-should-retry"]) == (500, "false"), name
            until_ready(server)  # the answer comes before the next engine does
            for seed in range(3):
                more = {} if "input" in asked else {"seed": seed, "max_tokens": 3 + seed}
                again = httpx.post(server.url + path, json=asked | more)
                assert again.status_code == 422, (name, again.text)
                assert again.json()["error"]["code"] == "request_convicted"
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert wild == calm
    assert len(set(pauses)) == 3
    assert counted(server, "request_convictions") == len(KINDS)
    assert counted(server, "convicted_requests_refused") == 3 * len(KINDS)
    assert counted(server, "engine_restarts") >= 2 * len(KINDS)
    state = httpx.get(server.url + "/internal/state").json()
    assert state["convictions"] == {"convicted": len(KINDS), "refused": 3 * len(KINDS), "held": len(KINDS)}
    assert httpx.get(server.url + "/ready").status_code == 200


def test_six_different_poisons_and_a_hundred_of_the_same(server: LiveServer) -> None:
    before = counted(server, "engine_restarts")
    with httpx.Client(base_url=server.url, timeout=60) as client:
        with ThreadPoolExecutor(6) as pool:
            bodies = [{"prompt": [90 + i, DIES]} for i in range(6)]
            answers = list(pool.map(lambda body: client.post("/v1/completions", json=body), bodies))
        assert [answer.status_code for answer in answers] == [500] * 6
        until_ready(server)
        for _ in range(100):
            assert client.post("/v1/completions", json={"prompt": [90, DIES]}).status_code == 422
        assert client.post("/v1/completions", json={"prompt": [90, 91], "max_tokens": 2}).status_code == 200
    assert 7 <= counted(server, "engine_restarts") - before <= 12


def test_the_usual_clients_do_not_send_it_again(server: LiveServer) -> None:
    """They repeat what fails with 500 twice, unless they are told not to."""
    before = counted(server, "request_convictions"), counted(server, "convicted_requests_refused")
    with openai.OpenAI(base_url=server.url + "/v1", api_key="-") as client:
        with pytest.raises(openai.InternalServerError, match="again and again"):
            client.completions.create(model="nano", prompt=[70, DIES], max_tokens=3)
        until_ready(server)
        with pytest.raises(openai.UnprocessableEntityError, match="not tried again"):
            client.completions.create(model="nano", prompt=[70, DIES], max_tokens=3)
    after = counted(server, "request_convictions"), counted(server, "convicted_requests_refused")
    assert after == (before[0] + 1, before[1] + 1)


def test_an_engine_that_dies_of_everything_is_given_up_and_blames_nobody() -> None:
    """What the next engine tries by itself first tells it from a request's fault."""
    faults = "step:poison:0,step:poison:7"  # 0 is in the engine's own request
    config = serve_from_kwargs(
        model=bundled(), port=0, max_model_len=128, num_gpu_blocks_override=32, request_log=False, fault=faults,
        threads=1, max_restarts_per_minute=2,
    )  # fmt: skip
    with LiveServer(config) as live:
        assert live.server is not None
        answer = httpx.post(live.url + "/v1/completions", json={"prompt": [5, 7]}, timeout=60)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_unavailable"
        assert live.server.client.state == "failed"
        assert live.server.client.convictions.num_convicted == 0


def test_the_answers_have_their_clients_shape() -> None:
    from penstock.base.errors import ConvictedError, RefusedError
    from penstock.server.errors import wire_error

    convicted = wire_error(ConvictedError("no more"))
    refused = wire_error(RefusedError("no more", status=422, code="request_convicted"))
    assert convicted.headers() == {"x-should-retry": "false"}
    assert convicted.body("/v1/messages") == {"type": "error", "error": {"type": "api_error", "message": "no more"}}
    assert refused.body("/v1/messages")["error"]["type"] == "invalid_request_error"
    assert refused.headers() == {}
