"""Stages of one thread each: how long they wait for each other by parts of a step, and the latency of one sequence.

    python -m benchmarks.engine.pipeline MODEL [--stages 2] [--tokens 512] [--rounds 5] [--out FILE]

A prompt of `tokens` is one step, in 1, 2, 4 and 8 parts. Waiting is what ranks count (in receiving, for a free slot,
and for hidden states of the last stage), its share is of stages x the time of the answer. The formula is GPipe's (Huang
et al., arXiv 1811.06965, section 2): (S - 1) / (M + S - 1), of stages that are equally long. The time of one process of
one thread is beside it; all tokens must be the same. Row H03.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from benchmarks.common import about, save
from benchmarks.engine.ranks import asked, drawn
from rich.console import Console
from rich.table import Table

from penstock import LLM

PARTS = (1, 2, 4, 8)


def waited(llm: LLM) -> list[float]:
    """Seconds that each rank has waited so far."""
    found: list[float] = llm.engine.core.executor.wires.waited_s()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    common: dict[str, Any] = {
        "max_model_len": 2048, "enable_prefix_caching": False, "executor": "multiproc", "threads": 1,
        "max_num_batched_tokens": args.tokens,
    }  # fmt: skip
    one = LLM(args.model, **common)
    prompts = [drawn(n, 1, args.tokens) for n in range(args.rounds + 1)]
    alone = [asked(one, prompt, 1) for prompt in prompts]
    told = [asked(one, drawn(n, 1, 16), 33) for n in range(args.rounds + 1)]
    found: dict[str, Any] = {"alone_s": [s for s, _ in alone[1:]], "parts": {}}
    table = Table("parts", "step, s", "one process / it", "waiting, share", "formula", title=f"{args.stages} stages")
    for parts in PARTS:
        llm = LLM(args.model, pipeline_parallel_size=args.stages, pipeline_microbatches=parts, **common)
        seconds, shares = [], []
        for n, prompt in enumerate(prompts):
            before = waited(llm)
            took, said = asked(llm, prompt, 1)
            assert said == alone[n][1], "other tokens"
            if n:  # the first one packs and warms up
                seconds.append(took)
                shares.append(sum(b - a for a, b in zip(before, waited(llm), strict=True)) / (args.stages * took))
        formula = (args.stages - 1) / (parts + args.stages - 1)
        quicker = statistics.median(a / b for a, b in zip(found["alone_s"], seconds, strict=True))
        found["parts"][parts] = {"seconds": seconds, "shares": shares, "formula": formula, "quicker": quicker}
        table.add_row(
            f"{parts}", f"{statistics.median(seconds):.3f}", f"{quicker:.2f}", f"{statistics.median(shares):.3f}",
            f"{formula:.3f}",
        )  # fmt: skip
        if parts == 1:
            found["latency"] = latency(llm, told)
        llm.engine.core.executor.close()
    Console().print(table)
    own = found["latency"]
    Console().print(
        f"One sequence: {own['token_ms']:.2f} ms a token on stages, {own['alone_ms']:.2f} ms in one process, that does "
        "the same one after the other", highlight=False,
    )  # fmt: skip
    if args.out:
        save(args.out, {**about(), "model": Path(args.model).name, "stages": args.stages, **found})


def latency(llm: LLM, told: list[tuple[float, list[list[int]]]]) -> dict[str, float]:
    """Milliseconds of a token: on stages, and in one process."""
    whole, alone = [], []
    for n, (took, said) in enumerate(told):
        seconds, own = asked(llm, drawn(n, 1, 16), 33)
        assert own == said, "other tokens"
        whole.append(seconds / 33)
        alone.append(took / 33)
    means = {"token_ms": whole, "alone_ms": alone}
    return {name: 1e3 * statistics.median(values[1:]) for name, values in means.items()}


if __name__ == "__main__":
    main()
