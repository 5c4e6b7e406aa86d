"""Keys: every path needs one, whether it exists or not; the admin routes need their own; tenants share nothing."""

from __future__ import annotations

import argparse
import hashlib
import hmac
import logging
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.base.clock import VirtualClock
from penstock.base.errors import ConfigError
from penstock.config import add_arguments, serve_from_args, serve_from_kwargs
from penstock.config.server import ServerConfig
from penstock.server.admission.keys import FAIR, OPEN_PATHS, Keys, fair_share, is_loopback
from penstock.server.app import routes
from penstock.server.call import ANYONE
from penstock.server.errors import WireError
from penstock.server.live import LiveServer
from tests.api.conftest import bundled

USER, OTHER, ADMIN = "sk-user", "sk-other", "sk-admin"


@pytest.fixture(scope="module")
def guarded() -> Iterator[LiveServer]:
    config = serve_from_kwargs(
        model=bundled(), port=0, ops="blas", engine_in_process=True, max_model_len=256,
        num_gpu_blocks_override=64, api_key=f"{USER},{OTHER}", admin_api_key=ADMIN,
        allowed_origins="https://app.example", probe_port=0,
    )  # fmt: skip
    with LiveServer(config) as server:
        yield server


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def all_routes() -> list[tuple[str, str]]:
    """Every method of every route there is, and some that there are not."""
    found = []
    for route in routes():
        path = route.path.replace("{", "").replace("}", "")  # type: ignore[attr-defined]
        found += [(method, path) for method in sorted(getattr(route, "methods", None) or {"GET"})]
    unknown = [("GET", "/v1/nothing"), ("POST", "/score"), ("POST", "/invocations"), ("GET", "/health/"),
               ("GET", "/Health"), ("GET", "/%2e/x"), ("OPTIONS", "/v1/chat/completions"),
               ("DELETE", "/"), ("PROPFIND", "/")]  # fmt: skip
    return found + unknown


def test_the_open_paths_are_few() -> None:
    assert OPEN_PATHS == ("/health", "/ready", "/", "/docs")


def test_every_route_needs_a_key(guarded: LiveServer) -> None:
    """Row 43: no key, a wrong one, half of a right one, one in the wrong scheme, on every path but the open ones."""
    seen = 0
    wrong: list[dict[str, str]] = [
        {}, bearer("sk-wrong"), bearer(USER[:-1]), {"authorization": "Bearer"}, {"authorization": f"Basic {USER}"},
        {"x-api-key": "nonsense"}, {"api-key": USER}, {"authorization": USER},
    ]  # fmt: skip
    with httpx.Client(base_url=guarded.url, timeout=20) as client:
        for method, path in all_routes():
            for headers in wrong if path == "/v1/models" else wrong[:2]:
                answer = client.request(method, path, headers=headers)
                if method in ("GET", "HEAD") and (path in OPEN_PATHS or path.startswith("/page/")):
                    assert answer.status_code in (200, 404, 503)
                    continue
                assert answer.status_code == 401, (method, path)
                assert answer.headers["www-authenticate"] == "Bearer"
                if method == "HEAD":
                    continue
                error = answer.json()["error"]  # of Ollama's paths and TGI's, a sentence
                said = path.startswith(("/api/", "/generate")) or (path == "/" and method == "POST")
                assert "key" in error if said else error["type"] == "authentication_error", path
                assert USER not in answer.text
                seen += 1
    assert seen > 30


def test_both_ways_of_sending_a_key_work(guarded: LiveServer) -> None:
    with httpx.Client(base_url=guarded.url, timeout=20) as client:
        for headers in (bearer(USER), {"authorization": f"bearer {USER}"}, {"x-api-key": OTHER}, bearer(ADMIN)):
            assert client.get("/v1/models", headers=headers).status_code == 200
        assert client.get("/v1/nothing", headers=bearer(USER)).status_code == 404


def test_websockets_need_a_key_too(guarded: LiveServer) -> None:
    upgrade = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-key": "x", "sec-websocket-version": "13"}
    assert httpx.get(guarded.url + "/v1/realtime", headers=upgrade).status_code == 401


