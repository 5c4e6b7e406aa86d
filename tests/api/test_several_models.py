"""Several models behind one server, on real sockets: in every client's shape, on demand, and no death hurts others."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.base.errors import PenstockError
from penstock.cli.doctor import _several as several_lines
from penstock.cli.servers import servers
from penstock.config import serve_from_kwargs
from penstock.launch.running import RunningServer, announce_running, find_running, running, started
from penstock.server.live import LiveServer
from penstock.server.several.served import AWAKE, GONE, ServedModel
from tests.api.chromium import Chromium
from tests.api.conftest import ANSWERED, READY, ask, bundled, needs_browser
from tests.encoders import add_modules, write_encoder

ADMIN = {"authorization": "Bearer of-an-operator"}
ONCE = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
SMALL = {"max_model_len": 128, "num_gpu_blocks_override": 8}


def several(encoder: Path, **more: Any) -> Any:
    return serve_from_kwargs(
        model=bundled(), port=0, ops="ref", max_model_len=256, num_gpu_blocks_override=16,
        admin_api_key="of-an-operator", files_dir=str(encoder.parent / "files"), **{
            "engine_in_process": True,
            "models": {"small": {"model": bundled(), **SMALL, "served_model_name": "tiny,wee"},
                       "vectors": {"model": str(encoder), "ops": "auto"}}
        } | more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_encoder(tmp_path_factory.mktemp("vectors"))
    add_modules(folder, "mean_tokens", max_tokens=48)
    return folder


@pytest.fixture(scope="module")
def house(encoder: Path) -> Iterator[LiveServer]:
    with LiveServer(several(encoder)) as live:
        yield live


@pytest.fixture
def client(house: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=house.url, timeout=60) as client:
        yield client


def served(live: LiveServer, name: str) -> ServedModel:
    assert live.server is not None
    assert live.server.models is not None
    return live.server.models.served[name]


def sleep(client: httpx.Client, name: str, level: int = 2) -> None:
    assert client.post(f"/sleep?level={level}&model={name}", headers=ADMIN).json() == {"is_sleeping": True}


def test_all_are_listed_and_none_but_the_first_is_started(encoder: Path) -> None:
    with LiveServer(several(encoder)) as live, httpx.Client(base_url=live.url, timeout=60) as client:
        listed = {one["id"]: one["max_model_len"] for one in client.get("/v1/models").json()["data"]}
        assert listed == {"nano": 256, "small": 128, "tiny": 128, "wee": 128, "vectors": 48}
        assert client.get("/v1/models/wee").json()["root"] == "small"
        assert [one["name"] for one in client.get("/api/tags").json()["models"]] == [*listed]
        assert client.post("/api/show", json={"model": "vectors"}).json()["capabilities"] == ["embedding"]
        assert client.post("/tokenize", json={"model": "small", "prompt": "Once"}).json()["count"] > 0
        assert [one["name"] for one in client.get("/api/ps").json()["models"]] == ["nano"]
        state = client.get("/internal/state").json()
        assert {one["name"]: one["state"] for one in state["models"]} == {
            "nano": "ready", "small": "absent", "vectors": "absent"
        }  # fmt: skip
        assert client.get("/internal/state?model=tiny").json()["model"] == "small"
        assert client.get("/ready").status_code == 200


def test_each_model_answers_in_every_shape_with_its_own_tokenizer_and_limits(client: httpx.Client) -> None:
    found = client.post("/v1/completions", json=ONCE | {"model": "small"}).json()
    first = client.post("/v1/completions", json=ONCE).json()
    assert (found["model"], first["model"]) == ("small", "nano")
    assert found["choices"][0]["text"] == first["choices"][0]["text"]
    long = {"prompt": [5] * 100, "max_tokens": 60}
    assert client.post("/v1/completions", json=long).status_code == 200
    assert "128" in client.post("/v1/completions", json=long | {"model": "wee"}).json()["error"]["message"]
    vectors = client.post("/v1/embeddings", json={"model": "vectors", "input": "the mill"}).json()
    assert len(vectors["data"][0]["embedding"]) == 32
    hello = [{"role": "user", "content": "Hello!"}]
    said = client.post("/v1/chat/completions", json={"model": "vectors", "messages": hello})
    assert said.status_code == 400
    anthropic = client.post("/v1/messages", json={"model": "tiny", "messages": hello, "max_tokens": 4}).json()
    assert anthropic["model"] == "tiny"
    ollama = client.post("/api/chat", json={"model": "small:latest", "messages": hello, "stream": False,
                                            "options": {"num_predict": 4}}).json()  # fmt: skip
    assert ollama["done"]
    response = client.post("/v1/responses", json={"model": "small", "input": "Hello!", "max_output_tokens": 16}).json()
    assert client.get(f"/v1/responses/{response['id']}").json()["model"] == "small"


@pytest.mark.parametrize(
    ("path", "body", "shape"),
    [
        ("/v1/chat/completions", {"messages": []}, lambda said: said["error"]["code"] == "model_not_found"),
        ("/v1/messages", {"messages": [], "max_tokens": 3}, lambda said: said["error"]["type"] == "not_found_error"),
        ("/api/generate", {"prompt": "x"}, lambda said: "served is nano, small" in said["error"]),
    ],
)
def test_an_unknown_name_is_a_404_in_the_shape_of_the_client(
    client: httpx.Client, path: str, body: Any, shape: Any
) -> None:
    found = client.post(path, json=body | {"model": "other"})
    assert found.status_code == 404
    assert shape(found.json())


def test_two_clients_that_come_at_once_start_a_model_once(house: LiveServer, client: httpx.Client) -> None:
    sleep(client, "small")
    model = served(house, "small")
    before = model.num_starts
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda _: httpx.post(house.url + "/v1/completions", json=ONCE | {"model": "small"}),
                              range(6)))  # fmt: skip
    assert [one.status_code for one in found] == [200] * 6
    assert model.num_starts == before + 1


def test_ollama_says_how_long_a_model_stays(house: LiveServer, client: httpx.Client) -> None:
    model = served(house, "small")
    load = client.post("/api/generate", json={"model": "small", "keep_alive": "1h30m"}).json()
    assert (load["done_reason"], model.keep_alive_s, model.level) == ("load", 5400, AWAKE)
    client.post(
        "/api/generate", json={"model": "small", "keep_alive": -1, "prompt": "x", "options": {"num_predict": 2}}
    )
    assert model.keep_alive_s == math.inf
    wrong = client.post("/api/generate", json={"model": "small", "keep_alive": "soon"})
    assert (wrong.status_code, "keep_alive must be seconds" in wrong.json()["error"]) == (400, True)
    unload = client.post("/api/generate", json={"model": "small", "keep_alive": 0}).json()
    assert unload["done_reason"] == "unload"
    for _ in range(1000):
        if model.level == GONE:
            break
        client.get("/health")
    assert (model.level, model.keep_alive_s) == (GONE, 300)
    assert "small" not in [one["name"] for one in client.get("/api/ps").json()["models"]]


@pytest.mark.parametrize("level", [1, 2])
def test_sleeping_gives_memory_back_and_a_request_wakes(house: LiveServer, client: httpx.Client, level: int) -> None:
    text = client.post("/v1/completions", json=ONCE | {"model": "small"}).json()["choices"][0]["text"]
    model = served(house, "small")
    sleep(client, "small", level)
    assert client.get("/is_sleeping?model=small", headers=ADMIN).json() == {"is_sleeping": True}
    assert client.get("/is_sleeping", headers=ADMIN).json() == {"is_sleeping": False}
    assert model.held_bytes == (model.weight_bytes if level == 1 else 0)
    if level == 1:
        loop = model.client.link._loop  # type: ignore[attr-defined]
        for _ in range(1000):
            if loop.core.kv.backing.num_bytes == 0:
                break
            client.get("/health")
        assert loop.core.kv.backing.num_bytes == 0
    again = client.post("/v1/completions", json=ONCE | {"model": "small"}).json()
    assert again["choices"][0]["text"] == text
    sleep(client, "small", level)
    assert client.post("/wake_up?model=small", headers=ADMIN).json() == {"is_sleeping": False}
    assert model.level == AWAKE


def test_sleep_needs_the_admin_key_and_a_level(client: httpx.Client) -> None:
    assert client.post("/sleep").status_code == 401
    assert client.post("/sleep?level=3", headers=ADMIN).status_code == 400
    assert client.post("/sleep?model=other", headers=ADMIN).status_code == 404


def test_metrics_tell_of_each_model_in_families_that_come_once(client: httpx.Client) -> None:
    client.post("/v1/completions", json=ONCE | {"model": "small"})
    families = list(text_string_to_metric_families(client.get("/metrics").text))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    samples = {
        (sample.name, sample.labels.get("model_name"), sample.labels.get("reason")): sample.value
        for family in families for sample in family.samples
    }  # fmt: skip
    assert samples["penstock:model_starts_total", "small", None] >= 1
    assert samples["penstock:model_start_seconds_count", "small", None] >= 1
    assert ("penstock:model_stops_total", "small", "memory") in samples
    assert samples["vllm:generation_tokens_total", "small", None] >= 8
    assert samples["penstock:model_held_bytes", "nano", None] > 0
    assert samples["penstock:models_memory_limit_bytes", "nano", None] > 0


def test_a_batch_may_ask_any_model(client: httpx.Client) -> None:
    sleep(client, "nano")  # the first model, whose slots batches look at
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": ONCE | {"model": name}}
        for name in ("nano", "small")
    ]
    content = "\n".join(map(json.dumps, lines))
    file = client.post("/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch"}).json()
    batch = client.post("/v1/batches", json={"input_file_id": file["id"], "endpoint": "/v1/completions",
                                             "completion_window": "24h"}).json()  # fmt: skip
    while batch["status"] not in ("completed", "failed"):
        batch = client.get(f"/v1/batches/{batch['id']}").json()
    assert batch["request_counts"]["completed"] == 2, batch
    out = client.get(f"/v1/files/{batch['output_file_id']}/content").text
    assert {json.loads(line)["response"]["body"]["model"] for line in out.splitlines()} == {"nano", "small"}


@needs_browser
def test_the_page_lets_people_choose_and_shows_what_is_not_in_memory(house: LiveServer, browser: Chromium) -> None:
    with httpx.Client(base_url=house.url, timeout=60) as client:
        sleep(client, "small")
    browser.look(1280, 900)
    browser.fresh(house.url + "/")
    browser.until(READY)
    shown = "[...document.getElementById('model').options].map((o) => o.textContent)"
    browser.until(f"{shown}.includes('small (absent)')")
    names = browser.run(shown.replace("textContent", "value"))
    assert names == ["nano", "small", "tiny", "wee", "vectors"]
    browser.run(
        "{ const m = document.getElementById('model'); m.value = 'small'; m.dispatchEvent(new Event('change')) }"
    )
    browser.until("document.title === 'small · Penstock'")
    ask(browser, "Once", max_tokens="8")
    browser.until(ANSWERED)
    browser.until(f"{shown}.includes('small')")
    assert browser.complaints == []
    browser.leave()


def test_a_key_may_have_other_limits_for_a_model(encoder: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[alice]\nkey = "a"\ntokens_per_minute = 5000\n[alice.models.small]\ntokens_per_minute = 10\n')
    config = several(encoder, api_keys_file=str(keys))
    with LiveServer(config) as live, httpx.Client(base_url=live.url, headers={"authorization": "Bearer a"}) as client:
        assert client.post("/v1/completions", json=ONCE).status_code == 200
        refused = client.post("/v1/completions", json=ONCE | {"model": "small"})
        assert refused.status_code == 429
        assert "10 a minute" in refused.json()["error"]["message"]


def test_what_does_not_fit_is_refused_with_a_time_to_come_again(encoder: Path) -> None:
    """Memory for one of two: the other leaves for it when it is idle, and not while it is in use."""
    models = {"small": {"model": bundled(), **SMALL, "max_queue_wait": 0.05}}
    go_on = threading.Event()
    live = LiveServer(several(encoder, models=models, models_memory=0.025))
    with live, httpx.Client(timeout=60) as client, ThreadPoolExecutor(1) as pool:
        client.base_url = live.url
        assert client.post("/v1/completions", json=ONCE | {"model": "small"}).status_code == 200
        assert (served(live, "nano").level, served(live, "nano").stops["memory"]) == (GONE, 1)
        assert client.post("/v1/completions", json=ONCE).status_code == 200
        core = served(live, "nano").client.link._loop.core  # type: ignore[attr-defined]
        core.watch, watched = lambda requests: (watched(requests), go_on.wait(60)), core.watch
        running = pool.submit(httpx.post, live.url + "/v1/completions", json=ONCE, timeout=60)
        while not served(live, "nano").client.num_live:
            pass
        refused = client.post("/v1/completions", json=ONCE | {"model": "small"})
        go_on.set()
        assert running.result().status_code == 200
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_memory")
        assert refused.headers["retry-after"] == "10"
        assert client.post("/v1/completions", json=ONCE | {"model": "small"}).status_code == 200


def test_a_killed_engine_hurts_no_other(encoder: Path) -> None:
    """kill -9 of one engine while the other streams: both streams are whole."""
    config = several(encoder, models={"small": {"model": bundled(), **SMALL}}, engine_in_process=False)
    long = ONCE | {"max_tokens": 100, "ignore_eos": True}
    with LiveServer(config) as live:

        async def texts(kill: bool) -> list[str]:
            async with httpx.AsyncClient(base_url=live.url, timeout=60) as client:

                async def stream(model: str) -> str:
                    text, killed = "", not kill
                    body = long | {"model": model, "stream": True}
                    async with client.stream("POST", "/v1/completions", json=body) as answer:
                        async for line in answer.aiter_lines():
                            if line.startswith("data: {"):
                                text += json.loads(line[6:])["choices"][0]["text"]
                            if model == "small" and text and not killed:
                                killed = True
                                pid = served(live, "small").client.link.pid  # type: ignore[attr-defined]
                                os.kill(pid, signal.SIGKILL)
                    return text

                return await asyncio.gather(stream("nano"), stream("small"))

        whole = asyncio.run(texts(kill=False))
        assert asyncio.run(texts(kill=True)) == whole
        assert len(set(whole)) == 1
        assert served(live, "small").client.num_restarts == 1
        assert served(live, "nano").client.num_restarts == 0


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"models": {"nano": bundled()}}, "two models are called nano; give one of them another name"),
        ({"models": {"b": "/not/there"}}, "the model b: there is no model at"),
        ({"models": {"b": bundled()}, "models_memory": 0.012}, "the model nano: .* raise models_memory"),
        ({"models": {"b": {"model": bundled(), "served_model_name": "nano"}}}, "two models are called nano"),
    ],
)
def test_what_cannot_be_served_is_said_before_anything_is_loaded(
    encoder: Path, more: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.server.assembly.make_link", lambda *given: pytest.fail("an engine was begun"))
    with pytest.raises(PenstockError, match=said):
        LiveServer(several(encoder, **more)).__enter__()


def test_one_model_may_leave_too(encoder: Path) -> None:
    """With --keep-alive alone; and without it an operator may let the one model sleep."""
    for more in ({"keep_alive": "0"}, {}):
        with LiveServer(several(encoder, models={}, **more)) as live, httpx.Client(base_url=live.url) as client:
            text = client.post("/v1/completions", json=ONCE).json()["choices"][0]["text"]
            if not more:
                assert live.server is not None
                assert live.server.models is None
                assert client.post("/sleep?level=2", headers=ADMIN).status_code == 200
            for _ in range(1000):
                if served(live, "nano").level == GONE:
                    break
                client.get("/health")
            assert served(live, "nano").level == GONE
            assert client.get("/ready").status_code == 200
            assert client.post("/v1/completions", json=ONCE).json()["choices"][0]["text"] == text


def test_ps_and_doctor_say_what_each_is_doing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    pid = os.getpid()
    entry = RunningServer(
        pid=pid, started=started(pid) or "", model="nano", names=["nano", "small"], where="127.0.0.1:1", port=1,
        since_s=0.0, models={"nano": "ready", "small": "absent"},
    )  # fmt: skip
    assert announce_running(entry)
    assert find_running("small", running()).pid == pid
    assert servers(argparse.Namespace(command="ps", json=False)) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown[1:]] == ["nano", "nano", "small"]
    assert shown[-1].split() == ["small", "absent"]
    assert several_lines() == ["Several models at 127.0.0.1:1: nano ready, small absent"]
