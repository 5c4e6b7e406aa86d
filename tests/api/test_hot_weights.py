"""Weights swapped in a running server, generation paused, and versions in every client's shape."""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock import LLM, SamplingParams
from penstock.config import serve_from_kwargs
from penstock.server.live import LiveServer
from tests.adapting import nano
from tests.weights import other_nano

ADMIN = {"Authorization": "Bearer sk-admin"}
PROMPT = "Once upon a time"
ASK = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("weights")
    other_nano(root / "one", 1)
    shutil.copytree(nano(), root / "first")
    shutil.copytree(nano(), root / "cut")
    (root / "cut" / "model.safetensors").write_bytes((nano() / "model.safetensors").read_bytes()[:-1000])
    shutil.copytree(nano(), root / "deeper")
    config = json.loads((nano() / "config.json").read_text())
    (root / "deeper" / "config.json").write_text(json.dumps(config | {"rope_theta": 123.0}))
    (root / "link").symlink_to(nano())
    return root


@pytest.fixture(scope="module")
def served(folders: Path) -> Iterator[httpx.Client]:
    config = serve_from_kwargs(
        model=str(nano()), served_model_name="nano", port=0, ops="ref", max_model_len=512, num_gpu_blocks_override=128,
        engine_in_process=True, weights_root=str(folders), admin_api_key="sk-admin",
    )  # fmt: skip
    with LiveServer(config) as live, httpx.Client(base_url=live.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def texts(folders: Path) -> dict[str, str]:
    found = {}
    for name in ("first", "one"):
        llm = LLM(str(folders / name), ops="ref", max_model_len=256)
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        found[name] = llm.generate(PROMPT, params)[0].outputs[0].text
    assert found["first"] != found["one"]
    return found


def swap(served: httpx.Client, path: str, **more: Any) -> httpx.Response:
    return served.post("/update_weights_from_disk", headers=ADMIN, json={"model_path": path, **more})


def ask(served: httpx.Client) -> dict[str, Any]:
    answer = served.post("/v1/completions", json=ASK)
    assert answer.status_code == 200
    found: dict[str, Any] = answer.json()
    return found


FRONTS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "completions": ("/v1/completions", ASK, lambda a: [a["system_fingerprint"], a["usage"]["weight_version"]]),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4},
             lambda a: [a["system_fingerprint"], a["usage"]["weight_version"]]),
    "responses": ("/v1/responses", {"input": "Hi", "max_output_tokens": 4}, lambda a: [a["usage"]["weight_version"]]),
    "messages": ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4},
                 lambda a: [a["usage"]["weight_version"]]),
    "ollama": ("/api/generate", {"prompt": "Hi", "stream": False, "options": {"num_predict": 4}},
               lambda a: [a["weight_version"]]),
    "llama_server": ("/completion", {"prompt": "Hi", "n_predict": 4}, lambda a: [a["weight_version"]]),
    "tgi": ("/generate", {"inputs": "Hi", "parameters": {"max_new_tokens": 4}}, lambda a: [a["weight_version"]]),
}  # fmt: skip


def test_I15_every_client_hears_which_weights_answered(served: httpx.Client, texts: dict[str, str]) -> None:
    done = swap(served, "one", weight_version="step-7")
    assert done.status_code == 200, done.text
    assert done.json()["weight_version"] == "step-7"
    for path, body, told in FRONTS.values():
        answer = served.post(path, json={"model": "nano", **body})
        assert told(answer.json()) == ["step-7"] * len(told(answer.json())), path
        assert answer.headers["x-penstock-weight-version"] == "step-7"
    assert ask(served)["choices"][0]["text"] == texts["one"]
    assert served.get("/v1/models").json()["data"][0]["weight_version"] == "step-7"
    assert served.get("/get_weight_version", headers=ADMIN).json() == {"weight_version": "step-7"}
    assert served.get("/internal/state").json()["weights"]["version"] == "step-7"
    metrics = served.get("/metrics").text
    assert re.search('penstock:weights_info.*version="step-7"', metrics)
    assert "penstock:weight_swaps_total" in metrics
    unnamed = swap(served, "first").json()
    assert unnamed["weight_version"] == unnamed["content"][:12]
    assert ask(served)["choices"][0]["text"] == texts["first"]


def test_what_cannot_follow_leaves_the_old_weights(served: httpx.Client, texts: dict[str, str]) -> None:
    assert swap(served, "first", weight_version="back").status_code == 200
    for path, says in [
        ("nothing", "there is nothing"),
        ("../../etc", "leads out"),
        ("link", "leads out"),
        ("cut", "model.safetensors"),
        ("deeper", "rope.theta is 123.0 there and"),
    ]:
        refused = swap(served, path)
        assert refused.status_code == 400, (path, refused.text)
        assert says in refused.json()["error"]["message"], path
        assert refused.json()["error"]["param"] == "model_path"
    for body, param in [
        ({"load_format": "dummy"}, "load_format"), ({"recompute_kv": False}, "recompute_kv"),
        ({"in_place": True, "abort_all_requests": True}, "in_place"), ({"weight_version": "a b"}, "weight_version"),
    ]:  # fmt: skip
        assert swap(served, "one", **body).json()["error"]["param"] == param
    assert served.post("/update_weights_from_disk", json={"model_path": "one"}).status_code == 401
    answer = ask(served)
    assert (answer["choices"][0]["text"], answer["system_fingerprint"]) == (texts["first"], "back")


