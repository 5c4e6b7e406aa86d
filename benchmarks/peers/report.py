"""Results as a table in the terminal, as Markdown, as one HTML page, and frozen for later.

python -m benchmarks.peers.report results.jsonl --html report.html --markdown report.md
python -m benchmarks.peers.report results.jsonl --freeze benchmarks/baselines/NAME.json
python -m benchmarks.peers.report results.jsonl --baseline benchmarks/baselines/NAME.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.measure import FIGURES, TITLES
from benchmarks.peers.page import html_page
from benchmarks.peers.results import read
from benchmarks.peers.rows import OURS, rows, summary
from rich.console import Console
from rich.table import Table

FORMAT = 1
Summary = list[dict[str, Any]]


def three(value: float) -> str:
    """About three significant digits."""
    return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f}"


def figure_text(name: str, f: dict[str, Any] | None) -> str:
    """`median (low - high)`, times with the unit that suits the median."""
    if f is None:
        return "-"
    scale, unit = (1.0, "") if not name.endswith("_s") else (1.0, " s") if f["median"] >= 1 else (1e3, " ms")
    median, low, high = (three(f[k] * scale) for k in ("median", "low", "high"))
    return f"{median} ({low} - {high}){unit}"


def ratio_text(f: dict[str, Any] | None) -> str:
    r = f and f["ratio"]
    if not r:
        return ""
    inside = f" [{r['low']:.2f}, {r['high']:.2f}]" if r["low"] is not None else ""
    return f"{r['value']:.2f}{inside} {r['peer']}"


def check_text(ok: bool | None) -> str:
    return {True: "ok", False: "WRONG", None: "?"}[ok]


def sections(found: Summary) -> dict[tuple[str, str, str], Summary]:
    """(model, workload, group) -> its rows: what may be compared."""
    out: dict[tuple[str, str, str], Summary] = {}
    for row in found:
        out.setdefault((row["model"], row["workload"], row["group"]), []).append(row)
    return out


def columns(workload: str) -> list[str]:
    limit = ["of the limit"] if workload == "W1" else []
    return ["engine", *(TITLES[f] for f in FIGURES[workload]), "ours / best peer", *limit, "GB/s", "n", "tokens"]


def cells(row: dict[str, Any]) -> list[str]:
    """One line of a section's table."""
    names = FIGURES[row["workload"]]
    head = row["figures"].get(names[0])
    failed = f", {len(row['errors'])} failed" if row["errors"] else ""
    limit = [] if row["workload"] != "W1" else ["-" if row["limit_share"] is None else f"{row['limit_share']:.0%}"]
    memory = "-" if row["probe"] is None else f"{row['probe'] / 1e9:.1f}"
    return [
        f"{row['engine']}:{row['precision']}", *(figure_text(n, row["figures"].get(n)) for n in names),
        ratio_text(head), *limit, memory, f"{head['n'] if head else 0}{failed}", check_text(row["check"]),
    ]  # fmt: skip


def print_tables(found: Summary, console: Console) -> None:
    for (model, workload, _), part in sections(found).items():
        table = Table(title=f"{model}, {workload}", title_justify="left")
        for column in columns(workload):
            table.add_column(column, justify="left" if column == "engine" else "right")
        for row in part:
            table.add_row(*cells(row), style="bold" if row["engine"] == OURS else None)
        console.print(table)


