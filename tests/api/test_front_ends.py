"""What holds for one front end holds for all: bad inputs, limits, keys, queue, deadlines, faults, leaving clients."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec
import pytest

from penstock.config import serve_from_kwargs
from penstock.server.admission.gate import GENERATING
from penstock.server.live import LiveServer
from penstock.text.infill import FillMarks
from tests.api.conftest import bundled
from tests.api.fronts import FRONTS, HELLO, Front, events
from tests.api.test_bad_input import RAW
from tests.api.test_disconnect import ask, core_of, is_free, until

CONTEXT = 512
MARKS = FillMarks(prefix=5, suffix=6, middle=7, repository=None, file=None, ends=(8,))
SHORT = {name: raw for name, raw in RAW.items() if len(raw[0]) < 1000}


@pytest.fixture(autouse=True)
def _as_it_was(live: LiveServer) -> Iterator[None]:
    """The server is other files' as well, and its model cannot fill in."""
    yield
    assert live.server is not None
    live.server.parts.pop("fill_marks", None)


def filling(live: LiveServer) -> LiveServer:
    """nano knows no marks: some tokens of its vocabulary stand for them."""
    assert live.server is not None
    live.server.parts["fill_marks"] = MARKS
    return live


def post(url: str, front: Front, body: Any, **more: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return httpx.post(url + front.path, content=content, timeout=60, **more)


def told(front: Front, answer: httpx.Response, status: int) -> str:
    """What an error says, in the shape that its clients read."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    message = front.error(answer.json())
    assert 0 < len(message) < 1000
    assert "Traceback" not in message
    return message


@pytest.fixture(params=FRONTS, scope="module")
def front(request: pytest.FixtureRequest) -> Front:
    return FRONTS[request.param]


@pytest.fixture
def url(live: LiveServer) -> str:
    return filling(live).url


def test_the_gate_knows_every_front_end() -> None:
    assert {front.path for front in FRONTS.values()} <= GENERATING


# -- answers ---------------------------------------------------------------------------------------------------------


def test_a_stream_adds_up_to_the_answer(url: str, front: Front) -> None:
    whole = front.text(post(url, front, front.body()).json())
    streamed = post(url, front, front.body(stream=True))
    kind = "application/x-ndjson" if front.path.startswith("/api/") else "text/event-stream"
    assert streamed.headers["content-type"].split(";")[0] == kind
    assert whole
    assert "".join(map(front.piece, events(streamed.text))) == whole


def test_all_that_chat_say_the_same(url: str) -> None:
    said = {path: front.text(post(url, front, front.body()).json()) for path, front in FRONTS.items() if front.chat}
    assert len(set(said.values())) == 1, said


# -- bad inputs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHORT)
def test_what_is_no_json_object(url: str, front: Front, name: str) -> None:
    raw, said = SHORT[name]
    assert said in told(front, post(url, front, raw), 400)


def test_bodies_that_are_too_long_or_compressed(url: str, live: LiveServer, front: Front) -> None:
    assert live.server is not None
    most = live.server.config.max_body_bytes
    assert str(most) in told(front, post(url, front, b" " * (most + 1)), 413)
    assert "compressed" in told(front, post(url, front, b"x", headers={"content-encoding": "gzip"}), 415)


def test_unknown_models(url: str, front: Front) -> None:
    assert "nano" in told(front, post(url, front, front.body(model="gpt-17")), 404)
    assert post(url, front, front.body(model="nano")).status_code == 200


CUTS = ("/v1/messages", "/api/chat", "/api/generate", "/completion", "/infill")
"""Where more tokens than there is room for are a bound that is not reached, as on the servers that these stand for."""
BAD: list[tuple[str, Any]] = [
    ("max_tokens", "4"), ("max_tokens", True), ("max_tokens", 2**31), ("max_tokens", CONTEXT), ("temperature", "0"),
    ("temperature", -1), ("temperature", 1e308), ("top_p", 0), ("top_p", 1.1), ("top_k", -2), ("top_k", 10**9),
    ("min_p", 2), ("presence_penalty", 1e9), ("repetition_penalty", 0), ("seed", "x"), ("seed", 2**64),
    ("stop", 5), ("stop", [""]), ("stop", ["a"] * 10_000), ("stream", "true"), ("priority", 2**40), ("timeout", 0),
    ("timeout", 1e300), ("prompt", 5), ("prompt", "x " * 3 * CONTEXT),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(BAD)), ids=lambda i: f"{BAD[i][0]}-{i}")
def test_values_that_no_request_may_have(url: str, front: Front, case: int) -> None:
    """Refused under the client's own name, streamed or not, and the next good request is answered."""
    ours, value = BAD[case]
    if ours == "max_tokens" and value in (2**31, CONTEXT) and front.path in CUTS:
        assert post(url, front, front.body(max_tokens=value)).status_code == 200
        return
    name = front.name(ours)
    if name is None or (front.path == "/v1/messages" and ours == "presence_penalty"):
        return
    raw = msgspec.json.encode(front.body(**{ours: None}))
    at = b'"%b":null' % name.rpartition(".")[2].encode()
    if ours == "prompt":
        raw, said = msgspec.json.encode(front.body(prompt=value)), front.prompt
    else:
        assert raw.count(at) == 1
        raw, said = raw.replace(at, at[:-4] + _json(value)), name
    for body in (raw, raw[:-1] + b',"stream":true}' if b'"stream"' not in raw else raw.replace(b":false", b":true")):
        message = told(front, post(url, front, body), 400)
        assert said in message or (ours == "prompt" and "tokens" in message), message
    assert post(url, front, front.body(max_tokens=1)).status_code == 200


def _json(value: Any) -> bytes:
    return str(value).encode() if isinstance(value, int) and not isinstance(value, bool) else msgspec.json.encode(value)


def test_unknown_fields_are_named(url: str, front: Front) -> None:
    answer = post(url, front, front.body() | {"tempreture": 1})
    assert answer.status_code == 200
    assert answer.headers["x-ignored-fields"] == "tempreture"


# -- load, time, life --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def narrow() -> Iterator[LiveServer]:
    """One place, one may wait, two keys."""
    config = serve_from_kwargs(
        model=bundled(), port=0, ops="blas", engine_in_process=True, max_model_len=512, num_gpu_blocks_override=256,
        max_num_seqs=1, max_num_batched_tokens=32, max_num_queued_reqs=1,
    )  # fmt: skip
    with LiveServer(config) as server:
        yield filling(server)


def test_a_key_is_needed_and_its_tokens_count(front: Front, guarded: LiveServer) -> None:
    assert "key" in told(front, post(guarded.url, front, front.body()), 401)
    known = {"authorization": "Bearer sk-much"}
    assert post(guarded.url, front, front.body(), headers=known).status_code == 200
    poor = {"authorization": "Bearer sk-poor"}
    assert "minute" in told(front, post(guarded.url, front, front.body(max_tokens=400), headers=poor), 429)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    keys = tmp_path_factory.mktemp("keys") / "keys.toml"
    keys.write_text('[much]\nkey = "sk-much"\n[poor]\nkey = "sk-poor"\ntokens_per_minute = 100\n')
    config = serve_from_kwargs(
        model=bundled(), port=0, ops="blas", engine_in_process=True, max_model_len=512, num_gpu_blocks_override=64,
        api_keys_file=str(keys),
    )  # fmt: skip
    with LiveServer(config) as server:
        yield filling(server)


def test_a_full_queue_refuses(narrow: LiveServer, front: Front) -> None:
    core = core_of(narrow)
    held = [ask(narrow, stream=True, max_tokens=480)]
    until(lambda: bool(core.scheduler.running))
    held.append(ask(narrow, stream=True, max_tokens=480))
    until(lambda: len(core.groups) == 2)
    answer = post(narrow.url, front, front.body())
    told(front, answer, 429)
    assert int(answer.headers["retry-after"]) >= 1
    for sock in held:
        sock.close()
    until(lambda: is_free(core))


def test_a_deadline_ends_it(narrow: LiveServer, front: Front) -> None:
    answer = post(narrow.url, front, front.body(), headers={"x-request-timeout": "0.0005"})
    assert "time limit" in told(front, answer, 408) or "within" in answer.text


@pytest.mark.parametrize("stream", [True, False])
def test_work_stops_when_its_client_leaves(narrow: LiveServer, front: Front, stream: bool) -> None:
    core = core_of(narrow)
    until(lambda: is_free(core))
    body = front.body(max_tokens=400, stream=stream)
    if front.path.startswith("/api/"):  # Ollama has no ignore_eos
        body["format"] = {"type": "array", "items": {"type": "integer"}, "minItems": 150}
    else:
        body["ignore_eos"] = True
    with ask_body(narrow, front.path, body):
        until(lambda: bool(core.groups))
    until(lambda: is_free(core))
    assert narrow.server is not None
    assert narrow.server.client.num_live == 0


def ask_body(live: LiveServer, path: str, body: dict[str, Any]) -> Any:
    import socket

    text = msgspec.json.encode(body)
    host, port = live.url.removeprefix("http://").split(":")
    sock = socket.create_connection((host, int(port)), timeout=10)
    sock.sendall(b"POST %b HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(text)) + text)
    return sock


def test_a_killed_engine_loses_nothing() -> None:
    """Streams of every front end at once; their texts are those without the fault."""
    config = serve_from_kwargs(
        model=bundled(), port=0, ops="ref", max_model_len=512, num_gpu_blocks_override=256, request_log=False,
        max_restarts_per_minute=20,
    )  # fmt: skip
    with LiveServer(config) as live, ThreadPoolExecutor(len(FRONTS)) as pool:
        filling(live)

        def run(front: Front) -> str:
            answer = post(live.url, front, front.body(max_tokens=150, stream=True))
            assert answer.status_code == 200, answer.text
            return "".join(map(front.piece, events(answer.text)))

        want = {front.path: run(front) for front in FRONTS.values()}
        assert live.server is not None
        restarts = live.server.client.num_restarts
        again = [pool.submit(run, front) for front in FRONTS.values()]
        until(lambda: live.server is not None and live.server.client.snapshot.num_running > 0)
        info = live.server.client.info
        assert info is not None
        os.kill(info.pid, signal.SIGKILL)
        got = {path: future.result() for path, future in zip(FRONTS, again, strict=True)}
        assert live.server.client.num_restarts > restarts
        assert got == want


def test_a_prompt_is_cut_only_where_that_is_asked_for(url: str) -> None:
    long = " ".join(f"word{i}" for i in range(CONTEXT))
    for front in FRONTS.values():
        told(front, post(url, front, front.body(prompt=long)), 400)
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
        front = FRONTS[path]
        for most, used in ((-1, CONTEXT - 6), (20, 20)):
            answer = post(url, front, front.body(prompt=long, truncate_prompt_tokens=most))
            assert answer.status_code == 200, answer.text
            usage = answer.json()["usage"]
            assert usage.get("prompt_tokens", usage.get("input_tokens")) == used
        for bad in (0, -2, CONTEXT + 1):
            body = front.body(prompt=long, truncate_prompt_tokens=bad)
            assert "truncate_prompt_tokens" in told(front, post(url, front, body), 400)


def test_what_is_cut_is_the_beginning(url: str) -> None:
    front = FRONTS["/v1/completions"]
    whole = post(url, front, front.body(prompt=HELLO, echo=True, max_tokens=1)).json()["choices"][0]["text"]
    body = front.body(prompt=HELLO, echo=True, max_tokens=1, truncate_prompt_tokens=3)
    answer = post(url, front, body).json()
    assert answer["usage"]["prompt_tokens"] == 3
    assert whole.startswith(HELLO)
    echoed = answer["choices"][0]["text"]
    assert len(echoed) < len(HELLO)
    assert HELLO.endswith(echoed[:4]) or HELLO[-4:] in echoed
