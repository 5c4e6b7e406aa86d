"""The highest rate that a server sustains: Poisson arrivals over HTTP, rates and engines in turns (A B A B).

    python -m benchmarks.peers.online --engines penstock:bf16,vllm:bf16,llamacpp:bf16 --rates 0.8,1.6 --out online.jsonl
    python -m benchmarks.peers.online --base-url http://127.0.0.1:8000 --name mine --rates 1,2,4

A rate is sustained if in every round 95 % of the requests had their first token within 2 s and 150 ms per token after
it. Prompts are token ids with the lengths of W3; all engines get the same ones at the same moments. With
`--stop-when-lost` a rate ends as soon as too many requests have missed their limits for it to be sustained.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.peers.engines import ENGINES, Place, Spec, default_place, environment, highest_id, needed_path, problem
from benchmarks.peers.results import Entry, Results, opened
from benchmarks.peers.workloads import Request, arrivals, mixed
from rich.console import Console
from rich.table import Table

from penstock.base.errors import PenstockError
from penstock.bench import serve
from penstock.bench.http import CallError, HttpClient
from penstock.bench.metrics import Outcome, summarize
from penstock.bench.prompts import Sample
from penstock.plan.probe import probe as probe_machine

SLO_MS = {"ttft": 2000.0, "tpot": 150.0}
ATTAINED = 0.95
SERVED_AS = "model"
PENSTOCK_FORMATS = {
    "fp32": ("float32", "none"), "bf16": ("bfloat16", "none"), "int8": ("bfloat16", "int8-w8a8"),
    "int4": ("bfloat16", "int4-w4a8:128"),
}  # fmt: skip
"""dtype and quantization, as adapters/penstock_.py has them."""
_SAMPLED = ("ttft", "tpot", "e2el")


def command(spec: Spec, model: str, place: Place, port: int, threads: int, more: Sequence[str]) -> list[str]:
    """What starts a server of this engine. `more`: further arguments of the user's."""
    path = str(needed_path(spec, model, place))
    match spec.engine:
        case "penstock":
            words = [sys.executable, "-m", "penstock.cli.main", "serve", path, "--port", str(port)]
            if spec.precision in PENSTOCK_FORMATS:
                dtype, quantization = PENSTOCK_FORMATS[spec.precision]
                words += ["--dtype", dtype, "--quantization", quantization]
            return [*words, *more]
        case "vllm":
            return [
                str(place.python("vllm")), "-m", "vllm.entrypoints.openai.api_server", "--model", path, "--port",
                str(port), "--dtype", "bfloat16", "--max-model-len", "2048", "--max-num-seqs", "64",
                "--max-num-batched-tokens", "2048", "--served-model-name", SERVED_AS, *more,
            ]  # fmt: skip
        case "llamacpp":
            return [
                str(place.llama_server()), "-m", path, "--port", str(port), "-t", str(threads), "-tb", str(threads),
                "-np", "32", "-c", "32768", "--kv-unified", "-b", "2048", "-ub", "512", "--threads-http", "64",
                "--no-webui", "-a", SERVED_AS, *more,
            ]  # fmt: skip
    raise ValueError(f"there is no server of {spec.engine} here; start one and give --base-url")


@contextmanager
def server(spec: Spec, words: Sequence[str], place: Place) -> Iterator[subprocess.Popen[bytes]]:
    """In a process group of its own, which is gone afterwards."""
    log = place.folder / "logs" / f"online.{spec.engine}.{spec.precision}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
            env={**environment(), **ENGINES[spec.engine].env},
        )  # fmt: skip
    try:
        yield process
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, number)
                process.wait(15)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


async def healthy(client: HttpClient, process: subprocess.Popen[bytes] | None, timeout_s: float) -> None:
    """Raises PenstockError if the server ends, or is not there in time."""
    until = time.monotonic() + timeout_s
    while True:
        with suppress(CallError):
            if (await client.call("GET", "/v1/models")).status == 200:
                return
        if process is not None and process.poll() is not None:
            raise PenstockError(f"the server ended with status {process.returncode}")
        if time.monotonic() > until:
            raise PenstockError(f"the server was not ready within {timeout_s:g} s")
        await asyncio.sleep(0.2)


def asked_at(rate: float, num: int, round_: int, highest: int) -> list[Request]:
    """Lengths are always the same; every rate and round has its own prompts, for servers keep what they have read."""
    return mixed(f"online/{rate:g}/{round_}", num, highest)


