"""Mean time to the first token where KV memory is short: blocks of all layers at once, and layer by layer (B24).

    python -m benchmarks.serving.layerkv MODEL [--requests 16] [--prompt 600] [--output 64] [--holds 3] [--json FILE]

Requests arrive `--gap` seconds apart; KV memory holds `--holds` of them. Both allocators serve the same requests in
turn, a pair per round, with the same greedy tokens (they are compared).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from penstock import LLM
from penstock.core.request import Request
from penstock.core.sampling import TokenRules

ALLOCATORS = ("paged", "layerkv")


class ProcessorTime:
    """Seconds that this process has computed, and those for which there was nothing to do: what a machine of one core,
    which nobody else uses, would take."""

    def __init__(self) -> None:
        self.idle_s = 0.0

    def now(self) -> float:
        return time.process_time() + self.idle_s

    def wait(self, seconds: float) -> None:
        self.idle_s += seconds


class WallTime:
    def now(self) -> float:
        return time.perf_counter()

    def wait(self, seconds: float) -> None:
        time.sleep(min(seconds, 0.001))


def serve(
    llm: LLM, prompts: list[list[int]], output: int, gap_s: float, name: str, clock: ProcessorTime | WallTime
) -> dict[str, Any]:
    """Seconds: means over requests; tokens by request."""
    core: Any = llm.engine.core
    core.clock = core.executor.runner._clock = clock
    begin = clock.now()
    due = [begin + gap_s * i for i in range(len(prompts))]
    came: dict[str, list[float]] = {}
    tokens: dict[str, list[int]] = {}
    todo = list(range(len(prompts)))
    while todo or core.has_work:
        now = clock.now()
        while todo and due[todo[0]] <= now:
            i = todo.pop(0)
            rules = TokenRules(temperature=0.0)
            core.add(Request(request_id=f"{name}-{i}", prompt_token_ids=prompts[i], rules=rules, max_tokens=output))
        if not core.has_work:
            clock.wait(due[todo[0]] - now)
            continue
        for out in core.step():
            now = clock.now()
            key = out.request_id.rpartition("-")[2]
            came.setdefault(key, []).extend([now] * len(out.token_ids))
            tokens.setdefault(key, []).extend(out.token_ids)
    ttft = [came[str(i)][0] - due[i] for i in range(len(prompts))]
    tpot = [(t[-1] - t[0]) / (len(t) - 1) for t in came.values() if len(t) > 1]
    return {
        "ttft_s": statistics.mean(ttft), "tpot_s": statistics.mean(tpot),
        "span_s": clock.now() - begin, "tokens": tokens,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=600)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--holds", type=float, default=3)
    parser.add_argument("--gap", type=float, default=0.2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tpot", type=float)
    parser.add_argument("--processor-time", action="store_true", help="of one thread, whoever else computes")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    blocks = round(args.holds * -(-(args.prompt + args.output) // 32))
    llms = {
        name: LLM(
            args.model, kv_allocator=name, num_gpu_blocks_override=blocks, enable_prefix_caching=False,
            max_model_len=args.prompt + args.output + 32, swap_space=2.0, max_num_seqs=args.requests,
            kv_layer_tpot=args.tpot, threads=1 if args.processor_time else None,
        )
        for name in ALLOCATORS
    }  # fmt: skip
    clock = ProcessorTime() if args.processor_time else WallTime()
    rng = np.random.default_rng(1)
    size = min(llm.engine.core.executor.runner.vocab_size for llm in llms.values())
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ALLOCATORS}
    for turn in range(args.rounds):
        prompts = [rng.integers(10, size - 10, args.prompt).tolist() for _ in range(args.requests)]
        for name in ALLOCATORS if turn % 2 == 0 else ALLOCATORS[::-1]:
            found[name].append(serve(llms[name], prompts, args.output, args.gap, f"{name}{turn}", clock))
        tokens = [found[name][-1].pop("tokens") for name in ALLOCATORS]
        assert tokens[0] == tokens[1], "other tokens"
    books: Any = llms["layerkv"].engine.core.kv
    out = {
        "model": Path(args.model).name, "blocks": blocks,
        "settings": {k: v for k, v in vars(args).items() if k not in ("json", "model")},
        "load": os.getloadavg(), "layerwise": books.num_layerwise, "brought_back": books.num_brought_back,
        "waits": books.num_waits, "runs": found,
        **{
            key: {name: statistics.median(run[key] for run in found[name]) for name in ALLOCATORS}
            for key in ("ttft_s", "tpot_s", "span_s")
        },
    }  # fmt: skip
    print(json.dumps(out, indent=1))
    if args.json:
        args.json.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
