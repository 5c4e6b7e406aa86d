"""The command line as a person types it: real processes, real exit codes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from penstock import __version__
from tests.shared import shared


def penstock(*args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", *args], input=stdin, capture_output=True, text=True, timeout=120
    )


def test_version_and_help() -> None:
    assert penstock("--version").stdout == f"penstock {__version__}\n"
    shown = penstock("--help")
    assert shown.returncode == 0
    assert "run" in shown.stdout
    assert "doctor" in shown.stdout
    assert penstock().returncode == 2


def test_run_writes_the_recorded_text() -> None:
    reference = shared("models", "stories260K", "reference_greedy.txt").read_text(encoding="utf-8")
    model = str(shared("models", "stories260K"))
    done = penstock(
        "run", model, "--prompt", "Once upon a time", "--temperature", "0", "--max-tokens", "100", "--stats"
    )
    assert done.returncode == 0
    text = done.stdout.rstrip("\n")
    assert len(text) > 150
    assert reference.startswith(text)
    assert "generated 100 tokens" in done.stderr
    piped = penstock("run", model, "--temperature", "0", "--max-tokens", "100", stdin="Once upon a time")
    assert piped.stdout == done.stdout


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--temperature", "-1"], "temperature"),
        (["--temperature", "nan"], "temperature"),
        (["--temperature", "hot"], "not a number"),
        (["--top-p", "1.1"], "top_p"),
        (["--top-k", "1000000000"], "top_k"),
        (["--max-tokens", "0"], "max_tokens"),
        (["--max-tokens", "1e99"], "max_tokens"),
        (["--max-tokens", "513"], "512"),
        (["--n", "1000000000"], "n must"),
        (["--min-tokens", "9", "--max-tokens", "3"], "min_tokens"),
        (["--sampling-seed", str(2**64)], "seed"),
        (["--stop", ""], "stop"),
        (["--prefix-cache", "magic"], "radix"),
        (["--max-model-len", "513"], "512"),
        (["--max-num-sequences", "3"], "max-num-seqs"),
        (["--chat"], "chat template"),
    ],
)
def test_bad_input_is_one_line_that_names_what_to_change(args: list[str], says: str) -> None:
    done = penstock("run", str(shared("models", "stories260K")), "--prompt", "Once", *args)
    assert done.returncode in (1, 2)
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("penstock: error: ")
    assert says in lines[0]


def test_a_model_that_is_not_there_is_one_line() -> None:
    for name in ("/nowhere/at/all", "org/some-model", ""):
        done = penstock("run", name, "--prompt", "x")
        assert done.returncode == 1
        assert len(done.stderr.splitlines()) == 1


def test_empty_prompt_is_refused() -> None:
    done = penstock("run", str(shared("models", "stories260K")), stdin="")
    assert done.returncode == 1
    assert "prompt" in done.stderr


def test_doctor_lists_the_parts_and_explains_a_model() -> None:
    done = penstock("doctor", str(shared("models", "stories260K")))
    assert done.returncode == 0
    for word in ("radix", "fcfs", "llama", "260,032", "max_model_len"):
        assert word in done.stdout
