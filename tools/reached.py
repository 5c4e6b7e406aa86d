"""Which tests run which statement: a copy's source is marked, then each file of tests runs there once.

A mark is one store into a file that is mapped into memory, so processes that a test starts are seen as well. What a
file of tests ran is kept below `folder` until the file, or the source that it ran, changes.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

_MARKS = """
import mmap
from pathlib import Path

with open(Path(__file__).with_name("reached.marks"), "r+b") as file:
    marks = mmap.mmap(file.fileno(), 0)
"""
_PLUGIN = """
import json, time
from pathlib import Path

import pytest
from reached_marks import marks

OUT = Path(__file__).with_name("reached.jsonl")


FAILED = set()


def pytest_runtest_logreport(report):
    if report.failed:
        FAILED.add(report.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    began = time.perf_counter()
    try:
        return (yield)
    finally:
        found = marks[:]
        marks[:] = bytes(len(found))
        numbers = [n for n, mark in enumerate(found) if mark]
        if item.nodeid not in FAILED:
            with OUT.open("a") as file:
                file.write(json.dumps([item.nodeid, time.perf_counter() - began, numbers]) + "\\n")
"""


def spot(node: ast.stmt) -> int:
    """A statement's place in its file, as one number."""
    return node.lineno * 1000 + node.col_offset


def _marked(text: str, number: int) -> tuple[str, list[int]]:
    """(the source with a mark before each statement within a function, counted from `number`, those statements)."""
    tree, found = ast.parse(text), list[int]()

    def body(statements: list[ast.stmt], inside: bool) -> list[ast.stmt]:
        out: list[ast.stmt] = []
        for at, one in enumerate(statements):
            says = at == 0 and isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant)
            if inside and not says:
                out += ast.parse(f"_reached[{number + len(found)}] = 1").body
                found.append(spot(one))
            visit(one, inside)
            out.append(one)
        return out

    def visit(node: ast.AST, inside: bool) -> None:
        inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for name, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                setattr(node, name, body(value, inside))
            elif isinstance(value, list):  # handlers, cases
                for child in value:
                    if isinstance(child, ast.ExceptHandler | ast.match_case):
                        visit(child, inside)

    visit(tree, False)
    start = 0
    for one in tree.body:
        if isinstance(one, ast.ImportFrom) and one.module == "__future__":
            start = tree.body.index(one) + 1
    if not start and ast.get_docstring(tree) is not None:
        start = 1
    tree.body[start:start] = ast.parse("from reached_marks import marks as _reached").body
    return ast.unparse(ast.fix_missing_locations(tree)), found


@dataclass(frozen=True)
class Ran:
    """What one test that passes ran: its id for pytest, how long it took, by path the spots."""

    test: str
    seconds: float
    spots: dict[str, list[int]]


def _sum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


class Reached:
    """`copy`: the repository's copy to mark. `paths`: the source files, relative to it. `run`: runs pytest there."""

    def __init__(
        self, root: Path, copy: Path, paths: list[str], folder: Path, run: Callable[[list[str]], None]
    ) -> None:
        self.root, self.copy, self.folder, self._run = root, copy, folder, run
        self._sums = {path: _sum(root / path) for path in paths}
        self._at: list[tuple[str, int]] = []
        self._known: dict[tuple[str, str], list[Ran]] = {}
        self._new: dict[str, list[Ran]] = {}
        for path in paths:
            text, spots = _marked((copy / path).read_text("utf-8"), len(self._at))
            (copy / path).write_text(text, "utf-8")
            self._at += [(path, one) for one in spots]
        (copy / "src" / "reached_marks.py").write_text(_MARKS)
        (copy / "src" / "reached_plugin.py").write_text(_PLUGIN)
        (copy / "src" / "reached.marks").write_bytes(bytes(max(1, len(self._at))))

    def has(self, tests: str, path: str) -> bool:
        """Whether `of` takes no run."""
        return self._kept(tests, path) is not None

    def of(self, tests: str, path: str) -> list[Ran]:
        """What the tests of a file (relative to the root) ran; what it says of `path` is of the present source."""
        found = self._kept(tests, path)
        if found is None:
            found = self._new[tests] = self._made(tests)
        return found

    def _file(self, tests: str) -> Path:
        return self.folder / (tests.replace("/", "__") + ".json")

    def _kept(self, tests: str, path: str) -> list[Ran] | None:
        if tests not in self._new and (tests, path) not in self._known and self._file(tests).exists():
            found = json.loads(self._file(tests).read_text("utf-8"))
            now = self._sums[path]
            if found["file"] == _sum(self.copy / tests) and found["sources"].get(path, now) == now:
                self._known[tests, path] = [Ran(*one) for one in found["tests"] if path in one[2]]
        return self._new.get(tests, self._known.get((tests, path)))

    def _made(self, tests: str) -> list[Ran]:
        lines = self.copy / "src" / "reached.jsonl"
        lines.write_text("")
        self._run(["-p", "reached_plugin", tests])
        found = []
        for line in lines.read_text("utf-8").splitlines():
            test, seconds, numbers = json.loads(line)
            spots: dict[str, list[int]] = {}
            for number in numbers:
                path, one = self._at[number]
                spots.setdefault(path, []).append(one)
            found.append(Ran(test, round(seconds, 3), spots))
        paths = {path for one in found for path in one.spots}
        whole = {"file": _sum(self.copy / tests), "sources": {p: self._sums[p] for p in sorted(paths)},
                 "tests": [[one.test, one.seconds, one.spots] for one in found]}  # fmt: skip
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file(tests).write_text(json.dumps(whole), "utf-8")
        return found

    def by(self, files: list[str], path: str, at: int) -> Iterator[Ran]:
        """Tests of these files that run the statement."""
        for tests in files:
            for one in self.of(tests, path):
                if at in one.spots.get(path, ()):
                    yield one
