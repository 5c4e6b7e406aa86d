"""What the server itself costs and promises: start, overhead per token, refusals under overload, a key beside a flood.

    python benchmarks/serving/server.py --out benchmarks/serving/results/server.json

Runs `penstock serve` with the bundled model on this machine, client and server on the same cores (so times are upper
bounds). Texts of accepted requests are compared with those of an idle server in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
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

from penstock.bench.http import HttpClient

COMMAND = [sys.executable, "-m", "penstock.cli.main"]
ASKED: dict[str, Any] = {"prompt": "Once upon a time", "temperature": 0, "ignore_eos": True}


@contextmanager
def serving(*args: str, log: Path | None = None, env: dict[str, str] | None = None) -> Iterator[tuple[str, int, float]]:
    """(url, pid, seconds from start to ready) of a server; its log goes to a file. `env`: set besides ours."""
    began = time.perf_counter()
    with (log or Path(os.devnull)).open("w", encoding="utf-8") as stderr:
        server = subprocess.Popen(
            [*COMMAND, "serve", "--port", "0", *args], stdout=subprocess.PIPE, stderr=stderr, text=True,
            env=os.environ | (env or {}),
        )  # fmt: skip
        try:
            assert server.stdout is not None
            url = re.findall(r"on (http://\S+)", server.stdout.readline())[0]
            yield url, server.pid, time.perf_counter() - began
        finally:
            server.terminate()
            server.wait()
            assert server.stdout is not None
            server.stdout.close()


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def start_times(repeats: int) -> dict[str, Any]:
    helps, readies = [], []
    for _ in range(repeats):
        began = time.perf_counter()
        subprocess.run([*COMMAND, "--help"], stdout=subprocess.DEVNULL, check=True)
        helps.append(time.perf_counter() - began)
        with serving() as (_, _, ready_s):
            readies.append(ready_s)
    return {"help_s": spread(helps), "ready_s": spread(readies)}


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "n": len(values)}


async def streamed(client: httpx.AsyncClient, asked: dict[str, Any]) -> tuple[str, float, int]:
    """(text, seconds to the first token, chunks)."""
    began, first, text, chunks = time.perf_counter(), 0.0, [], 0
    async with client.stream("POST", "/v1/completions", json=asked | {"stream": True}) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                first = first or time.perf_counter() - began
                chunks += 1
                text += [c["text"] for c in json.loads(line[6:])["choices"]]
    return "".join(text), first, chunks


async def overhead(url: str, pid: int, at_once: int, tokens: int) -> dict[str, float]:
    """CPU time of the API process per streamed token."""
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=httpx.Limits(max_connections=None)) as client:
        await streamed(client, ASKED | {"max_tokens": 4})
        before, began = cpu_s(pid), time.perf_counter()
        await asyncio.gather(*(streamed(client, ASKED | {"max_tokens": tokens}) for _ in range(at_once)))
        wall = time.perf_counter() - began
        spent = cpu_s(pid) - before
    total = at_once * tokens
    return {"streams": at_once, "tokens": total, "api_us_per_token": spent / total * 1e6, "tokens_per_s": total / wall}


async def overload(url: str, num: int, connections: int, tokens: int) -> dict[str, Any]:
    """Row 48 of the fault list: `num` requests within a second over at most `connections` connections."""
    client = HttpClient(url, {"content-type": "application/json"})
    asked = json.dumps(ASKED | {"max_tokens": tokens}).encode()
    expected = json.loads((await client.call("POST", "/v1/completions", asked)).body)["choices"][0]["text"]
    todo, found = iter(range(num)), []
    began = time.perf_counter()

    async def worker() -> None:
        for i in todo:
            await asyncio.sleep(max(0.0, began + i / num - time.perf_counter()))
            sent = time.perf_counter()
            answer = await client.call("POST", "/v1/completions", asked)
            took = time.perf_counter() - sent
            if answer.status == 200:
                good = json.loads(answer.body)["choices"][0]["text"] == expected
            else:
                good = answer.status in (429, 503) and int(answer.headers["retry-after"]) > 0
            found.append((answer.status, took, good))

    await asyncio.gather(*(worker() for _ in range(connections)))
    wall_s = time.perf_counter() - began
    await client.close()
    statuses: dict[str, int] = {}
    for status, _, _ in found:
        statuses[str(status)] = statuses.get(str(status), 0) + 1
    refused = sorted(took * 1e3 for status, took, _ in found if status != 200)
    return {
        "statuses": statuses, "wrong": sum(not good for _, _, good in found),
        "client_refusal_ms": percentiles(refused), "served_tokens_per_s": statuses.get("200", 0) * tokens / wall_s,
    }  # fmt: skip


def percentiles(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    return {name: values[min(len(values) - 1, int(p * len(values)))] for name, p in
            (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))}  # fmt: skip


def refusals(log: Path) -> dict[str, float]:
    """Server's own time from a refused request's body to its answer, in ms."""
    times = []
    for line in log.read_text().splitlines():
        at = line.find('{"event":"refused"')
        if at >= 0:
            entry = json.loads(line[at:])
            if entry.get("status") in (429, 503):
                times.append(entry["took_ms"])
    return percentiles(sorted(times)) | {"n": len(times)}


async def flood(url: str, seconds: float, *, words: int = 4) -> dict[str, Any]:
    """Row 50: TTFT of one key, alone and beside another key's flood, whose prompts have so many words."""
    other = httpx.AsyncClient(base_url=url, timeout=300, headers={"authorization": "Bearer beta"})
    limits = httpx.Limits(max_connections=None)
    async with (
        other,
        httpx.AsyncClient(base_url=url, timeout=300, headers={"authorization": "Bearer alpha"}, limits=limits) as noisy,
    ):

        async def probe(until: float) -> list[float]:
            out = []
            number = 0
            while time.perf_counter() < until:
                number += 1
                asked = ASKED | {
                    "prompt": f"The king had {number} sons and",
                    "max_tokens": 8,
                    "cache_salt": str(number),
                }
                out.append((await streamed(other, asked))[1])
                await asyncio.sleep(0.3)
            return out

        await probe(time.perf_counter() + 1)
        idle = await probe(time.perf_counter() + seconds)

        async def shout(i: int, until: float) -> None:
            while time.perf_counter() < until:
                loud = {"prompt": f"{i} " + "there was a king " * (words // 4), "max_tokens": 64}
                answer = await noisy.post("/v1/completions", json=ASKED | loud)
                if answer.status_code != 200:
                    await asyncio.sleep(0.2)

        until = time.perf_counter() + seconds
        shouting = [asyncio.create_task(shout(i, until)) for i in range(40)]
        await asyncio.sleep(1)
        before = await steps(other), time.perf_counter()
        beside = await probe(until)
        step_s = (time.perf_counter() - before[1]) / max(1.0, await steps(other) - before[0])
        await asyncio.gather(*shouting)
    return {
        "idle_ms": spread([x * 1e3 for x in idle]),
        "beside_ms": spread([x * 1e3 for x in beside]),
        "step_ms": step_s * 1e3,
    }


async def probe_timing(url: str, trials: int) -> dict[str, Any]:
    """Row 41: can one tenant tell from times what another has asked? Prompts the other sent, and fresh ones."""
    other = httpx.AsyncClient(base_url=url, timeout=300, headers={"authorization": "Bearer alpha"})
    mine = httpx.AsyncClient(base_url=url, timeout=300, headers={"authorization": "Bearer beta"})
    times: dict[str, list[float]] = {"asked by the other": [], "asked by nobody": [], "asked by oneself": []}
    cached = 0
    async with other, mine:
        for i in range(trials):
            known = [3 + (i * 7919 + j * 31) % 4000 for j in range(192)]
            fresh = [3 + (i * 104729 + j * 37 + 11) % 4000 for j in range(192)]
            asked = {"temperature": 0, "max_tokens": 1, "ignore_eos": True}
            await other.post("/v1/completions", json=asked | {"prompt": known})
            pairs = [("asked by the other", known), ("asked by nobody", fresh)]
            for kind, prompt in pairs if i % 2 else pairs[::-1]:
                began = time.perf_counter()
                answer = (await mine.post("/v1/completions", json=asked | {"prompt": prompt})).json()
                times[kind].append((time.perf_counter() - began) * 1e3)
                cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            began = time.perf_counter()
            await mine.post("/v1/completions", json=asked | {"prompt": known})
            times["asked by oneself"].append((time.perf_counter() - began) * 1e3)
    a, b = times["asked by the other"], times["asked by nobody"]
    wins = sum((x < y) + 0.5 * (x == y) for x in a for y in b) / (len(a) * len(b))
    return {"ms": {k: spread(v) for k, v in times.items()}, "guessed_right": wins, "cached_tokens": cached}


async def steps(client: httpx.AsyncClient) -> float:
    """Steps of the engine so far."""
    text = (await client.get("/metrics")).text
    return float(re.findall(r"^penstock:engine_steps_total\S* (\S+)", text, re.M)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--trials", type=int, default=200, help="of the timing probe")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--floods", action="store_true", help="the floods alone (a minute)")
    args = parser.parse_args()
    console = Console()
    small = ("--max-model-len", "512", "--num-gpu-blocks-override", "1024")
    if args.floods:
        told = floods(small)
        console.print(told)
        if args.out is not None:
            args.out.write_text(json.dumps(told, indent=1) + "\n", "utf-8")
        return
    result: dict[str, Any] = {"start": start_times(args.repeats)}
    console.print(result)
    with serving(*small, "--ops", "blas") as (url, pid, _):
        result["overhead"] = [asyncio.run(overhead(url, pid, n, 240)) for n in (1, 8, 64)]
    console.print(result["overhead"])
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with serving(*small, "--max-num-seqs", "100", "--max-num-queued-reqs", "100", log=log) as (url, _, _):
            result["overload"] = asyncio.run(overload(url, 1000, 256, 24))
        result["overload"]["server_refusal_ms"] = refusals(log)
    console.print(result["overload"])
    threading.Event().wait(0.5)
    result |= floods(small)
    with serving(*small, "--ops", "blas", "--api-key", "alpha,beta") as (url, _, _):
        result["timing_probe"] = asyncio.run(probe_timing(url, args.trials))
    table = Table("figure", "value")
    for name, value in flat(result):
        table.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
    console.print(table)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n", "utf-8")


def floods(small: tuple[str, ...]) -> dict[str, Any]:
    """Beside many short requests; beside prompts of which a few fill the memory, where each key has half of it."""
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.toml"
        keys.write_text('[flood]\nkey = "alpha"\nkv_share = 1\n[quiet]\nkey = "beta"\nkv_share = 1\n')
        with serving(*small, "--api-key", "alpha,beta") as (url, _, _):
            short = asyncio.run(flood(url, 10.0))
        tight = ("--max-model-len", "512", "--num-gpu-blocks-override", "64", "--api-keys-file", str(keys))
        with serving(*tight) as (url, _, _):
            long = asyncio.run(flood(url, 10.0, words=300))
    found = {"flood": short, "long_flood": long}
    for one in found.values():
        one["times_idle"] = one["beside_ms"]["median"] / one["idle_ms"]["median"]
    return found


def flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from flat(item, f"{prefix}.{key}".lstrip("."))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from flat(item, f"{prefix}[{i}]")
    else:
        yield prefix, value


if __name__ == "__main__":
    main()