def markdown(found: Summary, head: Sequence[str]) -> str:
    lines = ["# Engines compared", "", *[f"{line}  " for line in head], ""]
    for (model, workload, _), part in sections(found).items():
        names = columns(workload)
        lines += [f"## {model}, {workload}", "", "| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
        lines += ["| " + " | ".join(cells(row)) + " |" for row in part]
        lines += [""]
    return "\n".join(lines)


def about(entries: Sequence[dict[str, Any]]) -> list[str]:
    """Sentences on the machine, the memory's speed and the versions."""
    machines = [e["machine"] for e in entries if "machine" in e]
    out = []
    if machines:
        m = machines[-1]
        out.append(f"{m['cpu'] or m['arch']}, {m['cores']} cores, {m['memory_bytes'] / 2**30:.0f} GiB.")
    probes = [e[k] / 1e9 for e in entries for k in ("probe_before", "probe_after") if k in e]
    if probes:
        how = {e["probe"] for e in entries if "probe" in e}
        note = "" if how == {"native"} else " (by numpy: slower than the memory is, so no shares of its limit)"
        out.append(
            f"Memory around the cells: median {statistics.median(probes):.1f} GB/s, {min(probes):.1f} to "
            f"{max(probes):.1f}{note}."
        )
    versions: dict[str, dict[str, None]] = {}
    for e in entries:
        if e.get("kind") == "cell" and e.get("version"):
            versions.setdefault(e["engine"], {})[e["version"]] = None
    if versions:
        out.append("; ".join(f"{engine}: {' and '.join(found)}" for engine, found in sorted(versions.items())) + ".")
    mixed = [engine for engine, found in versions.items() if len(found) > 1]
    if mixed:
        out.append(f"Several versions in one file: {', '.join(mixed)}. Their figures should not be put together.")
    out.append(
        "Figures: median (lowest - highest). Ratios: above 1 ours is faster; 95 % bootstrap interval over pairs."
    )
    return out


def freeze(found: Summary, entries: Sequence[dict[str, Any]], path: Path) -> None:
    """The peers' rows, without ours, in the format of benchmarks/baselines/README.md."""
    machines = [e["machine"] for e in entries if "machine" in e]
    data = {
        "format": FORMAT, "date": time.strftime("%Y-%m-%d"), "machine": machines[-1] if machines else {},
        "rows": [row for row in found if row["engine"] != OURS and row["figures"]],
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n", "utf-8")


def against(found: Summary, baseline: dict[str, Any]) -> list[tuple[str, ...]]:
    """(engine, model, workload, now, frozen, now / frozen by the headline) for what both have. Raises ValueError."""
    if baseline.get("format") != FORMAT:
        raise ValueError(f"the baseline has format {baseline.get('format')}, not {FORMAT}")
    out: list[tuple[str, ...]] = []
    frozen = {(r["engine"], r["precision"], r["model"], r["workload"]): r for r in baseline["rows"]}
    for row in found:
        name = FIGURES[row["workload"]][0]
        old = frozen.get((row["engine"], row["precision"], row["model"], row["workload"]))
        if old is not None and name in row["figures"] and name in old["figures"]:
            now, then = row["figures"][name], old["figures"][name]
            change = f"{now['median'] / then['median']:.2f}"
            who = f"{row['engine']}:{row['precision']}"
            out.append((who, row["model"], row["workload"], figure_text(name, now), figure_text(name, then), change))
    return out


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    parser.add_argument("--html", type=Path, metavar="FILE")
    parser.add_argument("--freeze", type=Path, metavar="FILE", help="keep the peers' figures here")
    parser.add_argument("--baseline", type=Path, metavar="FILE", help="how the peers here differ from frozen ones")
    args = parser.parse_args(argv)
    entries = read(args.results)
    found, head = summary(rows(entries)), about(entries)
    console = Console()
    for line in head:
        console.print(line, markup=False)
    print_tables(found, console)
    if args.markdown:
        args.markdown.write_text(markdown(found, head), "utf-8")
    if args.html:
        args.html.write_text(html_page(sections(found), head, columns, cells), "utf-8")
    if args.freeze:
        freeze(found, entries, args.freeze)
    if args.baseline:
        table = Table("engine", "model", "workload", "now", "frozen", "now / frozen", title="Peers now and then")
        for cells_ in against(found, json.loads(args.baseline.read_text("utf-8"))):
            table.add_row(*cells_)
        console.print(table)
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
