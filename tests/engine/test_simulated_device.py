"""A simulated device: real engines and servers, made-up tokens, the pace of a formula."""

from __future__ import annotations

import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from penstock import LLM, SamplingParams
from penstock.base.errors import ConfigError, InputError
from penstock.config import from_kwargs, serve_from_kwargs
from penstock.core.sampling import StructuredOutputs
from penstock.launch.build import plan_of
from penstock.server.live import LiveServer

STEP_S = 0.02
DEVICE = f"""
name = "slow"
flops_per_s = {{ float32 = 1e15, bfloat16 = 1e15 }}
read_bytes_per_s = 1e15
memory_bytes = 8000000000
host_copy_bytes_per_s = 1e12
step_overhead_s = {STEP_S}
"""


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("device") / "slow.toml"
    path.write_text(DEVICE)
    return str(path)


def test_tokens_come_at_the_pace_of_the_device_and_are_as_many_as_asked_for(device: str) -> None:
    llm = LLM(model="nano", simulated_device=device, max_model_len=256)
    began_s = time.perf_counter()
    first, second = llm.generate(["one", "another"], SamplingParams(max_tokens=20, temperature=1.0, logprobs=0))
    took_s = time.perf_counter() - began_s
    assert 20 * STEP_S <= took_s < 60 * STEP_S
    for out in (first, second):
        assert len(out.outputs[0].token_ids) == 20
        assert out.outputs[0].text
        assert out.outputs[0].logprobs is not None
        assert len(out.outputs[0].logprobs) == 20
    assert any(d.name == "simulated_device" and d.value == device for d in llm.engine.decisions)


def test_a_device_of_a_data_sheet_plans_its_own_memory() -> None:
    llm = LLM(model="nano", simulated_device="h100-sxm")
    assert llm.engine.plan.max_num_seqs == 256
    assert llm.engine.plan.kv_bytes > 1 << 30
    (out,) = llm.generate(["a longer text than one token"], SamplingParams(max_tokens=4, prompt_logprobs=0))
    assert len(out.outputs[0].token_ids) == 4
    assert out.prompt_logprobs is not None
    assert len(out.prompt_logprobs) == len(out.prompt_token_ids), "none for the token that follows the prompt"


def test_engines_have_a_device_each_wherever_they_are() -> None:
    alone = plan_of(from_kwargs({}, model="nano", simulated_device="h100-sxm"))
    several = {"data_parallel_size": 3, "data_parallel_size_local": 2}
    plan = plan_of(from_kwargs({}, model="nano", simulated_device="h100-sxm", **several))
    assert (plan.kv_bytes, plan.max_num_seqs) == (alone.kv_bytes, alone.max_num_seqs)


def test_what_is_computed_cannot_be_had(device: str, tmp_path: Path) -> None:
    for settings, said in (
        ({"tensor_parallel_size": 2}, "tensor_parallel_size: a simulated_device computes nothing"),
        ({"kv_offload": f"disk:{tmp_path},1GiB"}, "kv_offload: a simulated_device"),
        ({"speculative_config": '{"method": "ngram"}'}, "speculative_config: a simulated_device"),
    ):
        with pytest.raises(ConfigError, match=said):
            from_kwargs({}, model="nano", simulated_device=device, **settings)
    with pytest.raises(ConfigError, match="unknown device 'h100'; choose one of"):
        LLM(model="nano", simulated_device="h100")
    llm = LLM(model="nano", simulated_device=device, max_model_len=64)
    with pytest.raises(InputError, match="made up and follow no grammar"):
        llm.generate(["x"], SamplingParams(max_tokens=4, structured_outputs=StructuredOutputs(regex="a+")))


@pytest.mark.skipif(sys.platform != "linux", reason="engines are killed by signals")
def test_engines_behind_a_server_work_at_the_same_time_and_a_killed_ones_streams_go_on(device: str) -> None:
    config = serve_from_kwargs(
        model="nano", port=0, data_parallel_size=2, route_policy="round-robin", simulated_device=device,
        max_num_seqs=1, max_model_len=256, request_log=False,
    )  # fmt: skip
    body = {"prompt": "Two at once", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    with LiveServer(config) as live:
        assert live.server is not None
        client = live.server.client

        def ask() -> str:
            answer = httpx.post(live.url + "/v1/completions", json=body, timeout=120)
            assert answer.status_code == 200, answer.text
            return str(answer.json()["choices"][0]["text"])

        with ThreadPoolExecutor(2) as pool:
            asked = [pool.submit(ask) for _ in range(2)]
            while sum(replica.snapshot.num_running for replica in client.replicas) < 2:
                time.sleep(0.005)
            os.kill(client.replicas[0].link.pid, signal.SIGKILL)  # type: ignore[attr-defined]
            texts = [one.result() for one in asked]
    assert len(set(texts)) == 1
    assert texts[0]
