"""Log-probabilities over HTTP with a SentencePiece vocabulary: texts, keys, offsets; an end token is no text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from penstock.config import serve_from_kwargs
from penstock.server.live import LiveServer
from tests.api.conftest import bundled
from tests.shared import shared

TEXT = "/v1/completions"


@pytest.fixture(scope="module")
def stories() -> Iterator[httpx.Client]:
    config = serve_from_kwargs(
        model=str(shared("models", "stories260K", "stories260K.bin")),
        tokenizer=str(shared("models", "stories260K", "tok512.model")), port=0, ops="ref", num_gpu_blocks_override=64,
    )  # fmt: skip
    with LiveServer(config) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture(params=["stories", "nano"])
def client(request: pytest.FixtureRequest) -> httpx.Client:
    found: httpx.Client = request.getfixturevalue({"stories": "stories", "nano": "http"}[request.param])
    return found


def ask(client: httpx.Client, path: str = TEXT, **body: Any) -> Any:
    answer = client.post(path, json={"temperature": 0} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(client: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    """Choices as they add up."""
    lines = client.post(TEXT, json={"temperature": 0, "stream": True} | body).text.splitlines()
    out: dict[int, dict[str, Any]] = {}
    for chunk in [json.loads(line[6:]) for line in lines if line.startswith("data: {")]:
        for part in chunk["choices"]:
            choice = out.setdefault(part["index"], {"text": "", "logprobs": {}})
            choice["text"] += part["text"]
            for name, values in (part["logprobs"] or {}).items():
                choice["logprobs"].setdefault(name, []).extend(values)
    return [out[i] for i in sorted(out)]


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize(
    "more", [{}, {"n": 3, "temperature": 1, "seed": 5}, {"stop": ["e", "my"]}, {"logprobs": 20}, {"max_tokens": 1},
             {"skip_special_tokens": False}, {"stop": [" a"], "include_stop_str_in_output": True}]
)  # fmt: skip
def test_tokens_stand_where_their_offsets_say(client: httpx.Client, echo: bool, more: dict[str, Any]) -> None:
    body: dict[str, Any] = {
        "prompt": "Once upon a time 🦊, Tim", "max_tokens": 12, "logprobs": 3, "echo": echo, "ignore_eos": True
    } | more  # fmt: skip
    choices = ask(client, **body)["choices"]
    for choice in [*choices, *streamed(client, **body)]:
        text, told = choice["text"], choice["logprobs"]
        pairs = [(t, o) for t, o in zip(told["tokens"], told["text_offset"], strict=True) if t not in ("<s>", "</s>")]
        assert told["text_offset"] == sorted(told["text_offset"])
        for name, offset in pairs:
            if name.startswith("bytes:"):
                assert text[offset] == "🦊"
            else:  # what a stop string has cut off stood there
                assert text[offset:].startswith(name) or name.startswith(text[offset:])
        if "stop" not in more:
            assert "".join(t for t, _ in pairs if not t.startswith("bytes:")) == text.replace("🦊", "")
    assert [c["logprobs"]["text_offset"] for c in choices] == [
        c["logprobs"]["text_offset"] for c in streamed(client, **body)
    ]


def test_no_alternative_is_lost(stories: httpx.Client) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 8, "logprobs": 20}
    told = ask(stories, **body)["choices"][0]["logprobs"]
    for name, number, top in zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True):
        assert len(top) == 20
        assert top[name] == number
    assert " there" in "".join(told["tokens"])


def test_bytes_of_a_chat_are_those_of_its_text(http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 10, "logprobs": True, "top_logprobs": 2}
    choice = ask(http, "/v1/chat/completions", ignore_eos=True, **body)["choices"][0]
    tokens = choice["logprobs"]["content"]
    kept = [t for t in tokens if not t["token"].startswith("<|")]
    assert bytes(b for t in kept for b in t["bytes"]).decode() == choice["message"]["content"]
    assert "".join(t["token"] for t in kept) == choice["message"]["content"]


def test_a_prompts_logprobs_name_tokens_with_their_spaces(stories: httpx.Client) -> None:
    told = ask(stories, prompt="Once upon a time", max_tokens=1, prompt_logprobs=0)["choices"][0]["prompt_logprobs"]
    names = [entry["decoded_token"] for position in told[1:] for entry in position.values()]
    assert "".join(names) == " Once upon a time"


# -- the end token ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [TEXT, "/v1/chat/completions"])
@pytest.mark.parametrize("extra", [{}, {"stop": ["zzz"]}, {"logprobs": True}])
def test_the_end_is_no_part_of_the_text(http: httpx.Client, path: str, extra: dict[str, Any]) -> None:
    info = http.get("/tokenizer_info").json()
    end = info["eos_token_id"]
    ends = {"logit_bias": {str(end): 100}, "max_tokens": 8, "return_token_ids": True, "n": 2}
    prompt = {"prompt": "Once"} if path == TEXT else {"messages": [{"role": "user", "content": "Hello"}]}
    extra = {"logprobs": 1} if path == TEXT and "logprobs" in extra else extra
    for skip in (True, False):
        for shown in (True, False):
            body = {**prompt, **ends, **extra, "skip_special_tokens": skip, "include_stop_str_in_output": shown}
            for choice in ask(http, path, **body)["choices"]:
                text = choice["text"] if path == TEXT else choice["message"]["content"]
                assert text == (info["eos_token"] if shown and not skip else "")
                assert (choice["finish_reason"], choice["token_ids"]) == ("stop", [end])
    inside = {**prompt, **ends, **extra, "skip_special_tokens": False, "ignore_eos": True, "max_tokens": 2}
    for choice in ask(http, path, **inside)["choices"]:
        text = choice["text"] if path == TEXT else choice["message"]["content"]
        assert text == 2 * info["eos_token"], "tokens that do not end it are shown where that is asked for"


def test_the_end_in_python() -> None:
    from penstock.core.sampling import SamplingParams
    from penstock.launch.llm import LLM

    llm = LLM(bundled(), ops="ref", max_model_len=64, num_gpu_blocks_override=16)
    end = llm.get_tokenizer().eos_ids[0]
    asked = SamplingParams(temperature=0, max_tokens=4, logit_bias={end: 100.0}, skip_special_tokens=False)
    out = llm.generate("Once", asked)[0].outputs[0]
    assert (out.text, out.token_ids, out.finish_reason) == ("", [end], "stop")
