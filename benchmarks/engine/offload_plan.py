"""Does the plan for memory that weights and sequences share hold what it promises (row B19)?

    python -m benchmarks.engine.offload_plan MODEL [--memory BYTES] [--rows 1,4,8,16] [--rounds 5] [--json FILE]

Rates are measured first: the drive, and steps of two numbers of rows with all weights in memory. Then every plan of a
grid is run, in turns: tokens/s of decode steps, medians. `of_best` is the planned one's over the best of the grid.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.engine.beyond_memory import Steps, drive_rate, packed_path, prompts_of

from penstock import LLM
from penstock.plan.offload import OffloadModel, OffloadPlan, OffloadRates, kept_layers, offload_plans

CONTEXT = 256


def engine(model: str, rows: int, **options: Any) -> Steps:
    llm = LLM(model, max_num_seqs=rows, max_model_len=CONTEXT, num_gpu_blocks_override=rows * CONTEXT // 32,
              enable_prefix_caching=False, **options)  # fmt: skip
    return Steps(llm, rows)


def layers_share(steps: Steps) -> float:
    """Of the time of native operations, what layers take."""
    forward = steps.runner._forward
    forward.profile()
    steps.run(prompts_of(steps.llm, steps.batch), 8)
    spent = [ns for _, ns in forward.profile()]
    first, last = forward._code.bounds[0], forward._code.bounds[-1]
    return sum(spent[first:last]) / sum(spent)


def measured_rates(model: str, path: Path, few: int, many: int, rounds: int) -> OffloadRates:
    whole = {rows: engine(model, rows) for rows in (few, many)}
    spans = [(0, path.stat().st_size // 4096 * 4096)]
    drive, load = [], []
    for _ in range(rounds):
        start = time.process_time()
        drive.append(drive_rate(path, spans))
        load.append((time.process_time() - start) / spans[0][1] / (os.cpu_count() or 1))
        for steps in whole.values():
            steps.run(prompts_of(steps.llm, steps.batch), 12)
    seconds = {rows: steps.median(steps.seconds) for rows, steps in whole.items()}
    row_s = max(0.0, (seconds[many] - seconds[few]) / (many - few))
    share = layers_share(whole[few])
    return OffloadRates(statistics.median(drive), seconds[few] - few * row_s, row_s, share, statistics.median(load))


def shape_of(model: str) -> OffloadModel:
    steps = engine(model, 1, packed_weights="streamed")
    forward = steps.runner._forward
    found = forward._resident
    assert found is not None
    layers = [s.num_bytes for s in found.segments[1:]]
    plan: Any = steps.llm.engine.plan
    row = sum(g.slab_bytes(plan.block_size) for g in plan.groups) * (CONTEXT // plan.block_size)
    return OffloadModel(tuple(layers), found.segments[0].num_bytes, row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument(
        "--memory", type=int, help="bytes for weights, keys and values; by default those of all weights"
    )
    parser.add_argument("--rows", default="1,4,8,16")
    parser.add_argument("--prefetch", default="0,1,2,3")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    path = packed_path(args.model, {})
    rows, prefetches = ([int(n) for n in text.split(",")] for text in (args.rows, args.prefetch))
    shape = shape_of(args.model)
    memory = args.memory or shape.beside + sum(shape.layers)
    rates = measured_rates(args.model, path, min(rows), max(rows), args.rounds)
    plans = offload_plans(shape, memory, rates, rows, prefetches)
    if not plans:
        raise SystemExit("nothing fits; give more memory")
    runs: dict[OffloadPlan, Steps] = {}
    for plan in plans:
        runs[plan] = engine(args.model, plan.rows, weight_memory_bytes=plan.weight_bytes, weight_prefetch=plan.prefetch)
    for _ in range(args.rounds):
        for steps in runs.values():
            steps.run(prompts_of(steps.llm, steps.batch), 12)
    tokens_s = {plan: plan.rows / steps.median(steps.seconds) for plan, steps in runs.items()}
    quickest = {plan: plan.rows / min(steps.seconds) for plan, steps in runs.items()}
    found: dict[str, Any] = {
        "model": args.model.rsplit("/", 1)[-1], "memory": memory, "num_layers": len(shape.layers),
        "layer_bytes": max(shape.layers), "beside": shape.beside, "row_bytes": shape.row, "rates": rates._asdict(),
        "of_best": tokens_s[plans[0]] / max(tokens_s.values()),
        "of_best_by_quickest_steps": quickest[plans[0]] / max(quickest.values()),
        "load": os.getloadavg(), "plans": [],
    }  # fmt: skip
    for plan in plans:
        keeps = kept_layers(shape.layers, plan.weight_bytes, plan.prefetch, beside=shape.beside)
        figures = {"planned_tokens_s": plan.tokens_s, "tokens_s": tokens_s[plan], "quickest": quickest[plan]}
        found["plans"].append(plan._asdict() | {"coming": keeps.count(False)} | figures)
    print(json.dumps(found, indent=1))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
