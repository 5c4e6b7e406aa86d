"""What a model's weights take of this process's memory, beside the bytes of its file.

    python -m benchmarks.engine.resident MODEL [--packed-weights copied|mapped] [--quantization none]

The difference of the process's resident memory (private pages and, where weights are mapped, pages of files) before and
after a start without a tokenizer and with next to no KV memory. The first start packs, the second reads what it has
left.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from penstock.families.registry import open_model


def resident() -> int:
    """Bytes of this process's pages that are its own or of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {
        name: int(rest.split()[0]) << 10 for name, _, rest in (line.partition(":") for line in lines) if "Rss" in name
    }
    return found["RssAnon"] + found["RssFile"]


def started(model: str, settings: dict[str, str]) -> dict[str, int]:
    """Bytes that a start adds, and what the plan counts."""
    from penstock import LLM

    before = resident()
    llm = LLM(model, skip_tokenizer_init=True, num_gpu_blocks_override=8, max_model_len=128, max_num_seqs=1, **settings)
    found = {"resident": resident() - before, "planned": llm.engine.plan.weight_bytes}
    llm.engine.core.executor.close()
    return found


def second_start(model: str, settings: dict[str, str]) -> dict[str, int]:
    """What `started` finds where an earlier start has packed: each in a process and with a cache of its own."""
    options = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", value)]
    command = [sys.executable, "-m", "benchmarks.engine.resident", model, *options, "--child"]
    with tempfile.TemporaryDirectory() as cache:
        for _ in range(2):
            done = subprocess.run(
                command, capture_output=True, text=True, check=True, env=os.environ | {"PENSTOCK_CACHE": cache}
            )
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--packed-weights", default="copied")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        settings = {"packed_weights": args.packed_weights, "quantization": args.quantization}
        print(json.dumps(started(args.model, settings)))
        return
    in_file = sum(ref.tensor.nbytes for ref in open_model(args.model).weights.values())
    table = Table(title=f"{args.model}: {in_file / 2**20:.0f} MiB of tensors")
    for column in ("start", "resident, MiB", "of the file", "planned, MiB"):
        table.add_column(column)
    for start in ("first, or packed before", "second"):
        done = subprocess.run([sys.executable, "-m", "benchmarks.engine.resident", *sys.argv[1:], "--child"],
                              capture_output=True, text=True, check=True)  # fmt: skip
        found = json.loads(done.stdout.splitlines()[-1])
        mib = [f"{found[name] / 2**20:.0f}" for name in ("resident", "planned")]
        table.add_row(start, mib[0], f"{found['resident'] / in_file:.3f}", mib[1])
    Console().print(table)


if __name__ == "__main__":
    main()
