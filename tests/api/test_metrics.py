"""/metrics: the names that dashboards, autoscalers and gateways know, and numbers that are true."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.base.clock import VirtualClock
from penstock.base.errors import ConfigError
from penstock.core.messages import EngineInfo, EngineSnapshot, Outputs
from penstock.engine.client import Tally
from penstock.launch import remote_store
from penstock.launch.block_server import BlockServer, MemoryShelf, listen
from penstock.runner.shared_secret import make_secret, read_secrets
from penstock.server.distribution import Distribution
from penstock.server.live import LiveServer
from penstock.server.observation.stats import Stats
from tests.api.watch import CHAT, COMPLETIONS, Endings, grown, on_loop, scrape, small

BOTH = {
    "num_requests_running": "gauge", "num_requests_waiting": "gauge", "num_requests_waiting_by_reason": "gauge",
    "kv_cache_usage_perc": "gauge", "cache_config_info": "gauge", "prefix_cache_queries": "counter",
    "prefix_cache_hits": "counter", "num_preemptions": "counter", "prompt_tokens": "counter",
    "prompt_tokens_cached": "counter", "prompt_tokens_by_source": "counter", "generation_tokens": "counter",
    "admission_rejections": "counter", "iteration_tokens_total": "histogram",
    "time_to_first_token_seconds": "histogram", "inter_token_latency_seconds": "histogram",
    "request_time_per_output_token_seconds": "histogram", "e2e_request_latency_seconds": "histogram",
    "request_queue_time_seconds": "histogram", "request_prefill_time_seconds": "histogram",
    "request_decode_time_seconds": "histogram", "request_inference_time_seconds": "histogram",
    "request_prompt_tokens": "histogram", "request_generation_tokens": "histogram",
    "request_max_num_generation_tokens": "histogram", "request_params_n": "histogram",
    "request_params_max_tokens": "histogram", "request_num_preemptions": "histogram",
    "request_prefill_kv_computed_tokens": "histogram",
}  # fmt: skip
NAMES = {prefix + name: kind for name, kind in BOTH.items() for prefix in ("vllm:", "penstock:")} | {
    "vllm:request_success": "counter", "vllm:engine_sleep_state": "gauge", "penstock:saturation": "gauge",
    "penstock:predicted_wait_seconds": "gauge", "penstock:predicted_ttft_seconds": "gauge",
    "penstock:memory_bytes": "gauge", "penstock:engine_restarts": "counter", "penstock:requests_aborted": "counter",
    "penstock:requests_refused": "counter", "penstock:request_errors": "counter", "penstock:request_replays": "counter",
    "penstock:prompt_compression_seconds": "histogram", "penstock:prompt_compression_tokens": "counter",
    "penstock:prompt_compressions": "counter", "penstock:energy_joules": "counter",
    "penstock:prefill_seconds": "counter", "penstock:decode_seconds": "counter", "penstock:qoe": "histogram",
}  # fmt: skip


@pytest.fixture(scope="module")
def watched() -> Iterator[LiveServer]:
    with small() as server:
        yield server


def complete(live: LiveServer, **body: Any) -> dict[str, Any]:
    asked = {
        "model": "nano",
        "prompt": "Once upon a time",
        "max_tokens": 5,
        "temperature": 1,
        "ignore_eos": True,
    } | body
    answer = httpx.post(live.url + COMPLETIONS, json=asked, timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_every_name_has_its_kind_and_the_labels_model_name_and_engine(watched: LiveServer) -> None:
    answer = httpx.get(watched.url + "/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    assert {name: families[name].type for name in NAMES if name in families} == NAMES
    for name, family in families.items():
        if not name.startswith(("process_", "penstock_engine_process_")):
            for sample in family.samples:
                assert sample.labels["model_name"] == "nano", name
                assert sample.labels["engine"] == "0", name
    assert {"process_resident_memory_bytes", "process_open_fds"} <= set(families)


def test_one_request_is_counted_once(watched: LiveServer) -> None:
    complete(watched)
    before = scrape(watched.url)
    usage = complete(watched, n=2, max_tokens=5)["usage"]
    more = grown(before, scrape(watched.url))
    for prefix in ("vllm:", "penstock:"):
        assert more[prefix + "prompt_tokens_total"] == usage["prompt_tokens"]
        assert more[prefix + "generation_tokens_total"] == usage["completion_tokens"] == 10
        assert more[prefix + "request_generation_tokens_sum"] == 10
        assert more[prefix + "request_max_num_generation_tokens_sum"] == 5
        assert more[prefix + "request_params_n_sum"] == 2
        assert more[prefix + "inter_token_latency_seconds_count"] == 8  # four gaps in each of two samples
        for once in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time",
                     "request_decode_time", "request_inference_time", "request_time_per_output_token"):  # fmt: skip
            assert more[f"{prefix}{once}_seconds_count"] == 1, once
        queue, prefill = (
            more[prefix + "request_queue_time_seconds_sum"],
            more[prefix + "request_prefill_time_seconds_sum"],
        )
        assert queue + prefill == pytest.approx(more[prefix + "time_to_first_token_seconds_sum"])
        both = prefill + more[prefix + "request_decode_time_seconds_sum"]
        assert both == pytest.approx(more[prefix + "request_inference_time_seconds_sum"])
        steps = more[prefix + "iteration_tokens_total_count"]
        assert steps == more["penstock:engine_steps_total"] >= 5
        assert more[prefix + "iteration_tokens_total_sum"] == more["penstock:scheduled_tokens_total"]
    assert more["vllm:request_success_total{finished_reason=length}"] == 2
    assert more["penstock:requests_total{ending=length,endpoint=completions}"] == 1
    assert more["penstock:tenant_total{kind=generation_tokens,tenant=default}"] == 10


def test_K10_energy_grows_with_time_and_work_and_says_where_it_comes_from() -> None:
    with small(power_watts="10:30") as live:
        complete(live, max_tokens=20)
        first = scrape(live.url)
        name = "penstock:energy_joules_total{source=model}"
        assert first[name] > 0
        complete(live, max_tokens=20)
        more = grown(first, scrape(live.url))
        busy_s = more["penstock:prefill_seconds_total"] + more["penstock:decode_seconds_total"]
        assert more["penstock:decode_seconds_total"] > 0
        assert more[name] > 20 * busy_s  # what work adds, and idling besides
        began = time.perf_counter()
        idle = scrape(live.url)[name]
        time.sleep(0.2)
        passed_s = time.perf_counter() - began
        assert 0 < scrape(live.url)[name] - idle == pytest.approx(10 * passed_s, rel=0.5)


@pytest.mark.parametrize("wrong", ["5", "hot", "9:1"])
def test_watts_that_are_none_are_one_sentence_before_anything_is_loaded(wrong: str) -> None:
    with pytest.raises(ConfigError, match=r"power_watts: .* is not IDLE:LOAD in watts"), small(power_watts=wrong):
        pass


def test_cached_tokens_are_counted_where_dashboards_look(watched: LiveServer) -> None:
    prompt = "Seven ducks swam over the pond, and then seven more came after them. " * 4
    complete(watched, prompt=prompt, max_tokens=1)
    before = scrape(watched.url)
    usage = complete(watched, prompt=prompt, max_tokens=1)["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached >= 32
    more = grown(before, scrape(watched.url))
    assert more["vllm:prefix_cache_hits_total"] == cached
    assert more["vllm:prompt_tokens_cached_total"] == cached
    assert more["vllm:prompt_tokens_by_source_total{source=local_cache_hit}"] == cached
    computed = usage["prompt_tokens"] - cached
    assert more["vllm:prompt_tokens_by_source_total{source=local_compute}"] == computed
    assert more["vllm:request_prefill_kv_computed_tokens_sum"] == computed


def test_a_client_that_goes_away_is_an_abort_with_its_reason(watched: LiveServer) -> None:
    endings = Endings(watched)
    before = scrape(watched.url)
    body = {"model": "nano", "messages": [{"role": "user", "content": "Hi"}], "stream": True, "max_tokens": 400,
            "ignore_eos": True}  # fmt: skip
    with httpx.stream("POST", watched.url + CHAT, json=body, timeout=30) as answer:
        lines = answer.iter_lines()  # dropping it would close the connection
        next(lines)
        running = scrape(watched.url)
    endings.wait()
    more = grown(before, scrape(watched.url))
    assert running["penstock:live_requests"] == 1
    assert more["penstock:requests_aborted_total{reason=client_gone}"] == 1
    assert more["vllm:request_success_total{finished_reason=abort}"] == 1


def test_error_answers_are_counted_by_status(watched: LiveServer) -> None:
    before = scrape(watched.url)
    httpx.post(watched.url + COMPLETIONS, json={"model": "another", "prompt": "x"})
    httpx.post(watched.url + COMPLETIONS, json={"model": "nano", "prompt": "x", "temperature": "hot"})
    httpx.get(watched.url + "/nowhere")
    more = grown(before, scrape(watched.url))
    assert more["penstock:request_errors_total{status=404}"] == 2
    assert more["penstock:request_errors_total{status=400}"] == 1


def test_refusals_are_counted_by_reason(watched: LiveServer) -> None:
    server = watched.server
    assert server is not None
    before = scrape(watched.url)
    on_loop(watched, lambda: setattr(server.service, "draining", True))
    try:
        assert httpx.post(watched.url + COMPLETIONS, json={"model": "nano", "prompt": "x"}).status_code == 503
        assert scrape(watched.url)["penstock:draining"] == 1
    finally:
        on_loop(watched, lambda: setattr(server.service, "draining", False))
    assert grown(before, scrape(watched.url))["penstock:requests_refused_total{reason=shutting_down}"] == 1


def test_memory_is_given_by_subsystem(watched: LiveServer) -> None:
    found = scrape(watched.url)
    assert found["penstock:memory_bytes{subsystem=weights}"] > 1e6
    info = watched.server and watched.server.client.info
    assert info
    assert found[f"penstock:weight_bytes{{format={info.dtype}}}"] == found["penstock:memory_bytes{subsystem=weights}"]
    assert [found[f"penstock:packed_file{{state={state}}}"] for state in ("read", "made", "none")] == [0, 0, 1]
    per_block = found["penstock:memory_bytes{subsystem=kv}"] / info.num_blocks
    assert per_block == int(per_block) > 0


def test_two_servers_do_not_mix_their_numbers(watched: LiveServer) -> None:
    with small(served_model_name="other") as second:
        complete(second, model="other", max_tokens=3)
        assert scrape(second.url)["vllm:generation_tokens_total"] == 3
        before = scrape(watched.url)
        complete(second, model="other", max_tokens=3)
        after = scrape(watched.url)
    assert before["vllm:generation_tokens_total"] == after["vllm:generation_tokens_total"]


def test_counters_of_the_engine_do_not_fall_when_it_is_restarted() -> None:
    client: Any = SimpleNamespace(info=EngineInfo(vocab_size=8, max_model_len=64), snapshot=EngineSnapshot(),
                                  on_message=[], on_finish=[])  # fmt: skip
    stats = Stats(client, VirtualClock())

    def say(epoch: int, steps: float, tokens: float) -> None:
        counters = {"num_steps": steps, "num_scheduled_tokens": tokens}
        stats.on_message(Outputs(epoch, [], EngineSnapshot(counters=counters)), Tally())

    seen = []
    for epoch, steps, tokens in ((0, 4.0, 40.0), (0, 10.0, 100.0), (1, 1.0, 3.0), (1, 2.0, 6.0), (3, 5.0, 50.0)):
        say(epoch, steps, tokens)
        seen.append(stats.counter("num_scheduled_tokens"))
    assert seen == [40, 100, 103, 106, 156]
    assert stats.counter("num_steps") == stats.step_tokens.num == 17
    assert stats.step_tokens.total == pytest.approx(156)


def test_buckets_are_those_of_prometheus() -> None:
    bounds = (0.001, 0.5, 1, 2.5, 10)
    ours, theirs = Distribution(bounds), prometheus_client.Histogram("x", "x", buckets=bounds, registry=None)
    rng = random.Random(5)
    for value in [*bounds, 0.0, 99.0, *(rng.expovariate(0.5) for _ in range(500))]:
        ours.observe(value)
        theirs.observe(value)
    samples = [s for metric in theirs.collect() for s in metric.samples]
    assert ours.cumulative() == [(s.labels["le"], s.value) for s in samples if s.name == "x_bucket"]
    assert ours.total == pytest.approx(next(s.value for s in samples if s.name == "x_sum"))


def test_a_killed_engine_is_counted_and_nothing_falls(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock.request")
    with small(engine_in_process=False) as live:
        assert live.server is not None
        client = live.server.client
        complete(live)
        before = scrape(live.url)
        assert before["penstock_engine_process_resident_memory_bytes"] > 1e7
        endings = Endings(live)
        body = {"model": "nano", "prompt": "Once", "max_tokens": 60, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", live.url + COMPLETIONS, json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            assert client.info is not None
            os.kill(client.info.pid, signal.SIGKILL)
            assert sum("data: [DONE]" in line for line in lines) == 1
        endings.wait()
        after = scrape(live.url)
    assert after["penstock:engine_restarts_total"] == 1
    assert after["penstock:request_replays_total"] == 1
    assert after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"] == 60
    assert after["vllm:time_to_first_token_seconds_count"] == 2
    fallen = [name for name in before if "_total" in name and after[name] < before[name]]
    assert set(fallen) <= {"penstock_engine_process_cpu_seconds_total"}  # that is another process now
    assert after["penstock:engine_steps_total"] > before["penstock:engine_steps_total"]
    line = json.loads([r.getMessage() for r in caplog.records if r.name == "penstock.request"][-1])
    assert (line["replays"], line["generated_tokens"], line["status"]) == (1, 60, 200)


def until_told(live: LiveServer, name: str) -> dict[str, float]:
    """The numbers, once one of this name is above zero: an answer may come before the engine's next snapshot."""
    until = time.monotonic() + 20
    while True:
        found = scrape(live.url)
        if time.monotonic() > until or any(value for each, value in found.items() if each.startswith(name)):
            return found
        time.sleep(0.05)