async def one_rate(
    client: HttpClient, model: str, rate: float, num: int, round_: int, highest: int, stop_when_lost: bool = False
) -> dict[str, Any]:
    """200 requests, say, at one rate. `ended`: how many of them the figures are of."""
    target = serve.Target(backend="openai", endpoint="/v1/completions", model=model, ignore_eos=True)
    asked, due_s = asked_at(rate, num, round_, highest), arrivals(rate, num)
    samples = [Sample(prompt, len(prompt), new) for prompt, new in asked]
    allowed = (1 - ATTAINED) * num if stop_when_lost else num
    outcomes, took_s = await _until_lost(client, target, samples, due_s, allowed)
    found = summarize(outcomes, took_s, metrics=_SAMPLED, percentiles=(50.0, 95.0), goodput=SLO_MS)
    wanted = {at: new for at, (_, new) in zip(due_s, asked, strict=True)}
    found["wrong_length"] = sum(o.ok and o.output_tokens != wanted[o.due_s] for o in outcomes)
    found["ended"] = len(outcomes)
    kept = ("duration", "ended", "completed", "failed", "output_throughput", "request_goodput", "goodput_fraction",
            "wrong_length", "max_send_delay_ms", "errors_by_kind")  # fmt: skip
    spread = {k: v for k, v in found.items() if k.endswith(("_ttft_ms", "_tpot_ms", "_e2el_ms")) and k.startswith("p")}
    return {k: found[k] for k in kept} | spread


async def _until_lost(
    client: HttpClient, target: serve.Target, samples: Sequence[Sample], due_s: Sequence[float], allowed: float
) -> tuple[list[Outcome], float]:
    """serve.run, but stopped with the answers so far as soon as more than `allowed` are not within the limits."""
    ended: list[Outcome] = []
    missed: list[Outcome] = []
    lost, began_s = asyncio.Event(), time.perf_counter()

    def on_done(outcome: Outcome) -> None:
        ended.append(outcome)
        if not summarize([outcome], 1.0, metrics=(), goodput=SLO_MS)["goodput_fraction"]:
            missed.append(outcome)
        if len(missed) > allowed:
            lost.set()

    running = asyncio.create_task(serve.run(client, target, samples, due_s, on_done=on_done))
    watching = asyncio.create_task(lost.wait())
    try:
        await asyncio.wait({running, watching}, return_when=asyncio.FIRST_COMPLETED)
        return await running if running.done() else (ended, time.perf_counter() - began_s)
    finally:
        for task in (running, watching):
            task.cancel()
        await asyncio.gather(running, watching, return_exceptions=True)


async def rates_of(
    base_url: str, process: subprocess.Popen[bytes] | None, todo: Sequence[tuple[float, str]], args: argparse.Namespace,
    round_: int, highest: int,
) -> list[tuple[str, dict[str, Any]]]:  # fmt: skip
    """All rates that are due, against one running server."""
    client = HttpClient(base_url)
    try:
        await healthy(client, process, args.start_timeout_s)
        model = await serve.served_model(client)
        for prompt, new in mixed("online warm-up", 2, highest):
            body = serve.Target(backend="openai", endpoint="", model=model, ignore_eos=True).body(
                Sample(prompt, len(prompt), min(new, 16))
            )
            await serve.one(client, "/v1/completions", body)
        found, num, stop = [], args.requests, args.stop_when_lost
        for rate, key in todo:
            found.append((key, await one_rate(client, model, rate, num, round_, highest, stop)))
        return found
    finally:
        await client.close()


def key_of(name: str, model: str, rate: float, num: int, round_: int) -> str:
    return f"online|{name}|{model}|{rate:g}|{num}|{round_}"


def sustained(entries: Sequence[Entry]) -> dict[tuple[str, str], float]:
    """(engine, model) -> the highest rate at which every round kept the promise; 0 if none did."""
    shares: dict[tuple[str, str], dict[float, list[float]]] = {}
    for e in entries:
        if e.get("kind") == "online":
            share = 0.0 if "error" in e else e["goodput_fraction"]
            shares.setdefault((e["name"], e["model"]), {}).setdefault(e["rate"], []).append(share)
    return {
        who: max((rate for rate, values in rates.items() if min(values) >= ATTAINED), default=0.0)
        for who, rates in shares.items()
    }


