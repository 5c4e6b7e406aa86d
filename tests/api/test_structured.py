"""Structured outputs over HTTP: outputs are as asked; what cannot be compiled is a 400, and its worker's end only."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from penstock.base.errors import InputError, RefusedError
from penstock.config import serve_from_kwargs
from penstock.core.sampling import StructuredOutputs
from penstock.server.live import LiveServer
from penstock.server.turns import grammars
from penstock.server.turns.grammars import GrammarPool
from tests.api.conftest import bundled
from tests.unit.text.grammar_walk import VOCABULARY

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "people": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["city", "people"],
    "additionalProperties": False,
}
SLOW = {"regex": "(a{140}){140}" * 50}
"""Compiles for seconds, or until it is stopped: many repeats, each of which is possible."""


def complete(http: httpx.Client, asked: dict[str, Any] | None, **more: Any) -> httpx.Response:
    # Room for all the blanks that the grammar allows: nano likes to indent.
    body = {"model": "nano", "prompt": "A city: ", "max_tokens": 400, "temperature": 1.0, "seed": 1, **more}
    if asked is not None:
        body["structured_outputs"] = asked
    return http.post("/v1/completions", json=body)


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    return str(choice["text"])


def is_city(text: str) -> bool:
    value = json.loads(text)
    return set(value) == {"city", "people"} and value["city"] in ("Oslo", "Rome") and value["people"] in range(10)


@pytest.fixture(scope="module")
def hasty() -> Iterator[LiveServer]:
    """Compiling may take half a second."""
    config = serve_from_kwargs(
        model=bundled(), port=0, ops="blas", max_model_len=512, num_gpu_blocks_override=64, grammar_timeout=0.5
    )
    with LiveServer(config) as server:
        yield server


def test_outputs_are_as_asked(http: httpx.Client) -> None:
    for seed in range(6):
        assert is_city(text_of(complete(http, {"json": SCHEMA}, seed=seed)))
        assert text_of(complete(http, {"choice": ["yes", "no"]}, seed=seed)) in ("yes", "no")
        assert re.fullmatch(r"\d{2}-[ab]", text_of(complete(http, {"regex": r"\d{2}-[ab]"}, seed=seed)))
        assert text_of(complete(http, {"grammar": 'root ::= "x" | "yz"'}, seed=seed)) in ("x", "yz")
    assert is_city(text_of(complete(http, {"json": json.dumps(SCHEMA)}, seed=1)))


def test_response_format(http: httpx.Client) -> None:
    chosen = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
    body = {"model": "nano", "messages": [{"role": "user", "content": "A city?"}], "max_tokens": 60, "seed": 4}
    body["temperature"] = 1
    answer = http.post("/v1/chat/completions", json={**body, "response_format": chosen})
    assert answer.status_code == 200, answer.text
    assert is_city(answer.json()["choices"][0]["message"]["content"])
    streamed = http.post("/v1/chat/completions", json={**body, "response_format": chosen, "stream": True})
    lines = [line[6:] for line in streamed.text.splitlines() if line.startswith("data: {")]
    deltas = [c["delta"].get("content") or "" for line in lines for c in json.loads(line)["choices"]]
    assert "".join(deltas) == answer.json()["choices"][0]["message"]["content"]
    broken = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "uniqueItems": True}}}
    answer = http.post("/v1/chat/completions", json={**body, "response_format": broken})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "response_format.json_schema.schema.uniqueItems"


S = "structured_outputs"
ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "24 back-reference": ({"regex": r"(a)\1"}, f"{S}.regex"),
    "24 regex of 10 MiB": ({"regex": "a" * (10 << 20)}, f"{S}.regex"),
    "24 repeats within repeats": ({"regex": "((a{1,1000}){1,1000}){1,1000}"}, f"{S}.regex"),
    "24 the same, exactly": ({"regex": "(?:(?:x|[^{]{300}){300}){3}"}, f"{S}.regex"),
    "24 in a Lark grammar": ({"grammar": "start: /((a{1,1000}){1,1000}){1,1000}/"}, f"{S}.grammar"),
    "24 through Lark rules": (
        {"grammar": 'start: a\na: b{1000}\nb: c{1000}\nc: "a"{1000}'},
        f"{S}.grammar",
    ),
    "24 through GBNF rules": (
        {"grammar": 'root ::= x{1,1000}\nx ::= y{1,1000}\ny ::= "a"{1,1000}'},
        f"{S}.grammar",
    ),
    "24 in a pattern": ({"json": {"pattern": "((a{1,1000}){1,1000}){1,1000}"}}, f"{S}.json.pattern"),
    "25 loop of references": (
        {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
        f"{S}.json.$defs.a.$ref",
    ),
    "25 external reference": ({"json": {"items": {"$ref": "http://127.0.0.1:9/x"}}}, f"{S}.json.items.$ref"),
    "25 properties": ({"json": {"properties": {f"p{n}": {} for n in range(10_000)}}}, f"{S}.json.properties"),
    "25 enum": ({"json": {"items": {"enum": list(range(100_000))}}}, f"{S}.json.items.enum"),
    "25 maxItems": ({"json": {"type": "array", "maxItems": 10**9}}, f"{S}.json.maxItems"),
    "25 unknown keyword": ({"json": {"properties": {"a": {"sometimes": 1}}}}, f"{S}.json.properties.a.sometimes"),
    "25 bad pattern": ({"json": {"properties": {"a": {"pattern": "(?<=a)b"}}}}, f"{S}.json.properties.a"),
    "25 a reference to nothing": ({"json": {"items": {"$ref": "#/$defs/a"}}}, f"{S}.json.items.$ref"),
    "25 a number beyond 64 bits": ({"json": {"items": {"multipleOf": 10**30}}}, f"{S}.json.items.multipleOf"),
    "25 many ways to deny": (
        {
            "json": {
                "not": {"$ref": "#/$defs/d0"},
                "$defs": {
                    f"d{n}": {"properties": {f"p{k}": {"$ref": f"#/$defs/d{n + 1}"} for k in range(10)}}
                    for n in range(20)
                }
                | {"d20": {}},
            }
        },
        f"{S}.json.not",
    ),
    "25 nothing satisfies it": ({"json": {"type": "integer", "minimum": 2, "maximum": 1}}, f"{S}.json"),
    "25 an object in itself": (
        {"json": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}},
        f"{S}.json",
    ),
    "26 an escape that is none": ({"grammar": r'root ::= "\q"'}, f"{S}.grammar"),
    "26 brackets without end": ({"grammar": "root ::= " + "[" * 90_000}, f"{S}.grammar"),
    "26 a rule that is missing": ({"grammar": "start: nothing"}, f"{S}.grammar"),
    "26 100,000 rules": ({"grammar": "start: r0\n" + "".join(f'r{n}: "a"\n' for n in range(100_000))}, f"{S}.grammar"),
    "26 endless left recursion": ({"grammar": 'start: start "a"'}, f"{S}.grammar"),
    "26 empty": ({"grammar": ""}, f"{S}.grammar"),
    "26 regex and json": ({"regex": "a", "json": {}}, S),
}


@pytest.mark.parametrize("row", ROWS)
def test_rows_24_to_26_are_answered_with_the_place(http: httpx.Client, row: str) -> None:
    asked, param = ROWS[row]
    began = time.monotonic()
    response = complete(http, asked)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param, error
    assert len(error["message"]) < 500
    assert time.monotonic() - began < 5


def test_numbers_of_any_size(http: httpx.Client) -> None:
    """In every field that holds a schema; where a description only says them, they do no harm."""
    for value in (1183472938475029391, 10**30):
        assert json.loads(text_of(complete(http, {"json": {"const": value}}))) == value
        assert json.loads(text_of(complete(http, {"json": json.dumps({"enum": [value]})}))) == value
        schema = {"type": "integer", "minimum": value, "maximum": value, "default": 2**70, "examples": [value]}
        format = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        body = {"model": "nano", "messages": [{"role": "user", "content": "x"}], "max_tokens": 60}
        answer = http.post("/v1/chat/completions", json={**body, "response_format": format})
        assert answer.status_code == 200, answer.text
        assert json.loads(answer.json()["choices"][0]["message"]["content"]) == value
        format = {"type": "json_schema", "name": "n", "schema": schema}
        body = {"model": "nano", "input": "x", "max_output_tokens": 60}
        answer = http.post("/v1/responses", json={**body, "text": {"format": format}})
        assert answer.status_code == 200, answer.text
        assert json.loads(answer.json()["output"][0]["content"][0]["text"]) == value
        assert answer.json()["text"]["format"]["schema"] == schema


def test_gbnf_with_zeros(http: httpx.Client) -> None:
    assert text_of(complete(http, {"grammar": r'root ::= "a\u000A" [\x62]'})) == "a\nb"


@pytest.mark.parametrize("name", ["temperature", "top_p", "presence_penalty", "frequency_penalty", "min_p"])
def test_denormal_numbers_are_served(http: httpx.Client, name: str) -> None:
    response = complete(http, {"choice": ["a"]}, **{name: 5e-324})
    assert text_of(response) == "a"


def test_a_denormal_divisor_is_refused(http: httpx.Client) -> None:
    response = complete(http, None, repetition_penalty=5e-324)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "repetition_penalty"


def test_rows_24_and_26_what_is_harmless_is_served(http: httpx.Client) -> None:
    """No backtracking: nested repetition is a regular expression like others; left recursion that ends, a grammar."""
    assert re.fullmatch("(a+)+b", text_of(complete(http, {"regex": "(a+)+b"}, temperature=2.0, seed=1)))
    endless = complete(http, {"grammar": 'start: start "a" | "b"'}, max_tokens=40)  # stops where it likes, or never
    assert re.fullmatch("ba*", endless.json()["choices"][0]["text"])


@pytest.mark.parametrize("asked", [{"regex": "(a?){5000}a{5000}"}, {"regex": "(([a-z ]{1,20}){1,50}){1,20}"}])
def test_row_24_what_explodes_only_when_it_is_used_is_the_clients_error(
    http: httpx.Client, asked: dict[str, Any]
) -> None:
    """No more than that: such a grammar may also live, if the model takes another way through it."""
    response = complete(http, asked, max_tokens=200)
    if response.status_code != 200:
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (400, "grammar_error", S)
        assert "make it simpler" in error["message"]
    assert response.status_code == 400 or "a?" not in asked["regex"]


def test_row_24_a_slow_one_ends_with_its_worker(hasty: LiveServer) -> None:
    """Killed and replaced, remembered, and in the way of nobody."""
    assert hasty.server is not None
    pool: GrammarPool = hasty.server.parts["grammars"]
    with httpx.Client(base_url=hasty.url, timeout=60) as http, ThreadPoolExecutor(4) as others:
        assert text_of(complete(http, {"choice": ["a"]})) == "a"
        before = pool.pids
        assert len(before) == 1
        running = others.submit(complete, http, None, seed=7, max_tokens=40)
        began = time.monotonic()
        response = complete(http, SLOW)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == f"{S}.regex" or "0.5 s" in response.json()["error"]["message"]
        assert time.monotonic() - began < 5
        assert not alive(before[0])
        assert pool.num_timeouts == 1
        assert complete(http, SLOW).status_code == 400
        assert pool.num_timeouts == 1  # remembered
        assert text_of(complete(http, {"choice": ["b"]})) == "b"
        assert set(pool.pids).isdisjoint(before)
        assert running.result().status_code == 200
        undisturbed = complete(http, None, seed=7, max_tokens=40)
        assert running.result().json()["choices"] == undisturbed.json()["choices"]


@pytest.mark.parametrize("warm", [False, True])
def test_workers_begin_with_a_grammar_or_before_and_end_with_their_server(warm: bool) -> None:
    config = serve_from_kwargs(
        model=bundled(), port=0, ops="blas", max_model_len=512, num_gpu_blocks_override=64, warm_grammars=warm
    )
    with LiveServer(config) as server:
        assert server.server is not None
        pool: GrammarPool = server.server.parts["grammars"]
        with httpx.Client(base_url=server.url, timeout=60) as http:
            assert complete(http, None, max_tokens=4).status_code == 200
            until = time.monotonic() + 20
            while warm and not pool.pids and time.monotonic() < until:
                time.sleep(0.01)
            assert bool(pool.pids) == warm
            assert text_of(complete(http, {"choice": ["a"]})) == "a"
        pids = pool.pids
        assert pids
        assert all(map(alive, pids))
    assert not any(map(alive, pids))


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# -- the pool by itself -------------------------------------------------------------------------------------------


def in_pool(work: Any, **settings: Any) -> Any:
    async def main() -> Any:
        pool = GrammarPool(lambda: VOCABULARY, **{"timeout_s": 20.0, **settings})
        try:
            return await work(pool)
        finally:
            await pool.close()
            assert not pool.pids

    return asyncio.run(main())


def test_equal_questions_are_asked_once_and_remembered() -> None:
    async def work(pool: GrammarPool) -> None:
        asked = StructuredOutputs(regex="a+")
        texts = await asyncio.gather(*[pool.compile(asked) for _ in range(20)])
        assert len(set(texts)) == 1
        assert await pool.compile(asked) == texts[0]
        assert (pool.num_misses, pool.num_hits) == (1, 1)
        with pytest.raises(InputError):
            await pool.compile(StructuredOutputs(regex="(a"))
        with pytest.raises(InputError):
            await pool.compile(StructuredOutputs(regex="(a"))
        assert (pool.num_misses, pool.num_hits, pool.num_crashes) == (2, 2, 0)
        assert len(pool.pids) == 1

    in_pool(work)


def test_a_worker_that_dies_is_replaced() -> None:
    """Out of memory, or killed by somebody: a client's error, and the next grammar has another worker."""

    async def work(pool: GrammarPool) -> None:
        await pool.compile(StructuredOutputs(regex="a"))
        first = pool.pids
        job = asyncio.ensure_future(pool.compile(StructuredOutputs(**SLOW)))
        while pool.pids == [] or not pool._busy:
            await asyncio.sleep(0)
        os.kill(first[0], 9)
        with pytest.raises(InputError, match="too much memory"):
            await job
        assert pool.num_crashes == 1
        assert await pool.compile(StructuredOutputs(regex="b"))
        assert set(pool.pids).isdisjoint(first)

    in_pool(work)


