"""What the core's classic ideas are worth on this machine, in wall-clock time: rows A05, A10, B01, B05, C61.

    python benchmarks/engine/core.py [--repeats 5] [--out results.json]

A and B of each comparison run interleaved; medians, extremes and ratios are printed. Every run's tokens are compared
with the other side's in the same run. The model has random weights in a small Llama shape whose 176 MB of float32
weights do not fit the caches, so that a step's cost is dominated by reading them once (`--ops blas`), as on any real
server; the reference ops go over them once per row and hide a part of what batching is worth.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from penstock.config import from_kwargs
from penstock.core.machine import Machine
from penstock.core.model_spec import Attention, FeedForward, Layer, ModelSpec, Rope, weight_shapes
from penstock.core.request import Request
from penstock.core.sampling import TokenRules
from penstock.engine.core import EngineCore
from penstock.launch.assemble import assemble
from penstock.plan.resolve import resolve

VOCAB = 2048
HUGE = Machine(num_cores=2, memory_bytes=1 << 36, available_bytes=1 << 36)


def spec(layers: int = 6, hidden: int = 768) -> ModelSpec:
    mixer = Attention(num_heads=12, num_kv_heads=4, head_dim=64, rope=Rope(dim=64))
    layer = Layer(mixer=mixer, ffn=FeedForward(width=3 * hidden))
    return ModelSpec(family="bench", vocab_size=VOCAB, hidden_size=hidden, layers=(layer,) * layers, max_position=4096)


@cache
def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    out = {}
    for name, shape in weight_shapes(spec()).items():
        noise = rng.standard_normal(shape, dtype=np.float32)
        out[name] = 1 + 0.1 * noise if len(shape) == 1 else noise * np.float32(1.5 / np.sqrt(shape[-1]))
    out["embed"] = rng.standard_normal((VOCAB, spec().hidden_size), dtype=np.float32)
    return out


def engine(**settings: Any) -> EngineCore:
    defaults: dict[str, Any] = {"ops": "blas", "num_gpu_blocks_override": 512, "max_num_seqs": 8, "block_size": 32}
    config = from_kwargs(model="(benchmark)", **{**defaults, **settings})
    return assemble(config, spec(), weights(), resolve(config, spec(), HUGE))


def request(name: str, prompt: list[int], max_tokens: int) -> Request:
    return Request(request_id=name, prompt_token_ids=prompt, rules=TokenRules(), max_tokens=max_tokens)


def prompt(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(n)]


class Run:
    """One timed drive of an engine: tokens per request and the wall-clock times at which they came."""

    def __init__(self, core: EngineCore, load: list[Request], late: tuple[int, Request] | None = None) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.times: dict[str, list[float]] = {}
        for r in load:
            core.add(r)
        began = time.perf_counter()
        steps = 0
        while core.has_work:
            if late is not None and steps == late[0]:
                core.add(late[1])
            for out in core.step():
                self.tokens.setdefault(out.request_id, []).extend(out.token_ids)
                self.times.setdefault(out.request_id, []).extend([time.perf_counter() - began] * len(out.token_ids))
            steps += 1
        self.wall_s = time.perf_counter() - began
        self.num_steps = steps
        self.num_tokens = sum(map(len, self.tokens.values()))


def agree(a: Run, b: Run) -> float:
    """Share of equal tokens. Whole-batch products may flip a near tie, so this is reported, not asserted."""
    pairs = [(x, y) for name in a.tokens for x, y in zip(a.tokens[name], b.tokens[name], strict=False)]
    return sum(x == y for x, y in pairs) / max(1, len(pairs))


def continuous_against_static() -> dict[str, float]:
    """A05: 100 requests, most answers short and a few long; tokens per second."""
    rng = random.Random(3)
    load = [request(str(i), prompt(rng, rng.randrange(4, 12)), rng.choice([2, 3, 4, 5, 6, 8, 60])) for i in range(100)]
    static = Run(engine(scheduling_policy="static:size=8"), load)
    continuous = Run(engine(scheduling_policy="fcfs"), load)
    return {
        "static tok/s": static.num_tokens / static.wall_s,
        "continuous tok/s": continuous.num_tokens / continuous.wall_s,
        "speed-up": static.wall_s / continuous.wall_s,
        "equal tokens": agree(static, continuous),
    }


def chunked_against_prefill_first() -> dict[str, float]:
    """A10: three streams decode, a prompt of 1,200 tokens arrives; the longest wait between two of their tokens."""
    rng = random.Random(5)
    streams = [request(f"s{i}", prompt(rng, 8), 48) for i in range(3)]
    late = (6, request("long", prompt(rng, 1200), 8))
    runs = {
        p: Run(engine(scheduling_policy=p, max_num_batched_tokens=128), streams, late)
        for p in ("prefill-first", "fcfs")
    }

    def worst(run: Run) -> float:
        return max(
            b - a for s in streams for a, b in zip(run.times[s.request_id], run.times[s.request_id][1:], strict=False)
        )

    return {
        "prefill-first max TBT ms": worst(runs["prefill-first"]) * 1e3,
        "chunked max TBT ms": worst(runs["fcfs"]) * 1e3,
        "max TBT ratio": worst(runs["prefill-first"]) / worst(runs["fcfs"]),
        "tokens/s ratio": runs["prefill-first"].wall_s / runs["fcfs"].wall_s,
        "equal tokens": agree(runs["prefill-first"], runs["fcfs"]),
    }


def cache_against_none() -> dict[str, float]:
    """B01: time per token late in a generation over early, with the cache and when all is recomputed."""
    rng = random.Random(7)
    start, n = prompt(rng, 16), 160
    cached = Run(engine(), [request("c", start, n)])
    gaps = [b - a for a, b in zip(cached.times["c"], cached.times["c"][1:], strict=False)]
    late_early = statistics.median(gaps[-20:]) / statistics.median(gaps[:20])

    def recompute(length: int) -> float:
        run = Run(engine(prefix_cache="none"), [request("r", (start + cached.tokens["c"])[:length], 1)])
        return run.wall_s

    first, last = recompute(20), recompute(len(start) + n - 4)
    return {
        "cached ms/token": statistics.median(gaps) * 1e3,
        "cached late/early": late_early,
        "uncached late/early": last / first,
        "uncached ms at the end": last * 1e3,
    }


def prefix_hit_against_miss() -> dict[str, float]:
    """B05: time to first token of a second request with the same 512-token prefix, without and with its blocks."""
    rng = random.Random(9)
    stem = prompt(rng, 512)
    core = engine()
    miss = Run(core, [request("miss", stem + prompt(rng, 8), 1)])
    hit = Run(core, [request("hit", stem + prompt(rng, 8), 1)])
    return {"miss ms": miss.wall_s * 1e3, "hit ms": hit.wall_s * 1e3, "speed-up": miss.wall_s / hit.wall_s}


def packed_against_padded() -> dict[str, float]:
    """C61: eight prompts of skewed lengths as they are, and all padded to the longest (a padded batch)."""
    rng = random.Random(11)
    lengths = [8, 8, 12, 16, 16, 24, 40, 256]
    packed = Run(
        engine(max_num_batched_tokens=4096), [request(str(i), prompt(rng, n), 1) for i, n in enumerate(lengths)]
    )
    padded = Run(engine(max_num_batched_tokens=4096), [request(str(i), prompt(rng, 256), 1) for i in range(8)])
    return {
        "packed ms": packed.wall_s * 1e3,
        "padded ms": padded.wall_s * 1e3,
        "speed-up": padded.wall_s / packed.wall_s,
    }


STUDIES: tuple[Callable[[], dict[str, float]], ...] = (
    continuous_against_static,
    chunked_against_prefill_first,
    cache_against_none,
    prefix_hit_against_miss,
    packed_against_padded,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", help="write all samples as JSON")
    args = parser.parse_args()
    console = Console()
    weights()
    samples: dict[str, dict[str, list[float]]] = {s.__name__: {} for s in STUDIES}
    for _ in track(range(args.repeats), description="repeats", console=console):
        for study in STUDIES:
            for key, value in study().items():
                samples[study.__name__].setdefault(key, []).append(value)
    for study in STUDIES:
        table = Table(title=(study.__doc__ or "").strip(), title_justify="left")
        for column in ("what", "median", "min", "max"):
            table.add_column(column, justify="left" if column == "what" else "right")
        for key, values in samples[study.__name__].items():
            table.add_row(key, *(f"{v:.3g}" for v in (statistics.median(values), min(values), max(values))))
        console.print(table)
    if args.out:
        with open(args.out, "w", encoding="utf-8") as f:
            json.dump({"machine": platform.machine(), "repeats": args.repeats, "samples": samples}, f, indent=1)


if __name__ == "__main__":
    main()