def test_tiers_outside_are_told_by_name_and_misses_by_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_store, "LOOK_S", 1e9)  # or it hears in time that the server is gone, and misses nothing
    secret = tmp_path / "secret"
    assert make_secret(secret)
    blocks = BlockServer(listen("127.0.0.1:0", anywhere=False), read_secrets(secret).connection, MemoryShelf(), 1 << 30)
    thread = threading.Thread(target=blocks.run, daemon=True)
    thread.start()
    port = blocks.sock.getsockname()[1]
    settings = {"kv_offload": f"disk:{tmp_path / 'kv'} remote:127.0.0.1:{port}", "kv_offload_secret_file": str(secret)}
    prompts = [word + " ducks swam over the pond, and then seven more came. " * 4 for word in ("Seven", "Nine")]
    with small(**settings) as live:
        for prompt in prompts:
            complete(live, prompt=prompt, max_tokens=1)
        until = time.monotonic() + 20
        while blocks.num_blocks < 4 and time.monotonic() < until:
            time.sleep(0.05)
    shutil.rmtree(tmp_path / "kv")
    with small(**settings) as live:
        complete(live, prompt=prompts[0], max_tokens=1)
        found = until_told(live, "penstock:kv_tier_read_blocks_total{tier=remote}")
        assert found["penstock:kv_tier_read_blocks_total{tier=remote}"] >= 2
        assert found["penstock:kv_tier_read_blocks_total{tier=disk}"] == 0
        assert found["penstock:kv_tier_bytes{tier=remote}"] > 0
        assert found["penstock:kv_tier_read_bytes_total{tier=remote}"] > 0
        assert found["penstock:kv_tier_hit_tokens_total{tier=remote}"] > 0
        assert not any(name.startswith(("penstock:store_", "penstock:tier_")) for name in found), (
            "one family for all tiers"
        )
        blocks.close()
        thread.join(5)
        complete(live, prompt=prompts[1], max_tokens=1)
        name = "penstock:kv_tier_misses_total"
        misses = {found: value for found, value in until_told(live, name).items() if found.startswith(name)}
        assert sum(misses.values()) >= 2
        assert all("tier=remote" in each for each in misses)
        assert {each.partition("reason=")[2].partition(",")[0] for each in misses} <= {"lost", "unreachable"}
