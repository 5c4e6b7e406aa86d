"""`penstock bench latency` and `throughput`: vLLM's names, and the amounts that were asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.launch.bundled import bundled_model

MODEL = [str(bundled_model("nano")), "--ops", "blas", "--max-model-len", "128", "--num-gpu-blocks-override", "32"]


def test_latency_and_throughput_say_what_was_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "r.json")
    sizes = ["--input-len", "8", "--output-len", "3"]
    few = ["--batch-size", "1", "--num-iters", "3", "--num-iters-warmup", "1"]
    assert main(["bench", "latency", *MODEL, *sizes, *few, "--output-json", file]) == 0
    found = json.loads(Path(file).read_text())
    assert len(found["latencies"]) == 3
    assert found["avg_latency"] == pytest.approx(sum(found["latencies"]) / 3)
    assert set(found["percentiles"]) == {"10", "25", "50", "75", "90", "99"}
    assert main(["bench", "throughput", *MODEL, *sizes, "--num-prompts", "2", "--output-json", file]) == 0
    found = json.loads(Path(file).read_text())
    assert (found["num_requests"], found["total_num_tokens"], found["total_output_tokens"]) == (2, 22, 6)
    assert found["tokens_per_second"] == pytest.approx(22 / found["elapsed_time"])
    assert "Throughput" in capsys.readouterr().out
