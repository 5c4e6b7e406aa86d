"""Two ranks of one thread each beside one process of two threads: decoding, prompts, and what goes between ranks.

    python -m benchmarks.engine.ranks MODEL [--ranks 2] [--rounds 7] [--out FILE]

Both engines stay up and answer in turns, every round begun by the other; all tokens must be the same. Ratios are of
ranks to the one process, round by round, with Student's interval of 95 % over their logarithms (above 1: ranks are
faster). Row H01.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.common import about, save
from rich.console import Console
from rich.table import Table

from penstock import LLM, SamplingParams
from penstock.measure.intervals import ratio_interval


def asked(llm: LLM, prompts: list[list[int]], new: int) -> tuple[float, list[list[int]]]:
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
    began = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    return time.perf_counter() - began, [list(o.outputs[0].token_ids) for o in outputs]


def drawn(number: int, count: int, length: int) -> list[list[int]]:
    return [[100 + (number * 7919 + i * 104_729 + j * 31) % 20_000 for j in range(length)] for i in range(count)]


WORKLOADS: dict[str, tuple[int, int, int]] = {
    "decode, 1 sequence": (1, 64, 96), "decode, 16 sequences": (16, 64, 32), "prompt of 1,024": (1, 1024, 1),
}  # fmt: skip
"""Sequences, tokens of each prompt, new tokens."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    common: dict[str, Any] = {"max_model_len": 2048, "enable_prefix_caching": False, "executor": "multiproc"}
    engines = {
        "one": LLM(args.model, threads=args.ranks, **common),
        "ranks": LLM(args.model, tensor_parallel_size=args.ranks, threads=1, **common),
    }
    found: dict[str, Any] = {}
    table = Table("workload", "one, s", "ranks, s", "ratio", "95 %", title=f"{args.ranks} ranks of one thread each")
    for name, (count, length, new) in WORKLOADS.items():
        times: dict[str, list[float]] = {kind: [] for kind in engines}
        for llm in engines.values():
            asked(llm, drawn(0, count, length), new)
        for round_ in range(1, args.rounds + 1):
            said = {}
            for kind in list(engines) if round_ % 2 else list(engines)[::-1]:
                seconds, said[kind] = asked(engines[kind], drawn(round_, count, length), new)
                times[kind].append(seconds)
            assert said["one"] == said["ranks"], "other tokens"
        middle = statistics.median(a / b for a, b in zip(times["one"], times["ranks"], strict=True))
        _, interval = ratio_interval(times["one"], times["ranks"])
        low, high = (math.nan, math.nan) if interval is None else (1 + interval[0], 1 + interval[1])
        found[name] = {"seconds": times, "ratio": middle, "interval": [low, high]}
        medians = [f"{statistics.median(times[kind]):.3f}" for kind in engines]
        table.add_row(name, *medians, f"{middle:.3f}", f"{low:.3f} to {high:.3f}")
    Console().print(table)
    if args.out:
        save(args.out, {**about(), "model": Path(args.model).name, "ranks": args.ranks, "workloads": found})


if __name__ == "__main__":
    main()
