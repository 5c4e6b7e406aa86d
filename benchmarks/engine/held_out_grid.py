"""H18: prompts and decoding steps that the cost model was not fitted to, predicted and measured on a grid.

    python -m benchmarks.engine.held_out_grid MODEL [--minutes 1.5] [--rounds 3] [--out FILE]

The calibration (`penstock sim calibrate`) draws rounds at random. Then, in the same run and on the same engine: prompts
of some lengths, alone and two at a time, and decoding of some batches behind some contexts, all cells in turns. Of a
cell the sum of its steps is predicted and compared with the median of the measured ones.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.common import about, save
from msgspec.structs import asdict
from rich.console import Console
from rich.table import Table

from penstock.config import from_kwargs
from penstock.plan.calibrated import CalibratedTimer
from penstock.sim.calibrate import collect, plain
from penstock.sim.calibrated import calibration_of
from penstock.sim.real import real_engine, run_on
from penstock.sim.workload import TimedRequest, from_list

PROMPTS = ((1, 48), (1, 100), (1, 200), (1, 400), (1, 800), (2, 150), (2, 600))
"""Prompts at a time, and their length."""
DECODES = tuple((batch, context) for context in (40, 300, 900) for batch in (1, 3, 6, 12))
"""Sequences, and tokens before them."""
STEPS = 12
NEAR = 0.15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--minutes", type=float, default=1.5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out")
    options = parser.parse_args()
    config = plain(
        from_kwargs(
            {}, model=options.model, threads=options.threads, max_model_len=2048, max_num_seqs=16,
            kv_cache_memory_bytes=1 << 29, max_num_batched_tokens=1024,
        )
    )  # fmt: skip
    cells = [("prompt", *cell) for cell in PROMPTS] + [("decode", *cell) for cell in DECODES]
    measured: dict[Any, list[float]] = defaultdict(list)
    predicted: dict[Any, float] = {}
    with real_engine(config) as engine:
        fitted, held = collect(engine, seconds=options.minutes * 60, longest=1024, seed=5)
        found = calibration_of(engine, config, fitted, held)
        timer = CalibratedTimer(found.curve, found.copy_bytes_per_s)
        for _ in range(options.rounds):
            for cell in cells:
                kind, count, length = cell
                samples: list[Any] = []
                outputs = STEPS if kind == "decode" else 1
                run_on(
                    engine, from_list(str(cell), [TimedRequest(0.0, length, outputs) for _ in range(count)]),
                    samples=samples,
                )  # fmt: skip
                engine.core.kv.reset_prefix_cache()
                if kind == "decode":
                    own = [(s, t) for s, t in samples if s.num_tokens == s.num_rows == count]
                    predicted[cell] = statistics.fmean(timer.step_s(s) for s, _ in own)
                    measured[cell].append(statistics.median(t for _, t in own))
                else:
                    predicted[cell] = sum(timer.step_s(s) for s, _ in samples)
                    measured[cell].append(sum(t for _, t in samples))
    table = Table("cell", "measured ms", "fastest, slowest", "predicted ms", "predicted / measured")
    rows = []
    for cell in cells:
        middle = statistics.median(measured[cell])
        ratio = predicted[cell] / middle
        kind, count, length = cell
        name = f"{count} x {length} tokens read" if kind == "prompt" else f"{count} decode behind {length}"
        spread = f"{min(measured[cell]) * 1e3:.1f}, {max(measured[cell]) * 1e3:.1f}"
        table.add_row(name, f"{middle * 1e3:.1f}", spread, f"{predicted[cell] * 1e3:.1f}", f"{ratio:.3f}")
        rows.append({"cell": name, "measured_s": measured[cell], "predicted_s": predicted[cell], "ratio": ratio})
    console = Console()
    console.print(table)
    far = [row["cell"] for row in rows if abs(row["ratio"] - 1) > NEAR]
    errors = sorted(abs(row["ratio"] - 1) for row in rows)
    console.print(
        f"{len(rows) - len(far)} of {len(rows)} cells within {NEAR:.0%}; median error "
        f"{statistics.median(errors):.1%}, largest {errors[-1]:.1%}"
    )
    if options.out:
        about_run = {"model": Path(options.model).name, "samples": found.num_samples}
        save(options.out, {**about(**about_run), "errors": asdict(found.errors), "cells": rows, "far": far})


if __name__ == "__main__":
    main()
