"""Other people's web pages cannot use a server without keys; its own page, and whoever is no page, can."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from penstock.config import serve_from_kwargs
from penstock.config.server import ServerConfig
from penstock.server.live import LiveServer
from penstock.server.transport.web_guard import WebGuard
from tests.api.conftest import bundled

ASK = b'{"prompt": "One", "max_tokens": 1}'
TELLING = (
    "/",
    "/metrics",
    "/v1/models",
    "/internal/state",
    "/props",
    "/docs",
    "/openapi.json",
    "/page/api.js",
    "/none",
)


def small(**more: Any) -> LiveServer:
    return LiveServer(serve_from_kwargs(
        model=bundled(), port=0, ops="blas", engine_in_process=True, max_model_len=256, num_gpu_blocks_override=64,
        **more,
    ))  # fmt: skip


@pytest.fixture(scope="module")
def keyless() -> Iterator[LiveServer]:
    with small(allowed_origins="https://app.example", allowed_hosts="mine.example,.below.example") as server:
        yield server


FOREIGN = (
    "evil.example", "evil.example:8000", "127.0.0.1.evil.example", "EVIL.example.", "localhost.evil.example",
    "xbelow.example", "user@evil.example", "a.b$(id)", "localhost:80@evil.example", "[::1].evil.example:1",
    "evil.example:x", "127.0.0.1:8000.evil.example",
)  # fmt: skip
OURS = (
    "localhost", "LOCALHOST:1", "localhost.", "app.localhost:3", "127.0.0.1", "10.1.2.3:80", "[::1]:80", "[fe80::1]",
    socket.gethostname(), socket.gethostname() + ":80", "penstock", "mine.example", "Mine.Example.:443",
    "below.example.below.example", "",
)  # fmt: skip


@pytest.mark.parametrize("host", FOREIGN)
def test_a_foreign_name_is_told_nothing(keyless: LiveServer, host: str) -> None:
    with httpx.Client(base_url=keyless.url, headers={"host": host}) as client:
        for path in TELLING:
            answer = client.get(path)
            assert answer.status_code == 421, path
            assert answer.json()["error"]["code"] == "unknown_host"
            assert "--allowed-hosts" in answer.text
            assert "$" not in answer.text
        answer = client.post("/v1/messages", content=ASK)
        assert (answer.status_code, answer.json()["type"]) == (421, "error")
        assert set(answer.json()["error"]) == {"type", "message"}, "Anthropic's shape"
        for path in ("/health", "/ready"):
            assert client.get(path).status_code == 200, "probes choose no names"


@pytest.mark.parametrize("host", OURS)
def test_our_own_names_and_all_addresses_are_answered(keyless: LiveServer, host: str) -> None:
    assert httpx.get(keyless.url + "/v1/models", headers={"host": host}).status_code == 200


BROWSER: list[dict[str, str]] = [
    {"origin": "https://evil.example"}, {"origin": "null"}, {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site", "origin": "http://localhost:3000"}, {"origin": "http://127.0.0.1:1"},
    {"origin": "https://evil.example", "sec-fetch-site": "cross-site"}, {"sec-fetch-site": "new-word"},
    {"origin": "https://app.example.evil.example"}, {"origin": ""},
]  # fmt: skip
SIMPLE: list[str | None] = [
    None, "", "text/plain", "text/plain; application/json", "application/x-www-form-urlencoded", "TEXT/PLAIN;x=y",
    "multipart/form-data; boundary=x", "text/plain, application/json", "x/application/json",
]  # fmt: skip


@pytest.mark.parametrize("signs", BROWSER)
def test_a_page_of_another_site_cannot_send_what_needs_no_leave(keyless: LiveServer, signs: dict[str, str]) -> None:
    with httpx.Client(base_url=keyless.url) as client:
        for kind in SIMPLE:
            headers = signs if kind is None else signs | {"content-type": kind}
            for path in ("/v1/completions", "/tokenize", "/v1/files", "/v1/batches/x/cancel", "/v1/responses"):
                answer = client.post(path, content=ASK, headers=headers)
                assert answer.status_code == 403, (path, kind)
                assert answer.json()["error"]["code"] == "cross_site"
                assert "--allowed-origins" in answer.text
        answer = client.post("/v1/messages", content=ASK, headers=signs)
        assert (answer.status_code, answer.json()["error"]["type"]) == (403, "permission_error")
        preflight = signs | {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
        assert "access-control-allow-origin" not in client.options("/v1/completions", headers=preflight).headers


@pytest.mark.parametrize("kind", SIMPLE)
def test_whoever_is_no_page_may_leave_the_type_away(keyless: LiveServer, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    assert httpx.post(keyless.url + "/v1/completions", content=ASK, headers=headers).status_code == 200


def test_our_own_page_and_allowed_ones_may_send(keyless: LiveServer) -> None:
    own = [
        {"sec-fetch-site": "same-origin", "origin": keyless.url}, {"sec-fetch-site": "none"}, {"origin": keyless.url},
        {"sec-fetch-site": "cross-site", "origin": "https://app.example"}, {"origin": "https://APP.example"},
        # A proxy that has a name of its own in front of the server's.
        {"sec-fetch-site": "same-origin", "origin": "https://public.example"},
    ]  # fmt: skip
    for signs in own:
        for kind in ("text/plain", "application/json", "application/json; charset=utf-8"):
            answer = httpx.post(keyless.url + "/v1/completions", content=ASK, headers=signs | {"content-type": kind})
            assert answer.status_code == 200, (signs, kind)
    tls = {"host": "mine.example", "origin": "https://mine.example", "content-type": "text/plain"}
    assert httpx.post(keyless.url + "/v1/completions", content=ASK, headers=tls).status_code == 200


def test_behind_a_path_of_a_proxy_the_rules_and_the_shapes_are_the_same() -> None:
    with small(root_path="/llm", allowed_hosts="*") as server:
        page = {"origin": "https://any.example", "sec-fetch-site": "same-origin", "host": "any.example"}
        for path in ("/", "/page/api.js", "/internal/state"):
            assert httpx.get(server.url + path, headers=page).status_code == 200
        asked = page | {"content-type": "application/json"}
        assert httpx.post(server.url + "/v1/completions", content=ASK, headers=asked).status_code == 200
        refused = httpx.post(server.url + "/v1/messages", content=ASK, headers={"sec-fetch-site": "cross-site"})
        assert (refused.status_code, refused.json()["type"]) == (403, "error")
        assert "x-ratelimit-limit-requests" not in refused.headers


def test_with_keys_nothing_is_checked_that_a_key_guards() -> None:
    with small(api_key="k") as server, httpx.Client(base_url=server.url, headers={"host": "any.example"}) as client:
        key = {"authorization": "Bearer k"}
        assert client.get("/").status_code == client.get("/health").status_code == 200
        assert client.get("/metrics").status_code == 401
        assert client.get("/metrics", headers=key).status_code == 200
        foreign = key | {"origin": "https://evil.example", "content-type": "text/plain"}
        assert client.post("/v1/completions", content=ASK, headers=foreign).status_code == 200
    with (
        small(admin_api_key="boss") as server,
        httpx.Client(base_url=server.url, headers={"host": "any.example"}) as client,
    ):
        assert client.get("/v1/models").status_code == 421, "the ordinary paths are open to all"
        assert client.get("/v1/models", headers={"authorization": "Bearer boss"}).status_code == 200


def test_the_full_name_is_learnt_when_dns_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getfqdn", lambda: "Box.corp.example")
    guard = WebGuard(ServerConfig(host="0.0.0.0"))
    guard.learn_full_name()
    for _ in range(500):
        try:
            guard.check({"headers": [(b"host", b"box.corp.example")], "path": "/", "method": "GET"})
        except Exception:
            continue
        return
    pytest.fail("the name was not learnt")
