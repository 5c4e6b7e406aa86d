"""Kill the engine of a real server again and again, and compare every text with an undisturbed run.

    python tools/kill_soak.py --kills 40 --apart 25      kills alone (about 20 minutes)
    python tools/kill_soak.py --kills 24 --apart 12 --kinds kill,poison,poison-kill,poison-exception,poison-hang \\
        --hang-every 900 --ops native --out run.json     with poisons and hung steps (about 5 minutes)
    python tools/kill_soak.py --kills 4 --apart 3        a quick look

A server with the bundled model answers `--streams` concurrent streamed completions all the time. Every `--apart`
seconds (plus or minus a fifth) something of `--kinds` happens, at random: its engine process gets SIGKILL, or a request
comes that kills, breaks or hangs any engine. With `--hang-every` a step hangs besides, of which nobody is guilty. Each
text is compared with the one that the same request got before. Poisons must end with an error that says so, and be
refused when they are sent again. The exit status is 1 if a text differs, is missing or ended with an error, or if a
poison got anything else.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from penstock.config import serve_from_kwargs
from penstock.engine.process_link import ProcessLink
from penstock.launch.bundled import DEFAULT, bundled_model
from penstock.server.live import LiveServer

POISONS = {"poison": 4000, "poison-kill": 4001, "poison-exception": 4002, "poison-hang": 4003}
"""Kinds of `--fault`, and a token that no text here has."""


@dataclass
class Tally:
    """What happened. `ready_s`: from each kill until /ready said 200 again; `gaps_s`: a stream's longest silence."""

    finished: int = 0
    changed: int = 0
    failed: int = 0
    kills: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    poisons_wrong: list[str] = field(default_factory=list)
    convicted: int = 0
    refused: int = 0
    restarts: int = 0
    busy: list[int] = field(default_factory=list)
    ready_s: list[float] = field(default_factory=list)
    restart_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)


