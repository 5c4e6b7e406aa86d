"""Adapters as model names: in every front end, loaded and unloaded while the server runs, below one folder."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock import LLM, LoRARequest, SamplingParams
from penstock.base.errors import ConfigError, InputError
from penstock.config import serve_from_args, serve_from_kwargs
from penstock.server.live import LiveServer
from tests.adapting import nano, nano_folder

ADMIN = {"Authorization": "Bearer sk-admin"}
ASK = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
TARGETS = ("q_proj", "v_proj", "up_proj")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    for i, name in enumerate(("tales", "poems", "later")):
        nano_folder(root / name, i, targets=TARGETS)
    nano_folder(root.parent / "elsewhere", 9)
    (root / "link").symlink_to(root.parent / "elsewhere")
    return root


@pytest.fixture(scope="module")
def served(folders: Path) -> Iterator[httpx.Client]:
    config = serve_from_kwargs(
        model=str(nano()), served_model_name="nano", port=0, ops="ref", max_model_len=256, num_gpu_blocks_override=128,
        engine_in_process=True, lora_modules=f'tales={folders}/tales {{"name": "poems", "path": "{folders}/poems"}}',
        lora_root=str(folders), admin_api_key="sk-admin",
    )  # fmt: skip
    with LiveServer(config) as live, httpx.Client(base_url=live.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def texts(folders: Path) -> dict[str, str]:
    """What each should answer, offline."""
    llm = LLM(nano(), enable_lora=True, ops="ref", max_model_len=256)
    asked = {n: LoRARequest(n, i, str(folders / n)) for i, n in enumerate(("tales", "poems", "later"), 1)}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    found = llm.generate([ASK["prompt"]] * 4, params, lora_request=[None, *asked.values()])
    answers = dict(zip(("nano", *asked), (out.outputs[0].text for out in found), strict=True))
    assert len(set(answers.values())) == 4
    return answers


def test_J25_adapters_are_model_names(served: httpx.Client, texts: dict[str, str]) -> None:
    for name in ("nano", "tales", "poems", "nano", "tales"):
        answer = served.post("/v1/completions", json={"model": name, **ASK}).json()
        assert (answer["model"], answer["choices"][0]["text"]) == (name, texts[name])
    listed = {m["id"]: m for m in served.get("/v1/models").json()["data"]}
    assert [listed[n]["parent"] for n in ("nano", "tales", "poems")] == [None, "nano", "nano"]
    assert served.get("/v1/models/tales").json()["root"] == "tales"
    refused = served.post("/v1/completions", json={"model": "novels", **ASK})
    assert refused.status_code == 404
    assert "served is nano, tales, poems" in refused.json()["error"]["message"]


FRONTS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6},
             lambda a: a["choices"][0]["message"]["content"]),
    "responses": ("/v1/responses", {"input": "Hi", "max_output_tokens": 6},
                  lambda a: a["output"][0]["content"][0]["text"]),
    "messages": ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6},
                 lambda a: a["content"][0]["text"]),
    "ollama": ("/api/generate", {"prompt": "Hi", "stream": False, "options": {"num_predict": 6, "temperature": 0}},
               lambda a: a["response"]),
    "llama_server": ("/completion", {"prompt": "Hi", "n_predict": 6}, lambda a: a["content"]),
    "tgi": ("/generate", {"inputs": "Hi", "parameters": {"max_new_tokens": 6}}, lambda a: a["generated_text"]),
    "decisions": (
        "/v1/decisions",
        {"input": "Hi", "questions": [{"type": "predicate", "name": "urgent", "instructions": "Is this urgent?"}]},
        lambda a: str(a["answers"]),
    ),
    "embeddings": ("/v1/embeddings", {"input": "Hi"}, lambda a: tuple(a["data"][0]["embedding"])),
}  # fmt: skip


@pytest.mark.parametrize("front", FRONTS)
def test_J25_every_front_end_takes_an_adapter_for_a_model(served: httpx.Client, front: str) -> None:
    path, body, read = FRONTS[front]
    sampling = {} if front in ("ollama", "tgi", "embeddings", "decisions") else {"temperature": 0}
    found = {}
    for name in ("nano", "tales", "poems"):
        answer = served.post(path, json={"model": name, **sampling, **body})
        assert answer.status_code == 200, answer.text
        found[name] = read(answer.json())
    assert len(set(found.values())) == 3


def test_adapters_are_loaded_and_unloaded(served: httpx.Client, texts: dict[str, str], folders: Path) -> None:
    def load(name: str, path: str, **headers: str) -> httpx.Response:
        body = {"lora_name": name, "lora_path": path}
        return served.post("/v1/load_lora_adapter", json=body, headers=headers or ADMIN)

    assert served.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": "later"}).status_code == 401
    assert load("later", "later").json() == "Success: LoRA adapter 'later' added successfully."
    text = served.post("/v1/completions", json={"model": "later", **ASK}).json()["choices"][0]["text"]
    assert text == texts["later"]
    for name, path, sentence in (
        ("later", "later", "is loaded; unload it first"), ("nano", "later", "the name of the model itself"),
        ("a b", "later", "lora_name: 1 to 128"), ("x", "../elsewhere", "leads out of the folder"),
        ("x", str(folders.parent / "elsewhere"), "leads out of the folder"), ("x", "link", "leads out of the folder"),
        ("x", "nothing", "is no folder"),
    ):  # fmt: skip
        refused = load(name, path)
        assert refused.status_code == 400
        assert sentence in refused.json()["error"]["message"], refused.text
    gone = served.post("/v1/unload_lora_adapter", json={"lora_name": "later"}, headers=ADMIN)
    assert gone.json() == "Success: LoRA adapter 'later' removed successfully."
    assert served.post("/v1/completions", json={"model": "later", **ASK}).status_code == 404
    assert served.post("/v1/unload_lora_adapter", json={"lora_name": "later"}, headers=ADMIN).status_code == 404
    assert load("later", "poems").status_code == 200
    text = served.post("/v1/completions", json={"model": "later", **ASK}).json()["choices"][0]["text"]
    assert text == texts["poems"], "a name that is used again means what it was given last"
    assert served.post("/v1/unload_lora_adapter", json={"lora_name": "later"}, headers=ADMIN).status_code == 200


def test_unloading_waits_for_running_requests(served: httpx.Client) -> None:
    load = {"lora_name": "brief", "lora_path": "later"}
    assert served.post("/v1/load_lora_adapter", json=load, headers=ADMIN).status_code == 200
    body = {"model": "brief", **ASK, "max_tokens": 120, "stream": True}
    after: list[str] = []

    def unload() -> None:
        served.post("/v1/unload_lora_adapter", json={"lora_name": "brief"}, headers=ADMIN)
        after.append(served.get("/metrics").text)  # the server's own order: a client's threads wake in any

    with served.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(line for line in lines if line)
        metrics = served.get("/metrics").text
        assert 'running_lora_adapters="brief"' in metrics
        thread = threading.Thread(target=unload)
        thread.start()
        while "brief" in [m["id"] for m in served.get("/v1/models").json()["data"]]:
            time.sleep(0.01)  # its name goes at once
        rest = [line for line in lines if line]
    thread.join()
    assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2].replace(" ", "")
    assert 'running_lora_adapters="brief"' not in after[0]


def test_metrics_tell_of_adapters(served: httpx.Client) -> None:
    lines = served.get("/metrics").text.splitlines()
    found = {line.split("{")[0]: line for line in lines if "lora" in line and not line.startswith("#")}
    assert 'max_lora="8"' in found["vllm:lora_requests_info"]
    assert float(found["penstock:lora_adapters_wanted_total"].split()[-1]) > 0
    assert float(found["penstock:lora_adapters"].split()[-1]) >= 2
    blocks = float(found["penstock:lora_blocks"].split()[-1])
    assert blocks >= float(found["penstock:lora_adapters_in_blocks"].split()[-1]) >= 1
    assert served.get("/internal/state", headers=ADMIN).json()["kv"]["adapters"] == blocks


def test_J26_an_adapter_that_the_pool_has_no_room_for_is_refused_at_the_door(tmp_path: Path) -> None:
    nano_folder(tmp_path / "small", 1, targets=TARGETS)
    nano_folder(tmp_path / "large", 2, rank=64, targets=(*TARGETS, "k_proj", "o_proj", "gate_proj", "down_proj"))
    few: dict[str, Any] = {
        "model": str(nano()), "served_model_name": "nano", "port": 0, "ops": "ref", "max_model_len": 64,
        "block_size": 16, "num_gpu_blocks_override": 5, "engine_in_process": True, "admin_api_key": "sk-admin",
    }  # fmt: skip
    with (
        pytest.raises(
            ConfigError, match=r"lora_modules: the adapter large takes \d+ blocks of KV memory, and of the 5"
        ),
        LiveServer(serve_from_kwargs(lora_modules=f"large={tmp_path}/large", **few)),
    ):
        pass
    config = serve_from_kwargs(lora_modules=f"small={tmp_path}/small", lora_root=str(tmp_path), **few)
    with LiveServer(config) as live, httpx.Client(base_url=live.url, timeout=60) as client:
        ask: dict[str, Any] = {"prompt": [5] * 50, "max_tokens": 4, "temperature": 0}
        assert client.post("/v1/completions", json={"model": "nano", **ask}).status_code == 200
        refused = client.post("/v1/completions", json={"model": "small", **ask})
        assert refused.status_code == 400
        assert "by the size of the KV cache this model's maximum context length is 48" in refused.text
        assert client.post("/v1/completions", json={"model": "small", **ask, "prompt": [5] * 40}).status_code == 200
        load = {"lora_name": "large", "lora_path": "large"}
        refused = client.post("/v1/load_lora_adapter", json=load, headers=ADMIN)
        assert refused.status_code == 400
        assert "lora_path: the adapter large takes" in refused.text


def test_modules_on_the_command_line(folders: Path, tmp_path: Path) -> None:
    import argparse

    from penstock.config import add_arguments

    parser = argparse.ArgumentParser()
    add_arguments(parser, model_positional=True, server=True)
    words = [
        str(nano()),
        "--enable-lora",
        "--lora-modules",
        f"a={folders}/tales",
        f"b={folders}/poems",
        "--max-loras=2",
    ]
    config = serve_from_args(parser.parse_args(words), {})
    assert config.server.lora_modules == f"a={folders}/tales b={folders}/poems"
    assert config.engine.lora.max_loras == 2
    for text, sentence in (
        ("a", "name=path is needed"), ("a=x a=y", "names 'a' twice"), ("{", "is no JSON"),
        ('{"name": "a"}', "without name or path"), ('[{"name": 1, "path": "x"}]', "an object with name and path"),
        (f"a={tmp_path}/nothing", "is no folder"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"lora_modules: .*{sentence}"), LiveServer(
            serve_from_kwargs(model=str(nano()), port=0, ops="ref", max_model_len=64, lora_modules=text,
                              engine_in_process=True)
        ):  # fmt: skip
            pass


def test_what_does_not_go_with_adapters_is_refused(folders: Path) -> None:
    llm = LLM(nano(), ops="ref", max_model_len=64)
    with pytest.raises(InputError, match="serves no adapters; start it with enable_lora"):
        llm.generate("Hi", lora_request=LoRARequest("a", 1, str(folders / "tales")))
    with pytest.raises(ConfigError, match="max_cpu_loras: 2 adapters in memory are fewer than the max_loras 3"):
        LLM(nano(), enable_lora=True, max_loras=3, max_cpu_loras=2)
    for more in ({"weight_memory_bytes": 1 << 20}, {"packed_weights": "streamed"}, {"expert_memory_bytes": 1 << 20}):
        with pytest.raises(ConfigError, match="weights that are read while others compute"):
            LLM(nano(), enable_lora=True, **more)
    with pytest.raises(ConfigError, match=r"kv_allocator: modules computes texts again .*enable_lora"):
        LLM(nano(), enable_lora=True, ops="ref", max_model_len=64, kv_allocator="modules")
    with pytest.raises(ConfigError, match="kv_offload_format hidden"):
        LLM(nano(), enable_lora=True, kv_offload_format="hidden")


TOOL = {"type": "function", "function": {"name": "look", "parameters": {
    "type": "object", "properties": {"place": {"type": "string", "maxLength": 12}, "depth": {"enum": [1, 2, 3]}},
    "required": ["place", "depth"], "additionalProperties": False,
}}}  # fmt: skip


def test_J25_grammars_and_tool_calls_hold_for_rows_of_many_adapters(served: httpx.Client) -> None:
    """Bound rows of three models in the same steps, each with a grammar of its own, or a call that must be made: each
    is what it is alone, and fits."""
    chat = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "max_tokens": 60}
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}, "required": ["name"]}
    asked: list[tuple[str, dict[str, Any]]] = []
    for name in ("nano", "tales", "poems"):
        asked += [
            ("/v1/completions", ASK | {"model": name, "max_tokens": 12, "ignore_eos": False,
                                       "structured_outputs": {"regex": "[a-z]{3,6}-[0-9]{2}"}}),
            ("/v1/chat/completions", chat | {"model": name, "response_format": {
                "type": "json_schema", "json_schema": {"name": "x", "schema": schema | {"additionalProperties": False}},
            }}),
            ("/v1/chat/completions", chat | {"model": name, "tools": [TOOL], "tool_choice": {
                "type": "function", "function": {"name": "look"}}}),
        ]  # fmt: skip

    def answer(one: tuple[str, dict[str, Any]]) -> Any:
        got = served.post(one[0], json=one[1])
        assert got.status_code == 200, got.text
        (choice,) = got.json()["choices"]
        if "message" not in choice:
            return choice["text"]
        calls = choice["message"].get("tool_calls")
        return calls[0]["function"] if calls else choice["message"]["content"]

    alone = [answer(one) for one in asked]
    with ThreadPoolExecutor(len(asked)) as pool:
        assert list(pool.map(answer, asked)) == alone
    for n in range(3):
        text, shaped, call = alone[3 * n : 3 * n + 3]
        assert re.fullmatch("[a-z]{3,6}-[0-9]{2}", text)
        assert set(json.loads(shaped)) == {"name"}
        assert call["name"] == "look"
        assert json.loads(call["arguments"])["depth"] in (1, 2, 3)
    assert len({str(alone[n::3]) for n in range(3)}) == 3
    assert len({str(alone[3 * n : 3 * n + 3]) for n in range(3)}) == 3, "each adapter says something else"
