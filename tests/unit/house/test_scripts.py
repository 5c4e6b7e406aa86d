"""Benchmarks and tools are run by hand: what they take from the package must be there all the same."""

from __future__ import annotations

import ast
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = sorted(path for room in ("benchmarks", "tools") for path in (ROOT / room).rglob("*.py"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_script_takes_from_the_package_is_there(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or node.level or (node.module or "").partition(".")[0] != "penstock":
            continue
        if str(node.module).startswith("penstock.backends.gpu.kernels."):
            pytest.importorskip("triton", reason="Triton is not installed: pip install 'penstock[gpu]'")
        module = import_module(str(node.module))
        for name in node.names:
            inner = hasattr(module, "__path__") and find_spec(f"{node.module}.{name.name}")
            assert hasattr(module, name.name) or inner, f"{node.module} has no {name.name}"