def print_table(entries: Sequence[Entry], console: Console) -> None:
    columns = ("engine", "model", "req/s", "rounds", "attained", "TTFT p50 / p95, ms", "TPOT p50 / p95, ms", "tokens/s",
               "failed")  # fmt: skip
    table = Table(*columns, title="Served at a rate", title_justify="left")
    grouped: dict[tuple[str, str, float], list[Entry]] = {}
    for e in entries:
        if e.get("kind") == "online" and "error" not in e:
            grouped.setdefault((e["name"], e["model"], e["rate"]), []).append(e)
    for (name, model, rate), part in sorted(grouped.items()):

        def middle(key: str, part: list[Entry] = part) -> float:
            return float(statistics.median(e[key] for e in part))

        low, high = min(e["goodput_fraction"] for e in part), max(e["goodput_fraction"] for e in part)
        table.add_row(
            name, model, f"{rate:g}", str(len(part)), f"{low:.0%} - {high:.0%}",
            f"{middle('p50_ttft_ms'):.0f} / {middle('p95_ttft_ms'):.0f}",
            f"{middle('p50_tpot_ms'):.0f} / {middle('p95_tpot_ms'):.0f}", f"{middle('output_throughput'):.1f}",
            str(sum(e["failed"] + e["wrong_length"] for e in part)),
        )  # fmt: skip
    console.print(table)
    for (name, model), rate in sustained(entries).items():
        console.print(f"{name} on {model} sustains {rate:g} requests/s ({ATTAINED:.0%} within the limits)")


def measure(args: argparse.Namespace, results: Results, place: Place, console: Console) -> None:
    specs: list[Spec | None] = [None] if args.base_url else [Spec.parse(t) for t in args.engines.split(",")]
    rates, highest = [float(r) for r in args.rates.split(",")], highest_id(args.model, place)
    for round_ in range(args.rounds):
        for spec in specs:
            name = args.name if spec is None else str(spec)
            there = results.latest("online")
            todo = [(r, k) for r in rates if (k := key_of(name, args.model, r, args.requests, round_)) not in there
                    or (args.retry_failed and "error" in there[k])]  # fmt: skip
            if not todo:
                continue
            console.print(f"round {round_}: {name} at {', '.join(f'{r:g}' for r, _ in todo)} requests/s", markup=False)
            rate_of = {k: r for r, k in todo}
            try:
                found = _against(spec, todo, args, place, round_, highest)
            except (PenstockError, ValueError, OSError) as error:
                console.print(f"{name}: {error}", style="red", markup=False)
                found = [(k, {"error": str(error)}) for _, k in todo]
            for key, figures in found:
                about = {"kind": "online", "key": key, "name": name, "model": args.model, "rate": rate_of[key],
                         "round": round_, "num": args.requests, "slo_ms": SLO_MS, "at": time.time()}  # fmt: skip
                results.add(about | figures)


def _against(
    spec: Spec | None, todo: Sequence[tuple[float, str]], args: argparse.Namespace, place: Place, round_: int,
    highest: int,
) -> list[tuple[str, dict[str, Any]]]:  # fmt: skip
    if spec is None:
        return asyncio.run(rates_of(args.base_url, None, todo, args, round_, highest))
    missing = problem(spec, args.model, place)
    if missing is not None:
        raise PenstockError(missing)
    port = free_port()
    more = json.loads(args.server_args).get(str(spec), [])
    with server(spec, command(spec, args.model, place, port, args.threads, more), place) as process:
        return asyncio.run(rates_of(f"http://127.0.0.1:{port}", process, todo, args, round_, highest))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engines", default="penstock:bf16", help="NAME:PRECISION,... whose servers are started")
    parser.add_argument("--base-url", help="a server that runs already, instead")
    parser.add_argument("--name", default="server", help="what to call it")
    parser.add_argument("--model", default="qwen2.5-0.5b")
    parser.add_argument("--rates", default="0.8,1.6", help="requests per second")
    parser.add_argument("--requests", type=int, default=200, help="per rate (default: 200)")
    parser.add_argument("--rounds", type=int, default=2, help="how often all of it is done (default: 2)")
    parser.add_argument("--threads", type=int, default=probe_machine().num_cores)
    parser.add_argument("--server-args", default="{}", metavar="JSON", help='{"penstock:bf16": ["--ops", "blas"]}')
    parser.add_argument("--start-timeout-s", type=float, default=600.0)
    parser.add_argument("--stop-when-lost", action="store_true", help="end a rate that can no longer be sustained")
    parser.add_argument("--retry-failed", action="store_true")
    parser.add_argument("--peers", type=Path, help="default: $PENSTOCK_PEERS or ~/.cache/penstock-peers")
    parser.add_argument("--out", type=Path, default=Path("online.jsonl"))
    args = parser.parse_args(argv)
    place, console = Place(args.peers.expanduser()) if args.peers else default_place(), Console()
    with opened(args.out) as results:
        measure(args, results, place, console)
        print_table(results.entries, console)
        return 1 if any("error" in e for e in results.latest("online").values()) else 0


if __name__ == "__main__":
    sys.exit(main())
