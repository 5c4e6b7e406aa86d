"""Long texts at a server: what is refused, how soon, with how much memory, and that nobody else waits for it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.config import serve_from_kwargs
from penstock.core.request import Request
from penstock.core.sampling import TokenRules
from penstock.server.call import ANYONE, Tenant
from penstock.server.encoding import MAX_NODES, size_of
from penstock.server.live import LiveServer
from penstock.text.offload import INLINE_CHARS
from tests.api.conftest import bundled
from tests.api.test_admission import Bench
from tests.unit.server.test_parsing_templates import HERMES

KEYS = """
[flood]
key = "kf"
max_concurrent = 1
[good]
key = "kg"
[poor]
key = "kp"
tokens_per_minute = 1000
"""
LONG = "the cat sat on the mat. " * 180
"""4,320 characters and about 1,300 tokens: fits the context, and is not encoded at once."""


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    keys = tmp_path_factory.mktemp("keys") / "keys.toml"
    keys.write_text(KEYS)
    config = serve_from_kwargs(
        model=bundled(), port=0, ops="blas", engine_in_process=True, max_model_len=2048, num_gpu_blocks_override=256,
        api_keys_file=str(keys), request_log=False, max_body_bytes=32 << 20,
        chat_template=HERMES,  # one that shows calls: others refuse them at once
    )  # fmt: skip
    with LiveServer(config) as server:
        yield server


def client(live: LiveServer, key: str = "kg", **more: Any) -> httpx.Client:
    return httpx.Client(base_url=live.url, timeout=60, headers={"authorization": f"Bearer {key}"} | more)


class Stuck:
    """Stops the encoder while a text that holds a word is being encoded, until it is let go."""

    def __init__(self, live: LiveServer, monkeypatch: pytest.MonkeyPatch, word: str = "STUCK") -> None:
        assert live.server is not None
        self.encoding = live.server.service.encoding
        self.begun, self.go = threading.Event(), threading.Event()
        self.texts: list[str] = []
        tokenizer = live.server.service.need_tokenizer()
        encode = tokenizer.encode

        def wait(text: str, add_special_tokens: bool = True) -> list[int]:
            self.texts.append(text)
            if word in text:
                self.begun.set()
                assert self.go.wait(30)
            return encode(text, add_special_tokens)

        monkeypatch.setattr(tokenizer, "encode", wait)

    def until(self, told: Any) -> None:
        ends = time.monotonic() + 30
        while not told():
            assert time.monotonic() < ends, "it never came to it"
            time.sleep(0.005)


@pytest.fixture
def stuck(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stuck]:
    made = Stuck(live, monkeypatch)
    yield made
    made.go.set()
    made.until(lambda: made.encoding.queue.num_jobs == 0)


def posted(sock_live: LiveServer, path: str, body: dict[str, Any], key: str) -> socket.socket:
    text = json.dumps(body).encode()
    host, port = sock_live.url.removeprefix("http://").split(":")
    sock = socket.create_connection((host, int(port)), timeout=30)
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {key}\r\nContent-Length: {len(text)}\r\n\r\n"
    sock.sendall(head.encode() + text)
    return sock


# -- what cannot fit ---------------------------------------------------------------------------------------------

CHAT = [{"role": "user", "content": "\n" * 300_000}]
TOO_LONG = {
    "completions": ("/v1/completions", {"prompt": "\n" * 300_000}),
    "of several": ("/v1/completions", {"prompt": ["a", "b" * 300_000]}),
    "embeddings": ("/v1/embeddings", {"input": ["a", "\n" * 300_000]}),
    "chat": ("/v1/chat/completions", {"messages": CHAT}),
    "tool calls": ("/v1/chat/completions", {"messages": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": {
            "name": "f", "arguments": json.dumps({"x": "\n" * 300_000})}}]},
        {"role": "tool", "tool_call_id": "a", "content": "\n" * 300_000},
    ]}),
    "responses": ("/v1/responses", {"input": "\n" * 300_000}),
    "messages": ("/v1/messages", {"messages": CHAT, "max_tokens": 4}),
}  # fmt: skip


@pytest.mark.parametrize("case", TOO_LONG)
def test_what_cannot_fit_is_refused_with_both_numbers_and_never_encoded_whole(
    live: LiveServer, stuck: Stuck, case: str
) -> None:
    path, body = TOO_LONG[case]
    with client(live) as http:
        answer = http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    found = re.search(r"has at least (\d+) tokens, but this model's maximum context length is (\d+)", error["message"])
    assert found is not None, error
    assert (int(found[1]) > 2047, int(found[2])) == (True, 2048) if case != "embeddings" else True
    if path != "/v1/messages":
        assert error["code"] == "context_length_exceeded"
    assert max(map(len, stuck.texts), default=0) < 300_000


def test_a_prediction_is_bounded_too(live: LiveServer, stuck: Stuck) -> None:
    prediction = {"type": "content", "content": "\n" * 300_000}
    body = {"messages": [{"role": "user", "content": "Hi"}], "prediction": prediction, "max_tokens": 4}
    with client(live) as http:
        answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert re.search(r"prediction.content has at least \d+ tokens; the context holds 2048", answer.text)
    assert max(map(len, stuck.texts), default=0) < 300_000


@pytest.mark.parametrize("path", ["/tokenize", "/v1/messages/count_tokens", "/v1/responses/input_tokens"])
def test_counting_goes_beyond_the_context_but_not_for_ever(live: LiveServer, path: str) -> None:
    def body(text: str) -> dict[str, Any]:
        field = {"/tokenize": "prompt", "/v1/responses/input_tokens": "input"}.get(path)
        return {field: text} if field else {"messages": [{"role": "user", "content": text}]}

    with client(live) as http:
        answer = http.post(path, json=body("the cat " * 10_000))
        assert answer.status_code == 200
        assert 20_000 < (answer.json().get("count") or answer.json()["input_tokens"]) < 50_000
        answer = http.post(path, json=body(". " * 7_750_000))
    assert answer.status_code == 400
    assert "at most 1048576 are possible" in answer.text


def test_many_prompts_are_encoded_off_the_loop_and_the_first_that_is_too_long_ends_it(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert live.server is not None
    tokenizer = live.server.service.need_tokenizer()
    encode, threads = tokenizer.encode, []

    def noted(text: str, add_special_tokens: bool = True) -> list[int]:
        threads.append(threading.current_thread().name)
        return encode(text, add_special_tokens)

    monkeypatch.setattr(tokenizer, "encode", noted)
    texts = ["the cat "] * 500 + ["\n" * 4000] + ["the cat "] * 500
    with client(live) as http:
        answer = http.post("/v1/embeddings", json={"input": texts})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "input[500]"
    assert len(threads) == 501
    assert set(threads) == {"penstock-encoded"}


def test_bad_words_of_many_prompts_are_encoded_once(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert live.server is not None
    tokenizer = live.server.service.need_tokenizer()
    encode, texts = tokenizer.encode, []

    def noted(text: str, add_special_tokens: bool = True) -> list[int]:
        texts.append((text, threading.current_thread().name))
        return encode(text, add_special_tokens)

    monkeypatch.setattr(tokenizer, "encode", noted)
    words = [f"word{i} " + "x" * 200 for i in range(20)]
    with client(live) as http:
        answer = http.post("/v1/completions", json={"prompt": ["a"] * 8, "max_tokens": 1, "bad_words": words})
    assert answer.status_code == 200, answer.text
    found = [name for text, name in texts if "word" in text]
    assert len(found) == 40
    assert set(found) == {"penstock-encoded"}


# -- others, and oneself -----------------------------------------------------------------------------------------


def test_another_key_does_not_wait_for_long_texts(live: LiveServer, stuck: Stuck) -> None:
    """Those of one key hold one thread at most, and of its line."""
    ask = {"prompt": LONG + "STUCK" * 30_000}  # long for a thread
    flood = [posted(live, "/tokenize", ask, "kf")]
    assert stuck.begun.wait(30)
    with client(live) as http:
        assert http.post("/v1/completions", json={"prompt": LONG, "max_tokens": 2}).status_code == 200
        metrics = http.get("/metrics").text
    assert re.search(r"penstock:encoding_queue_requests\{[^}]*\} 1\.0", metrics)
    assert float(re.findall(r"penstock:encoding_queue_characters\{[^}]*\} (\S+)", metrics)[0]) == len(ask["prompt"])
    for sock in flood:
        sock.close()


def test_encoding_counts_as_a_request_of_its_key(live: LiveServer, stuck: Stuck) -> None:
    first = posted(live, "/v1/completions", {"prompt": LONG + "STUCK", "max_tokens": 1}, "kf")
    assert stuck.begun.wait(30)
    with client(live, "kf") as http:
        for ask in ({"prompt": LONG, "max_tokens": 1}, {"prompt": "Once", "max_tokens": 1}):
            answer = http.post("/v1/completions", json=ask)
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        stuck.go.set()
        assert first.recv(64).startswith(b"HTTP/1.1 200")
        first.close()
        stuck.until(lambda: stuck.encoding.queue.num_jobs == 0)

        def served() -> bool:
            return http.post("/v1/completions", json={"prompt": LONG, "max_tokens": 1}).status_code == 200

        stuck.until(served)


def test_a_key_with_too_few_tokens_is_refused_before_its_text_is_encoded(live: LiveServer, stuck: Stuck) -> None:
    assert live.server is not None
    with client(live, "kp") as http:
        answer = http.post("/v1/completions", json={"prompt": "x" * 17_000, "max_tokens": 1})
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert "this key has 1000 a minute" in answer.text
    assert stuck.texts == []
    assert stuck.encoding.refused["tenant_tokens"] >= 1


@pytest.mark.parametrize("where", ["running", "waiting"])
def test_a_client_that_leaves_frees_its_place(live: LiveServer, stuck: Stuck, where: str) -> None:
    body = {"prompt": LONG + "STUCK" * (30_000 if where == "waiting" else 1)}
    socks = [posted(live, "/tokenize", body, "kg") for _ in range(2 if where == "waiting" else 1)]
    assert stuck.begun.wait(30)
    stuck.until(lambda: stuck.encoding.queue.queued >= len(socks) * len(body["prompt"]))
    socks[-1].close()
    stuck.until(lambda: stuck.encoding.queue.queued == (len(socks) - 1) * len(body["prompt"]))
    for sock in socks:
        sock.close()
    stuck.go.set()
    stuck.until(lambda: stuck.encoding.queue.num_jobs == 0)
    assert sum("STUCK" in text for text in stuck.texts) <= 2


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/v1/embeddings"])
def test_a_deadline_passes_while_a_text_is_encoded(live: LiveServer, stuck: Stuck, path: str) -> None:
    field = "input" if path == "/v1/embeddings" else "prompt"
    with client(live, **{"x-request-timeout": "0.3"}) as http:
        answer = http.post(path, json={field: LONG + "STUCK"})
    assert answer.status_code == 408, answer.text
    assert answer.json()["error"]["code"] == "timeout"
    assert answer.json()["usage"]["prompt_tokens"] == 0
    assert stuck.begun.is_set()
    assert stuck.encoding.queue.queued == 0
    assert stuck.encoding.refused["deadline"] >= 1


def test_a_deadline_that_is_no_number_of_seconds_is_refused_before_anything_is_encoded(
    live: LiveServer, stuck: Stuck
) -> None:
    with client(live) as http:
        answer = http.post("/v1/completions", json={"prompt": LONG, "timeout": -1})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "timeout")
    assert stuck.texts == []


def test_the_servers_end_ends_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    config = serve_from_kwargs(model=bundled(), port=0, ops="blas", engine_in_process=True, max_model_len=2048,
                               num_gpu_blocks_override=256)  # fmt: skip
    with LiveServer(config) as server:
        stuck = Stuck(server, monkeypatch)
        socks = [posted(server, "/v1/completions", {"prompt": LONG + "STUCK" * n}, "") for n in (1, 2, 3, 4)]
        assert stuck.begun.wait(30)
        stuck.until(lambda: stuck.encoding.queue.num_jobs == 4)
        assert server.server is not None
        assert server.loop is not None
        server.loop.call_soon_threadsafe(server.server.service.drain)
        for sock in socks[2:]:
            assert sock.recv(64).startswith(b"HTTP/1.1 503")
            sock.close()
        stuck.go.set()
        for sock in socks[:2]:
            assert sock.recv(64).startswith(b"HTTP/1.1 503")
            sock.close()
        answer = httpx.post(server.url + "/v1/completions", json={"prompt": LONG})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")


# -- sizes and tenants -------------------------------------------------------------------------------------------


def test_a_conversations_size_is_that_of_all_its_text() -> None:
    call = {"function": {"name": "f", "arguments": "x" * 1000}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "y" * 500}]}, {"tool_calls": [call]}]
    tools = [{"function": {"description": "z" * 2000}}]
    assert 3500 < size_of((messages, tools, {"documents": None})) < 3700
    assert size_of((messages, tools, {"documents": ["w" * 5000]})) > 8500
    assert size_of([[0] * 500] * 20) > INLINE_CHARS, "work grows with values too"
    assert size_of([0] * (MAX_NODES * 3)) > INLINE_CHARS


def test_a_tenants_places_and_tokens_are_looked_at_before_encoding() -> None:
    bench = Bench()
    tenant = Tenant("t", tokens_per_minute=100, max_concurrent=2)
    release = bench.gate.hold(tenant)
    bench.ask(tenant)
    error = bench.refused(tenant)
    assert (error.status, error.code) == (429, "rate_limit_exceeded")
    release()
    assert bench.gate.tokens_left(tenant) == 80
    assert bench.gate.tokens_left(ANYONE) is None
    assert "ask for less" in str(bench.gate.too_costly(tenant, 100))
    later = bench.gate.too_costly(tenant, 90)
    assert later.retry_after_s is not None
    bench.ask(tenant)
    assert Request(request_id="", prompt_token_ids=[1], rules=TokenRules()).request_id == ""


# -- memory ------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="address space is limited by the system")
def test_two_bodies_of_32_mb_leave_a_small_server_and_its_streams_alone(tmp_path: Path) -> None:
    """Encoding them would take 3 GB each."""
    sources = str(Path(__file__).parents[2] / "src")
    command = [
        "bash", "-c", 'ulimit -v 2500000; exec "$@"', "x", sys.executable, "-m", "penstock.cli.main", "serve", "--port",
        "0", "--files-dir", str(tmp_path), "--num-gpu-blocks-override", "256", "--threads", "1",
        "--max-body-bytes", "32M",
    ]  # fmt: skip
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=os.environ | {"PYTHONPATH": sources}
    ) as process:
        try:
            assert process.stdout is not None
            url = re.findall(r"on (http://\S+)", process.stdout.readline())[0]
            body = json.dumps({"prompt": ". " * 15_500_000, "max_tokens": 4}).encode()
            answers: list[httpx.Response] = []
            asking = [
                threading.Thread(
                    target=lambda: answers.append(httpx.post(url + "/v1/completions", content=body, timeout=60))
                )
                for _ in range(2)
            ]
            ask = {"prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "stream": True}
            with httpx.stream("POST", url + "/v1/completions", json=ask, timeout=60) as stream:
                lines = stream.iter_lines()
                next(lines)
                for thread in asking:
                    thread.start()
                rest = list(lines)
            for thread in asking:
                thread.join()
            assert "data: [DONE]" in rest
            assert [answer.status_code for answer in answers] == [400, 400]
            assert answers[0].json()["error"]["code"] == "context_length_exceeded"
            peak = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text())
            assert peak is not None
            assert int(peak[1]) * 1024 < 800e6, "the bodies themselves, and what was made of them on the way"
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)
