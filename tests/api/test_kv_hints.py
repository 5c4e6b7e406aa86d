"""Hints over HTTP and in `LLM`: what is kept, what usage says of it, what a key may, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from penstock.base.errors import InputError
from penstock.cli.main import main
from penstock.config import serve_from_kwargs
from penstock.core.sampling import SamplingParams
from penstock.launch.llm import LLM
from penstock.server.live import LiveServer
from tests.api.chromium import Chromium
from tests.api.conftest import READY, axe, bundled, needs_browser
from tests.command import process

BLOCK = 16
LONG = " ".join(
    f"The {name} lives in house {n}." for n, name in enumerate(["cat", "dog", "owl", "fox", "hen", "pig"] * 2)
)
KEYS = """
[ann]
key = "ann-key"
kv_group = "team"
[bob]
key = "bob-key"
kv_group = "team"
[eve]
key = "eve-key"
"""


def settings(**more: Any) -> Any:
    return serve_from_kwargs(
        model=bundled(),
        port=0,
        ops="ref",
        max_model_len=512,
        block_size=BLOCK,
        **{"num_gpu_blocks_override": 128, **more},
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    place = tmp_path_factory.mktemp("keys")
    (place / "keys.toml").write_text(KEYS)
    (place / "keys.toml").chmod(0o600)
    config = settings(api_keys_file=str(place / "keys.toml"), kv_offload=f"disk:{place / 'kv'}", kv_pin_share=0.25)
    with LiveServer(config) as live:
        yield live


def post(server: LiveServer, path: str, body: dict[str, Any], key: str = "ann-key") -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(server.url + path, json={"model": "nano", "temperature": 0, **body}, headers=headers, timeout=60)


def chat(server: LiveServer, text: str, key: str = "ann-key", **more: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2, **more}
    got = post(server, "/v1/chat/completions", body, key)
    assert got.status_code == 200, got.text
    out: dict[str, Any] = got.json()
    return out


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize(
    ("hints", "param"),
    [
        ([{"action": "keep"}], "kv_hints[0].action"),
        ([{"action": "retain", "ttl": "2w"}], "kv_hints[0].ttl"),
        ([{"action": "retain", "ttl": 0}], "kv_hints[0].ttl"),
        ([{"action": "retain", "ttl": "90h"}], "kv_hints[0].ttl"),
        ([{"action": "retain", "until": 5}], "kv_hints[0].until"),
        ([{"action": "retain", "tokens": -1}], "kv_hints[0].tokens"),
        ([{"action": "prefetch"}, {"action": "pin"}], "kv_hints"),
        ([{"action": "retain"}] * 9, "kv_hints"),
        ({"actions": [{"action_type": "fetch"}]}, "kv_hints.actions[0].action_type"),
        ({"actions": [{"action_type": "retain", "payload": {"ttl": True}}]}, "kv_hints.actions[0].payload.ttl"),
        ({"protocol_version": "7", "actions": []}, "kv_hints.protocol_version"),
        ({"hints": []}, "kv_hints.hints"),
    ],
)
def test_what_is_no_hint_is_refused_with_its_name(server: LiveServer, hints: Any, param: str) -> None:
    say = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 2, "kv_hints": hints}
    got = post(server, "/v1/chat/completions", say)
    assert (got.status_code, got.json()["error"]["param"]) == (400, param)
    for path, more in (
        ("/v1/completions", {"prompt": "Hello", "max_tokens": 2}),
        ("/v1/responses", {"input": "Hello"}),
    ):
        got = post(server, path, {**more, "kv_hints": hints})
        assert (got.status_code, got.json()["error"]["param"]) == (400, param)
    got = post(server, "/v1/messages", say)
    assert (got.status_code, got.json()["error"]["type"]) == (400, "invalid_request_error")
    assert param in got.json()["error"]["message"]


def test_both_shapes_change_no_answer(server: LiveServer) -> None:
    plain = chat(server, "Name three animals.")
    for hints in (
        [{"action": "retain", "ttl": "5m", "messages": 1}, {"action": "demote", "from_token": 8}],
        {"protocol_version": "0.1", "message_id": "m", "actions": [
            {"action_id": "a", "action_type": "pin", "action_version": "1.0", "payload": {"ttl": 30, "tokens": 16}}]},
    ):  # fmt: skip
        assert chat(server, "Name three animals.", kv_hints=hints)["choices"] == plain["choices"]


def test_prefetch_loads_and_answers_nothing(server: LiveServer) -> None:
    text = "Prefetched. " + LONG
    whole = chat(server, text)["usage"]["prompt_tokens"]
    fetched = chat(server, text, kv_hints=[{"action": "prefetch"}])
    assert fetched["choices"][0]["message"]["content"] in ("", None)
    assert fetched["choices"][0]["finish_reason"] == "stop"
    assert fetched["usage"]["completion_tokens"] == 0
    assert cached(fetched) == whole // BLOCK * BLOCK - (0 if whole % BLOCK else BLOCK)
    streamed = post(server, "/v1/completions", {"prompt": text, "stream": True, "kv_hints": [{"action": "prefetch"}]})
    assert streamed.status_code == 200
    assert streamed.text.rstrip().endswith("[DONE]")
    got = post(server, "/v1/completions", {"prompt": text, "n": 2, "kv_hints": [{"action": "prefetch"}]})
    assert (got.status_code, got.json()["error"]["param"]) == (400, "kv_hints")


def test_only_keys_of_one_group_share_and_only_what_they_say(server: LiveServer) -> None:
    share = [{"action": "share"}]
    chat(server, "Private: " + LONG)
    assert cached(chat(server, "Private: " + LONG, "bob-key")) == 0
    assert cached(chat(server, "Private: " + LONG, "bob-key", kv_hints=share)) == 0, "it was not shared by its owner"
    chat(server, "Shared: " + LONG, kv_hints=share)
    assert cached(chat(server, "Shared: " + LONG, "bob-key")) == 0, "bob did not ask for what is shared"
    assert cached(chat(server, "Shared: " + LONG, "bob-key", kv_hints=share)) > 90
    got = post(server, "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "kv_hints": share},
               "eve-key")  # fmt: skip
    assert (got.status_code, got.json()["error"]["param"]) == (400, "kv_hints")


def test_pins_beyond_the_share_are_refused_and_the_same_blocks_count_once(server: LiveServer) -> None:
    """A quarter of 128 blocks of 16 tokens: 512."""
    pin = [{"action": "pin", "ttl": 60}]
    ids = [5 + n % 90 for n in range(300)]
    for _ in range(3):
        got = post(server, "/v1/completions", {"prompt": ids, "max_tokens": 1, "kv_hints": pin}, "eve-key")
        assert got.status_code == 200, got.text
    got = post(server, "/v1/completions", {"prompt": ids[::-1], "max_tokens": 1, "kv_hints": pin}, "eve-key")
    assert (got.status_code, got.json()["error"]["param"]) == (400, "kv_hints")
    assert "288 that are pinned" in got.json()["error"]["message"]
    assert post(server, "/v1/completions", {"prompt": ids[::-1], "max_tokens": 1}, "eve-key").status_code == 200


@pytest.fixture
def sdk(server: LiveServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="ann-key", max_retries=0) as client:
        yield client


def test_cache_control_says_in_usage_what_was_written_and_what_was_read(sdk: anthropic.Anthropic) -> None:
    system: Any = [{"type": "text", "text": "Rules. " + LONG, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    more: Any = [{"type": "text", "text": LONG, "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": LONG}]
    say: Any = {"model": "nano", "max_tokens": 2, "system": system}
    first = sdk.messages.create(messages=[{"role": "user", "content": more}], **say).usage
    assert first.cache_creation is not None
    hour, minutes = first.cache_creation.ephemeral_1h_input_tokens, first.cache_creation.ephemeral_5m_input_tokens
    assert hour > 0
    assert minutes > 0
    assert first.cache_read_input_tokens == 0
    assert first.cache_creation_input_tokens == hour + minutes
    assert first.cache_creation_input_tokens % BLOCK == 0
    whole = sdk.messages.count_tokens(messages=[{"role": "user", "content": more}], model="nano", system=system)
    assert first.input_tokens + hour + minutes == whole.input_tokens
    alone = sdk.messages.count_tokens(messages=[{"role": "user", "content": "x"}], model="nano", system=system)
    assert 0 <= alone.input_tokens - hour < 2 * BLOCK, "up to where the first message begins, in whole blocks"
    again = sdk.messages.create(messages=[{"role": "user", "content": more[:1]}], **say).usage
    assert again.cache_read_input_tokens is not None
    assert again.cache_read_input_tokens >= hour + minutes - BLOCK
    assert (again.cache_creation_input_tokens or 0) <= BLOCK


def test_without_cache_control_nothing_counts_as_written(sdk: anthropic.Anthropic) -> None:
    usage = sdk.messages.create(
        model="nano", max_tokens=2, messages=[{"role": "user", "content": "Plain " + LONG}]
    ).usage
    assert usage.cache_creation_input_tokens == 0


@pytest.mark.parametrize(
    ("control", "param"),
    [
        ({"type": "ephemeral", "ttl": "2h"}, "messages[0].content[0].cache_control.ttl"),
        ({"type": "persistent"}, "messages[0].content[0].cache_control"),
        ({"type": "ephemeral", "until": 3}, "messages[0].content[0].cache_control"),
        ("ephemeral", "messages[0].content[0].cache_control"),
    ],
)
def test_a_wrong_cache_control_is_refused_in_anthropics_shape(server: LiveServer, control: Any, param: str) -> None:
    block = {"type": "text", "text": "Hello", "cache_control": control}
    got = post(server, "/v1/messages", {"messages": [{"role": "user", "content": [block]}], "max_tokens": 2})
    error = got.json()["error"]
    assert (got.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["message"].startswith(param)


def test_four_breakpoints_and_no_more(server: LiveServer) -> None:
    block = {"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}
    tool = {"name": "t", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}
    for num, status in ((3, 200), (4, 400)):
        say = {"messages": [{"role": "user", "content": [block] * num}], "max_tokens": 2, "tools": [tool]}
        got = post(server, "/v1/messages", say)
        assert got.status_code == status, got.text
    assert "at most 4" in got.json()["error"]["message"]


def test_llm_takes_hints_and_keeps_what_they_say() -> None:
    """With a real model and real evictions; without the hint the same flood takes the conversation."""
    params = SamplingParams(temperature=0, max_tokens=4)
    talk = [{"role": "system", "content": LONG}, {"role": "user", "content": "Who lives in house 3?"}]
    flood = [{"prompt_token_ids": [5 + (n * 7 + i) % 90 for i in range(200)]} for n in range(6)]
    for hints, kept in (([{"action": "retain", "ttl": "5m", "messages": 1}], True), (None, False)):
        llm = LLM(bundled(), ops="ref", max_model_len=512, num_gpu_blocks_override=40, block_size=BLOCK)
        first = llm.chat(talk, params, kv_hints=hints)[0]
        for prompt in flood:
            llm.generate(prompt, params)
        again = llm.chat(talk, params)[0]
        assert again.outputs[0].token_ids == first.outputs[0].token_ids
        system = len(llm.get_tokenizer().encode(LONG))
        assert ((again.num_cached_tokens or 0) > system - 2 * BLOCK) == kept
        with pytest.raises(InputError, match=r"kv_hints\[0\].messages"):
            llm.chat(talk, params, kv_hints=[{"action": "retain", "messages": 9}])
        with pytest.raises(InputError, match="conversation"):
            llm.generate("Hello", params, kv_hints=[{"action": "retain", "messages": 1}])
        fetched = llm.generate(flood[0], params, kv_hints=[{"action": "prefetch"}])[0]
        assert (fetched.outputs[0].token_ids, fetched.outputs[0].finish_reason) == ([], "stop")


def test_blocks_of_a_group_are_in_its_own_folder(server: LiveServer, tmp_path: Path) -> None:
    from penstock.kv.stored import space_of

    place = Path(str(server.server.config.api_keys_file)).parent / "kv"
    chat(server, "Grouped: " + LONG, kv_hints=[{"action": "share"}])
    secret = (place / "secret").read_bytes()
    assert list(place.glob(f"*/{space_of(secret, 'kv_group:team')}"))


def test_warm_and_evict_on_a_server_that_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        json.dumps({"prompt": "Warm. " + LONG}) + "\n"
        + json.dumps({"messages": [{"role": "user", "content": "Chat. " + LONG}]}) + "\n"
    )  # fmt: skip
    with LiveServer(settings(api_key="user-key", admin_api_key="admin-key")) as server:
        assert main(["cache", "warm", server.url, "--prompts", str(file), "--for", "5m", "--api-key", "user-key"]) == 0
        assert "2 prompts" in capsys.readouterr().out
        say = "Chat. " + LONG
        assert cached(chat(server, say, "user-key")) > 90
        metrics = httpx.get(server.url + "/metrics", headers={"authorization": "Bearer user-key"}).text
        (told,) = [
            line for line in metrics.splitlines() if line.startswith("penstock:kv_hints_total") and "retain" in line
        ]
        assert told.endswith(" 2.0")
        assert main(["cache", "evict", server.url, "--api-key", "user-key"]) != 0
        assert "403" in capsys.readouterr().err
        assert main(["cache", "evict", server.url, "--unused-for", "1h", "--api-key", "admin-key"]) == 0
        assert cached(chat(server, say, "user-key")) > 90, "used just now"
        assert main(["cache", "evict", server.url, "--api-key", "admin-key"]) == 0
        assert cached(chat(server, say, "user-key")) == 0
        assert main(["cache", "warm", server.url, "--prompts", str(file), "--api-key", "nobody"]) != 0


def test_warm_fills_a_folder_that_a_server_reads(tmp_path: Path) -> None:
    file, place = tmp_path / "document.txt", tmp_path / "kv"
    file.write_text("Document. " + LONG)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"OPS": "ref", "MAX_MODEL_LEN": "512", "BLOCK_SIZE": str(BLOCK)}.items():
            patch.setenv(f"PENSTOCK_{name}", value)
        done = process("cache", "warm", str(place), "--prompts", str(file), "--model", bundled(), "--size", "1GiB")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1 prompts, ")
    assert list(place.glob("*/*/*"))
    with LiveServer(settings(kv_offload=f"disk:{place}")) as server:
        got = post(server, "/v1/completions", {"prompt": file.read_text(), "max_tokens": 1})
        assert cached(got.json()) > 90
        state = httpx.get(server.url + "/internal/state").json()["tiers"]
        tiers = {tier["name"]: tier for tier in state["tiers"]}
        assert tiers["disk"]["hit_tokens"] == cached(got.json())
        assert tiers["disk"]["blocks"] > 5
        assert state["misses"]["tail"] > 0
        text = httpx.get(server.url + "/metrics").text
        for name in ("kv_tier_blocks", "kv_tier_hit_tokens_total", "prefix_cache_missed_tokens_total"):
            assert f"penstock:{name}" in text
        assert "penstock:kv_found_block_age_seconds_bucket" in text
        assert 'tier="disk"' in next(
            line for line in reversed(text.splitlines()) if "found_block_age_seconds_count" in line
        )


@needs_browser
def test_the_page_shows_tiers_misses_and_ages(browser: Chromium, tmp_path: Path) -> None:
    with LiveServer(settings(kv_offload=f"disk:{tmp_path / 'kv'}")) as server:
        browser.look(1280, 1400)
        browser.fresh(server.url + "/")
        browser.until(READY)
        browser.until("!document.getElementById('tiers-head').hidden")
        for _ in range(2):
            post(server, "/v1/completions", {"prompt": "Page. " + LONG, "max_tokens": 1})
        browser.until("document.querySelectorAll('#tiers tr').length === 2")
        browser.until("document.getElementById('tiers-note').textContent.includes('% of prompt tokens found')")
        rows = browser.run(
            "[...document.querySelectorAll('#tiers tr')].map((r) => [...r.cells].map((c) => c.textContent))"
        )
        assert [row[0] for row in rows] == ["device", "disk"]
        state = httpx.get(server.url + "/internal/state").json()["tiers"]
        assert int(rows[0][4]) == state["tiers"][0]["hit_tokens"] > 90
        browser.until("document.getElementById('tiers-why').textContent.includes('found after at most 1 s unused')")
        why = browser.run("document.getElementById('tiers-why').textContent")
        assert why.startswith("computed: new ")
        (tmp_path / "page.png").write_bytes(browser.screenshot(whole=True))
        assert axe(browser) == []
        assert browser.complaints == []
        browser.leave()
