"""Each request to the engine that has most of its prompt, or else to the next one in turn."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

import httpx

turn = itertools.count()


def generate(http: httpx.Client, prompt: list[int], **sampling: Any) -> Iterator[int]:
    """Token ids as they come. `http`: of a server whose engines are 0 and 1, with its admin key."""
    has = [call(http, "prep_recv", engine=engine, prompt_token_ids=prompt)["matched"] for engine in (0, 1)]
    engine = has.index(max(has)) if has[0] != has[1] else next(turn) % 2
    body = {"engine": engine, "prompt_token_ids": prompt, **sampling}
    with http.stream("POST", "/internal/microserving/start_generate", json=body) as answer:
        for line in answer.iter_lines():
            yield from json.loads(line)["token_ids"]


def call(http: httpx.Client, name: str, **body: Any) -> Any:
    return http.post(f"/internal/microserving/{name}", json=body).raise_for_status().json()