def test_I15_a_stream_that_goes_over_says_which_tokens_are_whose(served: httpx.Client) -> None:
    """Paused, swapped, continued: a rollout of two samples with ids and log-probabilities."""
    assert swap(served, "first", weight_version="a").status_code == 200
    body = ASK | {
        "max_tokens": 240, "n": 2, "temperature": 1, "seed": 5, "logprobs": 1, "stream": True, "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    ids: dict[int, list[int]] = {0: [], 1: []}
    num_logprobs, usage = 0, {}
    with served.stream("POST", "/v1/completions", json=body) as stream:
        paused = False
        for line in stream.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            usage = chunk["usage"] or usage
            for choice in chunk["choices"]:
                ids[choice["index"]] += choice["token_ids"]
                num_logprobs += len((choice["logprobs"] or {"tokens": []})["tokens"])
            if not paused and len(ids[0]) > 3:
                paused = True
                assert served.post("/pause_generation", headers=ADMIN, json={"mode": "in_place"}).status_code == 200
                assert served.get("/is_paused", headers=ADMIN).json() == {"is_paused": True}
                assert served.get("/ready").json()["error"]["code"] == "paused"
                assert swap(served, "one", weight_version="b").status_code == 200
                assert served.post("/continue_generation", headers=ADMIN).status_code == 200
    assert [len(own) for own in ids.values()] == [240, 240]
    assert num_logprobs == 480
    for runs in usage["weight_versions"]:
        assert [run[2] for run in runs] == ["a", "b"]
        assert [runs[0][0], runs[1][1]] == [0, 240]
        assert runs[0][1] == runs[1][0]
    assert usage["weight_version"] == "b"


@pytest.mark.parametrize("aborts", [False, True])
def test_running_requests_end_or_are_aborted_as_asked(
    served: httpx.Client, texts: dict[str, str], aborts: bool
) -> None:  # fmt: skip
    assert swap(served, "first", weight_version="old").status_code == 200
    long = ASK | {"max_tokens": 200, "stream": True, "stream_options": {"include_usage": True}}
    seen: list[httpx.Response] = []
    with served.stream("POST", "/v1/completions", json=long) as stream:
        lines = stream.iter_lines()
        next(lines)
        if aborts:  # it must not end before
            assert served.post("/pause_generation", headers=ADMIN, json={"mode": "in_place"}).status_code == 200
        swapping = threading.Thread(target=lambda: seen.append(swap(served, "one", abort_all_requests=aborts)))
        swapping.start()
        said = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    swapping.join()
    served.post("/continue_generation", headers=ADMIN)
    assert seen[0].json()["success"]
    if aborts:
        assert said[-1]["error"]["code"] == "aborted"
    else:
        assert said[-1]["usage"]["weight_version"] == "old"
        assert "weight_versions" not in said[-1]["usage"]
    assert ask(served)["choices"][0]["text"] == texts["one"]


def test_vllms_pause_waits_for_those_that_run(served: httpx.Client) -> None:
    with served.stream("POST", "/v1/completions", json=ASK | {"max_tokens": 60, "stream": True}) as stream:
        lines = stream.iter_lines()
        next(lines)
        done: list[int] = []
        pausing = threading.Thread(
            target=lambda: done.append(served.post("/pause?mode=wait", headers=ADMIN).status_code)
        )
        pausing.start()
        assert list(lines)[-2:] == ["data: [DONE]", ""]
    pausing.join()
    assert done == [200]
    answers: list[dict[str, Any]] = []
    waiting = threading.Thread(target=lambda: answers.append(ask(served)))
    waiting.start()
    time.sleep(0.1)
    assert not answers
    assert served.post("/resume", headers=ADMIN).json() == {"status": "resumed"}
    waiting.join()
    assert answers[0]["usage"]["completion_tokens"] == 8


def test_each_of_several_models_has_weights_of_its_own(folders: Path, texts: dict[str, str]) -> None:
    config = serve_from_kwargs(
        model=str(nano()), served_model_name="nano", port=0, ops="ref", max_model_len=256, num_gpu_blocks_override=32,
        engine_in_process=True, weights_root=str(folders), admin_api_key="sk-admin",
        models={"other": {"model": str(nano()), "max_model_len": 256, "num_gpu_blocks_override": 32}},
    )  # fmt: skip
    with LiveServer(config) as live, httpx.Client(base_url=live.url, timeout=60) as client:
        body = {"model_path": "one", "weight_version": "v2"}
        early = client.post("/update_weights_from_disk?model=other", json=body, headers=ADMIN)
        assert early.status_code == 400
        assert "it starts with the next request" in early.text
        for model in ("nano", "other"):
            answer = client.post("/v1/completions", json=ASK | {"model": model})
            assert answer.json()["choices"][0]["text"] == texts["first"], answer.text
            assert answer.headers["x-penstock-weight-version"] == "default"
        swapped = client.post("/update_weights_from_disk?model=other", json=body, headers=ADMIN)
        assert swapped.status_code == 200, swapped.text
        for model, text, version in (("nano", "first", "default"), ("other", "one", "v2")):
            answer = client.post("/v1/completions", json=ASK | {"model": model})
            assert answer.json()["choices"][0]["text"] == texts[text], model
            assert answer.headers["x-penstock-weight-version"] == version
