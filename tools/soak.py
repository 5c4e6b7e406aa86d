"""A long run of a real server with faults among the requests, and what is left of them afterwards.

    python tools/soak.py --minutes 30 --faults 0.01 --out soak.json

Starts `penstock serve`, asks it without pause, and lets one request in a hundred go wrong: clients that leave, bodies
that are no JSON, values out of range, readers that stall, an engine that is killed or stopped. Every answer that was
not disturbed by its own fault is compared with the same request's answer before the soak. At the end: memory, file
descriptors and KV blocks against the beginning, and how fast memory grew: MiB per 10,000 requests, from a line through
the second half of the run. Exit status 1 if anything changed or leaked.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

PROMPTS = ("Once upon a time", "The little girl", "A dog and a cat", "On a cold winter morning", "The king said")
BAD_BODIES: tuple[bytes, ...] = (
    b"{", b'{"prompt": "a", "max_tokens": -1}', b'{"prompt": ""}', b'{"prompt": "a", "temperature": "hot"}',
    b'{"prompt": "a", "n": 1000000000}', b'{"model": "nobody", "prompt": "a"}', b"\xff\xfe", b"[" * 100_000,
)  # fmt: skip
FAULTS = {"leave": 8, "bad": 8, "stall": 2, "timeout": 3, "kill": 0.15, "stop": 0.1}
"""Kinds of faults and how often each is chosen among them."""
_SLOPE_REQUESTS = 4000
"""A slope needs so many requests: allocators take memory in steps."""
_MAX_SLOPE = 0.5
_KILL_GAP_S = 25.0
"""Seconds between kills at least: a server that loses its engine four times a minute gives up, and should."""


@dataclass
class State:
    url: str
    pid: int
    expected: dict[str, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    last_kill_s: float = 0.0


def body(rng: random.Random, which: int) -> dict[str, Any]:
    """Request number `which` of a fixed set: the same number, the same answer."""
    made = random.Random(which)
    out: dict[str, Any] = {
        "prompt": made.choice(PROMPTS), "max_tokens": made.randint(1, 60), "seed": which,
        "temperature": made.choice((0, 0.7, 1.0)),
    }  # fmt: skip
    if made.random() < 0.3:
        out["stop"] = [" the", "."]
    return out


async def text_of(client: httpx.AsyncClient, asked: dict[str, Any], stream: bool) -> str:
    if not stream:
        answer = await client.post("/v1/completions", json=asked)
        answer.raise_for_status()
        return str(answer.json()["choices"][0]["text"])
    out = []
    async with client.stream("POST", "/v1/completions", json=asked | {"stream": True}) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise RuntimeError(chunk["error"]["message"])
                out += [choice["text"] for choice in chunk["choices"]]
    return "".join(out)


async def good(client: httpx.AsyncClient, state: State, rng: random.Random, num: int) -> None:
    which = rng.randrange(num)
    for _ in range(50):
        try:
            found = await text_of(client, body(rng, which), rng.random() < 0.5)
        except httpx.HTTPStatusError as error:
            state.counts[f"refused {error.response.status_code}"] += 1
            if error.response.status_code not in (429, 503):
                state.wrong.append(f"{which}: status {error.response.status_code}")
                return
            await asyncio.sleep(0.2)
            continue
        except (httpx.HTTPError, RuntimeError) as error:
            state.wrong.append(f"{which}: {type(error).__name__}: {error}")
            return
        state.counts["answers"] += 1
        if found != state.expected[str(which)]:
            state.wrong.append(f"{which}: {found!r} instead of {state.expected[str(which)]!r}")
        return
    state.wrong.append(f"{which}: refused fifty times")


async def fault(client: httpx.AsyncClient, state: State, rng: random.Random) -> None:
    kind = rng.choices(list(FAULTS), list(FAULTS.values()))[0]
    if kind in ("kill", "stop"):
        if time.monotonic() - state.last_kill_s < _KILL_GAP_S:
            return
        state.last_kill_s = time.monotonic()
    state.counts[kind] += 1
    asked = {"prompt": "Once upon a time", "max_tokens": 200, "ignore_eos": True, "stream": True}
    if kind == "bad":
        answer = await client.post("/v1/completions", content=rng.choice(BAD_BODIES))
        if not 400 <= answer.status_code < 500 or "error" not in answer.json():
            state.wrong.append(f"bad body: {answer.status_code}")
    elif kind in ("leave", "stall"):
        with contextlib.suppress(httpx.HTTPError):
            async with client.stream("POST", "/v1/completions", json=asked) as answer:
                async for _ in answer.aiter_bytes():
                    if kind == "stall":
                        await asyncio.sleep(5.0)
                    if rng.random() < 0.2:
                        break
    elif kind == "timeout":
        answer = await client.post("/v1/completions", json=asked | {"stream": False, "timeout": 0.05})
        if answer.status_code not in (408, 429, 503, 504, 200):
            state.wrong.append(f"timeout: {answer.status_code}")
    else:
        for pid in children(state.pid):
            os.kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
            if kind == "stop":
                await asyncio.sleep(2.0)
                os.kill(pid, signal.SIGCONT)


def children(pid: int) -> list[int]:
    """Engine processes of the server: children whose command line names them."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            stat = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            if int(stat[1]) == pid and b"engine_process" in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


def used(pid: int) -> dict[str, float]:
    """Resident MiB and file descriptors of the server and its engine."""
    out = {"fds": 0.0, "threads": 0.0}
    for name, each in [("server", pid), *(("engine", child) for child in children(pid))]:
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{each}/status").read_text()
            for line in status.splitlines():
                if line.startswith("VmRSS"):
                    out[f"{name}_rss_mib"] = int(line.split()[1]) / 1024
                if line.startswith("Threads"):
                    out["threads"] += int(line.split()[1])
            out["fds"] += len(list(Path(f"/proc/{each}/fd").iterdir()))
    return out


