"""I03: an engine tells what its start went to, part by part."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.base.spans import Spans, told
from penstock.bench.startup import EngineStart, medians
from penstock.cli.main import main
from penstock.launch.bundled import bundled_model

PARTS = [
    "process and imports", "greeting", "model's files opened, planned", "weights read", "model put together",
    "KV memory, scheduler", "ready",
]  # fmt: skip


def test_I03_the_parts_of_a_start_follow_each_other_from_the_process_to_ready(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    out = tmp_path / "starts.json"
    command = ["bench", "startup", str(bundled_model("nano")), "--num-iters-cold", "1", "--num-iters-warm", "0"]
    assert main([*command, "--max-model-len", "64", "--output-json", str(out)]) == 0
    printed = capfd.readouterr()
    assert "process and imports" in printed.out
    assert "started in" in printed.err, "the engine's log has the line"
    found = json.loads(out.read_text("utf-8"))
    assert [name for name, _ in found["cold"][0]["parts"]] == PARTS
    parts = [took_s for _, took_s in found["cold"][0]["parts"]]
    assert all(took_s >= 0 for took_s in parts)
    # The process begins a moment after the order, and its word takes one; the kernel counts hundredths.
    assert 0.5 * found["cold"][0]["ready_s"] < sum(parts) < found["cold"][0]["ready_s"] + 0.02


def test_a_number_of_starts_that_makes_no_sense_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "startup", "--num-iters-cold", "0", "--num-iters-warm", "0"]) != 0
    assert "not both 0" in capsys.readouterr().err


def test_spans_leave_no_gap() -> None:
    spans = Spans()
    for name in ("one", "two", "one"):
        spans.end(name)
    assert [name for name, _ in spans.parts] == ["one", "two", "one"]
    assert sum(took_s for _, took_s in spans.parts) == pytest.approx(spans.total_s)
    assert told([("one", 0.5), ("two", 0.25)]) == "one 0.50 s, two 0.25 s"


def test_medians_are_of_every_part_over_all_starts() -> None:
    starts = [EngineStart(float(k), (("a", k), ("b", 1.0), ("a", k)), "read") for k in (3, 1, 2)]
    assert medians(starts) == {"a": 4, "b": 1.0, "in all": 2.0}
