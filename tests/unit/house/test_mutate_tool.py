"""tools/mutate.py on a repository of two functions: what its tests notice, what they do not, what no test runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
SOURCE = '''"""Small."""


def larger(a, b):
    """Of two."""
    if a > b:
        return a
    elif a == b:
        seen.append(7)
    return b


def unused(n):
    return n - 4
'''
TESTS = """
import subprocess, sys

from penstock.kv.small import larger


def test_that_fails_without_a_change_too():
    assert larger(2, 1) == 3


DONE = []


def test_that_comes_before():
    DONE.append(1)


def test_that_fails_alone():
    assert larger(2, 1) == 2 and DONE


def test_larger():
    assert larger(2, 1) == 2


def test_larger_in_a_process():
    code = "from penstock.kv.small import larger; raise SystemExit(larger(1, 2) != 2)"
    subprocess.run([sys.executable, "-c", code], check=True)
"""


def mutate(root: Path, *more: str) -> dict[str, dict[str, Any]]:
    """The trials that are written, by change and line."""
    out = root / "out.json"
    where = [] if "--again" in more else ["--out", str(out), "--only", "kv", "--number", "6"]
    given = ["--root", root, "--reached", root / "reached", "--equivalent", root / "same.txt", "--jobs", "1"]
    command = [sys.executable, str(ROOT / "tools" / "mutate.py"), *map(str, given), *where, *more]
    subprocess.run(command, check=False, timeout=300)
    return {f"{one['change']} at {one['line']}": one for one in json.loads(out.read_text())["trials"]}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repository")
    for name, text in {
        "src/penstock/__init__.py": "", "src/penstock/kv/__init__.py": "", "src/penstock/kv/small.py": SOURCE,
        "tests/unit/kv/test_kv_small.py": TESTS, "pyproject.toml": "[tool.pytest.ini_options]\n",
        "same.txt": "src/penstock/kv/small.py | return n - 4 | 4 -> 5 | for this test's sake\n",
    }.items():  # fmt: skip
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_what_is_noticed_and_what_survives(repository: Path) -> None:
    trials = mutate(repository)
    assert {name: (one["noticed"], one["by"]) for name, one in trials.items()} == {
        "> -> >= at 6": (False, ""),
        "== -> != at 8": (True, "tests/unit/kv/test_kv_small.py::test_larger_in_a_process"),
        "seen.append(7) -> pass at 9": (False, "no test runs it"),
        "7 -> 8 at 9": (False, "no test runs it"),
        "- -> + at 14": (False, "no test runs it"),
        "4 -> 5 at 14": (False, "equivalent: for this test's sake"),
    }
    # Lines move, a test comes, code goes: of what survived, each is settled.
    source = repository / "src/penstock/kv/small.py"
    source.write_text(SOURCE.partition("\n\ndef unused")[0].replace('"""Small."""', '"""Small."""\n\nseen = []'))
    tests = repository / "tests/unit/kv/test_kv_small.py"
    tests.write_text(TESTS.replace("larger\n", "larger, seen\n", 1) + "    larger(7, 7)\n    assert seen == [7]\n")
    again = mutate(repository, "--again", str(repository / "out.json"))
    assert {name: (one["first"], one["noticed"], one["by"]) for name, one in again.items()} == {
        "> -> >= at 8": (False, True, "tests/unit/kv/test_kv_small.py::test_larger_in_a_process"),
        "== -> != at 8": (True, True, "tests/unit/kv/test_kv_small.py::test_larger_in_a_process"),
        "seen.append(7) -> pass at 11": (False, True, "tests/unit/kv/test_kv_small.py::test_larger_in_a_process"),
        "7 -> 8 at 11": (False, True, "tests/unit/kv/test_kv_small.py::test_larger_in_a_process"),
        "- -> + at 14": (False, True, "the code is gone"),
        "4 -> 5 at 14": (False, False, "equivalent: for this test's sake"),
    }


def test_equivalent_mutations_have_a_place_a_line_a_change_and_a_reason() -> None:
    for line in (ROOT / "tools" / "equivalent_mutations.txt").read_text("utf-8").splitlines():
        if not line.startswith("#"):
            path, text, change, reason = line.split(" | ")
            assert (ROOT / path).is_file()
            assert text
            assert " -> " in change
            assert len(reason.split()) > 3, line
