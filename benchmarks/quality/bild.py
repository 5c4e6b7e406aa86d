"""Big Little Decoder (catalogue row D28): quality against the share of the large model's calls, by threshold.

    python -m benchmarks.quality.bild --model nano --draft pico --out FILE.json

The small model writes until it is unsure (`fallback`) or has written K tokens; the large one looks at them in one pass
and takes back the first that it finds too unlikely (`threshold`, -ln p). Greedy. Quality is what the large model thinks
of the text: mean bits of each generated token (its own greedy text is the best it can get greedily, the small model's
alone the worst here), and the share of tokens up to the first that differs from its own text. Lossy by construction.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from benchmarks.common import about
from benchmarks.speculation.breakeven import PROMPTS
from rich.console import Console
from rich.table import Table

from penstock import LLM, SamplingParams

THRESHOLDS = (0.01, 0.3, 1.0, 2.0, 3.0, 5.0, 8.0, 12.0)


def bits(judge: LLM, prompts: list[list[int]], answers: list[list[int]]) -> float:
    """Mean -log2 p of the answers' tokens by the judge."""
    whole = [{"prompt_token_ids": p + a} for p, a in zip(prompts, answers, strict=True)]
    outputs = judge.generate(whole, SamplingParams(max_tokens=1, prompt_logprobs=0))
    total, count = 0.0, 0
    for output, prompt, answer in zip(outputs, prompts, answers, strict=True):
        assert output.prompt_logprobs is not None
        for i, token in enumerate(answer, len(prompt)):
            entry = output.prompt_logprobs[i]
            assert entry is not None
            total -= entry[token].logprob / math.log(2)
            count += 1
    return total / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="nano")
    parser.add_argument("--draft", default="pico")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--drafts", type=int, default=8)
    parser.add_argument("--fallback", type=float, default=0.3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    judge, small = LLM(args.model), LLM(args.draft)
    assert judge.engine.tokenizer is not None
    prompts = [list(judge.engine.tokenizer.encode(text)) for text in PROMPTS]
    asked: list[Any] = [{"prompt_token_ids": p} for p in prompts]
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True, detokenize=False)

    def answers(llm: LLM) -> tuple[list[list[int]], int]:
        """The texts, and how many passes of the large model made them, counted per sequence."""
        stats = llm.engine.core.stats
        before = stats.num_sampled_tokens - stats.num_accepted_tokens
        outputs = llm.generate(asked, params)
        passes = stats.num_sampled_tokens - stats.num_accepted_tokens - before
        return [list(o.outputs[0].token_ids) for o in outputs], passes

    own, _ = answers(judge)
    rows = []

    def add(name: str, got: list[list[int]], calls: float) -> None:
        same = 0
        for a, b in zip(got, own, strict=True):
            same += next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(b))
        rows.append({"setting": name, "calls_per_token": calls, "bits_per_token": bits(judge, prompts, got),
                     "same_as_own": same / sum(map(len, own))})  # fmt: skip

    add("large alone", own, 1.0)
    for threshold in THRESHOLDS:
        config = {
            "method": "draft-model", "model": args.draft, "verifier": "bild", "threshold": threshold,
            "fallback": args.fallback, "num_speculative_tokens": args.drafts, "controller": "fixed",
        }  # fmt: skip
        llm = LLM(args.model, speculative_config=config)
        got, passes = answers(llm)
        add(f"threshold {threshold:g}", got, passes / sum(map(len, got)))
    add("small alone", answers(small)[0], 0.0)
    table = Table("setting", "large model's calls per token", "bits per token", "same as the large model's own text")
    for r in rows:
        table.add_row(
            str(r["setting"]), f"{r['calls_per_token']:.2f}", f"{r['bits_per_token']:.3f}", f"{r['same_as_own']:.0%}"
        )
    Console().print(table)
    if args.out:
        settings = {name: str(value) for name, value in vars(args).items() if name != "out"}
        args.out.write_text(json.dumps({"about": about(**settings), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
