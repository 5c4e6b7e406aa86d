"""What is streamed adds up to what is answered at once, whatever is asked for."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable
from itertools import chain
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.server.live import LiveServer
from penstock.server.transport.sse import EventStream

OPTIONS = st.fixed_dictionaries(
    {"seed": st.integers(0, 1000), "temperature": st.sampled_from([0, 1, 1.5]), "max_tokens": st.integers(1, 8)},
    optional={
        "n": st.integers(1, 3),
        "stop": st.lists(st.sampled_from(["e", " a", "the", "o,", "ing ", "\n", "zq"]), min_size=1, max_size=3),
        "include_stop_str_in_output": st.booleans(),
        "min_tokens": st.just(1),
        "top_p": st.just(0.9),
        "return_token_ids": st.booleans(),
        "skip_special_tokens": st.booleans(),
    },
)
FEW = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def stream(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = http.post(path, json=body | {"stream": True, "stream_options": {"include_usage": True}})
    assert answer.status_code == 200, answer.text
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks: list[dict[str, Any]] = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert chunks[-1]["choices"] == []
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    return chunks


def joined(lists: Iterable[list[Any]]) -> list[Any]:
    return list(chain.from_iterable(lists))


def alike(a: Any, b: Any) -> bool:
    """Equal but for the last digits of numbers: the BLAS library may add up otherwise in another batch."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(alike, a, b))
    return bool(a == (pytest.approx(b, rel=1e-3) if isinstance(b, float) else b))


def same_usage(a: dict[str, Any], b: dict[str, Any]) -> None:
    """The cache may know more the second time."""
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert a[name] == b[name]


@FEW
@given(
    OPTIONS,
    st.sampled_from(["Once upon a time", ["The", "a cat"], [11, 12, 13]]),
    st.none() | st.integers(0, 2),
    st.booleans(),
)
def test_completions(http: httpx.Client, options: Any, prompt: Any, logprobs: int | None, echo: bool) -> None:
    body = options | {"prompt": prompt, "echo": echo}
    if logprobs is not None:
        body["logprobs"] = logprobs
    whole = http.post("/v1/completions", json=body).json()
    chunks = stream(http, "/v1/completions", body)
    same_usage(chunks[-1]["usage"], whole["usage"])
    for choice in whole["choices"]:
        parts = [p for chunk in chunks for p in chunk["choices"] if p["index"] == choice["index"]]
        assert "".join(p["text"] for p in parts) == choice["text"]
        assert [p["finish_reason"] for p in parts if p["finish_reason"]] == [choice["finish_reason"]]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        assert parts[-1]["stop_reason"] == choice["stop_reason"]
        assert joined(p.get("token_ids", []) for p in parts) == choice.get("token_ids", [])
        if logprobs is None:
            assert choice["logprobs"] is None
            continue
        for name, values in choice["logprobs"].items():
            assert alike(joined(p["logprobs"][name] for p in parts if p["logprobs"]), values)
        num = len(choice["logprobs"]["tokens"])
        assert all(len(values) == num for values in choice["logprobs"].values())


@FEW
@given(OPTIONS, st.none() | st.integers(0, 2))
def test_chats(http: httpx.Client, options: Any, top: int | None) -> None:
    body = options | {"messages": [{"role": "user", "content": "Tell me a story"}]}
    if top is not None:
        body |= {"logprobs": True, "top_logprobs": top}
    whole = http.post("/v1/chat/completions", json=body).json()
    chunks = stream(http, "/v1/chat/completions", body)
    same_usage(chunks[-1]["usage"], whole["usage"])
    for choice in whole["choices"]:
        parts = [p for chunk in chunks for p in chunk["choices"] if p["index"] == choice["index"]]
        assert [p["delta"].get("role") for p in parts] == ["assistant"] + [None] * (len(parts) - 1)
        assert "".join(p["delta"].get("content", "") for p in parts) == choice["message"]["content"]
        assert [p["finish_reason"] for p in parts if p["finish_reason"]] == [choice["finish_reason"]]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        assert joined(p.get("token_ids", []) for p in parts) == choice.get("token_ids", [])
        got = [token for p in parts if p["logprobs"] for token in p["logprobs"]["content"]]
        assert alike(got, (choice["logprobs"] or {"content": []})["content"])
        assert (top is None) == (choice["logprobs"] is None)


# -- readers that leave, or do not read ----------------------------------------------------------------------------


def _num_live(live: LiveServer) -> int:
    assert live.server is not None
    return live.server.client.num_live


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_leaving_aborts(live: LiveServer, path: str, streamed: bool) -> None:
    body: dict[str, Any] = {"max_tokens": 450, "ignore_eos": True, "stream": streamed, "n": 2}
    body |= {"prompt": ["a", "b"]} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}

    async def run() -> None:
        async with httpx.AsyncClient(base_url=live.url, timeout=60) as client:
            task = asyncio.create_task(client.post(path, json=body))
            until = time.monotonic() + 10
            while _num_live(live) == 0 and time.monotonic() < until:
                await asyncio.sleep(0.002)
            assert _num_live(live) > 0
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            began = time.monotonic()
            while _num_live(live) and time.monotonic() < began + 2:
                await asyncio.sleep(0.002)
            assert time.monotonic() - began < 0.5
            assert _num_live(live) == 0

    asyncio.run(run())


def test_a_reader_that_is_too_slow_is_given_up() -> None:
    class Never:
        too_slow = True
        aborted = False

        async def frames(self) -> Any:
            yield b"data: 1\n\n"
            await asyncio.Event().wait()

        def abort(self) -> None:
            self.aborted = True

    source = Never()

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        pass

    async def run() -> None:
        with pytest.raises(ConnectionAbortedError, match="does not read"):
            await asyncio.wait_for(EventStream(source)({"type": "http"}, receive, send), 5)

    asyncio.run(run())
    assert source.aborted