async def worker(client: httpx.AsyncClient, state: State, args: argparse.Namespace, number: int, until: float) -> None:
    rng = random.Random(f"{args.seed} {number}")
    while time.monotonic() < until:
        if rng.random() < args.faults:
            await fault(client, state, rng)
        else:
            await good(client, state, rng, args.requests)


async def soak(args: argparse.Namespace, url: str, pid: int, console: Console) -> dict[str, Any]:
    state = State(url, pid)
    limits = httpx.Limits(max_connections=args.workers * 2)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        for which in range(args.requests):
            state.expected[str(which)] = await text_of(client, body(random.Random(), which), False)
        # A first burst, so that memory that is taken once and kept does not look like a leak.
        await asyncio.gather(*(good(client, state, random.Random(i), args.requests) for i in range(4 * args.workers)))
        await asyncio.sleep(10)
        before = used(pid) | {"kv_used": await kv_used(client)}
        until = time.monotonic() + args.minutes * 60
        tasks = [asyncio.create_task(worker(client, state, args, i, until)) for i in range(args.workers)]
        history = []
        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("soak", total=args.minutes * 60)
            while time.monotonic() < until:
                await asyncio.sleep(min(10, args.minutes * 6))
                now = used(pid) | {"requests": float(sum(state.counts.values()))}
                history.append(now)
                rss = now.get("server_rss_mib", 0)
                told = f"{state.counts['answers']} answers, {len(state.wrong)} wrong, {rss:.0f} MiB"
                progress.update(task, completed=args.minutes * 60 - (until - time.monotonic()), description=told)
        await asyncio.gather(*tasks)
        await asyncio.sleep(10)
        after = used(pid) | {"kv_used": await kv_used(client)}
    return {
        "minutes": args.minutes, "faults": args.faults, "counts": dict(state.counts), "wrong": state.wrong,
        "before": before, "after": after, "history": history,
        "mib_per_10000": {name: slope(history, f"{name}_rss_mib") for name in ("server", "engine")},
    }  # fmt: skip


def slope(history: list[dict[str, float]], name: str) -> float | None:
    """MiB per 10,000 requests over the second half of a run; None if there is too little of it to say.

    Points before an engine was replaced for the last time do not count: the new one fills its memory again.
    """
    half = history[len(history) // 2 :]
    starts = [i for i in range(1, len(half)) if half[i].get(name, 0) < 0.8 * half[i - 1].get(name, 0)]
    points = [(h["requests"], h[name]) for h in half[starts[-1] if starts else 0 :] if name in h]
    if len(points) < 3 or points[-1][0] - points[0][0] < _SLOPE_REQUESTS:
        return None
    middle = [sum(values) / len(points) for values in zip(*points, strict=True)]
    across = sum((x - middle[0]) ** 2 for x, _ in points)
    return 10_000 * sum((x - middle[0]) * (y - middle[1]) for x, y in points) / across


async def kv_used(client: httpx.AsyncClient) -> float:
    text = (await client.get("/metrics")).text
    values = [line.split()[-1] for line in text.splitlines() if line.startswith("vllm:kv_cache_usage_perc")]
    return float(values[0])


def judged(result: dict[str, Any]) -> list[str]:
    """What is wrong, in sentences."""
    before, after = result["before"], result["after"]
    out = [f"{len(result['wrong'])} answers were wrong"] if result["wrong"] else []
    for name, slack in (("server_rss_mib", 1.1), ("engine_rss_mib", 1.1), ("fds", 1.0)):
        if after.get(name, 0) > before.get(name, 0) * slack + 8:
            out.append(f"{name} grew from {before.get(name, 0):.0f} to {after.get(name, 0):.0f}")
    for name, grown in result["mib_per_10000"].items():
        if grown is not None and grown > _MAX_SLOPE:
            out.append(f"resident memory of the {name} grows by {grown:.2f} MiB per 10,000 requests")
    if after["kv_used"] > before["kv_used"]:
        out.append(f"KV in use grew from {before['kv_used']} to {after['kv_used']}")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--faults", type=float, default=0.01, help="part of the requests that go wrong")
    parser.add_argument("--workers", type=int, default=16, help="clients at once")
    parser.add_argument("--requests", type=int, default=40, help="different requests")
    parser.add_argument("--model", help="default: the bundled one")
    parser.add_argument("--ops", default="native")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="the whole result as JSON")
    args = parser.parse_args()
    console = Console(stderr=True)
    command = [
        sys.executable, "-m", "penstock.cli.main", "serve", *([args.model] if args.model else []), "--port", "0",
        "--ops", args.ops, "--max-model-len", "512", "--num-gpu-blocks-override", "128", "--no-request-log",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            first = server.stdout.readline()
            url = next(word for word in first.split() if word.startswith("http"))
            result = asyncio.run(soak(args, url, server.pid, console))
        finally:
            server.terminate()
    complaints = judged(result)
    table = Table("", "before", "after")
    for name in sorted(set(result["before"]) | set(result["after"])):
        table.add_row(name, f"{result['before'].get(name, 0):.3g}", f"{result['after'].get(name, 0):.3g}")
    console.print(table, result["counts"], {"MiB per 10,000 requests": result["mib_per_10000"]})
    for line in (*complaints, *result["wrong"][:10]):
        console.print(line, style="red")
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    sys.exit(1 if complaints else 0)


if __name__ == "__main__":
    main()
