"""The live state of every catalogue row: docs/catalogue.tsv.

    python tools/catalogue.py check              what the table claims must be there
    python tools/catalogue.py summary            counts by group and status
    python tools/catalogue.py sync CATALOGUE.md  take ids, names and priorities from the catalogue, keep the state

Columns: id, name, priority, status, switch (how it is turned on), file and test (paths from the repository's root,
several separated by spaces; a test may be `path::name`), measured (what it does to context, accuracy, performance; for
`documented` rows the reason why it is not built).
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "docs" / "catalogue.tsv"
STATUSES = ("absent", "partial", "works", "simulated", "documented")
PRIORITIES = ("P0", "P1", "P2", "P3")
_ID = re.compile(r"[A-L][0-9]{2}")
_PROVEN = ("works", "simulated")


@dataclass(frozen=True)
class Row:
    id: str
    name: str
    priority: str
    status: str = "absent"
    switch: str = ""
    file: str = ""
    test: str = ""
    measured: str = ""


HEADER = tuple(f.name for f in fields(Row))


def read(path: Path = TABLE) -> list[Row]:
    """The rows of the table. Raises ValueError naming the line if its shape is wrong."""
    lines = path.read_text(encoding="utf-8").splitlines()
    if not lines or tuple(lines[0].split("\t")) != HEADER:
        raise ValueError(f"{path.name}:1: the header must be {' '.join(HEADER)}, separated by tabs")
    rows = []
    for number, line in enumerate(lines[1:], 2):
        cells = line.split("\t")
        if len(cells) != len(HEADER):
            raise ValueError(f"{path.name}:{number}: {len(cells)} columns, not {len(HEADER)}")
        rows.append(Row(*cells))
    return rows


def write(rows: list[Row], path: Path = TABLE) -> None:
    lines = ["\t".join(HEADER)] + ["\t".join(astuple(row)) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def check(rows: list[Row], root: Path = ROOT) -> list[str]:
    """Everything that the rows claim and that is not so, one sentence each."""
    problems = [f"{row_id}: appears {n} times" for row_id, n in Counter(r.id for r in rows).items() if n > 1]
    if [r.id for r in rows] != sorted(r.id for r in rows):
        problems.append("rows must be in the order of their ids")
    for row in rows:
        problems += [f"{row.id}: {problem}" for problem in _check_row(row, root)]
    return problems


def _check_row(row: Row, root: Path) -> list[str]:
    out = []
    if not _ID.fullmatch(row.id):
        out.append("is not an id such as A01")
    if not row.name or any(cell != cell.strip() for cell in astuple(row)):
        out.append("name is empty, or a cell begins or ends with a space")
    if row.priority not in PRIORITIES:
        out.append(f"priority {row.priority!r} is none of {', '.join(PRIORITIES)}")
    if row.status not in STATUSES:
        out.append(f"status {row.status!r} is none of {', '.join(STATUSES)}")
    if row.status == "absent" and (row.switch or row.file or row.test or row.measured):
        out.append("is absent, so switch, file, test and measured must be empty")
    if row.status == "documented" and not row.measured:
        out.append("is documented, so measured must give the reason why it is not built")
    if row.status in _PROVEN:
        out += [f"{row.status}, but {name} is empty" for name in ("file", "test") if not getattr(row, name)]
    out += [f"file {path} does not exist" for path in row.file.split() if not (root / path).exists()]
    found = False
    for entry in row.test.split():
        path, _, inner = entry.partition("::")
        if not (root / path).is_file():
            out.append(f"test {path} does not exist")
            continue
        text = (root / path).read_text(encoding="utf-8")
        found = found or re.search(rf"(?<![A-Za-z0-9]){row.id}(?![A-Za-z0-9])", text) is not None
        out += [f"{path} has no {name}" for name in filter(None, inner.split("::")) if not _defines(text, name)]
    if row.status in _PROVEN and row.test and not found:
        out.append(f"none of its tests mentions {row.id}")
    return out


def _defines(text: str, name: str) -> bool:
    bare = re.escape(name.partition("[")[0])
    return re.search(rf"^\s*(?:async\s+def|def|class)\s+{bare}\b", text, re.MULTILINE) is not None


def parse_catalogue(text: str) -> list[Row]:
    """id, name and priority of every row of the catalogue's tables (sections A to L)."""
    rows = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == 10 and _ID.fullmatch(cells[0]):
            rows.append(Row(cells[0], " ".join(cells[1].split()), cells[8]))
    return sorted(rows, key=lambda row: row.id)


def sync(catalogue: Path, path: Path = TABLE) -> list[Row]:
    """The table with names and priorities from `catalogue`; rows keep their state, new ones are absent."""
    old = {row.id: row for row in read(path)} if path.exists() else {}
    fresh = parse_catalogue(catalogue.read_text(encoding="utf-8"))
    lost = sorted(old.keys() - {row.id for row in fresh})
    if lost:
        raise ValueError(f"{catalogue.name} has no longer {', '.join(lost)}; ids are never reused or dropped")
    return [replace(old.get(row.id, row), name=row.name, priority=row.priority) for row in fresh]


def print_summary(rows: list[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{len(rows)} catalogue rows", title_justify="left")
    table.add_column("group")
    for status in (*STATUSES, "all"):
        table.add_column(status, justify="right")
    groups = [(key, [r for r in rows if r.id[0] == key]) for key in sorted({r.id[0] for r in rows})]
    groups += [(key, [r for r in rows if r.priority == key]) for key in PRIORITIES]
    groups.append(("all", rows))
    for key, members in groups:
        counts = Counter(r.status for r in members)
        cells = [str(counts[status]) if counts[status] else "" for status in STATUSES]
        table.add_row(key, *cells, str(len(members)), end_section=key in ("L", "P3"))
    Console().print(table)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check", help="whether what the table claims is there")
    commands.add_parser("summary", help="counts by group, priority and status")
    syncing = commands.add_parser("sync", help="take ids, names and priorities from the catalogue")
    syncing.add_argument("catalogue", type=Path)
    args = parser.parse_args(argv)
    try:
        if args.command == "sync":
            write(sync(args.catalogue))
        rows = read()
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    problems = check(rows)
    if args.command == "summary":
        print_summary(rows)
    for problem in problems:
        print(problem, file=sys.stderr)
    if args.command != "summary" and not problems:
        print(f"{len(rows)} rows, no problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