def bodies(num: int) -> list[dict[str, Any]]:
    """Requests of many kinds, each with its seed."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.0, "n": 3},
        {"temperature": 0, "frequency_penalty": 0.5, "presence_penalty": 0.2},
        {"temperature": 1.0, "stop": ["\n\n", "The end"], "min_tokens": 30},
    ]
    return [
        {"prompt": f"Once there was a girl of {i} years. She", "seed": i, "max_tokens": 60 + i, "stream": True}
        | kinds[i % len(kinds)]
        for i in range(num)
    ]


async def texts(client: httpx.AsyncClient, body: dict[str, Any], tally: Tally | None = None) -> dict[int, str]:
    """Text by choice. Raises RuntimeError if the stream ends with an error or not at all."""
    out: dict[int, str] = {}
    last = time.monotonic()
    longest = 0.0
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            raise RuntimeError((await answer.aread()).decode())
        async for line in answer.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                if tally is not None:
                    tally.gaps_s.append(longest)
                return out
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(str(event["error"]))
            for choice in event["choices"]:
                out[choice["index"]] = out.get(choice["index"], "") + choice["text"]
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
    raise RuntimeError("the stream broke off")


async def poison(client: httpx.AsyncClient, kind: str, rng: random.Random, tally: Tally) -> None:
    """Send a request that no engine survives, and once more: the first must be convicted, the second refused."""
    prompt = [rng.randrange(10, 400) for _ in range(rng.randrange(1, 40))]
    prompt.insert(rng.randrange(len(prompt) + 1), POISONS[kind])
    asked: dict[str, Any] = {"prompt": prompt, "max_tokens": 9, "n": rng.choice([1, 1, 2]), "temperature": 1.0}
    path = "/v1/completions"
    if rng.random() < 0.2:
        path, asked = "/v1/embeddings", {"input": prompt}
    for wanted in (500, 422):
        for _ in range(200):
            answer = await client.post(path, json=asked)
            if answer.status_code not in (429, 503):
                break
            await asyncio.sleep(0.2)
        if answer.status_code != wanted or answer.json()["error"]["code"] != "request_convicted":
            tally.poisons_wrong.append(f"{kind}: {answer.status_code} {answer.text[:200]}")


async def soak(live: LiveServer, args: argparse.Namespace, console: Console) -> Tally:
    assert live.server is not None
    link, tally, ended = live.server.client.link, Tally(), asyncio.Event()
    assert isinstance(link, ProcessLink)
    rng = random.Random(args.seed)
    asked = bodies(args.streams)
    limits = httpx.Limits(max_connections=args.streams + 4)
    async with httpx.AsyncClient(base_url=live.url, timeout=300, limits=limits) as client:
        expected = await asyncio.gather(*(texts(client, body) for body in asked))

        async def again_and_again(i: int) -> None:
            while not ended.is_set():
                try:
                    got = await texts(client, asked[i], tally)
                except (RuntimeError, httpx.HTTPError) as error:
                    tally.failed += 1
                    console.print(f"[red]stream {i}: {error}")
                    await asyncio.sleep(0.5)
                    continue
                tally.finished += 1
                if got != expected[i]:
                    tally.changed += 1
                    console.print(f"[red]stream {i} differs:\n{expected[i]}\n{got}")

        load = [asyncio.create_task(again_and_again(i)) for i in range(args.streams)]
        for number in range(args.kills):
            await asyncio.sleep(args.apart * rng.uniform(0.8, 1.2))
            while (pid := link.pid) is None:  # a step has hung, and the next engine is on its way
                await asyncio.sleep(0.05)
            kind = rng.choice(args.kinds.split(","))
            tally.busy.append(live.server.client.num_live)
            tally.kinds[kind] += 1
            killed = time.monotonic()
            tally.kills += 1
            if kind == "kill":
                os.kill(pid, signal.SIGKILL)
                await asyncio.sleep(0.05)
            else:
                await poison(client, kind, rng, tally)
            while (await client.get("/ready")).status_code != 200 and time.monotonic() - killed < 60:
                await asyncio.sleep(0.01)
            tally.ready_s.append(time.monotonic() - killed)
            console.print(
                f"{kind} {number + 1}: {tally.busy[-1]} streams under way, ready again after {tally.ready_s[-1]:.2f} s"
            )
        await asyncio.sleep(min(5.0, args.apart))
        ended.set()
        await asyncio.gather(*load)
    tally.restart_s = list(link.restart_s)
    engine = live.server.client
    tally.restarts = engine.num_restarts
    tally.convicted, tally.refused = engine.convictions.num_convicted, engine.convictions.num_refused
    return tally


def show(tally: Tally, console: Console) -> None:
    def spread(values: list[float]) -> str:
        if not values:
            return "-"
        return f"{statistics.median(values):.2f} (largest {max(values):.2f})"

    table = Table(title="engine killed under load", show_header=False)
    for name, value in [
        ("kills and poisons", ", ".join(f"{kind} {number}" for kind, number in sorted(tally.kinds.items()))),
        ("engines started again", str(tally.restarts)),
        ("requests convicted, refused", f"{tally.convicted}, {tally.refused}"),
        ("poisons with another answer", str(len(tally.poisons_wrong))),
        ("streams under way at a kill", spread([float(n) for n in tally.busy])),
        ("streams finished", str(tally.finished)),
        ("texts that differ", str(tally.changed)),
        ("streams that failed", str(tally.failed)),
        ("new engine ready, s", spread(tally.restart_s)),
        ("/ready 200 again, s", spread(tally.ready_s)),
        ("longest silence of a stream, s", spread(tally.gaps_s)),
    ]:
        table.add_row(name, value)
    console.print(table)


def campaign(args: argparse.Namespace, console: Console) -> Tally:
    """Start the server, and do it."""
    faults = [f"step:{kind}:{token}" for kind, token in POISONS.items()]
    faults += [f"step:hang:{args.hang_every}+"] if args.hang_every else []
    config = serve_from_kwargs(
        model=args.model, port=0, ops=args.ops, max_model_len=512, num_gpu_blocks_override=512, request_log=False,
        max_restarts_per_minute=max(3, int(120 / args.apart)), fault=",".join(faults),
        watchdog_timeout=args.watchdog_timeout,
    )  # fmt: skip
    with LiveServer(config) as live:
        return asyncio.run(soak(live, args, console))


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--apart", type=float, default=5.0, help="seconds between kills")
    parser.add_argument("--streams", type=int, default=20)
    parser.add_argument("--model", default=str(bundled_model(DEFAULT)))
    parser.add_argument("--ops", default="ref", help="ref: no token depends on the batch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default="kill", help=f"what happens, commas between: kill, {', '.join(POISONS)}")
    parser.add_argument("--hang-every", type=int, default=0, help="this step of each engine hangs, and its multiples")
    parser.add_argument("--watchdog-timeout", type=float, default=2.0, help="seconds after which a hung step is ended")
    parser.add_argument("--out", type=Path, help="what happened, as JSON")
    return parser.parse_args(argv)


def main() -> int:
    args, console = parse(), Console()
    tally = campaign(args, console)
    show(tally, console)
    for line in tally.poisons_wrong:
        console.print(line, style="red")
    if args.out is not None:
        args.out.write_text(json.dumps(vars(args) | vars(tally), indent=1, default=str) + "\n", "utf-8")
    return 1 if tally.changed or tally.failed or tally.poisons_wrong or tally.kills < args.kills else 0


if __name__ == "__main__":
    sys.exit(main())
