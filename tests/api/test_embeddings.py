"""/v1/embeddings over a socket, with the official client, against the same model offline."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from penstock.launch.llm import LLM
from penstock.server.live import LiveServer
from tests.api.conftest import bundled

TEXTS = ["Once upon a time there was a fox.", "The fox", "A completely different thought about the sea"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(bundled(), ops="ref", max_model_len=512, num_gpu_blocks_override=64)


@pytest.fixture
def sdk(live: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def offline(llm: LLM, prompts: Any, **options: Any) -> Any:
    return np.array([o.outputs.embedding for o in llm.embed(prompts, **options)], np.float32)


def test_the_official_client_gets_the_vectors_of_the_model(sdk: openai.OpenAI, llm: LLM) -> None:
    want = offline(llm, TEXTS)
    got = sdk.embeddings.create(model="nano", input=TEXTS)  # asks for base64 by itself
    assert [d.index for d in got.data] == [0, 1, 2]
    np.testing.assert_allclose([d.embedding for d in got.data], want, atol=1e-5)
    plain = sdk.embeddings.create(model="nano", input=TEXTS[0], encoding_format="float")
    np.testing.assert_allclose(plain.data[0].embedding, want[0], atol=1e-5)
    ids = llm.get_tokenizer().encode(TEXTS[0])
    assert plain.usage.prompt_tokens == plain.usage.total_tokens == len(ids)
    for given in (ids, [ids]):
        same = sdk.embeddings.create(model="nano", input=given)
        np.testing.assert_allclose(same.data[0].embedding, want[0], atol=1e-5)


def test_the_asynchronous_client(live: LiveServer, llm: LLM) -> None:
    async def ask() -> list[list[float]]:
        async with openai.AsyncOpenAI(base_url=live.url + "/v1", api_key="none") as client:
            got = await asyncio.gather(*(client.embeddings.create(model="nano", input=t) for t in TEXTS))
            return [g.data[0].embedding for g in got]

    np.testing.assert_allclose(asyncio.run(ask()), offline(llm, TEXTS), atol=1e-5)


@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
def test_options(http: httpx.Client, llm: LLM, pooling: str) -> None:
    body = {"input": TEXTS[0], "pooling": pooling}
    raw = http.post("/v1/embeddings", json={**body, "normalize": False}).json()["data"][0]["embedding"]
    np.testing.assert_allclose(raw, offline(llm, TEXTS[:1], pooling=pooling, normalize=False)[0], rtol=1e-3, atol=1e-4)
    cut = http.post("/v1/embeddings", json={**body, "dimensions": 5, "encoding_format": "base64"}).json()
    vector = np.frombuffer(base64.b64decode(cut["data"][0]["embedding"]), "<f4")
    np.testing.assert_allclose(vector, np.asarray(raw[:5]) / np.linalg.norm(raw[:5]), rtol=1e-4)


def test_a_long_list_does_not_fill_the_queue(live: LiveServer, http: httpx.Client) -> None:
    answer = http.post("/v1/embeddings", json={"input": [[i % 50 + 3] for i in range(300)]})
    assert answer.status_code == 200
    assert len(answer.json()["data"]) == 300


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "input", "missing"),
        ({"input": ""}, "input", "empty"),
        ({"input": []}, "input", "0 entries"),
        ({"input": [""]}, "input[0]", "empty"),
        ({"input": [[]]}, "input[0]", "0 tokens"),
        ({"input": ["a"] * 1025}, "input", "1025"),
        ({"input": ["a", 1]}, "input", "mixes"),
        ({"input": [-1]}, "input", "from 0 to"),
        ({"input": [[3, 10**6]]}, "input[0]", "from 0 to"),
        ({"input": [3.5]}, "input[0]", ""),
        ({"input": [3] * 513}, "input", "513"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "float or base64"),
        ({"input": "a", "dimensions": 0}, "dimensions", "from 1 to"),
        ({"input": "a", "dimensions": 10**6}, "dimensions", "from 1 to"),
        ({"input": "a", "pooling": "median"}, "pooling", "last, mean, cls"),
        ({"input": "a", "cache_salt": "x" * 300}, "cache_salt", "256"),
        ({"input": "a", "truncate_prompt_tokens": 513}, "truncate_prompt_tokens", "from 1 to 512"),
    ],
)
def test_bad_input_is_named(http: httpx.Client, body: dict[str, Any], param: str, words: str) -> None:
    answer = http.post("/v1/embeddings", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert words in error["message"]


def test_an_unknown_model_is_404(http: httpx.Client) -> None:
    answer = http.post("/v1/embeddings", json={"input": "a", "model": "gpt-9"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_a_request_out_of_time_leaves_nothing_behind(live: LiveServer, http: httpx.Client) -> None:
    answer = http.post("/v1/embeddings", json={"input": [[5] * 500] * 40, "timeout": 0.001})
    assert (answer.status_code, answer.json()["error"]["code"]) == (408, "timeout")
    assert live.server is not None
    assert live.server.client.num_live == 0
    assert http.post("/v1/embeddings", json={"input": "a"}).status_code == 200
