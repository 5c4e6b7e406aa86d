"""Prompts are computed by engine 0, tokens made by engine 1: what 1 lacks of a prompt is computed by 0 and sent."""

import json
from collections.abc import Iterator
from typing import Any

import httpx


def generate(http: httpx.Client, prompt: list[int], **sampling: Any) -> Iterator[int]:
    """Token ids as they come. `http`: of a server whose engines are 0 and 1, with its admin key."""
    if call(http, "prep_recv", engine=1, prompt_token_ids=prompt)["matched"] < len(prompt) - 64:
        call(http, "remote_send", engine=0, to=1, prompt_token_ids=prompt)
    body = {"engine": 1, "prompt_token_ids": prompt, **sampling}
    with http.stream("POST", "/internal/microserving/start_generate", json=body) as answer:
        for line in answer.iter_lines():
            yield from json.loads(line)["token_ids"]


def call(http: httpx.Client, name: str, **body: Any) -> Any:
    return http.post(f"/internal/microserving/{name}", json=body).raise_for_status().json()
