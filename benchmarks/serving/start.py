"""How soon a server is ready, and what it holds then: row by row of model and weight format.

    python benchmarks/serving/start.py [MODEL ...] [--formats none int8-w8a8] --out benchmarks/results/start.json

Every row starts `penstock serve` once with an empty cache of packed weights (*first*), then `--repeats` times from
that cache (*again*). Seconds are from the start of the process to its word that it listens, which it says when it is
ready, and to the end of a first request of 8 tokens. Memory is the proportional set size (PSS) of the server and all
its processes, after that request and once it changes no more (KV memory is touched behind the start; after `SETTLE_S`
at the latest), beside packed weights as they lie in the cache and KV memory as taken by then. *peak* is the largest
sum seen from the moment it is ready, read every 50 ms; *rest* is what the peak has beyond weights and KV: at most
300 MB is the goal. Files are in the page cache: nothing was read from a disk.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table
from server import ASKED, serving

from penstock.launch.bundled import bundled_model

MB = 1e6
SETTLE_S = 5.0
"""How long a server is watched after its first answer."""


def processes(pid: int) -> list[int]:
    """`pid` and everything it started, however deep."""
    found, todo = [], [pid]
    while todo:
        one = todo.pop()
        found.append(one)
        for children in Path(f"/proc/{one}/task").glob("*/children"):
            try:
                todo += [int(child) for child in children.read_text().split()]
            except OSError:
                continue  # it ended meanwhile
    return found


def sizes(pid: int) -> dict[str, int]:
    """Bytes of a process and all it started: {"pss": ..., "rss": ...}."""
    total = {"pss": 0, "rss": 0}
    for one in processes(pid):
        try:
            lines = Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, rest = line.partition(":")
            if name.lower() in total:
                total[name.lower()] += int(rest.split()[0]) * 1024
    return total


@contextmanager
def watched(pid: int, seen: list[int]) -> Iterator[None]:
    """Append the PSS to `seen` every 50 ms meanwhile."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.05):
            seen.append(sizes(pid)["pss"])

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def settle(seen: list[int]) -> None:
    """Wait until the memory has been the same (1 MB) for a second."""
    end = time.perf_counter() + SETTLE_S
    while time.perf_counter() < end and (len(seen) < 20 or max(seen[-20:]) - min(seen[-20:]) > MB):
        time.sleep(0.05)


def one_start(model: str, scheme: str, cache: Path) -> dict[str, Any]:
    """Seconds and bytes of one start in an environment whose cache is `cache`."""
    flags = ["--quantization", scheme] if scheme != "none" else []
    began = time.perf_counter()
    with serving(model, *flags, env={"PENSTOCK_CACHE": str(cache)}) as (url, pid, ready_s):
        seen: list[int] = []
        with watched(pid, seen):
            answer = httpx.post(f"{url}/v1/completions", json=ASKED | {"max_tokens": 8}, timeout=120)
            answered_s = time.perf_counter() - began
            answer.raise_for_status()
            assert answer.json()["usage"]["completion_tokens"] == 8
            settle(seen)
        state = httpx.get(f"{url}/internal/state", timeout=30).json()
        held = sizes(pid)["pss"]
    return {
        "ready_s": ready_s, "answered_s": answered_s, "pss_bytes": held, "peak_bytes": max([held, *seen]),
        "text": answer.json()["choices"][0]["text"], "kv_bytes": state["kv"]["held_bytes"],
    }  # fmt: skip


def row(model: str, scheme: str, repeats: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        first = one_start(model, scheme, Path(folder))
        packed = sum(f.stat().st_size for f in Path(folder).rglob("*.pst"))
        again = [one_start(model, scheme, Path(folder)) for _ in range(repeats)]
    assert {run["text"] for run in again} == {first["text"]}, "weights from the cache gave another text"
    return {
        "model": Path(model).name, "scheme": scheme, "packed_bytes": packed, "first": first, "again": again,
        "kv_bytes": max(run["kv_bytes"] for run in again),
        "ready_s": statistics.median(run["ready_s"] for run in again),
        "answered_s": statistics.median(run["answered_s"] for run in again),
        "pss_bytes": max(run["pss_bytes"] for run in again),
        "peak_bytes": max(run["peak_bytes"] for run in again),
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> Table:
    out = Table(title="starts of penstock serve; seconds, MB = 10^6 bytes")
    for name in (
        "model",
        "format",
        "ready, first",
        "ready, again",
        "least",
        "most",
        "answered",
        "packed MB",
        "KV MB",
        "PSS MB",
        "peak MB",
        "rest",
    ):
        out.add_column(name, justify="left" if name in ("model", "format") else "right")
    for r in rows:
        spread = [run["ready_s"] for run in r["again"]]
        out.add_row(
            r["model"], r["scheme"], f"{r['first']['ready_s']:.2f}",
            f"{r['ready_s']:.2f}", f"{min(spread):.2f}", f"{max(spread):.2f}", f"{r['answered_s']:.2f}",
            *(f"{r[name + '_bytes'] / MB:,.0f}" for name in ("packed", "kv", "pss", "peak")),
            f"{(r['peak_bytes'] - r['packed_bytes'] - r['kv_bytes']) / MB:,.0f}",
        )  # fmt: skip
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", help="model folders (default: the bundled nano)")
    parser.add_argument("--formats", nargs="*", default=["none", "int8-w8a8", "int4-w4a8:128"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    console, rows = Console(), []
    for model in args.models or [str(bundled_model("nano"))]:
        for scheme in args.formats:
            rows.append(row(model, scheme, args.repeats))
            console.print(table(rows[-1:]))
    console.print(table(rows))
    if args.out is not None:
        args.out.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
