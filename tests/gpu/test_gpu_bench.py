"""`benchmarks/gpu`: all of it runs here with tiny shapes, so that it works on the first try where a GPU is."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.gpu import bundle, goals
from benchmarks.gpu.run import Run
from benchmarks.gpu.stages import NAMES, STAGES

ROOT = Path(__file__).resolve().parents[2]


def python(*args: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", ROOT)))}
    env.pop("TRITON_INTERPRET", None)  # the kernels have tests of their own for that
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, env=env, cwd=ROOT, check=False)


def test_every_stage_runs_with_tiny_shapes(tmp_path: Path) -> None:
    done = python("-m", "benchmarks.gpu.run", "--device", "cpu-torch", "--tiny", "--out", str(tmp_path))
    found = json.loads((tmp_path / "results.json").read_text("utf-8"))
    stages = {stage["name"]: stage for stage in found["stages"]}
    states = {name: stage["state"] for name, stage in stages.items()}
    assert states == dict.fromkeys(NAMES, "done") | {"kernel-checks": "left out"}, done.stdout
    assert done.returncode == 0, done.stdout + done.stderr
    checks = [check for stage in found["stages"] for check in stage["checks"]]
    assert len(checks) >= 8
    assert all(check["good"] for check in checks)
    figures = {figure["name"]: figure["value"] for stage in found["stages"] for figure in stage["figures"]}
    for name in (
        "copy_bytes_per_s", "llama-3.1-8b.decode1.copy_share", "llama-3.1-8b.decode4.step_s", "attention.decode8.s",
        "llama-3.1-8b.prefill.product_share", "llama-3.1-8b.int4.over_bf16", "llama-3.2-1b.clients16.tokens_per_s",
        "qwen3-30b-a3b.decode4.tokens_per_s", "llama-3.1-8b.ready_s", "llama-3.2-1b.decode1.step_s",
        "adapters.over_base",
    ):  # fmt: skip
        assert figures[name] > 0, name
    assert {goal["state"] for goal in found["goals"]} == {"not measured"}, "a CPU's speed is no figure of a GPU"
    assert all(found["about"][key] for key in ("penstock", "torch", "numpy", "python", "started"))
    page = (tmp_path / "index.html").read_text("utf-8")
    assert all(name in page for name in NAMES)
    assert "<script" not in page


def test_a_step_on_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    done = python("-m", "benchmarks.gpu.run", "--dry-run", "--tiny", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "dry-run.json").read_text("utf-8"))
    for name in ("llama-3.1-8b", "qwen3-30b-a3b"):
        assert "error" not in found[name], found[name].get("trace")
        assert found[name]["prefill"]["operations"] > 50
        assert found[name]["decode 1"]["waits"], "its token comes to the host"
    for name in ("llama-3.1-8b", "qwen3-30b-a3b"):
        assert sum(found[name]["decode 3"]["copies_to_device"].values()) == 1, "all numbers of a step at once"
        kinds = [kind for kind in found[name] if kind.startswith("two in flight")]
        assert len(kinds) == 4
        for kind in ("decode 1", "decode 3", "decode 4, one of them sampled", *kinds):
            assert list(found[name][kind]["waits"].values()) == [1], (kind, found[name][kind]["waits"])
    captured, decode = (found["llama-3.1-8b"][step] for step in ("captured step of 4", "decode 3"))
    assert captured["operations"] > 50
    told = found["llama-3.1-8b"]
    assert told["decode 3, two of them with adapters"]["by_name"]["graph"] == 1
    adapters = told["captured step of 4, with adapters"]
    assert adapters["waits"] == adapters["copies_to_device"] == {}
    if "kernel _to_ranks" in adapters["kernels"]:
        assert adapters["kernels"]["kernel _to_ranks"] == 4, "queries and values of two layers"
    assert captured["waits"] == captured["copies_to_device"] == {}
    assert decode["by_name"]["graph"] == 1
    assert decode["operations"] < 20
    assert sum(decode["copies_to_device"].values()) == 1


MIXED = """
import sys
from pathlib import Path
import torch
from benchmarks.gpu.dry_run import dry_run
from penstock.backends.gpu import ops, tables
from penstock.ops.table import OpTable
mixed = {"add": lambda x, y: ops.add(x, torch.ones(y.shape))}
tables.PLAIN = OpTable("torch", {**tables.PLAIN, **mixed})
sys.exit(dry_run(Path(sys.argv[1]), tiny=True, names=("llama-3.1-8b",)))
"""


def test_an_operation_that_mixes_host_and_device_is_found(tmp_path: Path) -> None:
    done = python("-c", MIXED, str(tmp_path))
    assert done.returncode == 1, done.stderr
    found = json.loads((tmp_path / "dry-run.json").read_text("utf-8"))
    assert "cuda:0 and cpu" in found["llama-3.1-8b"]["error"]


WORKER = """
import json, os, sys, time
lines, stages = sys.argv[1], sys.argv[2].split(",")
def say(stage, kind, **more):
    with open(lines, "a") as file:
        file.write(json.dumps({"stage": stage, "kind": kind, **more}) + "\\n")
