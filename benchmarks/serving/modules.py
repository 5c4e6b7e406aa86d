"""Time to the first token of prompts that are put together of modules (catalogue rows B11, J04).

    PYTHONPATH=. python -m benchmarks.serving.modules MODEL --corpus CORPUS --rounds 5 --out FILE

A prompt is `--modules` pieces of `--tokens` tokens of different books, drawn and in a drawn order, and a question. In
each round the same prompt is asked, in turns, of one engine whose prefix cache has been emptied (*full*: an ordinary
prompt) and of one that knows every piece, in an order that it has not seen (*reuse*; *blend 15 %*: with that share
computed again), and the first piece alone with the question behind it (*prefix full*; *prefix*). Medians, lowest and
highest of the rounds, in milliseconds, and the same of each round's ratios.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import about, save
from rich.console import Console

from penstock.core.sampling import SamplingParams
from penstock.launch.llm import LLM


def first_token_s(llm: LLM, prompt: dict[str, Any]) -> tuple[float, list[int]]:
    """Seconds until a prompt's first token is there, and that token."""
    began = time.perf_counter()
    (out,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1))
    return time.perf_counter() - began, out.outputs[0].token_ids


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--modules", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=str)
    args = parser.parse_args(arguments)
    rng = random.Random(args.seed)
    length = args.modules * args.tokens + 128
    settings: dict[str, Any] = {"max_model_len": length, "max_num_seqs": 2, "num_gpu_blocks_override": 8 * length // 32}
    llm, plain = LLM(args.model, kv_allocator="modules", **settings), LLM(args.model, **settings)
    tokenizer = llm.get_tokenizer()
    books = sorted((args.corpus / "novels").glob("*.txt"))
    rng.shuffle(books)
    pieces = [
        tokenizer.encode(b.read_text(errors="ignore")[20_000:40_000])[: args.tokens] for b in books[: args.modules]
    ]
    rounds: list[dict[str, float]] = []
    same = 0
    for n in range(args.rounds):
        order = rng.sample(range(args.modules), args.modules)
        question = tokenizer.encode(f"\nQuestion {n}: who of them speaks first?\nAnswer:", add_special_tokens=False)
        ids = [token for i in order for token in pieces[i]] + question
        modules = [{"token_ids": pieces[i]} for i in order]
        prefix = pieces[order[0]] + question
        took: dict[str, float] = {}
        plain.reset_prefix_cache()
        took["full"], _ = first_token_s(plain, {"prompt_token_ids": ids})
        plain.reset_prefix_cache()
        took["prefix full"], want = first_token_s(plain, {"prompt_token_ids": prefix})
        llm.reset_prefix_cache()
        for piece in pieces:
            first_token_s(llm, {"prompt_token_ids": question[:1], "prompt_cache": [{"token_ids": piece}]})
        took["prefix"], got = first_token_s(llm, {"prompt_token_ids": question, "prompt_cache": modules[:1]})
        took["reuse"], _ = first_token_s(llm, {"prompt_token_ids": question, "prompt_cache": modules})
        blend = {"modules": modules, "recompute": 0.15}
        took["blend 15 %"], _ = first_token_s(llm, {"prompt_token_ids": question, "prompt_cache": blend})
        same += got == want
        rounds.append(took)
        Console().print({name: f"{1000 * s:.0f} ms" for name, s in took.items()}, highlight=False)
    found: dict[str, Any] = {"about": about(), "args": {k: str(v) for k, v in vars(args).items() if k != "out"}}
    found["first tokens of prefix prompts equal to full"] = f"{same} of {len(rounds)}"
    for name in rounds[0]:
        times = sorted(1000 * one[name] for one in rounds)
        found[name] = {"ms": [round(statistics.median(times), 1), round(times[0], 1), round(times[-1], 1)]}
        whole = "prefix full" if name.startswith("prefix") else "full"
        ratios = sorted(one[whole] / one[name] for one in rounds)
        found[name]["sooner"] = [round(statistics.median(ratios), 2), round(ratios[0], 2), round(ratios[-1], 2)]
        Console().print(name, found[name], highlight=False)
    save(args.out, found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
