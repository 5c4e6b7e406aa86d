"""A trace through the real scheduler on a virtual clock: what would this device have done with this traffic?

    python simulate.py [TRACE.csv]

Without a file a small trace is made up. Columns: seconds, prompt tokens, answer tokens (the Azure traces' names).
"""

import random
import sys
from pathlib import Path

from penstock.cli.main import main


def made_up(path):
    """Two minutes of traffic with a burst in the middle."""
    rng = random.Random(0)
    rows, now = ["TIMESTAMP,ContextTokens,GeneratedTokens"], 0.0
    while now < 120:
        now += rng.expovariate(1.5 if 40 < now < 60 else 0.5)
        clock = f"2026-01-01 12:{int(now // 60):02}:{now % 60:09.6f}0"
        rows.append(f"{clock},{rng.randint(50, 3000)},{rng.randint(20, 400)}")
    path.write_text("\n".join(rows) + "\n")
    return path


if __name__ == "__main__":
    trace = Path(sys.argv[1]) if len(sys.argv) > 1 else made_up(Path("trace.csv"))
    sys.exit(
        main(
            [
                *("sim", "--trace", str(trace), "--spec", "llama-3.1-8b", "--device", "l4", "--max-model-len", "8192"),
                *("--scheduling-policy", "fcfs,prefill-first", "--out", "simulation.html"),
            ]
        )
    )