def test_admin_routes_are_for_the_admin_key(guarded: LiveServer) -> None:
    """Row 44."""
    with httpx.Client(base_url=guarded.url, timeout=20) as client:
        for method, path in (
            ("GET", "/admin/requests"),
            ("POST", "/admin/abort"),
            ("POST", "/admin/reset_prefix_cache"),
        ):
            answer = client.request(method, path, headers=bearer(USER))
            assert answer.status_code == 403
            assert answer.json()["error"]["type"] == "permission_error"
            assert client.request(method, path).status_code == 401
        assert client.get("/admin/requests", headers=bearer(ADMIN)).json() == {"object": "list", "data": []}
        assert client.post("/admin/reset_prefix_cache", headers=bearer(ADMIN)).json()["done"] is True
        missing = client.post("/admin/abort", headers=bearer(ADMIN), json={"request_id": "none"})
        assert missing.status_code == 404
        assert client.post("/admin/abort", headers=bearer(ADMIN), content=b"[]").status_code == 400


def test_without_an_admin_key_its_routes_do_not_exist(http: httpx.Client) -> None:
    assert http.get("/admin/requests").status_code == 404
    assert http.get("/admin/requests").json()["error"]["code"] == http.get("/v1/nothing").json()["error"]["code"]


def test_the_admin_sees_and_ends_what_runs(guarded: LiveServer) -> None:
    ask = {"prompt": "Once upon a time", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with httpx.Client(base_url=guarded.url, timeout=20) as client:
        headers = bearer(USER) | {"x-request-id": "mine"}
        with client.stream("POST", "/v1/completions", json=ask, headers=headers) as stream:
            assert stream.status_code == 200
            lines = stream.iter_lines()
            next(lines)
            (row,) = httpx.get(guarded.url + "/admin/requests", headers=bearer(ADMIN)).json()["data"]
            assert (row["request_id"], row["tenant"], row["max_tokens"]) == ("mine", "key-1", 200)
            assert "Once" not in str(row)
            done = httpx.post(guarded.url + "/admin/abort", headers=bearer(ADMIN), json={"request_id": row["id"]})
            assert done.json()["aborted"] == [row["id"]]
            assert "aborted" in "".join(lines)


def test_browsers_may_send_from_configured_pages_only(guarded: LiveServer) -> None:
    preflight = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    mine, other = {"origin": "https://app.example"}, {"origin": "https://evil.example"}
    with httpx.Client(base_url=guarded.url, timeout=20) as client:
        answer = client.options("/v1/chat/completions", headers=mine | preflight)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        assert answer.headers["access-control-allow-headers"] == "authorization"
        refused = client.options("/v1/chat/completions", headers=other | preflight)
        assert refused.status_code == 400
        assert "access-control-allow-origin" not in refused.headers
        plain = client.get("/v1/models", headers=mine | bearer(USER))
        assert plain.headers["access-control-allow-origin"] == "https://app.example"
        assert "access-control-allow-origin" not in client.get("/v1/models", headers=other | bearer(USER)).headers
        assert client.options("/v1/models", headers=mine).status_code == 401, "no preflight, no exception"


def test_a_store_of_blocks_knows_keys_again_after_a_restart(tmp_path: Path) -> None:
    """Each key finds its own blocks in a folder, and no other's, whichever server wrote them."""
    prompt = "There was a little girl who had a red ball and a blue ball and a dog. " * 3
    config = serve_from_kwargs(
        model=bundled(), port=0, ops="blas", engine_in_process=True, max_model_len=256, num_gpu_blocks_override=64,
        api_key=f"{USER},{OTHER}", kv_offload=f"disk:{tmp_path / 'kv'}",
    )  # fmt: skip
    found = []
    for key in (USER, USER, OTHER):
        with LiveServer(config) as server:
            ask = {"prompt": prompt, "max_tokens": 1}
            answer = httpx.post(server.url + "/v1/completions", json=ask, headers=bearer(key), timeout=20).json()
            found.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0)
    assert found == [False, True, False]


