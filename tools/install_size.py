"""What `pip install penstock` costs: bytes of every wheel it brings, and how fast the command line starts.

    python tools/install_size.py            both
    python tools/install_size.py --no-size  start-up only (needs no network)

The wheels of the base dependencies and of everything they need are downloaded into a temporary folder and never
installed. Times are medians of warm runs: the first run, which reads the files from disk, is thrown away.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
MIB = 1024**2


def base_dependencies() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return list(project["dependencies"])


def wheel_sizes(folder: Path) -> list[tuple[str, int, int]]:
    """(name, bytes of the wheel, bytes when unpacked) of every wheel in `folder`, largest first."""
    out = []
    for path in folder.glob("*.whl"):
        with zipfile.ZipFile(path) as wheel:
            unpacked = sum(item.file_size for item in wheel.infolist())
        name, version = path.name.split("-")[:2]
        out.append((f"{name} {version}", path.stat().st_size, unpacked))
    return sorted(out, key=lambda row: -row[1])


def source_size(folder: Path) -> int:
    """Bytes of Penstock's own modules, without caches."""
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts)


def download(folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--only-binary=:all:"]
    command += ["--constraint", str(ROOT / "constraints.txt"), "--dest", str(folder), *base_dependencies()]
    subprocess.run(command, check=True)


def start_times(arguments: Iterable[str], runs: int) -> list[float]:
    """Wall-clock seconds of `python -m penstock.cli.main ARGUMENTS`, warm."""
    command = [sys.executable, "-m", "penstock.cli.main", *arguments]
    out = []
    for _ in range(runs + 1):
        began = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        out.append(time.perf_counter() - began)
    return out[1:]


def print_sizes(console: Console) -> None:
    with tempfile.TemporaryDirectory() as name:
        download(Path(name))
        rows = wheel_sizes(Path(name))
    own = source_size(ROOT / "src" / "penstock")
    rows.append(("penstock itself (source)", own, own))
    table = Table(title=f"pip install .: {len(base_dependencies())} direct dependencies, {len(rows) - 1} wheels")
    for title in ("package", "wheel MiB", "unpacked MiB"):
        table.add_column(title, justify="left" if title == "package" else "right")
    for index, (package, packed, unpacked) in enumerate(rows):
        table.add_row(package, f"{packed / MIB:.2f}", f"{unpacked / MIB:.2f}", end_section=index == len(rows) - 1)
    table.add_row("all", f"{sum(r[1] for r in rows) / MIB:.2f}", f"{sum(r[2] for r in rows) / MIB:.2f}")
    console.print(table)


def print_times(console: Console, runs: int) -> None:
    table = Table(title=f"start-up, {runs} warm runs")
    for title in ("command", "median ms", "fastest ms", "slowest ms"):
        table.add_column(title, justify="left" if title == "command" else "right")
    for argument in ("--version", "--help"):
        times = start_times([argument], runs)
        figures = (statistics.median(times), min(times), max(times))
        table.add_row(f"penstock {argument}", *(f"{1000 * value:.0f}" for value in figures))
    console.print(table)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--no-size", action="store_true", help="do not download anything")
    parser.add_argument("--runs", type=int, default=10, help="warm runs per command (default: 10)")
    args = parser.parse_args(argv)
    console = Console()
    if not args.no_size:
        print_sizes(console)
    print_times(console, args.runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
