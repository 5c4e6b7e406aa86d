"""OpenAI's own client against the server: shapes, texts, streams, errors."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from penstock.core.sampling import SamplingParams
from penstock.launch.llm import LLM
from penstock.server.app import routes
from penstock.server.live import LiveServer
from penstock.text.defaults import MILD
from tests.api.conftest import bundled

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
DOG: list[Any] = [{"role": "user", "content": "Hello, dog!"}]  # what nano answers at length
GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(bundled(), ops="ref", max_model_len=512, num_gpu_blocks_override=64)


@pytest.fixture
def client(live: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def complete(client: openai.OpenAI, **more: Any) -> Any:
    given: dict[str, Any] = {"model": "nano", "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
    return client.completions.create(**(given | more))


def chat(client: openai.OpenAI, **more: Any) -> Any:
    given: dict[str, Any] = {"model": "nano", "messages": HELLO, "max_tokens": 12, "temperature": 0}
    return client.chat.completions.create(**(given | more))


# -- texts are those of `LLM` --------------------------------------------------------------------------------------


def test_completion_equals_llm(client: openai.OpenAI, llm: LLM) -> None:
    prompts = ["Once upon a time", "The"]
    expected = [o.outputs[0].text for o in llm.generate(prompts, GREEDY)]
    assert len(set(expected)) == 2
    answer = complete(client, prompt=prompts)
    assert [c.text for c in answer.choices] == expected
    assert [c.index for c in answer.choices] == [0, 1]
    assert complete(client).choices[0].text == expected[0]
    ids = [llm.get_tokenizer().encode(p) for p in prompts]
    assert [c.text for c in complete(client, prompt=ids).choices] == expected
    assert complete(client, prompt=ids[1]).choices[0].text == expected[1]


def test_chat_equals_llm(client: openai.OpenAI, llm: LLM) -> None:
    out = llm.chat(HELLO, GREEDY)[0].outputs[0]
    answer = chat(client)
    message = answer.choices[0].message
    assert (message.role, message.content, message.tool_calls) == ("assistant", out.text, None)
    assert answer.choices[0].finish_reason == out.finish_reason
    assert chat(client, max_tokens=2).choices[0].finish_reason == "length"
    assert answer.object == "chat.completion"
    assert answer.model == "nano"
    assert answer.id.startswith("chatcmpl-")


def test_seed_and_samples(client: openai.OpenAI, llm: LLM) -> None:
    params = SamplingParams(temperature=1, seed=7, n=3, max_tokens=12)
    expected = [o.text for o in llm.generate("Once upon a time", params)[0].outputs]
    assert len(set(expected)) == 3
    answer = complete(client, temperature=1, seed=7, n=3, max_tokens=12)
    assert [c.text for c in answer.choices] == expected
    assert answer.usage.completion_tokens == sum(
        len(o.token_ids) for o in llm.generate("Once upon a time", params)[0].outputs
    )


# -- usage, limits and reasons -------------------------------------------------------------------------------------


def test_usage(client: openai.OpenAI) -> None:
    prompt = "The cat and the dog went to the house. " * 12
    first = complete(client, prompt=prompt, max_tokens=3).usage
    again = complete(client, prompt=prompt, max_tokens=3).usage
    assert first.total_tokens == first.prompt_tokens + 3 == again.total_tokens
    assert first.completion_tokens == 3
    assert again.prompt_tokens_details.cached_tokens > 0
    assert again.prompt_tokens_details.cached_tokens < again.prompt_tokens
    two = complete(client, prompt=["a b", "c"], n=2, max_tokens=3).usage
    assert two.completion_tokens == 12


def test_max_tokens(client: openai.OpenAI) -> None:
    assert complete(client, max_tokens=openai.NOT_GIVEN, extra_body={"ignore_eos": True}).usage.completion_tokens == 16
    full = complete(client, prompt=[7] * 480, max_tokens=None, extra_body={"ignore_eos": True})
    assert full.usage.total_tokens == 512
    assert full.choices[0].finish_reason == "length"
    assert chat(client, max_tokens=openai.NOT_GIVEN, max_completion_tokens=3).usage.completion_tokens == 3


def test_stop(client: openai.OpenAI, llm: LLM) -> None:
    text = llm.generate("Once upon a time", GREEDY)[0].outputs[0].text
    stop = text.split()[3]
    choice = complete(client, stop=["zzzzz", stop]).choices[0]
    assert choice.text == text[: text.index(stop)]
    assert choice.finish_reason == "stop"
    assert choice.stop_reason == stop
    kept = complete(client, stop=stop, extra_body={"include_stop_str_in_output": True}).choices[0]
    assert kept.text == text[: text.index(stop)] + stop
    ids = llm.generate("Once upon a time", GREEDY)[0].outputs[0].token_ids
    by_id = complete(client, extra_body={"stop_token_ids": [ids[4]], "return_token_ids": True}).choices[0]
    assert (by_id.finish_reason, by_id.stop_reason) == ("stop", ids[4])
    assert by_id.token_ids == ids[:5]


def test_sampling_extras(client: openai.OpenAI, llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("Once upon a time")
    only = complete(client, max_tokens=3, extra_body={"allowed_token_ids": [ids[0]], "return_token_ids": True})
    assert only.choices[0].token_ids == [ids[0]] * 3
    assert only.choices[0].prompt_token_ids == ids
    biased = complete(client, max_tokens=2, logit_bias={str(ids[1]): 100}, extra_body={"return_token_ids": True})
    assert biased.choices[0].token_ids == [ids[1]] * 2
    said = complete(client).choices[0].text.replace(",", "").split()[1:]
    word = next(w for w in said if len(llm.get_tokenizer().encode(w)) == len(llm.get_tokenizer().encode(f" {w}")) == 1)
    assert word not in complete(client, extra_body={"bad_words": [word]}).choices[0].text.split()
    extras = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2, "skip_special_tokens": False,
              "spaces_between_special_tokens": False, "priority": 3, "cache_salt": "abc", "timeout": 30}  # fmt: skip
    params = SamplingParams(temperature=0.9, seed=3, top_k=5, min_p=0.1, repetition_penalty=1.1, min_tokens=2,
                            max_tokens=12)  # fmt: skip
    expected = llm.generate("Once upon a time", params)[0].outputs[0].text
    assert complete(client, temperature=0.9, seed=3, extra_body=extras).choices[0].text == expected


def test_structured_outputs(client: openai.OpenAI) -> None:
    answer = complete(client, extra_body={"structured_outputs": {"choice": ["yes indeed", "no"]}}, max_tokens=20)
    assert answer.choices[0].text in ("yes indeed", "no")
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    content = chat(client, response_format=format, max_tokens=60).choices[0].message.content
    assert json.loads(content)["a"] in (1, 2)
    both = {"structured_outputs": {"regex": "a+"}}
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, response_format=format, extra_body=both)
    assert caught.value.param == "structured_outputs"


def test_continue_final_message(client: openai.OpenAI) -> None:
    whole = chat(client, messages=DOG, max_tokens=12).choices[0].message.content
    begun = " ".join(whole.split(" ")[:2])
    messages = [*DOG, {"role": "assistant", "content": begun}]
    body = {"continue_final_message": True, "add_generation_prompt": False}
    more = chat(client, messages=messages, max_tokens=4, extra_body=body).choices[0].message.content
    assert len(more) > 4
    assert whole.startswith(begun + more)


# -- log-probabilities ---------------------------------------------------------------------------------------------


def test_completion_logprobs(client: openai.OpenAI, llm: LLM) -> None:
    out = llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=5, logprobs=2))[0].outputs[0]
    got = complete(client, max_tokens=5, logprobs=2).choices[0].logprobs
    assert got.token_logprobs == pytest.approx([e[t].logprob for e, t in zip(out.logprobs, out.token_ids, strict=True)])
    assert "".join(got.tokens) == out.text
    assert got.text_offset == [sum(map(len, got.tokens[:i])) for i in range(5)]
    assert all(len(top) == 2 and token in top for token, top in zip(got.tokens, got.top_logprobs, strict=True))
    as_ids = complete(client, max_tokens=5, logprobs=0, extra_body={"return_tokens_as_token_ids": True})
    assert as_ids.choices[0].logprobs.tokens == [f"token_id:{t}" for t in out.token_ids]


def test_echo(client: openai.OpenAI, llm: LLM) -> None:
    plain = complete(client, max_tokens=4).choices[0].text
    answer = complete(client, max_tokens=4, echo=True, logprobs=1).choices[0]
    assert answer.text == "Once upon a time" + plain
    assert "".join(answer.logprobs.tokens) == answer.text
    assert answer.logprobs.token_logprobs[0] is None
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    out = llm.generate("Once upon a time", params)[0]
    assert out.prompt_logprobs is not None
    expected = [e[t].logprob for e, t in zip(out.prompt_logprobs[1:], out.prompt_token_ids[1:], strict=True) if e]
    assert answer.logprobs.token_logprobs[1:4] == pytest.approx(expected)
    scored = complete(client, max_tokens=0, echo=True, logprobs=1).choices[0]
    assert scored.text == "Once upon a time"
    assert scored.logprobs.token_logprobs == answer.logprobs.token_logprobs[:4]
    vllm = complete(client, max_tokens=1, extra_body={"prompt_logprobs": 1}).choices[0]
    assert vllm.prompt_logprobs[0] is None
    assert [e[str(t)]["logprob"] for e, t in zip(vllm.prompt_logprobs[1:], out.prompt_token_ids[1:], strict=True)] == (
        pytest.approx(expected)
    )


def test_chat_logprobs(client: openai.OpenAI) -> None:
    choice = chat(client, messages=DOG, logprobs=True, top_logprobs=3, max_tokens=6).choices[0]
    assert "".join(t.token for t in choice.logprobs.content) == choice.message.content
    for token in choice.logprobs.content:
        assert len(token.top_logprobs) == 3
        assert token.logprob == token.top_logprobs[0].logprob  # greedy
        assert bytes(token.bytes).decode() == token.token
    assert chat(client, max_tokens=2).choices[0].logprobs is None
    assert chat(client, logprobs=True, max_tokens=2).choices[0].logprobs.content[0].top_logprobs == []


# -- streams -------------------------------------------------------------------------------------------------------


def test_chat_stream(client: openai.OpenAI) -> None:
    whole = chat(client)
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(c.choices[0].delta.role is None for c in chunks[1:-1])
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + [
        whole.choices[0].finish_reason
    ]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )
    assert all(c.usage is None for c in chunks[:-1])
    assert len({c.id for c in chunks}) == len({c.created for c in chunks}) == 1


def test_stream_bytes(http: httpx.Client) -> None:
    body = {"prompt": "a", "max_tokens": 3, "stream": True, "temperature": 0}
    answer = http.post("/v1/completions", json=body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    parsed = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert all("usage" not in chunk for chunk in parsed)
    usage = body | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    parsed = [json.loads(e[6:]) for e in http.post("/v1/completions", json=usage).text.split("\n\n")[:-2]]
    counts = [chunk["usage"]["completion_tokens"] for chunk in parsed]
    assert counts == sorted(counts)
    assert counts[-1] == 3
    assert parsed[-1]["choices"] == []


def test_async_streams_at_once(live: LiveServer, client: openai.OpenAI) -> None:
    prompts = ["Once upon a time", "The", "a", "Hello"]
    expected = [complete(client, prompt=p).choices[0].text for p in prompts]

    async def one(client: openai.AsyncOpenAI, prompt: str) -> str:
        stream = await client.completions.create(model="nano", prompt=prompt, max_tokens=12, temperature=0, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as client:
            return list(await asyncio.gather(*(one(client, p) for p in prompts)))

    assert asyncio.run(run()) == expected


# -- errors --------------------------------------------------------------------------------------------------------


def test_error_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        complete(client, model="gpt-17")
    assert (missing.value.code, missing.value.param, missing.value.type) == ("model_not_found", "model",
                                                                             "not_found_error")  # fmt: skip
    assert missing.value.request_id
    with pytest.raises(openai.BadRequestError) as bad:
        chat(client, temperature=-1)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError):
        chat(client, temperature=-1, stream=True)


def test_time_limit(http: httpx.Client, client: openai.OpenAI) -> None:
    # An idle machine makes the 400 tokens in 0.35 s, a busy one its first in 0.05.
    body: dict[str, Any] = {"prompt": "a", "max_tokens": 400, "timeout": 0.15, "ignore_eos": True}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 408
    error = answer.json()
    assert (error["error"]["code"], error["error"]["type"]) == ("timeout", "timeout_error")
    assert error["usage"]["prompt_tokens"] == 1
    assert error["usage"]["completion_tokens"] < 400
    events = http.post("/v1/completions", json=body | {"stream": True}).text.split("\n\n")
    assert json.loads(events[-3][6:])["error"]["code"] == "timeout"
    assert events[-2] == "data: [DONE]"
    with pytest.raises(openai.APIError, match=r"time limit|has to end"):
        list(chat(client, max_tokens=400, stream=True, extra_body={"timeout": 0.15, "ignore_eos": True}))


def test_one_bad_prompt_ends_all(live: LiveServer, client: openai.OpenAI) -> None:
    assert live.server is not None
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, prompt=[[7], [8], [9999999]], max_tokens=400)
    assert caught.value.param == "prompt[2]"
    assert live.server.client.num_live == 0


def test_request_ids_may_repeat(live: LiveServer) -> None:
    async def one(client: httpx.AsyncClient) -> Any:
        body = {"prompt": "a", "max_tokens": 8, "temperature": 0}
        return await client.post("/v1/completions", json=body, headers={"x-request-id": "same"})

    async def run() -> list[Any]:
        async with httpx.AsyncClient(base_url=live.url, timeout=60) as client:
            return await asyncio.gather(*(one(client) for _ in range(4)))

    answers = asyncio.run(run())
    assert {a.status_code for a in answers} == {200}
    assert {a.headers["x-request-id"] for a in answers} == {"same"}
    assert len({a.json()["id"] for a in answers}) == 4


# -- models and documents ------------------------------------------------------------------------------------------


def test_models(client: openai.OpenAI, http: httpx.Client) -> None:
    assert [m.id for m in client.models.list()] == ["nano"]
    model = client.models.retrieve("nano")
    assert (model.object, model.max_model_len, model.default_sampling_params) == ("model", 512, MILD)
    assert http.get("/version").json()["version"]


def test_the_models_own_defaults(live: LiveServer, client: openai.OpenAI) -> None:
    """generation_config.json decides where a request says nothing; what is no number of ours is left out."""
    assert live.server is not None
    parts = live.server.parts
    front = parts["front"]
    mine = {"temperature": 0.0, "top_k": 3, "max_new_tokens": 5, "do_sample": True, "top_p": "high"}
    parts["front"] = dataclasses.replace(front, generation_config=mine)
    try:
        assert client.models.retrieve("nano").default_sampling_params == {"temperature": 0.0, "top_k": 3,
                                                                          "max_tokens": 5}  # fmt: skip
        body = {"ignore_eos": True}
        answers = [client.chat.completions.create(model="nano", messages=HELLO, extra_body=body) for _ in range(2)]
        assert answers[0].choices[0].message.content == answers[1].choices[0].message.content
        assert answers[0].usage.completion_tokens == 5
        assert chat(client, max_tokens=7, extra_body=body).usage.completion_tokens == 7
    finally:
        parts["front"] = front


def test_openapi(http: httpx.Client, live: LiveServer) -> None:
    document = http.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    listed = {(path, method.upper()) for path, operations in document["paths"].items() for method in operations}
    for route in routes():
        path = getattr(route, "path", "").replace(":path", "")
        for method in (getattr(route, "methods", None) or set()) - {"HEAD"}:
            assert (path, method) in listed or path.startswith("/internal/"), (path, method)

    def refs(value: Any) -> Iterator[str]:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if key == "$ref":
                yield item
            elif isinstance(item, dict | list):
                yield from refs(item)

    names = {ref.removeprefix("#/components/schemas/") for ref in refs(document)}
    assert names <= set(document["components"]["schemas"])
    body = document["components"]["schemas"]["ChatRequest"]
    assert body["required"] == ["messages"]
    assert {"tools", "top_k", "chat_template_kwargs", "stream_options"} <= set(body["properties"])
