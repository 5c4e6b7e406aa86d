"""The adaptive controller against 'off' and every fixed number of drafts, on the virtual clock: rows A22, D26.

    python benchmarks/speculation/controller.py [--seeds 3] [--out results.json] [--device NAME ...] [--text NAME ...]

The scheduler, the memory and the controller are the ones that serve; the device is a cost table and the text a rule
that says which drafts are right (`penstock.sim.drafts`). A cell of the table is the lowest ratio over the seeds of
adaptive tokens per second to the better of 'off' and the best fixed number, which is named (most often best).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from penstock.config import from_kwargs
from penstock.core.machine import Machine
from penstock.core.model_spec import Attention, FeedForward, Layer, ModelSpec, Rope
from penstock.core.protocols import DraftController, StepTimer
from penstock.plan.cost import RooflineTimer
from penstock.plan.devices import device_preset
from penstock.plan.measured import MeasuredTimer, StepLaw
from penstock.plan.resolve import resolve
from penstock.sched.drafts.adaptive import AdaptiveDrafts
from penstock.sched.drafts.fixed import FixedDrafts
from penstock.sim.drafts import SPITEFUL, TEXTS, DraftRun, draft_engine, make_text, plain_requests, run_drafts
from penstock.sim.specs import find_spec

FIXED = (1, 2, 4, 8, 16)
BATCHES = (1, 8, 32)
SWEEP = (1, 2, 4, 12, 24, 48)
PROMISED = 0.8
"""Of the mean time per output token without drafts: the pace whose attainment is reported."""
HUGE = Machine(num_cores=1, memory_bytes=1 << 40, available_bytes=1 << 40)


def half_billion() -> ModelSpec:
    """The shape of Qwen2.5-0.5B."""
    mixer = Attention(num_heads=14, num_kv_heads=2, head_dim=64, rope=Rope(dim=64))
    layers = (Layer(mixer=mixer, ffn=FeedForward(width=4864)),) * 24
    return ModelSpec(
        family="llama", vocab_size=151936, hidden_size=896, layers=layers, tie_embeddings=True, max_position=8192
    )


def law(**costs: float) -> MeasuredTimer:
    """A cost table as `plan.measured` writes it."""
    names = ("base_s", "token_s", "row_s", "context_s", "pair_s", "logit_s")
    return MeasuredTimer(
        StepLaw(
            **{name: costs.get(name, 0.0) for name in names}, copy_bytes_per_s=1e10, num_samples=99, median_error=0.0
        )
    )


class Stairs:
    """A kernel that works in tiles of 8 rows: a token more is free or costs a whole tile."""

    name = "stairs"

    def step_s(self, shape: Any) -> float:
        return 0.002 + 0.008 * ((shape.num_tokens + 7) // 8) + 1e-7 * shape.num_context

    def copy_s(self, num_bytes: int) -> float:
        return num_bytes / 1e10


class Case(NamedTuple):
    """`timer`: what steps take. `known`: what the controller is told of it (None: nothing)."""

    timer: StepTimer
    known: StepTimer | None
    draft_s: Callable[[int, int], float]


def cases() -> dict[str, Case]:
    """By name. Figures of `linear` are like those of a 0.5 B model in float32 on two AVX2 cores."""

    def lookup(room: int, num_rows: int) -> float:
        return 2e-5 * num_rows

    cpu = RooflineTimer(half_billion(), device_preset("cpu-2core"), dtype="bfloat16")
    ref = RooflineTimer(half_billion(), device_preset("cpu-ref"), dtype="float32")
    gpu = RooflineTimer(find_spec("llama-3.1-8b"), device_preset("h100-sxm"))
    linear = law(base_s=0.040, token_s=0.009, row_s=0.0003, logit_s=0.002, context_s=1e-7)
    small = law(base_s=0.0025, token_s=0.0008, row_s=0.0001, logit_s=0.0002, context_s=1e-7)
    return {
        "cpu-2core": Case(cpu, cpu, lookup),
        "cpu-ref": Case(ref, ref, lookup),
        "h100, 8B": Case(gpu, gpu, lookup),
        "measured 0.5B": Case(linear, linear, lookup),
        "measured nano": Case(small, small, lookup),
        "tiles of 8": Case(Stairs(), Stairs(), lookup),
        "wrong table": Case(linear, gpu, lookup),
        "no table": Case(linear, None, lookup),
        "draft model": Case(linear, linear, lambda room, num_rows: 0.004 * room),
    }


def simulate(
    case: Case, text: str, seed: int, batch: int, make: Callable[[], DraftController | None], num_output: int = 256
) -> DraftRun:
    spec = half_billion()
    config = from_kwargs(
        model="(simulated)", max_num_seqs=batch, max_num_batched_tokens=1024, enable_prefix_caching=False,
        max_model_len=2048,
    )  # fmt: skip
    plan = resolve(config, spec, HUGE)
    core = draft_engine(config, spec, plan, case.timer, make_text(text, seed, case.draft_s), make())
    return run_drafts(core, plain_requests(4 * batch, 16, num_output))


def cell(case: Case, text: str, seed: int, batch: int, num_output: int = 256) -> dict[str, Any]:
    """Tokens per second of everybody, the ratios, and who keeps a pace of PROMISED times that of "off"."""
    runs = {"off": simulate(case, text, seed, batch, lambda: None, num_output)}
    for k in FIXED:
        runs[str(k)] = simulate(case, text, seed, batch, lambda k=k: FixedDrafts(k, 63), num_output)  # type: ignore[misc]
    rates = {name: run.tokens_per_s for name, run in runs.items()}
    best = max(rates, key=lambda name: rates[name])
    ours = simulate(case, text, seed, batch, lambda: AdaptiveDrafts(max(FIXED), 63, timer=case.known), num_output)
    plain_s = statistics.mean(runs["off"].tpot_s.values())
    in_time = {
        name: statistics.mean(tpot_s <= PROMISED * plain_s for tpot_s in run.tpot_s.values())
        for name, run in (*runs.items(), ("adaptive", ours))
    }
    return {
        "seed": seed, "best": best, "rates": rates, "adaptive": ours.tokens_per_s,
        "ratio": ours.tokens_per_s / rates[best], "to_off": ours.tokens_per_s / rates["off"], "in_time": in_time,
    }  # fmt: skip


def microseconds(batch: int, text: str) -> tuple[float, float]:
    """Of `begin_step` and `observe` together for each step of a run; and its steps."""
    spent = [0.0, 0]

    class Timed(AdaptiveDrafts):
        def begin_step(self, running: Any, now_s: float | None = None) -> Any:
            began = time.thread_time()
            out = super().begin_step(running, now_s)
            spent[0] += time.thread_time() - began
            return out

        def observe(self, output: Any, result: Any) -> None:
            began = time.thread_time()
            super().observe(output, result)
            spent[0] += time.thread_time() - began
            spent[1] += 1

    case = cases()["cpu-2core"]
    simulate(case, text, 1, batch, lambda: Timed(16, 63, timer=case.known), 1024)
    return 1e6 * spent[0] / spent[1], spent[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", nargs="*", default=list(cases()))
    parser.add_argument("--text", nargs="*", default=[*TEXTS, SPITEFUL])
    parser.add_argument("--sweep", action="store_true", help="the load sweep too (row D26)")
    parser.add_argument("--batch", nargs="*", type=int, default=list(BATCHES))
    args = parser.parse_args()
    console = Console()
    results: dict[str, Any] = {"cells": [], "overhead_us": {}}
    table = Table(title="adaptive / better of off and best fixed: lowest of the seeds (best one)")
    for column in ("cost table", "text", *(f"batch {b}" for b in args.batch)):
        table.add_column(column)
    for name in args.device:
        for text in args.text:
            shown = []
            for batch in args.batch:
                found = [cell(cases()[name], text, seed, batch) for seed in range(args.seeds)]
                results["cells"] += [{"device": name, "text": text, "batch": batch, **one} for one in found]
                lowest = min(one["ratio"] for one in found)
                best = Counter(one["best"] for one in found).most_common(1)[0][0]
                mark = "" if lowest >= 0.98 else "[red]"
                shown.append(f"{mark}{lowest:.3f} ({best})")
            table.add_row(name, text, *shown)
            console.print(name, text, *shown)
    console.print(table)
    swept = Table(title=f"load sweep, steady text: requests within {PROMISED} of the time per token without drafts")
    for column in ("cost table", "sequences", "to the better", "off", "best fixed", "adaptive"):
        swept.add_column(column)
    for name in ("h100, 8B", "cpu-2core", "tiles of 8") if args.sweep else ():
        for batch in SWEEP:
            one = cell(cases()[name], "steady", 5, batch, 128)
            results["cells"].append({"device": name, "text": "steady", "batch": batch, "sweep": True, **one})
            shares = [f"{one['in_time'][side]:.0%}" for side in ("off", one["best"], "adaptive")]
            swept.add_row(name, str(batch), f"{one['ratio']:.3f}", *shares)
    console.print(swept)
    for text in ("steady", "hopeless"):
        for batch in (1, 8, 32, 64):
            per_step, steps = microseconds(batch, text)
            results["overhead_us"][f"{text} {batch}"] = per_step
            console.print(f"{text}, batch {batch}: the controller takes {per_step:.1f} us of a step, {steps} steps")
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
