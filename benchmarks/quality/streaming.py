"""StreamingLLM on a text many times longer than what it keeps (catalogue row F01): does perplexity stay, and memory?

    PYTHONPATH=. python benchmarks/quality/streaming.py MODEL --text FILE [--kept 256 512] [--tokens 10240] [--out FILE]

The text is one prompt; every token's log-probability is the engine's own. `sinks` keeps the first block of tokens and
the newest ones, `window` the newest alone, both with positions inside the cache; `all` is the model as it was made, as
far as it goes. Perplexity is given piece by piece, with the spread (95 %, bootstrap over stretches of 64 tokens) of all
that lies behind ten times what is kept. KV bytes are the most that the allocator had in use, in the first tenth and in
all. Checked in the same run: up to what is kept, all three give the same log-probabilities.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.common import about, save, show
from rich.console import Console
from rich.progress import track

from penstock import LLM, SamplingParams

STRETCH = 64


def read(model: str, ids: list[int], piece: int, **settings: Any) -> tuple[list[float], list[int]]:
    """-ln p of tokens 1, 2, ..., and the KV bytes in use after every step."""
    llm = LLM(model, max_num_seqs=1, max_num_batched_tokens=256, enable_prefix_caching=False, dtype="float32",
              kv_cache_memory_bytes=512 << 20, **settings)  # fmt: skip
    core, plan = llm.engine.core, llm.engine.plan
    used: list[int] = []
    step = core.step

    def watched() -> Any:
        out = step()
        kv = core.kv.stats().groups
        used.append(sum(s.used * g.slab_bytes(plan.block_size) for s, g in zip(kv, plan.groups, strict=True)))
        return out

    core.step = watched
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    found = llm.generate({"prompt_token_ids": ids}, params)[0].prompt_logprobs
    losses = [-entry[token].logprob for token, entry in zip(ids[1:], found[1:], strict=True)]
    return losses, used


def spread(losses: list[float]) -> tuple[float, float, float]:
    """Perplexity, and its interval over stretches."""
    stretches = [losses[i : i + STRETCH] for i in range(0, len(losses) - STRETCH + 1, STRETCH)]
    means = [sum(s) / len(s) for s in stretches]
    rng = random.Random(0)
    draws = sorted(sum(rng.choices(means, k=len(means))) / len(means) for _ in range(2000))
    return math.exp(sum(means) / len(means)), math.exp(draws[50]), math.exp(draws[-51])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", required=True)
    parser.add_argument("--kept", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--tokens", type=int, default=10240)
    parser.add_argument("--interval", type=int, default=32, help="tokens from one cut to the next")
    parser.add_argument("--bos", type=int, help="token that is put before the text")
    parser.add_argument("--out")
    args = parser.parse_args()
    console = Console()
    tokenizer = LLM(args.model, max_model_len=64).get_tokenizer()
    ids = tokenizer.encode(Path(args.text).read_text("utf-8")[: 8 * args.tokens])[: args.tokens]
    ids = ids if args.bos is None else [args.bos, *ids[:-1]]
    assert len(ids) == args.tokens, f"the text has only {len(ids)} tokens"
    model_len = LLM(args.model).engine.plan.max_model_len
    cases: list[tuple[str, int, dict[str, Any]]] = [("all", 0, {})]
    for kept in args.kept:
        for name, sinks in (("sinks", 4), ("window", 0)):
            options = json.dumps({"sinks": sinks, "interval": args.interval, "prompt_interval": args.interval})
            settings = {"kv_selector": "streaming", "kv_budget": str(kept), "kv_selector_config": options}
            cases.append((name, kept, settings | {"max_model_len": args.tokens + 1}))
    edges = [0, 512, 1024, 2048, *range(4096, args.tokens + 1, 2048)]
    rows, results, whole = [], [], []
    for name, kept, settings in track(cases, "reading", console=console):
        own = ids[: model_len - 1] if name == "all" else ids
        losses, used = read(args.model, own, args.interval, **settings)
        pieces = [math.exp(sum(p) / len(p)) if (p := losses[a:b]) else None for a, b in pairwise(edges)]
        if name == "all":
            whole, late = losses, None
        else:
            same = kept - args.interval
            assert max(abs(a - b) for a, b in zip(whole[:same], losses[:same], strict=True)) < 1e-4, "not the same"
            late = spread(losses[10 * kept :])
        tenth = max(used[: max(1, len(used) // 10)])
        rows.append([
            name, str(kept or "all"), *("" if p is None else f"{p:.1f}" for p in pieces),
            "" if late is None else f"{late[0]:.1f} ({late[1]:.1f} to {late[2]:.1f})",
            f"{tenth / 2**10:.0f}", f"{max(used) / 2**10:.0f}",
        ])  # fmt: skip
        results.append({
            "name": name, "kept": kept, "settings": settings, "edges": edges, "perplexity": pieces, "late": late,
            "kv_bytes_first_tenth": tenth, "kv_bytes_most": max(used),
        })  # fmt: skip
    columns = ["", "kept", *(f"to {b:,}" for b in edges[1:]), "behind 10 x kept", "KV KiB, first tenth", "most"]
    show(console, f"Perplexity of {args.tokens:,} tokens, cut every {args.interval}", columns, rows, left=2)
    save(args.out, about(
        benchmark="streaming", model=Path(args.model).name, text=Path(args.text).name, tokens=args.tokens,
        interval=args.interval, cases=results,
    ))  # fmt: skip


if __name__ == "__main__":
    main()