def test_cached_prompts_are_not_shared_between_keys(guarded: LiveServer) -> None:
    """Rows 40, 41: the same prompt, also with the same salt, is found by its own key and no other."""
    prompt = "There was a little girl who had a red ball and a blue ball and a dog. " * 3

    def cached(key: str, **more: Any) -> int:
        ask = {"prompt": prompt, "max_tokens": 1, **more}
        answer = httpx.post(guarded.url + "/v1/completions", json=ask, headers=bearer(key), timeout=20).json()
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    for salt in ({}, {"cache_salt": "common"}):
        assert cached(USER, **salt) == 0
        assert cached(USER, **salt) > 0
        assert cached(OTHER, **salt) == 0
        assert cached(ADMIN, **salt) == 0
        assert cached(OTHER, **salt) > 0
    assert cached(USER, cache_salt="another") == 0
    for bad in ("x" * 257, "", "line\nbreak", "nul\x00"):
        answer = httpx.post(
            guarded.url + "/v1/completions", json={"prompt": prompt, "max_tokens": 1, "cache_salt": bad},
            headers=bearer(USER),
        )  # fmt: skip
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "cache_salt"


def test_request_ids_are_sanitised_and_may_repeat(guarded: LiveServer) -> None:
    """Row 42."""
    with httpx.Client(base_url=guarded.url, timeout=20, headers=bearer(USER)) as client:
        assert client.get("/v1/models", headers={"x-request-id": "ok-1"}).headers["x-request-id"] == "ok-1"
        for bad in ("x" * 129, "http://10.0.0.1/", "a b", "a\tb", "é", ""):
            given = client.get("/v1/models", headers={b"x-request-id": bad.encode()}).headers["x-request-id"]
            assert given.startswith("req-")
        assert client.get("/v1/models", headers={"x-request-id": "x" * (1 << 20)}).status_code == 431
        ask = {"prompt": "One", "max_tokens": 60, "ignore_eos": True, "stream": True}
        same = {"x-request-id": "twice"}
        with client.stream("POST", "/v1/completions", json=ask, headers=same) as first:
            lines = first.iter_lines()
            next(lines)
            second = client.post("/v1/completions", json=ask, headers=same)
            assert (first.status_code, second.status_code) == (200, 200)
            assert "".join(lines).count("[DONE]") == second.text.count("[DONE]") == 1


def test_each_key_sees_its_own_requests_and_numbers(guarded: LiveServer) -> None:
    """In /metrics and in what the page shows; the admin's key and the second port see all."""
    ask = {"prompt": "Once upon a time " * 20, "max_tokens": 1}  # whole blocks, which the tree shows
    with httpx.Client(base_url=guarded.url, timeout=20) as client:
        for key in (USER, OTHER):
            assert client.post("/v1/completions", json=ask, headers=bearer(key)).status_code == 200
        seen = {}
        for key in (USER, OTHER, ADMIN):
            text = client.get("/metrics", headers=bearer(key)).text
            state = client.get("/internal/state", headers=bearer(key)).json()
            seen[key] = set(re.findall(r'tenant="([^"]+)"', text)), {row["tenant"] for row in state["recent"]}
            assert text.count("# TYPE penstock:tenant_total counter") == 1
            assert bool(state["prefix"]["tree"]) == (key == ADMIN)
    assert seen[USER] == ({"key-1"}, {"key-1"})
    assert seen[OTHER] == ({"key-2"}, {"key-2"})
    assert all({"key-1", "key-2"} <= found for found in seen[ADMIN])
    assert '"key-2"' in httpx.get(guarded.probe_url + "/metrics").text


def test_the_second_port_is_for_operators_only(guarded: LiveServer) -> None:
    with httpx.Client(base_url=guarded.probe_url, timeout=20) as client:
        for path in ("/health", "/ready", "/metrics"):
            assert client.get(path).status_code == 200
        for path in ("/", "/v1/models", "/internal/state", "/docs", "/page/api.js"):
            assert client.get(path, headers=bearer(USER)).status_code == 404
        assert client.post("/v1/completions", json={}, headers=bearer(USER)).status_code == 404
        assert client.get("/admin/requests").status_code == 401
        assert client.get("/admin/requests", headers=bearer(USER)).status_code == 403
        assert client.get("/admin/requests", headers=bearer(ADMIN)).status_code == 200
        assert client.get("/metrics", headers={"host": "evil.example"}).status_code == 421
        assert client.get("/health", headers={"host": "evil.example"}).status_code == 200


