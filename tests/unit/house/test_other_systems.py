"""Where there are no kernels (macOS, Windows, other processors) Penstock starts, and answers from its reference."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("other_systems.py")


def on(system: str, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", str(SCRIPT), system, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("system", ["macos", "windows"])
def test_it_starts_and_answers(system: str) -> None:
    assert "usage: penstock" in on(system, "--help").stdout
    done = on(system, "run", "-p", "Once upon a time", "--max-tokens", "5", "--temperature", "0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "Traceback" not in done.stderr
    explained = on(system, "run", "-p", "Once", "--max-tokens", "1", "--explain")
    (ops,) = [line for line in (explained.stdout + explained.stderr).splitlines() if line.startswith("ops = ")]
    assert ops.startswith("ops = ref: "), ops


def test_what_windows_cannot_do_is_said_in_a_sentence() -> None:
    for command in ("serve", "batch"):
        done = on("windows", command, *(["x.jsonl", "-o", "y.jsonl"] if command == "batch" else []))
        assert done.returncode == 1
        assert done.stderr == (
            f"penstock: error: penstock {command} needs Linux or macOS; on Windows run it in WSL, or use penstock run "
            "and penstock.LLM\n"
        )


def test_memory_that_is_given_back_must_read_as_zeros() -> None:
    done = on("macos", "run", "-p", "Once", "--max-tokens", "2", "--kv-allocator", "virtual")
    assert done.returncode == 1
    assert "kv_allocator: virtual needs Linux; use paged" in done.stderr
