"""Batching, paging and prefix caching in seconds, with native kernels: rows A05, B03 and B06 of the catalogue.

    python -m benchmarks.engine.systems --threads 2 --out benchmarks/results/systems.json
    python -m benchmarks.engine.systems --like middle --requests 30 --repeats 2             (a try-out)

The model is the bundled nano, embedded in a larger shape that computes the same function (`tools/widen.py`), in
bfloat16. Each comparison runs its sides in turns, in every repeat on fresh engines, which share the packed weights.
Native kernels give a request the same bits in any company, so all sides must write equal tokens, request by request,
in every repeat: that is asserted, not counted.

- batching (A05): requests whose answers are mostly short and rarely long, all there at once; `fcfs` (continuous)
  against `static:size=N` (a batch runs to its last token), N running at most in both.
- paging (B03): skewed lengths in one KV memory, by blocks on demand against a reservation of max_model_len each; also
  the share of the memory's slots that hold a token, sequences at once, and slots held in vain, means over the steps in
  which somebody waits for memory.
- prefixes (B06): conversations whose turns repeat all that was said, and questions behind lists of examples that they
  share; the radix cache against none. TTFT is from the moment a request is sent; the next one is sent when one ends.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
from benchmarks.common import about, figures, ratios, save, show
from benchmarks.engines import Maker, Run, request
from rich.console import Console
from rich.progress import track
from tools.widen import SHAPES, Shape, Widening

from penstock.base.bf16 import narrow
from penstock.core.model_spec import ModelSpec, weight_shapes
from penstock.core.request import Request
from penstock.engine.core import EngineCore
from penstock.families.registry import open_model
from penstock.kv.waste import Waste, waste
from penstock.launch.bundled import bundled_model
from penstock.ops.native.library import best_library
from penstock.ops.native.program import Pool
from penstock.weights.load import load_weights

Side = Callable[[], dict[str, Any]]
MAX_LEN = 2048
BLOCK = 16
LIKE = {
    "0.5b": Shape(**{**vars(SHAPES["qwen2.5-0.5b"]), "vocab": None}), "middle": Shape(512, 8, 16, 4, 32, 1408),
    "nano": None,
}  # fmt: skip
"""Shapes to embed nano in; None: as it is."""


def widened(like: str) -> tuple[ModelSpec, dict[str, Any]]:
    """Spec and bfloat16 weights."""
    path = bundled_model("nano")
    if path is None:
        raise SystemExit("the bundled model nano is missing")
    checkpoint = open_model(path)
    weights = load_weights(checkpoint.weights, checkpoint.spec, "float32")
    shape = LIKE[like]
    if shape is None:
        return checkpoint.spec, {name: narrow(w) for name, w in weights.items()}
    widening = Widening(checkpoint.spec, shape)
    names = weight_shapes(widening.target)
    made = {name: narrow(widening.tensor(name, weights, np.random.default_rng([0, i]))) for i, name in enumerate(names)}
    return widening.target, made


def tokens(rng: Random, n: int) -> list[int]:
    return [rng.randrange(3, 4000) for _ in range(n)]


# -- batching ----------------------------------------------------------------------------------------------------


def batching(maker: Maker, args: argparse.Namespace) -> dict[str, Side]:
    rng = Random(3)
    answers = [4, 6, 8, 12, 16, 20, 160]
    load = [request(f"r{i}", tokens(rng, rng.randrange(8, 49)), rng.choice(answers)) for i in range(args.requests)]

    def side(policy: str) -> dict[str, Any]:
        core = maker.engine(
            scheduling_policy=policy, max_num_seqs=args.batch, block_size=BLOCK, enable_prefix_caching=False,
            num_gpu_blocks_override=args.batch * 256 // BLOCK + args.batch,
        )  # fmt: skip
        run = Run(core).serve(load)
        return run.summary() | {"tokens": run.tokens}

    return {"static": lambda: side(f"static:size={args.batch}"), "continuous": lambda: side("fcfs")}


# -- paging ------------------------------------------------------------------------------------------------------


def paging(maker: Maker, args: argparse.Namespace) -> dict[str, Side]:
    rng = Random(7)
    longest = args.reserve

    def length() -> int:
        return min(longest // 2, max(4, round(rng.lognormvariate(math.log(longest / 10), 0.9))))

    load = [request(f"r{i}", tokens(rng, length()), length()) for i in range(args.requests)]

    def side(allocator: str) -> dict[str, Any]:
        core = maker.engine(
            kv_allocator=allocator, max_model_len=longest, block_size=BLOCK, max_num_seqs=64,
            enable_prefix_caching=False, num_gpu_blocks_override=args.reservations * longest // BLOCK,
            schedule_conservativeness=0,  # whoever fits enters, as in the papers
        )  # fmt: skip
        seen: list[Waste] = []
        batches: list[int] = []
        tails: list[int] = []

        def look(core: EngineCore) -> None:
            running, waiting = core.scheduler.running, core.scheduler.waiting
            if not running or not waiting:
                return
            now = waste(core.kv, running, waiting[0])
            if now.free <= waiting[0].prompt_len:  # it waits for memory, not for its turn in a step
                seen.append(now)
                batches.append(len(running))
                tails.append(max(core.kv.num_held(s) * BLOCK - s.num_computed for s in running))

        run = Run(core).serve(load, on_step=look)
        assert seen, "nobody waited: the memory is too large for this load"
        share = np.array(seen, float).mean(axis=0) / seen[0].total
        return run.summary() | {
            "tokens": run.tokens, "batch": float(np.mean(batches)), "used": share[0],
            "reserved_and_internal": share[1] + share[2], "external": share[3], "worst_tail": max(tails),
            "preemptions": core.stats.num_preemptions,
        }  # fmt: skip

    return {"contiguous": lambda: side("contiguous"), "paged": lambda: side("paged")}


# -- prefixes ----------------------------------------------------------------------------------------------------


class Conversations:
    """Turns that repeat all that was said. A turn's text is drawn from its own number, whoever else is talking."""

    def __init__(self, count: int, turns: int, at_once: int) -> None:
        self._count, self._turns, self._at_once = count, turns, at_once
        self._systems = [tokens(Random(i), 200) for i in range(3)]
        self._said: dict[str, list[int]] = {}
        self._next = 0

    def start(self) -> list[Request]:
        return [r for _ in range(self._at_once) for r in self._begin()]

    def _begin(self) -> list[Request]:
        if self._next == self._count:
            return []
        number, self._next = self._next, self._next + 1
        return [self._turn(number, 0, self._systems[number % 3])]

    def _turn(self, number: int, turn: int, history: list[int]) -> Request:
        rng = Random(1000 * number + turn)
        name = f"{number}/{turn}"
        self._said[name] = history + tokens(rng, rng.randrange(20, 61))
        return request(name, self._said[name], rng.randrange(16, 49))

    def after(self, name: str, answer: list[int]) -> list[Request]:
        number, turn = map(int, name.split("/"))
        if turn + 1 == self._turns:
            return self._begin()
        return [self._turn(number, turn + 1, self._said[name] + answer)]


