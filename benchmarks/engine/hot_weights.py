"""What a swap of weights takes, and what requests that run feel of it.

    python -m benchmarks.engine.hot_weights MODEL [--to OTHER] [--streams 8] [--times 3] [--out FILE]

An engine in its own process decodes `--streams` streams; then weights are swapped (by default for the same ones, so
that every token can be compared with that of an undisturbed run), in each mode, `--times` times. Told are seconds of
the whole swap, seconds for which nothing ran, and the time between two tokens of a stream: undisturbed, while weights
are read, and the longest.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from penstock.base.clock import MonotonicClock
from penstock.config import from_kwargs
from penstock.core.sampling import SamplingParams
from penstock.core.weight_swap import WeightsOrder
from penstock.engine.frontend import EngineClient
from penstock.engine.process_link import ProcessLink
from penstock.engine.stream import Stream
from penstock.launch.front import limits_from, open_front
from penstock.text.validate import build_request

TEXT = "The keeper of the lighthouse wrote down what he saw on the sea that night, number {}:"


async def follow(stream: Stream, times: list[float]) -> list[int]:
    async for fresh in stream.deltas():
        times += [time.perf_counter()] * bool(fresh)
    assert stream.final is not None
    return list(stream.final.outputs[0].token_ids)


def gaps(times: list[list[float]], start: float, end: float) -> list[float]:
    """Between tokens whose later one came in [start, end)."""
    return [b - a for own in times for a, b in pairwise(own) if start <= b < end]


async def main(args: argparse.Namespace) -> dict[str, Any]:
    config = from_kwargs(model=args.model, max_model_len=1024, seed=1)
    front = open_front(config)
    client = EngineClient(ProcessLink(config.as_kwargs()), front.tokenizer, MonotonicClock())
    info = await client.start()
    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    assert front.tokenizer is not None
    count = 0

    async def load() -> tuple[list[asyncio.Task[list[int]]], list[list[float]]]:
        nonlocal count
        times: list[list[float]] = [[] for _ in range(args.streams)]
        tasks = []
        for i in range(args.streams):
            ids = front.tokenizer.encode(TEXT.format(i))  # type: ignore[union-attr]
            request = build_request(f"{count}", ids, params, limits=limits_from(info), tokenizer=front.tokenizer)
            count += 1
            tasks.append(asyncio.create_task(follow(client.submit(request, params), times[i])))
        while min(map(len, times)) < args.tokens // 8:
            await asyncio.sleep(0.01)
        return tasks, times

    tasks, _ = await load()
    expected = await asyncio.gather(*tasks)
    rows = []
    for _ in range(args.times):
        for mode in ("wait", "recompute", "keep"):
            tasks, times = await load()
            before, paused = time.perf_counter(), client.snapshot.counters.get("weight_swap_s", 0.0)
            await client.swap_weights(WeightsOrder(args.to or args.model, "next", mode))
            after = time.perf_counter()
            found = await asyncio.gather(*tasks)
            await asyncio.sleep(1.2)  # a snapshot comes once a second
            calm = gaps(times, 0.0, before)
            rows.append({
                "mode": mode, "swap_s": after - before,
                "stopped_s": client.snapshot.counters["weight_swap_s"] - paused,
                "gap_before_ms": 1000 * median(calm),
                "gap_during_ms": 1000 * median(gaps(times, before, after) or [0.0]),
                "gap_longest_ms": 1000 * max(gaps(times, before, float("inf"))),
                "same_tokens": found == expected,
            })  # fmt: skip
            print(json.dumps(rows[-1]), flush=True)
            assert args.to or found == expected, "a swap for the same weights changed a token"
    await client.stop()
    return {"model": Path(args.model).name, "streams": args.streams, "tokens": args.tokens, "rows": rows}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--to")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--out")
    given = parser.parse_args()
    result = asyncio.run(main(given))
    if given.out:
        Path(given.out).write_text(json.dumps(result, indent=1) + "\n")
