"""Rules of the house that are about files and imports, not about behaviour."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
ORACLES = ("torch", "transformers", "scipy", "triton")


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def name_of(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def modules_after(code: str) -> set[str]:
    """Names in sys.modules of a fresh interpreter that has run `code`."""
    run = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return set(json.loads(run.stdout.splitlines()[-1]))


IMPORT_ALL = """
import importlib, pkgutil, penstock
for found in pkgutil.walk_packages(penstock.__path__, "penstock."):
    if not found.name.startswith("penstock.backends.gpu."):
        importlib.import_module(found.name)
"""


def test_the_whole_package_is_torch_free() -> None:
    loaded = modules_after(IMPORT_ALL)
    files = [p.relative_to(ROOT / "src") for p in (ROOT / "src" / "penstock").rglob("*.py")]
    ours = {".".join(p.with_suffix("").parts).removesuffix(".__init__") for p in files}
    ours = {name for name in ours if not name.startswith("penstock.backends.gpu.")}
    assert ours <= loaded, f"not imported, so not checked: {sorted(ours - loaded)}"
    assert not {name for name in loaded if name.split(".")[0] in ORACLES}


@pytest.mark.parametrize("module", ["penstock", "penstock.cli.main", "penstock.config"])
def test_start_up_imports_nothing_heavy(module: str) -> None:
    loaded = {name.split(".")[0] for name in modules_after(f"import {module}")}
    assert not loaded & {"numpy", "tokenizers", "jinja2", "rich", *ORACLES}


def test_a_server_starts_without_what_reports_are_made_of() -> None:
    loaded = modules_after("import penstock.cli.serve, penstock.server.main, penstock.server.live")
    assert not {name for name in loaded if name.startswith(("penstock.report", "rich"))}


FRONT = "import penstock.cli.serve, penstock.server.main, penstock.launch.tokenizer_kinds"
RANK = "import penstock.launch.engine_process, penstock.backends.native.backend"


@pytest.mark.parametrize(
    ("code", "without"),
    [(FRONT, ("numpy", "penstock.runner", "penstock.model", "penstock.weights", "penstock.plan", "penstock.ops.ref",
              "penstock.kv.manager", "penstock.engine.core")),
     (RANK, ("asyncio", "tokenizers", "email", "penstock.server", "penstock.text.tokenizer"))],
    ids=["front", "engine"],
)  # fmt: skip
def test_a_process_of_a_server_starts_without_the_other_ones_modules(code: str, without: tuple[str, ...]) -> None:
    """Start time, and memory for good."""
    loaded = modules_after(code)
    assert not {name for name in loaded if any(name == w or name.startswith(w + ".") for w in without)}


def test_pages_have_one_rule_of_escaping() -> None:
    """A page that is put together by hand forgets to escape one day."""
    by_hand = [
        p.relative_to(ROOT / "src" / "penstock").as_posix()
        for p in (ROOT / "src" / "penstock").rglob("*.py")
        if re.search(r"from html import|html\.escape|<table|<svg|<html", p.read_text("utf-8"))
    ]
    assert by_hand == [], "HTML comes from report/templates"
    assert "safe" not in "".join(p.read_text() for p in (ROOT / "src/penstock/report/templates").iterdir())


def test_what_the_package_reads_is_installed() -> None:
    patterns = project()["tool"]["setuptools"]["package-data"]["penstock"]
    package = ROOT / "src" / "penstock"
    installed = {p for pattern in patterns for p in package.glob(pattern)}
    there = {p for p in package.rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc")}
    assert package / "report" / "templates" / "cap.html" in there
    assert not there - installed, "list them under package-data in pyproject.toml"


def test_version_is_one_number() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", "--version"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    version = run.stdout.split()[-1]
    assert project()["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "penstock.base.version.__version__"}
    released = re.findall(r"^## \[(\d.*?)\]", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert version == released[0]
    for page in (ROOT / "deploy").rglob("*"):
        named = re.findall(
            r"\bpenstock[:-](\d+\.\d+\.\d+)|newTag: (\S+)", page.read_text("utf-8") if page.is_file() else ""
        )
        assert {a or b for a, b in named} <= {version}, page.name


def test_direct_dependencies_are_few_and_pinned() -> None:
    pins = {name_of(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if line[:1] not in ("#", "")}
    base = project()["project"]["dependencies"]
    extras = project()["project"]["optional-dependencies"]
    assert len(base) <= 15
    assert not {name_of(r) for r in base} & set(ORACLES)
    assert {name_of(r) for r in base + extras["test"]} <= pins
    assert "penstock" not in pins


def test_constraints_are_exact_and_of_no_machine() -> None:
    lines = [x for x in (ROOT / "constraints.txt").read_text().splitlines() if not x.startswith("#")]
    assert lines == sorted(lines, key=str.lower)
    for line in lines:
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line), line
    assert "torch==2.13.0" in lines
    assert "torch==2.13.0" in project()["project"]["optional-dependencies"]["test"]


def commands(text: str) -> set[str]:
    """Targets of `make X` in code blocks and code spans."""
    code = re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL)
    return {target for piece in code for target in re.findall(r"(?:^|[`\s;&])make ([a-z][a-z-]*)", piece)}


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_commands_of_the_docs_exist(page: str) -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = commands((ROOT / page).read_text())
    assert "test" in named, f"{page} must say how to run the tests: `make test`"
    assert named <= targets


def test_ci_runs_the_readme_s_test_command_first() -> None:
    stages = re.findall(r"^stage (.+)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert stages == ["make test", "make lint", "make types", "make contracts", "make docs"]


def test_import_contracts_cover_every_room() -> None:
    contracts = {c["id"]: c for c in project()["tool"]["importlinter"]["contracts"]}
    layers = [name for level in contracts["layers"]["layers"] for name in re.findall(r"[a-z]+", level)]
    rooms = {p.parent.name for p in (ROOT / "src" / "penstock").glob("*/__init__.py")}
    assert rooms <= set(layers)
    assert contracts["layers"]["exhaustive"] is True
    assert project()["tool"]["importlinter"]["exclude_type_checking_imports"] is False
    assert set(contracts["torch-free"]["forbidden_modules"]) == set(ORACLES)


def test_unit_tests_lie_in_the_room_they_are_about() -> None:
    rooms = {p.parent.name for p in (ROOT / "src" / "penstock").glob("*/__init__.py")} | {"house", "train"}
    found = {p.parent for p in (ROOT / "tests" / "unit").rglob("test_*.py")}
    assert {p.name for p in found} <= rooms, "tests/unit/ROOM is about src/penstock/ROOM"
    assert {p.parent.name for p in found} == {"unit"}


def test_licence_and_its_name_agree() -> None:
    assert project()["project"]["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text()[:200]


PATCHED_CLOCK = re.compile(r'setattr\(\s*(?:\w+\.)*(?:time|asyncio), "(?:monotonic|perf_counter|sleep)(?:_ns)?"')


def test_no_test_changes_the_clock_of_the_whole_process() -> None:
    """A server of other tests lives in a thread beside: it slept for hours once. Replace the module's name instead."""
    assert PATCHED_CLOCK.search('patched.setattr(mtp.time, "monotonic", lambda: 0)')
    assert PATCHED_CLOCK.search('monkeypatch.setattr(\n    asyncio, "sleep", wait)')
    files = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    assert [path.name for path in files if PATCHED_CLOCK.search(path.read_text())] == []