def test_two_keys_that_disagree_are_none(guarded: LiveServer) -> None:
    with httpx.Client(base_url=guarded.url, timeout=20) as client:
        same = bearer(USER) | {"x-api-key": USER}
        assert client.get("/v1/models", headers=same).status_code == 200
        for headers in (bearer("wrong") | {"x-api-key": USER}, bearer(USER) | {"x-api-key": OTHER}):
            answer = client.get("/v1/models", headers=headers)
            assert answer.status_code == 401
            assert "different keys" in answer.json()["error"]["message"]
        for name in ("authorization", "x-api-key"):
            twice = [(name, "Bearer wrong"), (name, f"Bearer {USER}")]
            assert client.get("/v1/models", headers=twice).status_code == 400
        assert client.get("/v1/models", headers={"x_api_key": USER}).status_code == 401


def test_a_key_in_a_trailer_is_none(guarded: LiveServer) -> None:
    host, port = guarded.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        body = b'{"prompt": "x", "max_tokens": 1}'
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
            b"%x\r\n%b\r\n0\r\nAuthorization: Bearer %b\r\n\r\n" % (len(body), body, USER.encode())
        )
        assert sock.recv(4096).startswith(b"HTTP/1.1 401")


def test_the_tokenizer_is_told_to_every_key(guarded: LiveServer) -> None:
    """As lm-eval's RemoteTokenizer asks: the tokens, their ids by /tokenize, the template."""
    with httpx.Client(base_url=guarded.url, timeout=20) as client:
        assert client.get("/tokenizer_info").status_code == 401
        client.headers.update(bearer(USER))
        info = client.get("/tokenizer_info").json()
        assert "<|im_start|>" in info["chat_template"]
        for name in ("bos_token", "eos_token"):
            asked = {"prompt": info[name], "add_special_tokens": False}
            assert client.post("/tokenize", json=asked).json()["tokens"] == [info[name + "_id"]]
        ids = client.post("/tokenize", json={"prompt": "Once upon", "add_special_tokens": False}).json()["tokens"]
        assert client.post("/detokenize", json={"tokens": ids}).json()["prompt"] == "Once upon"


# -- without a server ------------------------------------------------------------------------------------------------


def scope(path: str, key: str | None = None) -> dict[str, Any]:
    headers = [] if key is None else [(b"authorization", b"Bearer " + key.encode())]
    return {"type": "http", "path": path, "headers": headers, "root_path": ""}


