"""`penstock bench serve` against a real server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from penstock.bench.http import HttpClient
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