def test_too_many_at_once_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "MAX_WAITING", 3)

    async def work(pool: GrammarPool) -> None:
        jobs = [pool.compile(StructuredOutputs(regex=f"a{n}")) for n in range(8)]
        results = await asyncio.gather(*jobs, return_exceptions=True)
        refused = [r for r in results if isinstance(r, RefusedError)]
        assert len(refused) == 5
        assert {r.status for r in refused} == {503}
        assert all(r.retry_after_s for r in refused)

    in_pool(work)


def test_a_client_that_leaves_leaves_the_answer_to_others() -> None:
    async def work(pool: GrammarPool) -> None:
        asked = StructuredOutputs(regex="a{3}")
        first = asyncio.ensure_future(pool.compile(asked))
        second = asyncio.ensure_future(pool.compile(asked))
        await asyncio.sleep(0)
        first.cancel()
        assert await second
        assert pool.num_misses == 1

    in_pool(work)


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "MAX_VERDICT_BYTES", 6_000)

    async def work(pool: GrammarPool) -> None:
        for n in range(40):
            await pool.compile(StructuredOutputs(regex=f"a{n}"))
        assert pool._known_bytes <= 6_000
        assert 5 <= len(pool._known) <= 12
        assert pool.counters()["verdict_misses"] == 40

    in_pool(work)
