"""Prompt compression over a real socket, with OpenAI's client: shapes, limits, company, refusals, metrics."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from penstock.base.errors import ConfigError
from penstock.config import serve_from_kwargs
from penstock.core.sampling import SamplingParams
from penstock.launch.llm import LLM
from penstock.launch.prompt_reader import PromptReader
from penstock.server.live import LiveServer
from penstock.server.turns.compression import PromptCompressing
from penstock.text.offload import _Line
from tests.api.conftest import bundled
from tests.api.test_metrics import grown, scrape

GREEDY = SamplingParams(temperature=0, max_tokens=8)
STORY = (
    "On Friday, Ann went to the harbour and found a golden whistle. Ann gave it to Vera. Vera was very happy and said "
    "thank you. The windows of the old house were broken, and nobody had lived in it for many years."
)
QUESTION = "\n\nWhat did Ann find? Ann found"
METHODS = ("random", "selective-context", "llmlingua")


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(bundled(), ops="ref", max_model_len=512, num_gpu_blocks_override=64)


@pytest.fixture
def client(live: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def complete(client: openai.OpenAI, asked: dict[str, Any] | None, **more: Any) -> Any:
    given: dict[str, Any] = {"model": "nano", "prompt": STORY + QUESTION, "max_tokens": 8, "temperature": 0}
    body = {"return_token_ids": True} | ({} if asked is None else {"prompt_compression": asked})
    return client.completions.create(**(given | more), extra_body=body | more.pop("body", {}))


def part_of(live: LiveServer) -> PromptCompressing:
    assert live.server is not None
    part: PromptCompressing = live.server.parts["compression"]
    return part


@pytest.mark.parametrize("method", METHODS)
def test_G38_G39_a_completion_of_the_shorter_prompt(client: openai.OpenAI, llm: LLM, method: str) -> None:
    """The ids, the text and the usage are those of what was computed; the usage tells of what was sent."""
    num = len(llm.get_tokenizer().encode(STORY))
    before = len(llm.get_tokenizer().encode(STORY + QUESTION))
    for rate in (1.0, 0.5, 0.25):
        asked = {"method": method, "rate": rate, "context": STORY}
        answer = complete(client, asked)
        ids = answer.choices[0].prompt_token_ids
        expected = llm.generate(STORY + QUESTION, GREEDY, prompt_compression=asked)[0]
        assert ids == expected.prompt_token_ids
        assert answer.choices[0].text == expected.outputs[0].text
        assert len(ids) == before - num + -(-num * int(rate * 100) // 100)
        assert answer.usage.prompt_tokens == len(ids)
        assert answer.usage.prompt_tokens_details.compressed_from == before
        assert complete(client, None, prompt=ids).choices[0].text == answer.choices[0].text
    assert not hasattr(complete(client, None).usage.prompt_tokens_details, "compressed_from")


def test_streams_samples_and_several_prompts(client: openai.OpenAI) -> None:
    asked = {"method": "llmlingua", "rate": 0.5, "context": STORY}
    whole = complete(client, asked)
    chunks = list(complete(client, asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks[:-1]) == whole.choices[0].text
    assert chunks[-1].usage.prompt_tokens_details.compressed_from == whole.usage.prompt_tokens_details.compressed_from
    several = complete(client, asked, prompt=[STORY + QUESTION, "Once. " + STORY], n=2, temperature=1, seed=3)
    assert len(several.choices) == 4
    assert several.choices[0].prompt_token_ids == whole.choices[0].prompt_token_ids
    assert several.usage.prompt_tokens_details.compressed_from > whole.usage.prompt_tokens_details.compressed_from


def test_chats_keep_template_and_question(client: openai.OpenAI, llm: LLM) -> None:
    messages: list[Any] = [
        {"role": "system", "content": "Answer from the story."},
        {"role": "user", "content": STORY * 3 + QUESTION},
    ]
    for method in METHODS:
        asked = {"method": method, "rate": 0.3}
        body = {"prompt_compression": asked, "return_token_ids": True}
        answer = client.chat.completions.create(
            model="nano", messages=messages, max_tokens=8, temperature=0, extra_body=body
        )
        out = llm.chat(messages, GREEDY, prompt_compression=asked)[0]
        assert answer.prompt_token_ids == out.prompt_token_ids
        assert answer.choices[0].message.content == out.outputs[0].text
        assert answer.usage is not None
        details: Any = answer.usage.prompt_tokens_details
        assert details.compressed_from > answer.usage.prompt_tokens == len(out.prompt_token_ids)
        assert out.prompt is not None
        assert "Answer from the story.<|im_end|>" in out.prompt
        assert out.prompt.endswith(QUESTION.strip() + "<|im_end|>\n<|im_start|>assistant\n")


def test_the_other_front_ends(http: httpx.Client) -> None:
    asked = {"method": "selective-context", "rate": 0.3}
    text = STORY * 3 + QUESTION
    plain = http.post("/v1/responses", json={"input": text, "max_output_tokens": 4}).json()
    short = http.post("/v1/responses", json={"input": text, "max_output_tokens": 4, "prompt_compression": asked}).json()
    assert short["usage"]["input_tokens"] < plain["usage"]["input_tokens"]
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4, "prompt_compression": asked}
    usage = http.post("/v1/messages", json=body).json()["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == short["usage"]["input_tokens"]


def test_a_prompt_that_fits_only_compressed_is_served(client: openai.OpenAI) -> None:
    long = STORY * 20 + QUESTION
    with pytest.raises(openai.BadRequestError, match="maximum context length is 512 tokens"):
        complete(client, None, prompt=long)
    answer = complete(client, {"method": "llmlingua", "target_tokens": 400}, prompt=long)
    assert answer.usage.prompt_tokens == 400
    with pytest.raises(openai.BadRequestError, match="maximum context length is 512 tokens"):
        complete(client, {"method": "random", "rate": 0.9}, prompt=long)


def test_eight_at_once_get_what_each_gets_alone(client: openai.OpenAI) -> None:
    asked = [
        (
            {"method": METHODS[n % 3], "rate": 0.3 + 0.05 * n},
            {"prompt": f"Story {n}. " + STORY * (1 + n % 4) + QUESTION},
        )
        for n in range(8)
    ]
    alone = [complete(client, a, **more) for a, more in asked]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda pair: complete(client, pair[0], **pair[1]), asked))
    assert [a.choices[0].prompt_token_ids for a in together] == [a.choices[0].prompt_token_ids for a in alone]
    assert [a.choices[0].text for a in together] == [a.choices[0].text for a in alone]


BAD: list[tuple[Any, dict[str, Any], str, str]] = [
    ({"method": "random", "rate": 0}, {}, "prompt_compression.rate", "above 0 and at most 1"),
    ({"method": "random", "rate": 1.5}, {}, "prompt_compression.rate", "above 0 and at most 1"),
    ({"method": "gzip", "rate": 0.5}, {}, "prompt_compression.method", "must be one of"),
    ({"method": "random", "rate": 0.5, "speed": 1}, {}, "prompt_compression", "unknown field speed"),
    ({"rate": 0.5}, {}, "prompt_compression.method", "is missing"),
    ("llmlingua", {}, "prompt_compression", "expected object"),
    ({"method": "random", "target_tokens": 0}, {}, "prompt_compression.target_tokens", "at least 1"),
    ({"method": "random", "target_tokens": 9999}, {}, "prompt_compression.target_tokens", "the prompt has only"),
    ({"method": "random", "rate": 0.5, "context": "zzz"}, {}, "prompt_compression.context", "does not stand"),
    ({"method": "random", "rate": 0.5, "messages": [0]}, {}, "prompt_compression.messages", "is for chats"),
    ({"method": "random", "rate": 0.5}, {"echo": True}, "echo", "leave one of them out"),
    ({"method": "random", "rate": 0.5}, {"prompt_logprobs": 1}, "prompt_logprobs", "leave one of them out"),
    ({"method": "random", "rate": 0.5}, {"prompt": [5] * 99 + [99999]}, "prompt", r"prompt\[99\] must be a token id"),
]


@pytest.mark.parametrize(("asked", "more", "param", "said"), BAD, ids=lambda v: str(v)[:50])
def test_bad_requests(http: httpx.Client, asked: Any, more: dict[str, Any], param: str, said: str) -> None:
    body = {"prompt": STORY * 2, "max_tokens": 2, "prompt_compression": asked} | more
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert re.search(said, error["message"])


def test_token_ids_are_compressed_too(client: openai.OpenAI, llm: LLM) -> None:
    ids = llm.get_tokenizer().encode(STORY * 2)
    asked = {"method": "selective-context", "rate": 0.5, "keep_last": 10}
    by_ids, by_text = (complete(client, asked, prompt=p).choices[0].prompt_token_ids for p in (ids, STORY * 2))
    assert by_ids == by_text
    assert by_ids[-10:] == ids[-10:]
    assert len(by_ids) == 10 + (len(ids) - 9) // 2


def test_G38_G39_metrics_and_the_clock(
    live: LiveServer, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compressing is within the server's own time to the first token, and has a histogram of its own."""
    step = PromptReader._step

    def slow(reader: PromptReader, *args: Any) -> Any:
        time.sleep(0.3)
        return step(reader, *args)

    monkeypatch.setattr(PromptReader, "_step", slow)
    before = scrape(live.url)
    answer = complete(client, {"method": "selective-context", "rate": 0.5, "context": STORY})
    more = grown(before, scrape(live.url))
    assert more["penstock:prompt_compression_seconds_count"] == 1
    assert 0.3 <= more["penstock:prompt_compression_seconds_sum"] < more["penstock:time_to_first_token_seconds_sum"]
    assert more["penstock:prompt_compressions_total{method=selective-context}"] == 1
    assert more["penstock:prompt_compression_tokens_total{stage=after}"] == answer.usage.prompt_tokens
    num_before = answer.usage.prompt_tokens_details.compressed_from
    assert more["penstock:prompt_compression_tokens_total{stage=before}"] == num_before


