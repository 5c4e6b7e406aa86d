"""What a run of the tests did not show for want of material: by what is missing, the tests and the catalogue's rows."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_IDS = re.compile(r"(?<![A-Za-z0-9])([A-L][0-9]{2})(?![0-9A-Za-z])")
_WANTS = (
    (
        re.compile(r"/shared/|are not beside the project|\bshared\b.* is not there"),
        "the folder shared beside the repository",
    ),
    (re.compile(r"tools/models\.py|\.gguf is not there"), "a real small model (python tools/models.py)"),
    (re.compile(r"native library|C\+\+17"), "the native kernels (a C++17 compiler)"),
    (re.compile(r"Chromium"), "a browser (apt-get install chromium)"),
    (re.compile(r"llama-cpp-python"), "llama.cpp (PENSTOCK_LLAMA_CPP names a Python that has it)"),
    (re.compile(r"could not import"), "a library of the extra test"),
)
OTHER = "something else of this machine"


def rows_of(nodeid: str, table: str) -> set[str]:
    """Ids in the test's name, and of the rows of `table` (docs/catalogue.tsv) that name the test."""
    path, _, name = nodeid.partition("[")[0].partition("::")
    found = set(_IDS.findall(name.replace("_", " ")))
    for line in table.splitlines()[1:]:
        cells = line.split("\t")
        if len(cells) > 6 and f"{path}::{name}" in cells[6].split():
            found.add(cells[0])
    return found


def unproven(skipped: Iterable[tuple[str, str]], table: str) -> list[str]:
    """A line for each thing that was missing. `skipped`: a test's id and why it was skipped."""
    tests: dict[str, int] = defaultdict(int)
    rows: dict[str, set[str]] = defaultdict(set)
    for nodeid, reason in skipped:
        want = next((name for pattern, name in _WANTS if pattern.search(reason)), OTHER)
        tests[want] += 1
        rows[want] |= rows_of(nodeid, table)
    order = [*(name for _, name in _WANTS), OTHER]
    return [f"{_count(tests[want])} for want of {want}{_named(sorted(rows[want]))}" for want in order if tests[want]]


def _count(n: int) -> str:
    return "1 test" if n == 1 else f"{n} tests"


def _named(rows: Sequence[str]) -> str:
    if not rows:
        return ""
    return f"; of the catalogue's rows {', '.join(rows)}" if len(rows) > 1 else f"; of the catalogue's row {rows[0]}"
