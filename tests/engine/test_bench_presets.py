"""`penstock bench presets` and `penstock features`, as commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.cli.main import main

SMALL = ["nano", "--max-model-len", "128", "--requests", "3", "--input-len", "24", "--output-len", "6"]


def test_presets_are_measured_in_turns_and_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, page = tmp_path / "r.json", tmp_path / "page.md"
    wanted = ["--presets", "orca,lightllm", "--rounds", "2", "--request-rate", "50"]
    wanted += ["--json", str(out), "--out", str(page)]
    assert main(["bench", "presets", *SMALL, *wanted]) == 0
    found = json.loads(out.read_text())["presets"]
    assert list(found) == ["default", "orca", "lightllm"]
    for one in found.values():
        assert one["same_tokens"] is True
        assert len(one["tokens_per_s"]["rounds"]) == 2
        assert 0 < one["ttft_s"]["min"] <= one["ttft_s"]["median"] <= one["mean_latency_s"]["max"]
        assert 0 < one["late_ttft_s"]["min"] <= one["late_ttft_s"]["max"]
        assert len(one["late_per_token_s"]["rounds"]) == 2
    assert found["lightllm"]["features"]["decode"] == "token attention"
    text = page.read_text()
    assert text.startswith("# Presets")
    assert "and as many again that come one by one, 50 a second" in text
    assert "| latency per token over time, ms |" in text


def test_requests_that_come_over_time_say_what_they_say_at_once() -> None:
    """The first token waits for nobody who comes later, and tokens do not depend on when one comes."""
    from penstock.bench.presets import _over_time
    from penstock.config import from_kwargs
    from penstock.core.sampling import SamplingParams
    from penstock.launch.llm import LLM

    llm = LLM.from_config(from_kwargs({}, model="nano", max_model_len=64))
    prompts = [[1, 2, 3, number] for number in range(4, 8)]
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    wanted = [out.outputs[0].token_ids for out in llm.generate([{"prompt_token_ids": p} for p in prompts], params)]
    late = _over_time(llm, [(p, 5) for p in prompts], [0.0, 0.0, 0.3, 2.0])
    assert [said for _, _, said in late] == [list(one) for one in wanted]
    assert all(0 < first_s <= last_s for first_s, last_s, _ in late)
    assert late[0][1] < 2.0


def test_other_tokens_fail_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from penstock.bench import presets

    real, calls = presets._one, []

    def one(*args: object) -> list[list[int]]:
        tokens = real(*args)  # type: ignore[arg-type]
        calls.append(1)
        return tokens if len(calls) == 1 else [[*tokens[0][:-1], -1], *tokens[1:]]

    monkeypatch.setattr(presets, "_one", one)
    assert main(["bench", "presets", *SMALL, "--presets", "orca", "--rounds", "1"]) == 1
    assert "NO" in capsys.readouterr().out


def test_one_that_cannot_run_is_told_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from penstock.base.errors import CapacityError
    from penstock.bench import presets

    real = presets._one

    def one(config: object, *args: object) -> list[list[int]]:
        if config.execution.preset == "orca":  # type: ignore[attr-defined]
            raise CapacityError("the memory is too small")
        return real(config, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(presets, "_one", one)
    assert main(["bench", "presets", *SMALL, "--presets", "orca,lightllm", "--rounds", "1"]) == 0
    told = capsys.readouterr().out
    assert "the memory" in told
    assert "lightllm" in told


@pytest.mark.parametrize(("given", "said"), [
    (["bench", "presets", *SMALL, "--presets", "orcas"], "preset: 'orcas' is unknown"),
    (["bench", "presets", *SMALL, "--preset", "orca"], "--preset: leave it away; --presets names those that run"),
    (["bench", "presets", "nano", "--rounds", "0"], "--rounds, --requests and --input-len must be at least 1"),
    (["bench", "presets", *SMALL, "--request-rate", "0"], "--request-rate: requests a second must be above 0"),
    (["features", "--columns", "kernel"], "--columns: 'kernel' is no column; the columns are"),
    (["features", "--presets", "orca,nothing"], "preset: 'nothing' is unknown"),
    (["features", "--preset", "orca,lightllm"], "preset: orca has"),
])  # fmt: skip
def test_what_is_wrong_is_one_sentence(given: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(given) != 0
    err = capsys.readouterr().err
    assert said in err
    assert "Traceback" not in err


def test_features_of_settings_and_of_presets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["features", "--swap-space", "1"]) == 0
    assert "keys and values to host" in capsys.readouterr().out
    out = tmp_path / "f.json"
    assert main(["features", "--presets", "all", "--columns", "iteration", "--json", str(out)]) == 0
    rows = {row["preset"]: row["iteration"] for row in json.loads(out.read_text())["rows"]}
    assert rows["fastertransformer"] == "no: static"
    assert rows["orca"] == "yes: fcfs"