for stage in stages:
    say(stage, "begin", at_s=time.time())
    if stage == "ceilings":
        say(stage, "figure", name="copy_bytes_per_s", value=1.0, unit="B/s")
        os.abort()
    if stage == "kernels":
        say(stage, "failed", name="attention", said="ValueError: no", trace="Traceback: line 1")
    if stage == "int4":
        say(stage, "check", name="right", good=False, said="off")
    say(stage, "end", at_s=time.time())
"""


def test_what_fails_is_recorded_and_the_next_stage_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stand_in_worker.py").write_text(WORKER, "utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT / "src")]))
    monkeypatch.setattr(Run, "worker", "stand_in_worker")
    found = Run(arguments(tmp_path / "out")).run()
    stages = {stage["name"]: stage for stage in found["stages"]}
    assert stages["ceilings"]["state"] == "broken"
    assert "status -6" in stages["ceilings"]["why"]
    assert [figure["name"] for figure in stages["ceilings"]["figures"]] == ["copy_bytes_per_s"], "it is not lost"
    assert stages["kernels"]["state"] == stages["int4"]["state"] == "failed"
    assert stages["kernels"]["failures"][0]["trace"].startswith("Traceback")
    rest = [name for name in NAMES if name not in ("ceilings", "kernels", "int4")]
    assert {stages[name]["state"] for name in rest} == {"done"}
    assert "Traceback" not in (tmp_path / "out" / "index.html").read_text("utf-8")


def test_where_nothing_begins_that_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "no_worker.py").write_text("raise SystemExit('torch is missing')", "utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(Run, "worker", "no_worker")
    found = Run(arguments(tmp_path / "out")).run()
    assert {stage["state"] for stage in found["stages"]} == {"broken"}
    assert all("torch is missing" in stage["why"] for stage in found["stages"])


HANGS = WORKER.replace("os.abort()", "time.sleep(60)")


def test_a_stage_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hanging_worker.py").write_text(HANGS, "utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(Run, "worker", "hanging_worker")
    short = tuple(stage._replace(budget_s=0.3) for stage in STAGES)
    monkeypatch.setattr("benchmarks.gpu.run.STAGES", short)
    monkeypatch.setattr("benchmarks.gpu.run.GRACE_S", 0.2)
    found = Run(arguments(tmp_path / "out")).run()
    states = {stage["name"]: stage["state"] for stage in found["stages"]}
    assert states["ceilings"] == "broken"
    assert states["llama-3.2-1b"] == "done"


def arguments(out: Path) -> argparse.Namespace:
    return argparse.Namespace(out=out, minutes=1.0, only=list(NAMES), tiny=False, device="cuda", depth=1)


@pytest.mark.parametrize(("value", "state"), [(0.85, "met"), (0.9, "met"), (0.84, "missed"), (None, "not measured")])
def test_goals(value: float | None, state: str) -> None:
    figures: dict[str, Any] = {} if value is None else {"llama-3.1-8b.decode1.copy_share": value}
    assert goals.judged(figures, None)[0]["state"] == state
    assert goals.judged(figures, "tiny")[0]["state"] == "not measured"


def test_less_is_better_for_the_host() -> None:
    host = next(i for i, goal in enumerate(goals.GOALS) if goal.figure == "llama-3.1-8b.host_share")
    assert goals.judged({"llama-3.1-8b.host_share": 0.02}, None)[host]["state"] == "met"
    assert goals.judged({"llama-3.1-8b.host_share": 0.03}, None)[host]["state"] == "missed"


def test_the_source_of_a_bundle(tmp_path: Path) -> None:
    bundle.copy_source(tmp_path)
    names = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert {"run.sh", "COMMIT", "src/penstock/cli/main.py", "benchmarks/gpu/run.py", "tests/specs.py"} <= names
    assert not [name for name in names if name.endswith((".so", ".pyc"))]
    assert bundle.size(tmp_path) < 12 << 20