class Questions:
    """Tasks of a long list of examples each and questions behind it; a few tasks are worked on at a time."""

    def __init__(self, tasks: int, questions: int, at_once: int) -> None:
        rng = Random(6)
        lists = [tokens(rng, rng.randrange(400, 801)) for _ in range(tasks)]
        self._load: list[Request] = []
        for first in range(0, tasks, at_once):
            for q in range(questions):
                for t in range(first, min(first + at_once, tasks)):
                    prompt = lists[t] + tokens(rng, rng.randrange(20, 41))
                    self._load.append(request(f"{t}/{q}", prompt, rng.randrange(5, 16)))
        self._at_once = at_once

    def start(self) -> list[Request]:
        first, self._load = self._load[: self._at_once], self._load[self._at_once :]
        return first

    def after(self, name: str, answer: list[int]) -> list[Request]:
        return [self._load.pop(0)] if self._load else []


def prefixes(maker: Maker, args: argparse.Namespace, kind: str) -> dict[str, Side]:
    n = max(2, args.requests // 20)
    loads: dict[str, Callable[[], Conversations | Questions]] = {
        "multi-turn": lambda: Conversations(4 * n, 5, 8), "few-shot": lambda: Questions(2 * n, 10, 4),
    }  # fmt: skip

    def side(cache: bool) -> dict[str, Any]:
        core = maker.engine(
            enable_prefix_caching=cache, prefix_cache="radix", block_size=BLOCK, max_num_seqs=16,
            num_gpu_blocks_override=16 * MAX_LEN // BLOCK,
        )  # fmt: skip
        before = core.kv.stats()
        load, run = loads[kind](), Run(core)
        run.serve(load.start(), lambda name: load.after(name, run.tokens[name]))
        stats = core.kv.stats()
        asked = stats.num_prefix_query_tokens - before.num_prefix_query_tokens
        hit = stats.num_prefix_hit_tokens - before.num_prefix_hit_tokens
        return run.summary() | {
            "tokens": run.tokens,
            "hit_rate": hit / asked if asked else 0.0,
            "evicted": stats.num_evicted_blocks,
        }

    return {"no cache": lambda: side(False), "radix": lambda: side(True)}


# -- what is shown -----------------------------------------------------------------------------------------------

STUDIES: dict[str, tuple[str, Callable[[Maker, argparse.Namespace], dict[str, Side]], tuple[str, ...]]] = {
    "batching": ("A05: continuous against static batching", batching, ()),
    "paging": ("B03: blocks on demand against reservation, same memory", paging,
               ("batch", "used", "reserved_and_internal", "worst_tail", "preemptions")),
    "multi-turn": ("B06: radix cache, conversations", lambda m, a: prefixes(m, a, "multi-turn"), ("hit_rate",)),
    "few-shot": ("B06: radix cache, shared examples", lambda m, a: prefixes(m, a, "few-shot"), ("hit_rate",)),
}  # fmt: skip
SHOWN = ("wall_s", "tokens_per_s", "num_steps", "ttft_s", "ttft_p95_s")


def compare(sides: dict[str, Side], repeats: int) -> dict[str, Any]:
    """Sides in turns; their tokens must be equal. Of every figure the samples and their spread."""
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in sides}
    first: dict[str, list[int]] | None = None
    names = list(sides)
    for turn in track(range(repeats), description="repeats"):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            got = sides[name]()
            written = got.pop("tokens")
            first = written if first is None else first
            assert written == first, f"{name}: other tokens in repeat {turn}"
            for key, value in got.items():
                samples[name].setdefault(key, []).append(float(value))
    base, other = names
    return {
        "sides": {name: {key: figures(of) for key, of in s.items()} for name, s in samples.items()},
        "speed_up": ratios(samples[base]["wall_s"], samples[other]["wall_s"]),
        "ttft_ratio": ratios(samples[base]["ttft_s"], samples[other]["ttft_s"]),
        "equal_tokens": sum(map(len, (first or {}).values())),
    }


