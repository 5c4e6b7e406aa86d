"""`penstock bench latency` and `throughput`: vLLM's names, and the amounts that were asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.bench import offline
from penstock.cli.main import main
from penstock.launch.bundled import bundled_model
from penstock.launch.llm import LLM

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


def test_K12_both_tell_of_drafts_where_there_is_speculation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "r.json")
    sizes = ["--input-len", "8", "--output-len", "30"]
    drafts = ["-sc", json.dumps({"method": "ngram", "controller": "fixed"})]
    few = ["--batch-size", "2", "--num-iters", "2", "--num-iters-warmup", "1"]
    for kind, flags in (("latency", few), ("throughput", ["--num-prompts", "4"])):
        assert main(["bench", kind, *MODEL, *sizes, *flags, *drafts, "--output-json", file]) == 0
        found = json.loads(Path(file).read_text())
        num, accepted = found["spec_decode_num_drafts"], found["spec_decode_accepted_tokens"]
        assert 0 < num <= found["spec_decode_draft_tokens"]
        assert found["spec_decode_acceptance_length"] == pytest.approx(1 + accepted / num)
        assert sum(found["spec_decode_per_position_acceptance_rates"]) == pytest.approx(accepted / num)
        assert found["spec_decode_draft_share"] + found["spec_decode_verify_share"] == pytest.approx(1)
        assert "Mean accepted length" in capsys.readouterr().out
    assert main(["bench", "throughput", *MODEL, *sizes, "--num-prompts", "1", "--output-json", file]) == 0
    assert "spec_decode" not in Path(file).read_text()


def test_drafts_of_the_warm_up_do_not_count() -> None:
    config = {"method": "ngram", "controller": "fixed"}
    llm = LLM(MODEL[0], max_model_len=128, num_gpu_blocks_override=32, speculative_config=config)
    found = offline.latency(llm, input_len=8, output_len=30, batch_size=2, num_iters=1, num_iters_warmup=2)
    assert 0 < found["spec_decode_num_drafts"] < offline.acceptance_of(llm).num_drafts
