"""What a server with default settings holds of the machine's memory: after its start, and after some requests.

    python benchmarks/serving/memory.py --penstock PATH/TO/penstock [MODEL ...] --out memory.json

Every model is served by itself (`""` is the bundled one) with all settings at their defaults but `--threads`. Memory is
the proportional set size (PSS) and the resident size (RSS) of the server and all its processes, once it has not changed
by more than 1 MB for two seconds, or after `SETTLE_S`: what is touched behind the start counts. Requests are
`--requests` different prompts of about `--words` words with `--tokens` tokens each, so that the prefix cache keeps all
of them. `--limit-gb`: the server gets SIGKILL beyond that, which is noted: others may need the memory. The size does
not depend on what else runs, unless the machine has no memory left.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table
from start import processes, sizes

MB = 1e6
SETTLE_S = 60.0
CACHE = Path.home() / ".cache/penstock"
MODELS = ["", str(CACHE / "smollm2-135m-instruct.gguf"), str(CACHE / "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf")]
WORDS = "the a red small old house tree river walks sees finds under near bird fox stone light song winter road".split()  # noqa: SIM905


def settled(pid: int) -> dict[str, int]:
    seen: list[dict[str, int]] = []
    end = time.monotonic() + SETTLE_S
    while time.monotonic() < end:
        seen.append(sizes(pid))
        last = [s["pss"] for s in seen[-8:]]
        if len(last) == 8 and max(last) - min(last) <= MB:
            break
        time.sleep(0.25)
    return seen[-1]


class Guard(threading.Thread):
    """Kills a server that takes more than its limit."""

    def __init__(self, pid: int, limit: float) -> None:
        super().__init__(daemon=True)
        self.pid, self.limit, self.peak, self.killed, self.ends = pid, limit, 0, False, threading.Event()

    def run(self) -> None:
        while not self.ends.wait(0.1):
            self.peak = max(self.peak, sizes(self.pid)["pss"])
            if self.peak > self.limit:
                self.killed = True
                for one in processes(self.pid)[::-1]:
                    os.kill(one, signal.SIGKILL)
                return


def prompt(i: int, words: int) -> str:
    """Different from the first word on."""
    return " ".join([f"Tale {i}:", *(WORDS[(i * 7 + j * (i + 3) + j // 5) % len(WORDS)] for j in range(words))])


def row(penstock: str, model: str, args: argparse.Namespace) -> dict[str, Any]:
    command = [
        penstock,
        "serve",
        *([model] if model else []),
        "--port",
        "0",
        "--threads",
        str(args.threads),
        *args.flag,
    ]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    out: dict[str, Any] = {"model": Path(model).name or "nano"}
    guard = Guard(server.pid, args.limit_gb * 1e9)
    guard.start()
    try:
        assert server.stdout is not None
        first = server.stdout.readline()
        url = re.findall(r"on (http://\S+)", first)[0]
        out["start"] = settled(server.pid)
        with httpx.Client(base_url=url, timeout=600) as client:
            for i in range(args.requests):
                body = {
                    "prompt": prompt(i, args.words),
                    "max_tokens": args.tokens,
                    "ignore_eos": True,
                    "temperature": 0,
                }
                client.post("/v1/completions", json=body).raise_for_status()
            out["after"] = settled(server.pid)
            state = client.get("/internal/state").json()
        out["kv_blocks"], out["kv"] = state["kv"]["total"], state["kv"]
    except (httpx.HTTPError, IndexError) as error:
        out["ended"] = f"{type(error).__name__}: {error}"
    finally:
        guard.ends.set()
        guard.join()
        server.terminate()
        server.wait()
        server.stdout.close()  # type: ignore[union-attr]
    out |= {"peak_pss": guard.peak, "killed": guard.killed}
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS, help="models to serve (nano, SmolLM2, Qwen2.5 0.5B)")
    parser.add_argument("--penstock", default="penstock", help="the command to run: of an old or a new version")
    parser.add_argument("--requests", type=int, default=50)
    parser.add_argument("--words", type=int, default=150)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit-gb", type=float, default=16.0)
    parser.add_argument("--flag", action="append", default=[], help="a flag for the server, as --flag=--kv-budget=1")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    table = Table(title="Memory of penstock serve and all its processes; MB = 10^6 bytes")
    for name in ("model", "start PSS", "RSS", f"after {args.requests} PSS", "RSS", "peak PSS", "KV blocks", ""):
        table.add_column(name, justify="left" if name in ("model", "") else "right")
    for model in args.models:
        r = row(args.penstock, model, args)
        rows.append(r)
        cells = [
            f"{r[when][kind] / MB:,.0f}" if when in r else "" for when in ("start", "after") for kind in ("pss", "rss")
        ]
        note = "killed at the limit" if r["killed"] else r.get("ended", "")
        table.add_row(r["model"], *cells, f"{r['peak_pss'] / MB:,.0f}", f"{r.get('kv_blocks', 0):,}", note)
    Console(width=140).print(table)
    if args.out is not None:
        args.out.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