def _cell(of: dict[str, float]) -> str:
    return f"{of['median']:.4g}" + ("" if of["low"] == of["high"] else f" ({of['low']:.4g} to {of['high']:.4g})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", nargs="+", choices=STUDIES, default=list(STUDIES))
    parser.add_argument("--like", choices=LIKE, default="0.5b")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8, help="sequences at once in the comparison of batching")
    parser.add_argument("--reserve", type=int, default=1024, help="max_model_len in the comparison of paging")
    parser.add_argument("--reservations", type=int, default=6, help="of them fit into its KV memory")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", help="write the figures as JSON")
    args = parser.parse_args()
    if (library := best_library()) is None:
        raise SystemExit("no native library was built")
    console = Console()
    spec, weights = widened(args.like)
    maker = Maker(spec, weights, Pool(library, args.threads), dtype="bfloat16", max_len=MAX_LEN)
    isa = library.pst_isa_name().decode()
    size = sum(m.num_bytes for m in maker.forward.matrices.values())
    console.print(f"nano as {args.like}: {spec.num_params:,} parameters, {size / 1e6:,.0f} MB, {isa}")
    result: dict[str, Any] = {
        "about": about(isa=isa, parameters=spec.num_params, matrix_bytes=size, settings=vars(args)),
        "studies": {},
    }
    for name in args.studies:
        title, make, more = STUDIES[name]
        found = result["studies"][name] = compare(make(maker, args), args.repeats)
        rows = [[key, *(_cell(side[key]) for side in found["sides"].values())] for key in (*SHOWN, *more)]
        show(console, f"{title}: medians (lowest to highest)", ("", *found["sides"]), rows)
        speed, first = found["speed_up"], found["ttft_ratio"]
        console.print(
            f"speed-up {speed['median']:.2f} ({speed['low']:.2f} to {speed['high']:.2f}; of the fastest runs "
            f"{speed['of_low']:.2f}), TTFT {first['median']:.2f} times shorter; {found['equal_tokens']:,} equal tokens"
        )
        save(args.out, result)


if __name__ == "__main__":
    main()
