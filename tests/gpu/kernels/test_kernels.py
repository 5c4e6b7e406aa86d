"""What all kernels keep to: one place for loads, figures within the budgets of the targets, and a list that is true."""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.backends.gpu.kernels import KERNELS
from tests.gpu.kernels import naive
from tests.unit.house.test_house import ROOT, modules_after

ROOM = ROOT / "src" / "penstock" / "backends" / "gpu" / "kernels"
TOOL = ROOT / "tools" / "gpu_kernels.py"
GUARDED = {"load", "store", "dot", "atomic_add", "make_block_ptr", "dot_scaled", "make_tensor_descriptor"}


def jitted(tree: ast.Module) -> list[ast.FunctionDef]:
    return [f for f in tree.body if isinstance(f, ast.FunctionDef) and f.decorator_list]


def test_kernels_load_store_and_multiply_in_one_place() -> None:
    """bfloat16 that is not widened is silently wrong in the interpreter: see `loads`."""
    found = []
    for path in ROOM.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "tl":
                narrow = node.attr in ("bfloat16", "float16")
                if (node.attr in GUARDED or narrow) and path.name != "loads.py":
                    found.append(f"{path.name}:{node.lineno}: tl.{node.attr}")
    assert not found, "loads.py has `load`, `store` and `dot` for that"


def test_every_launch_says_whether_products_and_sums_may_fuse() -> None:
    launches = 0
    for path in ROOM.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                said = [k.value.id for k in node.keywords if k.arg is None and isinstance(k.value, ast.Name)]
                wanted = "EXACT" if path.name == "sample.py" else "LAUNCH"
                assert wanted in said, f"{path.name}:{node.lineno}"
                launches += 1
    assert launches >= 12


def test_kernels_that_start_early_wait_before_they_end_or_write() -> None:
    """Every program of them: one that ended before would let the next kernel run ahead of all before it."""
    early = 0
    for path in ROOM.glob("*.py"):
        for f in jitted(ast.parse(path.read_text(encoding="utf-8"))):
            if "EARLY" not in [a.arg for a in f.args.args] or f.name == "wait_for_others":
                continue
            early += 1
            calls = [(n.func.id, n.lineno) for n in ast.walk(f)
                     if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]  # fmt: skip
            waits = [line for name, line in calls if name == "wait_for_others"]
            ends = [n.lineno for n in ast.walk(f) if isinstance(n, ast.Return)]
            ends += [line for name, line in calls if name in ("store", "_write")]
            assert waits, f"{path.name}: {f.name} never waits"
            assert max(waits) < min(ends), f"{path.name}: {f.name}"
    assert early >= 12


def test_the_list_names_what_is_there() -> None:
    pytest.importorskip("triton", reason=naive.ABSENT)
    assert len({k.name for k in KERNELS}) == len(KERNELS)
    for kernel in KERNELS:
        for name in (kernel.launcher, kernel.oracle):
            module, _, path = name.partition(":")
            found: Any = importlib.import_module(module)
            for part in path.split("."):
                found = getattr(found, part)
            assert callable(found)
        assert kernel.launcher.rpartition(":")[2] in (ROOT / kernel.test).read_text(encoding="utf-8")


def test_the_list_needs_neither_torch_nor_triton() -> None:
    loaded = modules_after("import penstock.backends.gpu.kernels")
    assert not {"torch", "triton"} & {name.split(".")[0] for name in loaded}


def tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("triton", reason=naive.ABSENT)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, str(TOOL), "--no-store", *arguments], capture_output=True, text=True,
                          check=False, timeout=300, env=environment)  # fmt: skip


@pytest.mark.parametrize(("target", "cases"), [
    ("sm_90", ("decode bf16, one", "int4 in groups of 128, 1 token", "argmax")), ("gfx942", ("rms_norm",)),
])  # fmt: skip
def test_kernels_compile_for_targets_that_are_not_here(target: str, cases: tuple[str, ...], tmp_path: Path) -> None:
    run = tool("--target", target, *(x for case in cases for x in ("--only", case)))
    assert run.returncode == 0, run.stderr
    for case in cases:
        assert f"| {case}" in run.stdout
    assert "within their budgets" in run.stderr


def test_stored_figures_are_within_the_budgets_and_complete() -> None:
    """Those of the last whole run; the page shows them."""
    pytest.importorskip("triton", reason=naive.ABSENT)
    sys.path.insert(0, str(TOOL.parent))
    try:
        kernels: Any = importlib.import_module("gpu_kernels")
    finally:
        sys.path.pop(0)
    stored = json.loads((ROOT / "benchmarks" / "results" / "gpu-kernels.json").read_text(encoding="utf-8"))
    cases = importlib.import_module("penstock.backends.gpu.kernels.cases").CASES
    assert {(row["case"], row["target"]) for row in stored["rows"]} == {(c, t) for c in cases for t in kernels.TARGETS}
    assert [what for row in stored["rows"] for what in kernels.problems(row)] == []
    page = (ROOT / "docs" / "guides" / "gpu-kernels.md").read_text(encoding="utf-8")
    assert kernels.table(stored["rows"], list(kernels.TARGETS)) in page


def test_a_budget_can_be_broken() -> None:
    sys.path.insert(0, str(TOOL.parent))
    try:
        kernels: Any = importlib.import_module("gpu_kernels")
    finally:
        sys.path.pop(0)
    row = {"target": "gfx942", "kernel": "weigh", "spilled_bytes": 8, "shared_bytes": 65537, "registers": 513,
           "fused_float64": 2}  # fmt: skip
    assert [what.split()[0] for what in kernels.problems(row)] == ["spills", "wants", "wants", "fuses"]
    assert kernels.fused("fma.rn.f64 %fd1, %fd2, %fd3, %fd4;\nv_fma_f64 v[0:1]") == 2


def test_the_benchmark_on_a_card_knows_every_kernel() -> None:
    from benchmarks.gpu.kernel_checks import CHECKS

    assert CHECKS.keys() == {entry.name for entry in KERNELS}
