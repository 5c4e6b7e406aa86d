"""What the size of a block costs: an index for each token (TokenAttention) beside blocks of 8 to 64.

    python -m benchmarks.engine.block_sizes MODEL [--sequences 16] [--context 512] --out FILE

One engine for each size, all with the same weights' file and the same sequences behind their prompts; they decode in
turns, `--steps` steps in each of `--rounds` rounds, every round begun by another. Ratios are taken round by round to
blocks of 16. All must say the same tokens. Row C50; what memory it wins is in `benchmarks.engine.memory` (row B07).
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path

from benchmarks.common import about, save
from rich.console import Console
from rich.table import Table

from penstock import LLM
from penstock.core.request import Request
from penstock.core.sampling import TokenRules

SIZES = (1, 8, 16, 32, 64)
PLAIN = 16


class Decoding:
    """One engine with all of its sequences behind their prompts."""

    def __init__(self, model: str, block_size: int, prompts: list[list[int]], num_tokens: int) -> None:
        length = len(prompts[0]) + num_tokens
        llm = LLM(
            model, block_size=block_size, max_num_seqs=len(prompts), max_model_len=-(-length // 64) * 64,
            enable_prefix_caching=False, num_gpu_blocks_override=len(prompts) * -(-length // 64) * 64 // block_size,
        )  # fmt: skip
        self.llm, self.core = llm, llm._engine.core
        self.said: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
        for i, prompt in enumerate(prompts):
            rules = TokenRules(temperature=0.0)
            self.core.add(Request(request_id=str(i), prompt_token_ids=prompt, rules=rules, max_tokens=num_tokens))
        began = time.perf_counter()
        while not all(self.said.values()):
            self._step()
        self.prefill_s = time.perf_counter() - began

    def _step(self) -> None:
        for out in self.core.step() or ():
            self.said[out.request_id] += out.token_ids

    def decode(self, steps: int) -> float:
        """Median seconds of so many steps."""
        times = []
        for _ in range(steps):
            began = time.perf_counter()
            self._step()
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    @property
    def table_bytes(self) -> int:
        """Of the indices by which the kernels find keys and values."""
        return sum(4 * len(table.ids) for seq in self.core.scheduler.running for table in seq.tables)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--vocab", type=int, default=1000, help="token ids of prompts are below it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out")
    args = parser.parse_args()
    console, rng = Console(), random.Random(args.seed)
    prompts = [[rng.randrange(100, args.vocab) for _ in range(args.context)] for _ in range(args.sequences)]
    num_tokens = 2 + args.steps * (args.rounds + 1)
    engines = {size: Decoding(args.model, size, prompts, num_tokens) for size in SIZES}
    times: dict[int, list[float]] = {size: [] for size in SIZES}
    for engine in engines.values():
        engine.decode(args.steps)
    for turn in range(args.rounds):
        for at in range(len(SIZES)):
            size = SIZES[(at + turn) % len(SIZES)]
            times[size].append(engines[size].decode(args.steps))
    told = [engine.said for engine in engines.values()]
    if any(said != told[0] for said in told):
        raise SystemExit("block sizes say different tokens")
    table = Table(title=f"{args.sequences} sequences behind {args.context} tokens, {Path(args.model).name}")
    for column in ("block", "prefill s", "step ms (fastest, slowest)", "of blocks of 16", "us more", "table bytes"):
        table.add_column(column, justify="right")
    rows = []
    for size, engine in engines.items():
        ratios = sorted(mine / plain for mine, plain in zip(times[size], times[PLAIN], strict=True))
        step, plain = statistics.median(times[size]), statistics.median(times[PLAIN])
        row = {
            "block_size": size, "prefill_s": engine.prefill_s, "step_s": step, "low_s": min(times[size]),
            "high_s": max(times[size]), "ratio": statistics.median(ratios), "ratio_low": ratios[0],
            "ratio_high": ratios[-1], "more_us": 1e6 * (step - plain), "table_bytes": engine.table_bytes,
        }  # fmt: skip
        rows.append(row)
        spread = f"({1e3 * row['low_s']:.2f}, {1e3 * row['high_s']:.2f})"
        ratio = f"{row['ratio']:.3f} ({ratios[0]:.3f}, {ratios[-1]:.3f})"
        cells = (f"{1e3 * step:.2f} {spread}", ratio, f"{row['more_us']:+.0f}", f"{engine.table_bytes:,}")
        table.add_row(str(size), f"{engine.prefill_s:.2f}", *cells)
    console.print(table)
    console.print("the same tokens with every size")
    if args.out:
        save(
            args.out,
            {"about": about(), "model": Path(args.model).name, "args": vars(args) | {"model": ""}, "rows": rows},
        )


if __name__ == "__main__":
    main()
