"""Two builds of Penstock in turns: decoding, prompts, W3, starts and memory of one against the other.

    python -m benchmarks.paired /old/.venv/bin/python .venv/bin/python --model MODEL --pairs 20 --out paired.json

Each interpreter has one build installed. Two processes stay up and answer in turns (the order turns with every pair);
the tokens of both must be the same. Starts are of `penstock serve` until /ready answers; memory is the proportional set
size of all its processes then, and of the two processes at their end. Ratios are before / after of times (above 1:
faster now) and after / before of memory (below 1: less now), with Student's interval of 95 % over the logarithms of the
pairs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Both builds keep their bytecode: one that compiles all its modules at every start would be compared by that.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
HERE = Path(__file__).resolve().parent
OPTIONS = {
    "bf16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8-w8a8"},
    "int4": {"quantization": "int4-w4a8:128"},
}


def worker(model: str, settings: dict[str, Any]) -> None:
    """Answers one line per workload: seconds, and the tokens."""
    sys.path.insert(0, str(HERE / "peers"))
    from workloads import mixed, single

    from penstock import LLM, SamplingParams

    llm = LLM(model, **settings)
    highest = min(30_000, llm.engine.limits.vocab_size - 1)
    draws: dict[str, Callable[[int], list[tuple[list[int], int]]]] = {
        "decode": lambda n: [single(128, 128, n, highest=highest)],
        "prefill": lambda n: [single(min(1024, llm.engine.limits.context[0] - 8), 1, n, highest=highest)],
        "W3": lambda n: mixed(n, highest=highest),
    }
    for line in sys.stdin:
        name, number = json.loads(line)
        asked = draws[name](number)
        params = [SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False) for _, new in asked]
        began = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": ids} for ids, _ in asked], params)
        seconds = time.perf_counter() - began
        if name == "decode":
            metrics = outputs[0].metrics
            seconds = metrics.finished_s - metrics.first_token_s
        print(json.dumps([seconds, [list(o.outputs[0].token_ids) for o in outputs]]), flush=True)


class Build:
    """One interpreter's process, kept up."""

    def __init__(self, python: str, model: str, settings: dict[str, Any]) -> None:
        self.python = python
        command = [python, str(HERE / "paired.py"), "worker", model, json.dumps(settings)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, name: str, number: int) -> tuple[float, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([name, number]) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.python}: its process ended")
        seconds, tokens = json.loads(line)
        return seconds, tokens

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


def proportional_bytes(pid: int) -> int:
    """Of the process and all it has started."""
    total, todo = 0, [pid]
    while todo:
        one = todo.pop()
        try:
            for line in Path(f"/proc/{one}/smaps_rollup").read_text().splitlines():
                total += 1024 * int(line.split()[1]) if line.startswith("Pss:") else 0
            for children in Path(f"/proc/{one}/task").glob("*/children"):
                todo += map(int, children.read_text().split())
        except OSError:
            continue
    return total


def start(python: str, model: str, flags: list[str]) -> tuple[float, float]:
    """(seconds until /ready, bytes two seconds later)."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    began = time.perf_counter()
    command = [str(Path(python).parent / "penstock"), "serve", model, "--port", str(port), *flags]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=2):
                    break
            except (OSError, urllib.error.URLError):
                if server.poll() is not None or time.perf_counter() - began > 120:
                    raise SystemExit(f"{python}: its server did not start") from None
                time.sleep(0.01)
        seconds = time.perf_counter() - began
        time.sleep(2)
        return seconds, float(proportional_bytes(server.pid))
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("before", help="interpreter of the one build")
    parser.add_argument("after", help="and of the other")
    parser.add_argument("--model", default="nano")
    parser.add_argument("--precision", choices=sorted(OPTIONS), help="(default: as stored)")
    parser.add_argument("--workloads", default="decode,prefill,W3,start")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--kv", type=int, default=1 << 30, metavar="BYTES", help="KV memory of both (default: 1 GiB)")
    parser.add_argument("--out")
    args = parser.parse_args()
    settings = {**OPTIONS.get(args.precision, {}), "threads": args.threads, "kv_cache_memory_bytes": args.kv}
    found: dict[str, list[list[float]]] = {}
    same = True
    names = args.workloads.split(",")
    builds = [Build(python, args.model, settings) for python in (args.before, args.after)]
    for name in (n for n in names if n != "start"):
        pairs: list[list[float]] = []
        for number in range(-1, args.pairs):  # the first one warms up
            pair, tokens = [0.0, 0.0], [None, None]
            for i in (0, 1) if number % 2 == 0 else (1, 0):
                pair[i], tokens[i] = builds[i].ask(name, number)
            same &= tokens[0] == tokens[1]
            pairs += [pair] if number >= 0 else []
        found[name] = pairs
        tell(name, pairs, less_now=False)
    if found:
        held = [[float(proportional_bytes(b.process.pid)) for b in builds]]
        found["memory of both processes at the end, bytes"] = held
        tell("memory at the end", held, less_now=True)
    for build in builds:
        build.close()
    if "start" in names:
        flags = [f"--{k.replace('_', '-')}={v}" for k, v in settings.items() if k != "kv_cache_memory_bytes"]
        starts: list[list[tuple[float, float]]] = []
        for number in range(-1, args.pairs):  # the first one compiles bytecode
            both: list[tuple[float, float]] = [(0.0, 0.0), (0.0, 0.0)]
            for i in (0, 1) if number % 2 == 0 else (1, 0):
                both[i] = start((args.before, args.after)[i], args.model, flags)
            starts += [both] if number >= 0 else []
        found["start"] = [[pair[0][0], pair[1][0]] for pair in starts]
        found["memory after start, bytes"] = [[pair[0][1], pair[1][1]] for pair in starts]
        tell("start", found["start"], less_now=False)
        tell("memory after start", found["memory after start, bytes"], less_now=True)
    print("tokens: the same" if same else "TOKENS DIFFER")
    if args.out:
        about = {"model": Path(args.model).name, "settings": settings, "load": os.getloadavg(), "tokens_same": same}
        Path(args.out).write_text(json.dumps(about | {"pairs": found}, indent=1) + "\n", "utf-8")


def tell(name: str, pairs: list[list[float]], *, less_now: bool) -> None:
    from penstock.measure.intervals import ratio_interval

    before, after = ([pair[i] for pair in pairs] for i in (0, 1))
    a, b = statistics.median(before), statistics.median(after)
    gain, interval = ratio_interval(after, before) if less_now else ratio_interval(before, after)
    spread = "" if interval is None else f" ({1 + interval[0]:.3f} to {1 + interval[1]:.3f})"
    unit = (1e6, "MB") if a > 1e4 else (1e-3, "ms")
    print(f"{name:20} {a / unit[0]:10.1f} {b / unit[0]:10.1f} {unit[1]}  ratio {1 + gain:.3f}{spread}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(sys.argv[2], json.loads(sys.argv[3]))
    else:
        main()
