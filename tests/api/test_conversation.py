"""J13: a conversation's next turn computes what is new, however long the history is."""

from __future__ import annotations

import itertools
from typing import Any

import httpx
import pytest

from tests.api.conftest import LiveServer

WORDS = ("dog", "ball", "garden", "king", "boat", "apple", "river", "song")


def turns(http: httpx.Client, num: int) -> list[dict[str, Any]]:
    """Usage of every turn of a conversation that grows by about the same each time."""
    messages: list[dict[str, str]] = []
    out = []
    for i in range(num):
        messages.append({"role": "user", "content": f"Tell me about the {WORDS[i % len(WORDS)]} number {i}."})
        answer = http.post(
            "/v1/chat/completions",
            json={"messages": messages, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "cache_salt": "j13"},
        ).json()
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        out.append(answer["usage"])
    return out


def test_J13_a_turn_computes_no_more_than_what_is_new(http: httpx.Client, live: LiveServer) -> None:
    assert live.server is not None
    assert live.server.client.info is not None
    block = live.server.client.info.block_size
    usages = turns(http, 8)
    computed = [u["prompt_tokens"] - u["prompt_tokens_details"]["cached_tokens"] for u in usages]
    grown = [b["prompt_tokens"] - a["prompt_tokens"] for a, b in itertools.pairwise(usages)]
    assert usages[-1]["prompt_tokens"] > 4 * usages[0]["prompt_tokens"]
    # A turn finds all full blocks of the turns before it, the last answer too as far as its text came back as the
    # same tokens; at worst one answer and one block are computed again.
    for new, fresh in zip(grown, computed[1:], strict=True):
        assert fresh <= new + block + 12, (computed, grown)
    assert max(computed[4:]) <= max(computed[1:4]) + block


@pytest.mark.parametrize("num", [5])
def test_J13_the_session_of_responses_does_the_same(http: httpx.Client, live: LiveServer, num: int) -> None:
    previous, fresh = None, []
    for i in range(num):
        asked: dict[str, Any] = {"input": f"And the {WORDS[i]}?", "max_output_tokens": 12, "temperature": 0}
        if previous is not None:
            asked["previous_response_id"] = previous
        answer = http.post("/v1/responses", json=asked).json()
        previous = answer["id"]
        usage = answer["usage"]
        fresh.append(usage["input_tokens"] - usage["input_tokens_details"]["cached_tokens"])
    assert live.server is not None
    assert live.server.client.info is not None
    assert max(fresh[2:]) <= fresh[1] + live.server.client.info.block_size + 12
