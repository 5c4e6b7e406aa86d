"""What a key has besides its rate: a class of service, a part of the memory, and headers that say what is left."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest

from penstock.base.errors import ConfigError
from penstock.config import serve_from_kwargs
from penstock.server.admission.keys import read_keys
from penstock.server.admission.limits import Left, duration, limit_headers
from penstock.server.call import CLASSES
from penstock.server.live import LiveServer
from tests.api.conftest import bundled

ASK = {"prompt": "Once upon a time", "max_tokens": 4, "ignore_eos": True}
FILE = """
[alice]
key = "sk-alice"
class = "interactive"
kv_share = 3
tokens_per_minute = 6000
max_concurrent = 2
[batch]
key = "sk-batch"
class = "batch"
[bob]
key = "sk-bob"
"""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (-1, "0s"),
        (0.0191, "20ms"),
        (0.9991, "1000ms"),
        (1, "1s"),
        (59.2, "1m0s"),
        (360, "6m0s"),
        (3723, "1h2m3s"),
    ],
)
def test_times_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_headers_of_both_families() -> None:
    lefts = [Left("requests", 2, 1, 0.0), Left("tokens", 600, 100, 50.0)]
    ours = dict(limit_headers(lefts, "/v1/chat/completions", 0.0))
    assert ours == {
        b"x-ratelimit-limit-requests": b"2", b"x-ratelimit-remaining-requests": b"1",
        b"x-ratelimit-reset-requests": b"0s", b"x-ratelimit-limit-tokens": b"600",
        b"x-ratelimit-remaining-tokens": b"100", b"x-ratelimit-reset-tokens": b"50s",
    }  # fmt: skip
    theirs = dict(limit_headers(lefts, "/v1/messages", 10.5))
    assert theirs[b"anthropic-ratelimit-tokens-reset"] == b"1970-01-01T00:01:01Z"
    assert theirs[b"anthropic-ratelimit-requests-remaining"] == b"1"
    assert len(theirs) == 6


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('class = "gold"', "interactive, standard, batch"), ("class = 3", "interactive, standard, batch"),
        ("class = []", "interactive, standard, batch"), ("kv_share = -1", "from 0.01 to 100"),
        ('kv_share = "half"', "from 0.01 to 100"), ('clas = "batch"', "clas: is unknown; possible are admin, class"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_the_file_is_one_sentence(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(f'[x]\nkey = "k"\n{line}\n')
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        read_keys(path)
    assert caught.value.field == "api_keys_file"
    assert "[x]" in str(caught.value)


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveServer, Path]]:
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text(FILE)
    config = serve_from_kwargs(
        model=bundled(), port=0, ops="blas", engine_in_process=True, max_model_len=256, num_gpu_blocks_override=64,
        api_keys_file=str(path),
    )  # fmt: skip
    with LiveServer(config) as server:
        yield server, path


def post(server: LiveServer, key: str, path: str = "/v1/completions", **fields: object) -> httpx.Response:
    body: dict[str, object] = ASK | fields
    if path == "/v1/messages":
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    return httpx.post(server.url + path, json=body, headers={"authorization": f"Bearer {key}"}, timeout=60)


def test_answers_say_what_is_left_and_when_it_is_there_again(keyed: tuple[LiveServer, Path]) -> None:
    server, _ = keyed
    answer = post(server, "sk-alice")
    assert answer.status_code == 200
    left = {name: answer.headers[f"x-ratelimit-{name}"] for name in (
        "limit-requests", "remaining-requests", "reset-requests", "limit-tokens", "remaining-tokens", "reset-tokens",
    )}  # fmt: skip
    assert (left["limit-requests"], left["limit-tokens"]) == ("2", "6000")
    assert 5000 < int(left["remaining-tokens"]) <= 6000
    assert re.fullmatch(r"\d+ms|\d+s|\d+m\d+s", left["reset-tokens"])
    messages = post(server, "sk-alice", "/v1/messages").headers
    assert "x-ratelimit-limit-tokens" not in messages
    assert messages["anthropic-ratelimit-tokens-limit"] == "6000"
    again = datetime.strptime(messages["anthropic-ratelimit-tokens-reset"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    assert timedelta(0) <= again - datetime.now(UTC) + timedelta(seconds=2) < timedelta(seconds=70)
    assert "x-ratelimit-limit-tokens" not in post(server, "sk-bob").headers


def test_classes_and_parts_reach_the_engine(keyed: tuple[LiveServer, Path]) -> None:
    server, _ = keyed
    assert server.server is not None
    client = server.server.client
    seen = []
    submit = client.submit

    def watched(request, *args, **kw):  # type: ignore[no-untyped-def]
        seen.append((request.tenant, request.priority, round(request.kv_share, 3)))
        return submit(request, *args, **kw)

    client.submit = watched  # type: ignore[method-assign]
    try:
        for key, priority in (
            ("sk-alice", None),
            ("sk-alice", -9),
            ("sk-alice", 0),
            ("sk-batch", -9),
            ("sk-batch", 5),
            ("sk-bob", -9),
        ):
            assert post(server, key, priority=priority).status_code == 200
    finally:
        client.submit = submit  # type: ignore[method-assign]
    assert seen == [
        ("alice", CLASSES["interactive"], 0.6), ("alice", CLASSES["interactive"], 0.6), ("alice", 0, 0.6),
        ("batch", CLASSES["batch"], 0.2), ("batch", 5, 0.2),
        ("bob", -9, 0.2),
    ]  # fmt: skip


def test_a_changed_file_changes_classes(keyed: tuple[LiveServer, Path]) -> None:
    server, path = keyed
    assert server.server is not None
    keys = server.server.parts["keys"]
    path.write_text(FILE.replace('class = "batch"', 'class = "standard"'))
    keys._checked_s = float("-inf")
    assert post(server, "sk-batch").status_code == 200
    assert {t.name: t.service_class for t in keys.tenants} == {"alice": "interactive", "batch": "standard", "bob": ""}
    path.write_text('[x]\nkey = "k"\nclass = "gold"\n')
    keys._checked_s = float("-inf")
    assert post(server, "sk-bob").status_code == 200, "a wrong file changes nothing"
