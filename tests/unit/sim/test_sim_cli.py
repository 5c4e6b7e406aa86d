"""`penstock sim` as a person types it."""

from __future__ import annotations

import json
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from penstock.sim.specs import SPECS, find_spec
from tests.command import penstock, process
from tests.shared import shared

TRACE = "synthetic:poisson?rate=20&requests=30&prompt=100&output=10&shared=64&groups=3"


def sim(*args: str) -> CompletedProcess[str]:
    return penstock("sim", *args)


def test_one_run(tmp_path: Path) -> None:
    page, numbers = tmp_path / "x.html", tmp_path / "x.json"
    done = process("sim", "--trace", TRACE, "--device", "h100-sxm", "--out", str(page), "--json", str(numbers))
    assert done.returncode == 0, done.stderr
    assert "TTFT p99" in done.stdout
    assert done.stderr.splitlines() == [f"wrote {numbers}", f"wrote {page}"]
    run = json.loads(numbers.read_text())["runs"][0]
    assert run["metrics"]["requests"]["finished"] == 30
    assert run["metrics"]["prefix_cache"]["hit_tokens"] > 0
    assert run["metrics"]["qoe"] == {"mean": 1.0, "p10": 1.0, "p50": 1.0}
    assert run["settings"]["model"] == "llama-3.1-8b"
    assert "llama-3.1-8b on h100-sxm" in page.read_text()


def test_K07_what_readers_expect_can_be_said(tmp_path: Path) -> None:
    numbers = tmp_path / "x.json"
    given = ("--expected-ttft", "0", "--expected-tds", "1000", "--json", str(numbers))
    done = sim("--trace", TRACE, "--device", "h100-sxm", *given)
    assert done.returncode == 0, done.stderr
    assert "quality of experience, mean" in done.stdout
    assert 0 < json.loads(numbers.read_text())["runs"][0]["metrics"]["qoe"]["mean"] < 0.9


def test_lists_are_compared(tmp_path: Path) -> None:
    numbers = tmp_path / "x.json"
    done = sim(
        "--trace", TRACE, "--device", "h100-sxm", "--scheduling-policy", "fcfs,prefill-first",
        "--max-num-batched-tokens", "64,1k", "--max-num-seqs", "16", "--limit", "10", "--json", str(numbers),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    runs = json.loads(numbers.read_text())["runs"]
    assert [r["label"] for r in runs] == [
        "fcfs, tokens 64", "fcfs, tokens 1000", "prefill-first, tokens 64", "prefill-first, tokens 1000",
    ]  # fmt: skip
    assert {r["settings"]["max_num_seqs"] for r in runs} == {16}
    assert {r["metrics"]["requests"]["finished"] for r in runs} == {10}


def test_a_config_is_model_enough(tmp_path: Path) -> None:
    config = shared("data", "configs", "model", "meta-llama--Llama-3.1-8B.config.json")
    numbers = tmp_path / "x.json"
    done = sim("--trace", TRACE, "--device", "h100-sxm", "--model", str(config), "--json", str(numbers))
    assert done.returncode == 0, done.stderr
    settings = json.loads(numbers.read_text())["runs"][0]["settings"]
    assert settings["parameters"] == f"{find_spec('llama-3.1-8b').num_params:,}"


def test_built_in_specs_are_the_published_ones() -> None:
    assert {name: round(spec.num_params / 1e9, 2) for name, spec in SPECS.items()} == {
        "llama-3.2-1b": 1.24, "llama-3.2-3b": 3.21, "llama-3.1-8b": 8.03, "llama-3.1-70b": 70.55,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--device", "h1000"], "h100-sxm"),
        (["--device", "l4"], "max_model_len"),
        (["--device", "h100-sxm", "--scheduling-policy", "fcfs,magic"], "magic"),
        (["--device", "h100-sxm", "--block-size", "16,x"], "not an integer"),
        (["--device", "h100-sxm", "--spec", "gpt-5"], "llama-3.1-8b"),
        (["--device", "h100-sxm", "--spec", "llama-3.1-8b", "--model", "x"], "one of them"),
        (["--device", "h100-sxm", "--arrivals", "poisson"], "rate"),
        (["--device", "h100-sxm", "--limit", "0"], "at least 1"),
        (["--device", "h100-sxm", "--scale-rate", "-1"], "positive"),
        (["--device", "h100-sxm", "--sim-seed", "-1"], "negative"),
        (["--device", "h100-sxm", "--out", "/no/such/folder/x.html"], "folder"),
        (["--device", "h100-sxm", "--block-size", ",".join(["16"] * 40)], "combinations"),
        (["--device", "h100-sxm", "--trace", "/no/such/trace"], "cannot be read"),
        ([], "--device"),
    ],
)
def test_bad_input_is_one_line_that_names_what_to_change(args: list[str], says: str) -> None:
    done = sim("--trace", TRACE, *args)
    assert done.returncode in (1, 2)
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("penstock: error: ")
    assert says in lines[0]


def test_lengths_without_times_need_an_arrival_process(tmp_path: Path) -> None:
    trace = tmp_path / "lengths.csv"
    trace.write_text("num_prefill_tokens,num_decode_tokens\n30,4\n40,5\n")
    refused = sim("--trace", str(trace), "--device", "h100-sxm")
    assert refused.returncode == 1
    assert "--arrivals" in refused.stderr
    assert sim("--trace", str(trace), "--device", "h100-sxm", "--arrivals", "poisson:rate=3").returncode == 0


def test_knobs_of_a_policy_belong_to_its_name() -> None:
    from penstock.cli.sim import _several

    read = _several(str)
    assert read("fcfs,dynamic:timeout_s=0.5,size=32,static") == ["fcfs", "dynamic:timeout_s=0.5,size=32", "static"]
    assert read("dynamic:timeout_s=0.5,size=32") == "dynamic:timeout_s=0.5,size=32"
    assert _several(int)("1,2") == [1, 2]
