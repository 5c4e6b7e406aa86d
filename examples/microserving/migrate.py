"""A request begins on engine 0 and moves to engine 1 in the middle of its answer; `sampling` needs a seed to draw."""

import json
from collections.abc import Iterator
from typing import Any

import httpx


def generate(http: httpx.Client, prompt: list[int], after: int, **sampling: Any) -> Iterator[int]:
    """Token ids as they come; it moves behind `after` of them. `http`: of a server whose engines are 0 and 1."""
    made: list[int] = []
    for token in part(http, 0, prompt, made, **sampling):
        made.append(token)
        yield token
        if len(made) == after:
            break  # the answer is closed, and so the request ended there
    if len(made) == after:
        call(http, "remote_send", engine=0, to=1, prompt_token_ids=prompt + made)
        yield from part(http, 1, prompt, made, **sampling)


def part(http: httpx.Client, engine: int, prompt: list[int], made: list[int], **sampling: Any) -> Iterator[int]:
    body = {"engine": engine, "prompt_token_ids": prompt, "generated": made, **sampling}
    with http.stream("POST", "/internal/microserving/start_generate", json=body) as answer:
        for line in answer.iter_lines():
            yield from json.loads(line)["token_ids"]


def call(http: httpx.Client, name: str, **body: Any) -> Any:
    return http.post(f"/internal/microserving/{name}", json=body).raise_for_status().json()
