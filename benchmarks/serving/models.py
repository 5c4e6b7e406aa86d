"""Two models behind one server: each against itself alone while the other idles, and its start on demand.

    python -m benchmarks.serving.models A B --out several.json

Three servers stand side by side: A alone, B alone, and both. In turns each answers the same greedy requests
(`--at-once` of them with `--tokens` each); the texts must be equal. Then, `--rounds` times for each model: it is put to
sleep (level 2) and asked for one token, of which the time that one token takes when it is there is taken away, against
its own start: a server of its own that is built in this process, which has read all its imports.
Goals: 0.95 of its speed alone; its own start + 0.2 s.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
from benchmarks.common import about, figures, ratios, save, show, take_turns
from rich.console import Console

from penstock.config import serve_from_kwargs
from penstock.server.live import LiveServer

ADMIN = {"authorization": "Bearer admin"}
PROMPT = "Once upon a time there was a mill by the river, and the miller"
SPEED, LATER_S = 0.95, 0.2


class Asked:
    """A model on one of the servers. `texts`: of its last requests."""

    def __init__(self, url: str, model: str, args: argparse.Namespace) -> None:
        self._http = httpx.Client(base_url=url, timeout=600)
        self._model, self._args = model, args
        self.texts: list[str] = []

    def one(self, tokens: int) -> str:
        body = {"model": self._model, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        answer = self._http.post("/v1/completions", json=body)
        answer.raise_for_status()
        return str(answer.json()["choices"][0]["text"])

    def all(self) -> None:
        with ThreadPoolExecutor(self._args.at_once) as pool:
            self.texts = list(pool.map(self.one, [self._args.tokens] * self._args.at_once))

    def on_demand(self) -> float:
        """Seconds of a start, seen from outside."""
        self._http.post(f"/sleep?level=2&model={self._model}", headers=ADMIN).raise_for_status()
        began = time.perf_counter()
        self.one(1)
        cold_s = time.perf_counter() - began
        began = time.perf_counter()
        self.one(1)
        return cold_s - (time.perf_counter() - began)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("first")
    parser.add_argument("second")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--settings", default="{}", help="of all engines, as JSON")
    parser.add_argument("--out")
    args = parser.parse_args(argv)
    common = {"port": 0, "request_log": False, "disable_log_stats": True, "admin_api_key": "admin",
              "max_model_len": 1024, "max_num_seqs": 8, **json.loads(args.settings)}  # fmt: skip
    paths = {"first": args.first, "second": args.second}
    own = {name: {**common, "model": path, "served_model_name": name} for name, path in paths.items()}
    further = {"second": {"model": args.second, "max_model_len": common["max_model_len"]}}
    both = serve_from_kwargs(**own["first"], models=further, keep_alive="-1")
    speed: dict[str, dict[str, list[float]]] = {}
    starts: dict[str, dict[str, list[float]]] = {name: {"alone": [], "demand": []} for name in paths}
    same = True
    with ExitStack() as stack:
        together = stack.enter_context(LiveServer(both))
        alone = {name: stack.enter_context(LiveServer(serve_from_kwargs(**own[name]))) for name in paths}
        for name in paths:
            ways = {"alone": Asked(alone[name].url, name, args), "both": Asked(together.url, name, args)}
            speed[name] = take_turns({way: asked.all for way, asked in ways.items()}, args.rounds)
            same &= ways["alone"].texts == ways["both"].texts
        for name in [*paths] * args.rounds:
            starts[name]["demand"].append(Asked(together.url, name, args).on_demand())
            began = time.perf_counter()
            with LiveServer(serve_from_kwargs(**own[name])):
                starts[name]["alone"].append(time.perf_counter() - began)
    num = args.tokens * args.at_once
    result: dict[str, Any] = about(
        models={name: Path(path).name for name, path in paths.items()}, tokens=args.tokens, at_once=args.at_once,
        same_texts=same,
        seconds={name: {way: figures(found) for way, found in ways.items()} for name, ways in speed.items()},
        speed={name: ratios(ways["alone"], ways["both"]) for name, ways in speed.items()},
        start_s={name: {way: figures(found) for way, found in ways.items()} for name, ways in starts.items()},
        later_s={
            name: statistics.median(a - b for a, b in zip(ways["demand"], ways["alone"], strict=True))
            for name, ways in starts.items()
        },
        goals={"speed": SPEED, "later_s": LATER_S},
    )  # fmt: skip
    save(args.out, result)
    rows = [
        [Path(paths[name]).name, f"{num / min(speed[name]['alone']):.1f}", f"{num / min(speed[name]['both']):.1f}",
         f"{result['speed'][name]['of_low']:.3f}", f"{min(starts[name]['alone']):.2f}",
         f"{min(starts[name]['demand']):.2f}", f"{result['later_s'][name]:+.2f}"] for name in paths
    ]  # fmt: skip
    show(Console(), f"two models on one server, {args.at_once} at once", ["model", "alone tokens/s", "both tokens/s",
         "speed", "start s", "on demand s", "later s"], rows)  # fmt: skip
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
