"""What a pause between two layers costs: decode steps of one row with pauses, and without, in turn.

    python -m benchmarks.micro.layer_pauses nano [MODEL ...] [--json FILE]

Where nobody asks for pauses, a run is one call and one test for None, as it was.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from penstock import LLM, SamplingParams


def measure(model: str, steps: int, **options: Any) -> dict[str, Any]:
    """Microseconds, medians over `steps` steps of each kind."""
    llm = LLM(model, max_model_len=512, **options)
    runner: Any = llm.engine.core.executor.runner
    forward, inner = runner._forward, runner.forward
    taken: dict[bool, list[float]] = {False: [], True: []}

    def timed(planned: Any) -> Any:
        apart = len(taken[True]) < len(taken[False])
        forward.pause((lambda n: None) if apart else None)
        start = time.perf_counter()
        found = inner(planned)
        taken[apart].append(1e6 * (time.perf_counter() - start))
        return found

    runner.forward = timed
    while len(taken[True]) < steps:
        llm.generate(["Once upon a time"], SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
    pairs = [b - a for a, b in zip(taken[False], taken[True], strict=False)]
    num = forward.num_layers + 1
    return {
        "model": model, "threads": forward.pool.num_threads, "pauses": num, "steps": len(pairs),
        "whole_us": statistics.median(taken[False]), "apart_us": statistics.median(taken[True]),
        "per_pause_us": statistics.median(pairs) / num, "whole_least_us": min(taken[False]),
        "apart_least_us": min(taken[True]),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    options = {"threads": args.threads} if args.threads else {}
    found = [measure(model, args.steps, **options) for model in args.models]
    print(json.dumps(found, indent=1))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