def test_a_client_that_leaves_ends_it_at_its_next_step(
    live: LiveServer, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    step, steps = PromptReader._step, []

    def stuck(reader: PromptReader, *args: Any) -> Any:
        steps.append(1)
        begun.set()
        assert go_on.wait(30)
        return step(reader, *args)

    monkeypatch.setattr(PromptReader, "_step", stuck)
    body = {"prompt": STORY * 40, "max_tokens": 2, "prompt_compression": {"method": "llmlingua", "rate": 0.01}}
    with httpx.Client(base_url=live.url) as gone, pytest.raises(httpx.ReadTimeout):
        gone.post("/v1/completions", json=body, timeout=1.0)
    assert begun.wait(30)
    until = time.monotonic() + 30
    while part_of(live)._queue.queued:
        assert time.monotonic() < until
        time.sleep(0.01)
    go_on.set()
    assert complete(client, {"method": "selective-context", "rate": 0.5, "context": STORY}).choices[0].text
    assert len(steps) == 2  # one of the prompt that nobody waited for, and this one's


def test_too_much_waits(live: LiveServer, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    part = part_of(live)
    monkeypatch.setattr(part._queue, "_size", part._queue._max_queued)
    monkeypatch.setattr(part._queue, "_lines", {"other": _Line("other", 1e9, 0.0)})
    with pytest.raises(openai.InternalServerError, match="waiting to be compressed") as caught:
        complete(client, {"method": "random", "rate": 0.5})
    assert caught.value.status_code == 503
    assert caught.value.response.headers["retry-after"] == "1"


def test_a_compressor_that_cannot_be_used_keeps_the_server_from_starting() -> None:
    config = serve_from_kwargs(
        model=bundled(), port=0, ops="ref", engine_in_process=True, max_model_len=64, num_gpu_blocks_override=8,
        prompt_compressor="nowhere",
    )  # fmt: skip
    with pytest.raises(ConfigError, match="prompt_compressor: 'nowhere' cannot be used"), LiveServer(config):
        pass