def test_every_key_takes_part_in_every_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever key is right, as many digests are compared: the time of an answer does not say how near a draft was."""
    compared: list[int] = []
    real: Any = hmac.compare_digest

    def counted(a: bytes, b: bytes) -> bool:
        compared.append(len(a))
        return bool(real(a, b))

    monkeypatch.setattr(hmac, "compare_digest", counted)
    keys = Keys(ServerConfig(api_key="a,b,c,d"), VirtualClock())
    counts = []
    for key in ("a", "d", "zzz"):
        compared.clear()
        try:
            keys.identify(scope("/v1/models", key))
        except WireError:
            assert key == "zzz"
        counts.append(len(compared))
    assert counts == [4, 4, 4]
    assert set(compared) == {32}


def test_the_file_is_read_again_and_a_broken_one_changes_nothing(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys.toml", VirtualClock(100)
    path.write_text('[one]\nkey = "k1"\nweight = 2.5\ntokens_per_minute = 600\nmax_concurrent = 3\n')
    keys = Keys(ServerConfig(api_keys_file=str(path)), clock)
    one = keys.identify(scope("/x", "k1"))
    assert (one.name, one.weight, one.tokens_per_minute, one.max_concurrent, one.admin) == ("one", 2.5, 600, 3, False)
    assert one.secret == b"", "alone, there is nobody to keep a cache from"
    digest = hashlib.sha256(b"k2").hexdigest()
    path.write_text(f'[one]\nkey = "k1"\n[two]\nkey_sha256 = "{digest}"\nadmin = true\n')
    os.utime(path, (1, 1))
    with pytest.raises(WireError):
        keys.identify(scope("/x", "k2"))  # not looked at yet
    clock.advance(1.5)
    two = keys.identify(scope("/x", "k2"))
    assert two.admin
    assert two.secret not in (b"", keys.identify(scope("/x", "k1")).secret)
    path.write_text("[two\n")
    clock.advance(1.5)
    assert keys.identify(scope("/x", "k2")) == two
    path.unlink()
    clock.advance(1.5)
    assert keys.identify(scope("/x", "k1")).name == "one"


@pytest.mark.parametrize(
    ("text", "needle"),
    [
        ("", "no keys"), ("key = 'a'", "must be a table"), ("[a]", "either key or key_sha256"),
        ("[a]\nkey = 'x'\nkey_sha256 = 'y'", "either key or key_sha256"), ("[a]\nkey = ''", "must be a text"),
        ("[a]\nkey_sha256 = 'abc'", "64 hexadecimal"), ("[a]\nkey = 'x'\nweight = 0", "0.01 to 100"),
        ("[a]\nkey = 'x'\nweight = nan", "0.01 to 100"), ("[a]\nkey = 'x'\nmax_concurrent = true", "whole number"),
        ("[a]\nkey = 'x'\nrate = 1", "is unknown"), ("[a]\nkey = 'x'\n[b]\nkey = 'x'", "are the same"),
        ("['a b']\nkey = 'x'", "must be named"), ("[a", "is not TOML"), ("[a]\nkey = 'x'\nadmin = 1", "true or false"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, text: str, needle: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=needle):
        Keys(ServerConfig(api_keys_file=str(path)), VirtualClock())
    with pytest.raises(ConfigError, match="cannot be read"):
        Keys(ServerConfig(api_keys_file=str(tmp_path / "none")), VirtualClock())


def test_keys_come_from_the_environment_too() -> None:
    def keys(*flags: str, **environment: str) -> Keys:
        parser = argparse.ArgumentParser()
        add_arguments(parser, server=True)
        args = parser.parse_args(["--model", "m", *flags])
        return Keys(serve_from_args(args, environment).server, VirtualClock())

    assert keys(VLLM_API_KEY="theirs").identify(scope("/x", "theirs")).name == "default"
    both = {"VLLM_API_KEY": "theirs", "PENSTOCK_API_KEY": "ours", "PENSTOCK_ADMIN_API_KEY": "top"}
    with pytest.raises(WireError):
        keys(**both).identify(scope("/x", "theirs"))
    assert keys(**both).identify(scope("/x", "top")).admin
    assert keys("--api-key", "flag", **both).identify(scope("/x", "flag")).name == "default"


def test_an_admin_key_alone_leaves_the_rest_open() -> None:
    keys = Keys(ServerConfig(admin_api_key=ADMIN), VirtualClock())
    assert keys.identify(scope("/v1/models")) is ANYONE
    assert keys.identify(scope("/v1/models", "EMPTY")) is ANYONE, "what clients send that must send something"
    assert keys.identify(scope("/v1/models", ADMIN)).admin
    for key in (None, "EMPTY"):
        with pytest.raises(WireError) as caught:
            keys.identify(scope("/admin/requests", key))
        assert caught.value.status == 401


def test_several_keys_make_the_policy_fair(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def policy(**kw: Any) -> str:
        return fair_share(serve_from_kwargs(model="m", **kw)).engine.scheduler.scheduling_policy

    caplog.set_level(logging.INFO)
    assert policy() == policy(api_key="a") == "fcfs"
    assert policy(api_key="a,b") == policy(api_key="a", admin_api_key="b") == FAIR
    assert policy(api_key="a,b", scheduling_policy="priority") == "priority"
    assert policy(api_key="a,b", scheduling_policy="fcfs:") == "fcfs:"


def test_who_can_reach_an_address_is_known() -> None:
    for host in ("127.0.0.1", "::1", "localhost", "127.1.2.3"):
        assert is_loopback(host)
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"):
        assert not is_loopback(host)
