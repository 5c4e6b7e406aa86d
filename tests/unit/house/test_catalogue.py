"""docs/catalogue.tsv says what is there and what is not; this test holds it to that."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("catalogue_tool", ROOT / "tools" / "catalogue.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


tool = load()


def test_the_table_keeps_its_word() -> None:
    assert tool.check(tool.read()) == []


def test_no_row_is_lost() -> None:
    rows = tool.read()
    assert len(rows) == 466
    assert Counter(r.priority for r in rows) == {"P0": 37, "P1": 112, "P2": 167, "P3": 150}
    groups = {
        "A": 24,
        "B": 33,
        "C": 90,
        "D": 50,
        "E": 43,
        "F": 45,
        "G": 47,
        "H": 31,
        "I": 16,
        "J": 30,
        "K": 37,
        "L": 20,
    }
    assert Counter(r.id[0] for r in rows) == groups


def test_reading_and_writing_agree(tmp_path: Path) -> None:
    copy = tmp_path / "copy.tsv"
    tool.write(tool.read(), copy)
    assert copy.read_bytes() == tool.TABLE.read_bytes()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "policy.py").write_text("")
    (tmp_path / "test_policy.py").write_text('class TestBatch:\n    def test_gain(self):\n        """A05: ..."""\n')
    return tmp_path


GOOD = tool.Row("A05", "Continuous batching", "P0", "works", "always on", "policy.py", "test_policy.py", "P +50 %")


@pytest.mark.parametrize(
    "test", ["test_policy.py", "test_policy.py::TestBatch::test_gain", "test_policy.py::test_gain[x]"]
)
def test_a_row_that_holds(root: Path, test: str) -> None:
    assert tool.check([replace(GOOD, test=test)], root) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"id": "Z05"}, "Z05: is not an id"),
        ({"status": "done"}, "A05: status 'done' is none of"),
        ({"priority": "P9"}, "A05: priority 'P9' is none of"),
        ({"name": ""}, "A05: name is empty"),
        ({"switch": " x"}, "A05: name is empty, or a cell begins or ends with a space"),
        ({"file": ""}, "A05: works, but file is empty"),
        ({"test": ""}, "A05: works, but test is empty"),
        ({"test": "", "status": "simulated"}, "A05: simulated, but test is empty"),
        ({"file": "policy.py gone.py"}, "A05: file gone.py does not exist"),
        ({"test": "test_gone.py"}, "A05: test test_gone.py does not exist"),
        ({"test": "test_policy.py::test_gai"}, "A05: test_policy.py has no test_gai"),
        ({"id": "A06"}, "A06: none of its tests mentions A06"),
        ({"status": "partial", "file": "gone.py"}, "A05: file gone.py does not exist"),
        ({"status": "absent"}, "A05: is absent, so switch, file, test and measured must be empty"),
        ({"status": "documented", "measured": ""}, "A05: is documented, so measured must give the reason"),
    ],
)
def test_what_does_not_hold_is_named(root: Path, change: dict[str, str], problem: str) -> None:
    problems = tool.check([replace(GOOD, **change)], root)
    assert any(text.startswith(problem) for text in problems), problems


def test_ids_are_unique_and_in_order(root: Path) -> None:
    assert tool.check([GOOD, GOOD], root) == ["A05: appears 2 times"]
    first = replace(GOOD, id="A01", status="absent", switch="", file="", test="", measured="")
    assert tool.check([GOOD, first], root) == ["rows must be in the order of their ids"]


def test_a_table_of_another_shape_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.tsv"
    path.write_text("id\tname\n")
    with pytest.raises(ValueError, match=r"t.tsv:1: the header must be id name priority"):
        tool.read(path)
    path.write_text("\t".join(tool.HEADER) + "\nA01\tx\n")
    with pytest.raises(ValueError, match=r"t.tsv:2: 2 columns, not 8"):
        tool.read(path)


def test_sync_keeps_the_state_and_drops_nothing(tmp_path: Path) -> None:
    catalogue, table = tmp_path / "c.md", tmp_path / "t.tsv"
    line = "| {} | {} | 001 | m | w | N | Y | - | {} | CORE |\n"
    catalogue.write_text("# x\n| id | name |\n" + line.format("A02", "Two", "P1") + line.format("A01", "One", "P0"))
    tool.write(tool.sync(catalogue, table), table)
    assert [(r.id, r.name, r.priority, r.status) for r in tool.read(table)] == [
        ("A01", "One", "P0", "absent"), ("A02", "Two", "P1", "absent"),
    ]  # fmt: skip
    tool.write([replace(r, status="partial", switch="x") for r in tool.read(table)], table)
    catalogue.write_text(line.format("A02", "Two", "P2") + line.format("A01", "Uno", "P0"))
    rows = tool.sync(catalogue, table)
    assert [(r.name, r.priority, r.status, r.switch) for r in rows] == [
        ("Uno", "P0", "partial", "x"), ("Two", "P2", "partial", "x"),
    ]  # fmt: skip
    catalogue.write_text(line.format("A01", "One", "P0"))
    with pytest.raises(ValueError, match="A02"):
        tool.sync(catalogue, table)


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["check"]) == 0
    assert "466 rows, no problems" in capsys.readouterr().out
    assert tool.main(["summary"]) == 0
    assert "466 catalogue rows" in capsys.readouterr().out
