"""Does the plan for memory that weights and sequences share hold what it promises (row B19)?

    python -m benchmarks.engine.offload_plan MODEL [--memory BYTES] [--rows 1,4,8,16] [--rounds 5] [--json FILE]

Rates are measured by the engine's own means (`--memory-bytes`, `launch.offload`). Then every plan of a grid is run, in
turns: tokens/s of decode steps, medians. Keys and values are in memory, or on the disk for all sequences. `of_best` is
the planned one's over the best of the grid. All
tokens are compared with those of texts that run alone, in memory. The default memory is 0.6 of what weights take.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from benchmarks.engine.beyond_memory import Steps, prompts_of

from penstock import LLM
from penstock.config import EngineConfig, from_kwargs
from penstock.families.registry import open_model
from penstock.launch.backend import choose_ops
from penstock.launch.build import start
from penstock.launch.hub import local_path
from penstock.launch.offload import OffloadSearch, _alone, measured, planned, search
from penstock.plan.offload import OffloadPlan, best_plan, kept_layers
from penstock.plan.probe import probe

CONTEXT = 256


def engine(config: EngineConfig, found: OffloadSearch, plan: OffloadPlan) -> Steps:
    settings = planned(config, found._replace(chosen=plan)).as_kwargs()
    return Steps(LLM(**(settings | {"enable_prefix_caching": False})), plan.rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--memory", type=int, help="bytes for weights, keys and values")
    parser.add_argument("--rows", default="1,4,8,16")
    parser.add_argument("--prefetch", default="0,1,2,3")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows, prefetches = ([int(n) for n in text.split(",")] for text in (args.rows, args.prefetch))
    checkpoint, machine = open_model(local_path(args.model)), probe()
    config = from_kwargs(model=args.model, max_model_len=CONTEXT, memory_bytes=1 << 40)
    config, _ = choose_ops(config, checkpoint.spec)
    alone = _alone(config, checkpoint.spec, machine, checkpoint.stored)
    memory = args.memory or int(0.6 * alone.weight_bytes)
    config = replace(config, execution=replace(config.execution, memory_bytes=memory))
    known = measured(config, checkpoint, alone, lambda small: start(small, machine=machine).core)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rates.json"
        path.write_bytes(msgspec.json.encode(known))
        config = replace(config, execution=replace(config.execution, offload_rates=str(path)))
        found = search(config, checkpoint.spec, machine, checkpoint.stored)
    grid = [
        p for p in found.plans if p.rows in rows and p.prefetch in prefetches and p.away in (0, p.rows)
    ]  # fmt: skip
    first = best_plan(grid)
    if first is None:
        raise SystemExit("nothing fits; give more memory")
    runs: dict[OffloadPlan, Steps] = {plan: engine(config, found, plan) for plan in grid}
    turns, rng = list(runs), random.Random(1)
    plain = Steps(LLM(args.model, max_model_len=CONTEXT, max_num_seqs=1), 1)
    wanted = {n: plain.run(prompts_of(plain.llm, n), 12) for n in {plan.rows for plan in grid}}
    del plain
    for _ in range(args.rounds):
        rng.shuffle(turns)
        for plan in turns:
            got = runs[plan].run(prompts_of(runs[plan].llm, plan.rows), 12)
            assert got == wanted[plan.rows], "the tokens of texts that ran alone, in memory"
    tokens_s = {plan: plan.rows / steps.median(steps.seconds) for plan, steps in runs.items()}
    quickest = {plan: plan.rows / min(steps.seconds) for plan, steps in runs.items()}
    model = found.model
    out: dict[str, Any] = {
        "model": args.model.rsplit("/", 1)[-1], "memory": memory, "num_layers": len(model.layers),
        "layer_bytes": max(model.layers), "beside": model.beside, "row_bytes": model.row,
        "rates": found.rates._asdict(), "planned": first._asdict(),
        "of_best": tokens_s[first] / max(tokens_s.values()),
        "of_best_by_quickest_steps": quickest[first] / max(quickest.values()), "load": os.getloadavg(), "plans": [],
    }  # fmt: skip
    for plan in grid:
        keeps = kept_layers(model.layers, plan.weight_bytes, plan.prefetch, beside=model.beside)
        figures = {"planned_tokens_s": plan.tokens_s, "tokens_s": tokens_s[plan], "quickest": quickest[plan]}
        out["plans"].append(plan._asdict() | {"coming": keeps.count(False)} | figures)
    print(json.dumps(out, indent=1))
    if args.json:
        args.json.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
