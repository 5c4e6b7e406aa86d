"""LayerKV beside request-wise blocks on a simulated device (B24): seconds to the first token, between them, to the end.

python -m benchmarks.engine.layerkv [--rates 3,4,5] [--holds 8] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from penstock.core.model_spec import cache_spec
from penstock.plan.devices import device_preset
from penstock.sim.metrics import metrics
from penstock.sim.specs import find_spec
from penstock.sim.studies.study import Bench
from penstock.sim.synthetic import synthetic


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="3,4,5", help="requests per second")
    parser.add_argument("--holds", type=int, default=8, help="sequences of 2,400 tokens in KV memory")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    bench = Bench(find_spec("llama-3.1-8b"), device_preset("h100-sxm"), scale=1.0, seed=1)
    token_bytes = sum(c.num_bytes for layer in bench.spec.layers if (c := cache_spec(layer, bench.spec.dtype)))
    rows = []
    for rate in map(float, args.rates.split(",")):
        text = f"synthetic:poisson?rate={rate:g}&prompt=2000&prompt_cv=0.3&output=400&output_cv=0.5&requests=150"
        for allocator in ("paged", "layerkv"):
            result, stats, _ = bench.run_with_stats(
                synthetic(text, 1), allocator, kv_allocator=allocator, prefix_cache="none", swap_space=64.0,
                kv_cache_memory_bytes=args.holds * 2400 * token_bytes, max_model_len=4096,
                schedule_conservativeness=1.0,
            )  # fmt: skip
            found = metrics(result)["latency_s"]
            rows.append(
                {"rate": rate, "allocator": allocator, "preemptions": stats.num_preemptions}
                | {f"{name}_s": found[name]["mean"] for name in ("ttft", "tpot", "jct")}
            )
            print(json.dumps(rows[-1]))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
