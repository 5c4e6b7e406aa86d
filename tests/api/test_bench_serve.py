"""`penstock bench serve` against a real server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.bench import serve
from penstock.bench.http import HttpClient
from penstock.bench.metrics import Outcome
from penstock.cli.main import main
from penstock.server.live import LiveServer

SMALL = ["--random-input-len", "20", "--random-output-len", "5", "--ignore-eos", "--ready-check-timeout-sec", "20"]


def bench(live: LiveServer, folder: Path, *flags: str, status: int = 0) -> dict[str, Any]:
    command = ["bench", "serve", "--base-url", live.url, "--result-dir", str(folder), "--result-filename", "r.json"]
    assert main([*command, *SMALL, *flags]) == status
    found: dict[str, Any] = json.loads((folder / "r.json").read_text())
    return found


def test_figures_have_vllm_s_names_and_add_up(
    live: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = bench(
        live, tmp_path, "--num-prompts", "6", "--request-rate", "50", "--goodput", "ttft:100000", "e2el:100000",
        "--verify", "2", "--save-detailed", "--random-prefix-len", "64", "--max-concurrency", "2",
    )  # fmt: skip
    assert (found["completed"], found["failed"], found["errors_by_kind"]) == (6, 0, {})
    assert found["total_input_tokens"] == 6 * 84  # exact: the prompts are ids of the server's own tokenizer
    assert found["total_output_tokens"] == 30
    assert found["request_goodput"] == found["request_throughput"] > 0
    assert found["max_concurrent_requests"] <= 2
    assert found["prefix_cache_hit_rate"] > 0.1
    assert (found["verified"], found["verify_mismatches"]) == (2, 0)
    for metric in ("ttft", "tpot", "itl", "e2el"):
        for column in ("mean", "median", "std", "p50", "p90", "p99"):
            assert found[f"{column}_{metric}_ms"] >= 0
    for ttft, itls, whole in zip(found["ttfts"], found["itls"], found["latencies"], strict=True):
        assert ttft + sum(itls) == pytest.approx(whole)
    assert found["output_throughput"] == pytest.approx(30 / found["duration"])
    assert "TTFT" in capsys.readouterr().out


def test_chat_asks_in_words_and_errors_are_counted_by_kind(live: LiveServer, tmp_path: Path) -> None:
    found = bench(live, tmp_path, "--num-prompts", "2", "--backend", "openai-chat")
    assert (found["completed"], found["backend"]) == (2, "openai-chat")
    assert found["total_input_tokens"] > 20
    found = bench(live, tmp_path, "--num-prompts", "3", "--random-input-len", "5000", status=1)
    assert found["errors_by_kind"] == {"http 400": 3}
    assert (found["completed"], found["mean_ttft_ms"]) == (0, 0.0)


def test_a_server_that_is_not_there_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "serve", "--base-url", "http://127.0.0.1:9", "--model", "m", "--ready-check-timeout-sec", "0.1"]
    assert main(command) == 1
    assert "not ready" in capsys.readouterr().err


def test_connections_are_used_again_and_replaced_if_the_server_closed_them(live: LiveServer) -> None:
    async def ask() -> tuple[int, int]:
        client = HttpClient(live.url)
        for _ in range(3):
            assert (await client.call("GET", "/v1/models")).status == 200
        before = client.num_connects
        client._idle[0].writer.close()  # as a server does that waited long enough
        await client._idle[0].writer.wait_closed()
        assert (await client.call("GET", "/v1/models")).status == 200
        await client.close()
        return before, client.num_connects

    assert asyncio.run(ask()) == (1, 2)


def test_K01_the_ttft_of_each_request_splits_into_queue_prefill_and_network(
    live: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = bench(live, tmp_path, "--num-prompts", "4", "--save-detailed", "--machine-price", "0.1")
    columns = zip(
        found["ttfts"], found["queue_times"], found["prefill_times"], found["network_times"], strict=True
    )  # fmt: skip
    for ttft, *parts in columns:
        assert all(part >= 0 for part in parts)
        assert sum(parts) == pytest.approx(ttft, rel=1e-6)
        assert parts[1] > 0
        assert parts[2] > 0
    for part in ("ttft", "queue", "prefill", "network"):
        assert found[f"p50_{part}_ms"] <= found[f"p90_{part}_ms"] <= found[f"p99_{part}_ms"]
    assert found["phases_s"][0] > 0
    assert found["phases_s"][1] > 0
    assert found["cost"]["split_by"] == "seconds of prefill and decode"
    assert found["energy"]["joules"] > 0
    assert found["energy"]["energy_source"] in ("rapl", "model")
    assert abs(found["decomposition"]["residual"]) < 1
    told = capsys.readouterr().out
    assert "... network" in told
    assert "TTFT + TPOT" in told


def test_usage_tells_times_only_to_those_who_ask(http: httpx.Client) -> None:
    body = {"prompt": "One two three", "max_tokens": 4, "ignore_eos": True, "temperature": 0}
    names = {"queue_time", "prompt_time", "completion_time", "total_time"}
    assert not names & http.post("/v1/completions", json=body).json()["usage"].keys()
    asking = {"X-Request-Times": "1"}
    usage = http.post("/v1/completions", json=body, headers=asking).json()["usage"]
    assert usage["queue_time"] + usage["prompt_time"] + usage["completion_time"] == pytest.approx(usage["total_time"])
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True}}  # fmt: skip
    lines = http.post("/v1/chat/completions", json=chat, headers=asking).text.splitlines()
    last = json.loads([line for line in lines if line.startswith("data: {")][-1].removeprefix("data: "))
    assert names <= last["usage"].keys()
    several = http.post("/v1/completions", json=body | {"prompt": ["a b", "c d e"]}, headers=asking).json()["usage"]
    assert names <= several.keys()


def test_K04_a_sustainable_rate_is_searched_with_prompts_of_its_own_at_every_rate(
    live: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--num-prompts", "64", "--request-rate", "4", "--find-rate", "0.9", "--rate-tolerance", "0.1")
    seen: list[tuple[float, list[Any]]] = []

    async def run(client: Any, target: Any, samples: Any, due_s: list[float], **more: Any) -> Any:
        """A server that answers in time up to 10 requests a second."""
        rate = len(samples) / due_s[-1]
        seen.append((rate, [sample.prompt for sample in samples]))
        late = rate > 10
        return [Outcome(ok=True, due_s=at, ttft_s=9.0 if late else 0.1, latency_s=9.0) for at in due_s], 1.0

    monkeypatch.setattr(serve, "run", run)
    found = bench(live, tmp_path, *flags, "--goodput", "ttft:1000")
    assert 4 <= found["sustainable_rate"] <= 11
    assert len(found["trials"]) == len(seen) >= 3
    rates = [t["rate"] for t in found["trials"]]
    assert rates[:2] == [4, 8]
    assert max(t["rate"] for t in found["trials"] if t["kept"]) == found["sustainable_rate"]
    prompts = [json.dumps(prompt) for _, asked in seen for prompt in asked]
    assert len(set(prompts)) == len(prompts)


def test_senseless_searches_are_one_sentence(live: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["bench", "serve", "--base-url", live.url]
    for flags, said in (
        (["--find-rate"], "give one, such as --request-rate 1"),
        (["--find-rate", "2", "--request-rate", "1"], "a share is above 0 and at most 1"),
        (["--find-rate", "--request-rate", "1", "--num-prompts", "3"], "needs 16 requests"),
        (["--alone", "1"], "3 requests at least"),
        (["--machine-price", "cheap"], "no number (USD an hour)"),
        (["--power", "5"], "IDLE:LOAD"),
    ):
        assert main([*base, *flags]) != 0
        assert said in capsys.readouterr().err.replace("\n", " ")


def test_K20_scenarios_against_a_server(live: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["bench", "mlperf", "--base-url", live.url, *SMALL, "--output-json", str(tmp_path / "r.json"),
              "--ttft-limit", "60000", "--tpot-limit", "60000"]  # fmt: skip
    for scenario, flags, status in (
        ("offline", ["--min-query-count", "3", "--target-qps", "20"], 0),
        ("server", ["--min-query-count", "3", "--target-qps", "20", "--no-early-stopping"], 0),
        ("single-stream", ["--min-query-count", "3"], 1),
    ):
        assert main([*common, "--scenario", scenario, "--min-duration", "0.05", *flags]) == status
        found = json.loads((tmp_path / "r.json").read_text())
        assert found["num_samples"] >= 3
        assert found["failed"] == 0
        assert found["result"] == ("VALID" if status == 0 else "INVALID")
        assert found["metric_value"] > 0
        told = capsys.readouterr().out
        assert "Result is" in told
    assert "ask 64 at least" in " ".join(found["why_invalid"])
