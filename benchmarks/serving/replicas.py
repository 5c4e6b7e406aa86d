"""One engine of one thread beside two of one thread each: tokens per second of the same requests through one server.

    python -m benchmarks.serving.replicas MODEL [--rounds 3] [--requests 32] [--tokens 64] [--out FILE.json]

Both servers stand all the time and take turns; each round begins with another one. Twice the rate where there are cores
for both engines and the front end.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from benchmarks.common import about, save
from rich.console import Console

from penstock.config import serve_from_kwargs
from penstock.server.live import LiveServer


def rate(url: str, requests: int, tokens: int, turn: int) -> float:
    """Tokens per second of wall time; each prompt is new."""

    def ask(n: int) -> int:
        body = {"prompt": f"Turn {turn}: the {n}th letter of a long story began with", "max_tokens": tokens,
                "temperature": 0, "ignore_eos": True}  # fmt: skip
        answer = httpx.post(url + "/v1/completions", json=body, timeout=600)
        answer.raise_for_status()
        return int(answer.json()["usage"]["completion_tokens"])

    began = time.perf_counter()
    with ThreadPoolExecutor(requests) as pool:
        total = sum(pool.map(ask, range(requests)))
    return total / (time.perf_counter() - began)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--policy", default="least-requests")
    parser.add_argument("--out")
    args = parser.parse_args(argv)
    usual: dict[str, Any] = {"model": args.model, "port": 0, "threads": 1, "max_model_len": 512, "request_log": False}
    found: dict[str, list[float]] = {"one": [], "two": []}
    with (
        LiveServer(serve_from_kwargs(**usual)) as one,
        LiveServer(serve_from_kwargs(**usual, data_parallel_size=2, route_policy=args.policy)) as two,
    ):
        sides = [("one", one.url), ("two", two.url)]
        for turn in range(-1, args.rounds):
            for name, url in sides if turn % 2 else sides[::-1]:
                measured = rate(url, args.requests, args.tokens, turn)
                found[name] += [measured] if turn >= 0 else []
    medians = {name: statistics.median(rates) for name, rates in found.items()}
    ratio = medians["two"] / medians["one"]
    Console().print(f"one {medians['one']:.0f} tokens/s, two {medians['two']:.0f}: {ratio:.2f} times")
    asked = {"model": Path(args.model).name, "requests": args.requests, "tokens": args.tokens, "policy": args.policy}
    save(args.out, about(asked=asked, found=found, ratio=round(ratio, 3)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
