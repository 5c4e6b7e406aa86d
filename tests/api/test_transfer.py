"""H29, H26: the three calls of microserving over HTTP, routers made of them, roles and moves; what is refused."""

from __future__ import annotations

import importlib.util
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

from penstock.base.errors import ConfigError
from penstock.config import serve_from_kwargs
from penstock.server.live import LiveServer
from tests.api.test_replicas import USUAL

EXAMPLES = Path(__file__).parents[2] / "examples" / "microserving"
PROMPT = [3 + (11 * i) % 4000 for i in range(150)]
DRAWN = {"max_tokens": 40, "seed": 7, "temperature": 0.8, "ignore_eos": True}


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("store") / "blocks"
    config = serve_from_kwargs(
        **USUAL, data_parallel_size=2, kv_offload=f"disk:{folder},200MiB", admin_api_key="boss", block_size=16,
        route_policy="round-robin", kv_load_policy="wait",
    )  # fmt: skip
    with LiveServer(config) as found:
        yield found


@pytest.fixture
def http(live: Any) -> Any:
    live.server.client.handover.set_roles({0: "mixed", 1: "mixed"})
    with httpx.Client(base_url=live.url, headers={"authorization": "Bearer boss"}, timeout=60) as client:
        yield client


def test_H29_routers_of_three_calls_give_the_tokens_of_one_engine(live: Any, http: httpx.Client) -> None:
    parallel, apart, moving = (script(name) for name in ("data_parallel", "disaggregated", "migrate"))
    for name in ("data_parallel", "disaggregated", "migrate"):
        assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 40
    want = list(moving.part(http, 0, PROMPT, [], **DRAWN))
    assert len(want) == 40
    assert [list(parallel.generate(http, PROMPT, **DRAWN)) for _ in range(2)] == [want, want]
    http.post("/admin/reset_prefix_cache").raise_for_status()
    other = PROMPT[::-1]
    wanted = list(moving.part(http, 1, other, [], **DRAWN))
    http.post("/admin/reset_prefix_cache").raise_for_status()
    assert list(apart.generate(http, other, **DRAWN)) == wanted
    assert list(moving.generate(http, PROMPT, 13, **DRAWN)) == want
    fresh = [5 + (13 * i) % 4000 for i in range(100)]
    assert http.post("/internal/microserving/prep_recv", json={"engine": 1, "prompt_token_ids": fresh}).json() == {
        "matched": 0
    }
    sent = {"engine": 0, "to": 1, "prompt_token_ids": fresh, "end": 70}
    assert http.post("/internal/microserving/remote_send", json=sent).json() == {"matched": 64}
    asked = {"engine": 1, "prompt_token_ids": fresh}
    assert http.post("/internal/microserving/prep_recv", json=asked).json() == {"matched": 64}


def test_H26_H30_roles_and_moves_over_http(live: Any, http: httpx.Client) -> None:
    body = {"prompt": "Once there was a fox who " * 8, "max_tokens": 100, "temperature": 0, "ignore_eos": True}
    want = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    found = http.post("/internal/roles", json={"roles": {"0": "prefill", "1": "decode"}}).json()
    assert [one["role"] for one in found["data"]] == ["prefill", "decode"]
    assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == want
    now = http.get("/internal/roles").json()
    assert now["prompts_passed_on"] == found["prompts_passed_on"] + 1
    texts: list[str] = []
    worker = threading.Thread(
        target=lambda: texts.append(http.post("/v1/completions", json=body).json()["choices"][0]["text"])
    )
    worker.start()
    moved = None
    while worker.is_alive() and moved is None:
        for row in http.get("/admin/requests").json()["data"]:
            answer = http.post("/internal/migrate", json={"request_id": row["id"], "to": 0})
            moved = answer.json() if answer.status_code == 200 else None
    worker.join()
    assert moved is not None
    assert moved["num_copied"] >= moved["num_tokens"] - 32
    assert texts == [want]


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("roles", {"roles": {"0": "boss"}}, "'boss' is no role; there are prefill, decode, mixed"),
        ("roles", {"roles": {"0": "prefill", "1": "prefill"}}, "no engine would be left for tokens"),
        ("migrate", {"request_id": "x", "to": 1}, "no request 'x' is running"),
        ("microserving/prep_recv", {"engine": 5, "prompt_token_ids": [3]}, "there is no engine 5; there are 0, 1"),
        ("microserving/prep_recv", {"engine": 0, "prompt_token_ids": [3], "end": 4}, "end: 4 is not within the 1 tok"),
        ("microserving/remote_send", {"engine": 0, "to": 1, "prompt_token_ids": []}, "prompt"),
        ("microserving/start_generate", {"engine": 0, "prompt_token_ids": [3], "generated": [4] * 16}, "generated: fe"),
        ("microserving/start_generate", {"engine": 0, "prompt": "x"}, "unknown field `prompt`"),
    ],
)
def test_H29_what_is_asked_wrongly_is_said(http: httpx.Client, path: str, body: dict[str, Any], says: str) -> None:
    answer = http.post(f"/internal/{path}", json=body)
    assert answer.status_code == 400, answer.text
    assert says in answer.json()["error"]["message"]


def test_H29_the_calls_need_the_admin_key(live: Any) -> None:
    assert httpx.get(live.url + "/internal/roles").status_code == 401
    assert httpx.get(live.url + "/internal/roles", headers={"authorization": "Bearer me"}).status_code == 401


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"replica_roles": "prefill=1,decode=1"}, "replica_roles: keys and values go from engine to engine by a store"),
        ({"enable_migration": True}, "enable_migration: keys and values go from engine to engine by a store"),
        ({"replica_roles": "prefill=2"}, "replica_roles: no engine would be left for tokens"),
        ({"replica_roles": "prefill=2,decode=1"}, "replica_roles: prefill=2,decode=1 are 3 engines, and data_parall"),
        ({"replica_roles": "cook=1"}, "replica_roles: 'cook=1' is none of prefill=N, decode=N, mixed=N"),
    ],
)
def test_H26_roles_that_cannot_be_are_refused(more: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says), LiveServer(serve_from_kwargs(**USUAL, **more, data_parallel_size=2)):
        pytest.fail("it was started")
