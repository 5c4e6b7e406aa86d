"""Row B11 over HTTP and in `LLM`: `prompt_cache` of prompts and conversations, what usage says, what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from penstock.base.errors import ConfigError, InputError
from penstock.config import serve_from_kwargs
from penstock.core.sampling import SamplingParams
from penstock.launch.llm import LLM
from penstock.server.live import LiveServer
from tests.api.conftest import bundled

BLOCK = 16
ENGINE: dict[str, Any] = {
    "ops": "ref", "max_model_len": 512, "block_size": BLOCK, "num_gpu_blocks_override": 96, "kv_allocator": "modules",
}  # fmt: skip
STORIES = ["The cat lives in the red house by the sea.", "Tom has a dog. The dog is big and likes to run and jump."]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with LiveServer(serve_from_kwargs(model=bundled(), port=0, **ENGINE)) as live:
        yield live


def ask(server: LiveServer, path: str, **fields: Any) -> httpx.Response:
    body = {"max_tokens": 6, "temperature": 0, **fields}
    return httpx.post(f"{server.url}/v1/{path}", json=body, timeout=60)


def test_B11_completions_behind_modules(server: LiveServer) -> None:
    llm = LLM(bundled(), **ENGINE)
    modules = [{"text": text} for text in STORIES]
    for order, cached in (([0], 0), ([0, 1], 1), ([1, 0], 2), ([1], 1)):
        own = [modules[i] for i in order]
        answer = ask(server, "completions", prompt=" The dog", prompt_cache=own)
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        (want,) = llm.generate({"prompt": " The dog", "prompt_cache": own}, SamplingParams(temperature=0, max_tokens=6))
        assert answer.json()["choices"][0]["text"] == want.outputs[0].text
        assert usage["prompt_tokens"] == len(want.prompt_token_ids or ())
        found = usage["prompt_tokens_details"]["cached_tokens"]
        assert (found, found % BLOCK) == (want.num_cached_tokens, 0)
        assert (found > 0) == (cached > 0)
        if cached == len(order):
            assert usage["prompt_tokens"] - found < BLOCK, "only what stands behind modules is computed"
    whole = ask(server, "completions", prompt=" The dog", prompt_cache={"modules": modules, "recompute": 1})
    (read,) = llm.generate({"prompt": " The dog", "prompt_cache": modules}, SamplingParams(max_tokens=1))
    plain = ask(server, "completions", prompt=read.prompt_token_ids)
    assert whole.json()["choices"][0]["text"] == plain.json()["choices"][0]["text"]
    metrics = httpx.get(f"{server.url}/metrics", timeout=60).text
    lines = [line.split() for line in metrics.splitlines() if line.startswith("penstock:kv_module")]
    counted = {name.partition("{")[0]: float(value) for name, value in lines}
    assert counted["penstock:kv_module_hits_total"] > 0
    assert counted["penstock:kv_module_tokens_total"] >= counted["penstock:kv_module_hits_total"]


def test_B11_messages_of_a_conversation_as_modules(server: LiveServer) -> None:
    said = [
        {"role": "system", "content": STORIES[0]},
        {"role": "user", "content": STORIES[1]},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Who is big?"},
    ]
    first = ask(server, "chat/completions", messages=said, prompt_cache=[{"messages": 1}, {"messages": 3}])
    again = ask(server, "chat/completions", messages=said, prompt_cache=[{"messages": 1}, {"messages": 3}])
    assert (first.status_code, again.status_code) == (200, 200), first.text
    assert first.json()["choices"][0]["message"] == again.json()["choices"][0]["message"]
    details = again.json()["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] >= 2 * BLOCK
    gone = ask(server, "chat/completions", messages=said, prompt_cache=[{"messages": 4}])
    assert gone.status_code == 400
    assert "prompt_cache[0].messages is 4" in gone.text


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("text", "expected object | array | null"),
        ([{"text": ""}], "prompt_cache[0].text must be a text"),
        ([{"text": "a", "token_ids": [3]}], "nothing else"),
        ([{"messages": 1}], "must be an object with text or token_ids"),
        ([{"token_ids": []}], "prompt_cache[0].token_ids"),
        ({"modules": [{"text": "a"}], "recompute": 1.5}, "prompt_cache.recompute must be a share from 0 to 1"),
        ({"texts": []}, "with modules and recompute"),
        ([{"text": "a"}] * 257, "at most 256"),
        ([{"token_ids": [10**9]}, {"text": "a"}], "prompt"),
    ],
)
def test_what_is_no_module_is_refused_by_name(server: LiveServer, given: Any, why: str) -> None:
    answer = ask(server, "completions", prompt="x", prompt_cache=given)
    assert answer.status_code == 400, answer.text
    assert why in answer.text


def test_nothing_may_change_what_modules_are(server: LiveServer) -> None:
    modules = [{"text": text} for text in STORIES]
    cut = ask(server, "completions", prompt="x", prompt_cache=modules, truncate_prompt_tokens=20)
    assert cut.status_code == 400
    assert "truncate_prompt_tokens changes the texts of prompt_cache" in cut.text
    empty = ask(server, "completions", prompt=[[]], prompt_cache=modules)
    assert empty.status_code == 400
    assert "behind the last module" in empty.text


def test_engines_without_modules_say_how_to_get_them() -> None:
    llm = LLM(bundled(), ops="ref", max_model_len=512)
    with pytest.raises(InputError, match="start it with kv_allocator modules"):
        llm.generate({"prompt": "x", "prompt_cache": [{"text": "y"}]})
    with pytest.raises(ConfigError, match="kv_allocator: modules does not go together with speculative_config"):
        LLM(bundled(), **ENGINE, speculative_config='{"method": "ngram", "num_speculative_tokens": 3}')
    with pytest.raises(ConfigError, match="modules turns keys when they are read"):
        LLM(bundled(), **ENGINE, kv_rotation="hadamard")


def test_prompts_are_cut_into_modules_where_that_is_asked_for(server: LiveServer) -> None:
    named = LLM(bundled(), **ENGINE)
    cut = LLM(bundled(), **ENGINE, module_chunk_tokens=2 * BLOCK, module_recompute=0.5)
    ids = [3 + n * n % 97 for n in range(6 * BLOCK + 5)]
    parts = [{"token_ids": ids[at : at + 2 * BLOCK]} for at in range(0, 6 * BLOCK, 2 * BLOCK)]
    greedy = SamplingParams(temperature=0, max_tokens=8, logprobs=3)
    modules = {"modules": parts, "recompute": 0.5}
    (want,) = named.generate({"prompt_token_ids": ids[6 * BLOCK :], "prompt_cache": modules}, greedy)
    (got,) = cut.generate({"prompt_token_ids": ids}, greedy)
    (plain,) = named.generate({"prompt_token_ids": ids}, greedy)
    assert got.outputs[0].logprobs == want.outputs[0].logprobs
    assert got.outputs[0].logprobs != plain.outputs[0].logprobs
    with LiveServer(
        serve_from_kwargs(model=bundled(), port=0, **ENGINE, module_chunk_tokens=2 * BLOCK, module_recompute=0.5)
    ) as live:
        first = ask(live, "completions", prompt=ids, max_tokens=8)
        again = ask(live, "completions", prompt=ids[2 * BLOCK :], max_tokens=8)
    assert first.json()["choices"][0]["text"] == want.outputs[0].text
    assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 4 * BLOCK


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ConfigError, match="modules are whole blocks of block_size 16"):
        LLM(bundled(), **ENGINE, module_chunk_tokens=20)
    with pytest.raises(ConfigError, match="module_recompute is for the modules that module_chunk_tokens makes"):
        LLM(bundled(), **ENGINE, module_recompute=0.2)
    with pytest.raises(ConfigError, match="module_chunk_tokens is for kv_allocator modules"):
        LLM(bundled(), ops="ref", max_model_len=512, module_chunk_tokens=32)
