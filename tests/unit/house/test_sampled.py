"""What a sample of a grid leaves out is no value, and it is the same one everywhere."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from itertools import combinations, product
from pathlib import Path

import pytest

from tests import sampled, specs

AXES = ("abcdefg", (1, 2, 3), (0, 8))


def test_each_value_and_each_pair_that_is_asked_for_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampled, "ALL", False)
    whole = list(product(*AXES))
    found, pairs = sampled.some(whole), sampled.some(whole, pairs=True)
    assert [set(column) for column in zip(*found, strict=True)] == [set(axis) for axis in AXES]
    for i, j in combinations(range(3), 2):
        assert {(case[i], case[j]) for case in pairs} == set(product(AXES[i], AXES[j]))
    assert len(found) < len(pairs) < len(whole)
    assert found == sampled.some(whole) == [case for case in whole if case in found]
    assert len(sampled.some(whole, 20)) == 20
    assert len(sampled.some(range(30), 4)) == 4


def test_all_is_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampled, "ALL", True)
    whole = list(product(*AXES))
    assert sampled.some(whole) == whole
    assert sampled.draws(2, 9) == 9


def test_marks_come_with_their_values() -> None:
    marked = pytest.param("native", marks=pytest.mark.skip)
    cases = sampled.grid("ab", ["ref", marked])
    assert [case.values for case in cases] == [("a", "ref"), ("a", "native"), ("b", "ref"), ("b", "native")]
    assert [len(case.marks) for case in cases] == [0, 1, 0, 1]


def test_what_a_case_shows_may_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampled, "ALL", False)
    found = sampled.some(specs.ALL, shows=specs.kinds)
    assert set[str]().union(*map(specs.kinds, found)) == set[str]().union(*map(specs.kinds, specs.ALL))
    assert len(found) < len(specs.ALL) / 2
    whole = [(name, size) for name in specs.ALL for size in (2, 4)]
    assert {size for _, size in sampled.some(whole, shows=lambda name, size: {size, *specs.kinds(name)})} == {2, 4}


MARKED = """
import pytest

@pytest.fixture(params=["x", "y"])
def way(request):
    return request.param

@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(("name", "kind"), [("a", len), ("b", max)])
@pytest.mark.sampled
def test_grid(name, kind, size, way):
    pass

@pytest.mark.parametrize("size", range(9))
@pytest.mark.sampled(4)
def test_draws(size):
    pass

@pytest.mark.parametrize("fault", range(5))
def test_faults(fault):
    pass
"""


def collected(folder: Path, *args: str, **environment: str) -> list[str]:
    root = Path(sampled.__file__).parents[1]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-p", "tests.conftest",
         f"--rootdir={folder}", *args],
        cwd=folder, capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(root), *sys.path]), "PENSTOCK_TESTS": ""} | environment,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    return [line.partition("::")[2] for line in run.stdout.splitlines() if "::" in line]


def test_of_a_function_that_is_marked_some_cases_run_and_all_when_all_are_asked_for(tmp_path: Path) -> None:
    """Cases are those of all axes, of fixtures too; one that is named runs."""
    (tmp_path / "test_marked.py").write_text(MARKED)
    found = collected(tmp_path)
    grid = [name.split("[")[1].rstrip("]").split("-") for name in found if name.startswith("test_grid")]
    assert {value for row in grid for value in row} >= {"x", "y", "a", "b", "1", "2", "3"}
    assert len(grid) < 12
    assert Counter(name.partition("[")[0] for name in found) == {
        "test_grid": len(grid), "test_draws": 4, "test_faults": 5
    }  # fmt: skip
    everything = collected(tmp_path, PENSTOCK_TESTS="all")
    assert len(everything) == 12 + 9 + 5
    left_out = next(name for name in everything if name not in found)
    assert collected(tmp_path, f"test_marked.py::{left_out}") == [left_out]
