"""Tokens per step that drafters reach on a model: eight beginnings of held-out prose, one sequence at a time.

    PYTHONPATH=tools python -m train.drafts nano --corpus ../shared/data/corpus \
      '{"method": "medusa", "heads": "nano-medusa"}' '{"method": "eagle", "heads": "nano-eagle"}'

Every step of a request counts, the one that ends its prompt too, so plain decoding has 1.00 and speed depends on what a
step costs. The tokens are checked against plain decoding.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from penstock import LLM, SamplingParams
from train.text import books

TEMPERATURES = (0.0, 0.7)
NUM_TOKENS = 64


def beginnings(corpus: Path, number: int = 8, chars: int = 400) -> list[str]:
    """Stretches of the held-out books, each from the begin of a word, taken in turn."""
    held = books(corpus / "children", held=True)
    out = []
    for i in range(number):
        text = held[i % len(held)]
        start = text.find(" ", len(text) * (i + 1) // (number + 1)) + 1
        out.append(text[start : start + chars])
    return out


def measure(llm: LLM, prompts: Sequence[str], temperature: float) -> tuple[dict[str, Any], list[list[int]]]:
    """Tokens per step, drafts, and what was written; one request at a time."""
    core = llm.engine.core
    drafted = accepted = steps = 0
    texts = []
    for i, prompt in enumerate(prompts):
        before = core.stats.num_steps
        params = SamplingParams(temperature=temperature, seed=i, max_tokens=NUM_TOKENS, ignore_eos=True)
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        steps += core.stats.num_steps - before
        drafted += output.metrics.num_draft_tokens
        accepted += output.metrics.num_accepted_tokens
        texts.append(list(output.outputs[0].token_ids))
    per_step = sum(map(len, texts)) / steps
    return {"temperature": temperature, "per_step": per_step, "drafted": drafted, "accepted": accepted}, texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("drafters", nargs="+", metavar="JSON", help="speculative configurations")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--drafts", default="8,16", help="num_speculative_tokens to try")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    prompts = beginnings(args.corpus)
    plain = LLM(args.model, threads=1, enable_prefix_caching=False)
    want = {t: measure(plain, prompts, t)[1] for t in TEMPERATURES}
    table = Table(
        "drafter", "drafts", "temperature", "tokens per step", "accepted", title=f"{args.model}, 8 x 64 tokens"
    )
    rows = []
    for drafter in args.drafters:
        for drafts in map(int, args.drafts.split(",")):
            config = {"controller": "fixed", "num_speculative_tokens": drafts} | json.loads(drafter)
            llm = LLM(args.model, threads=1, enable_prefix_caching=False, speculative_config=config)
            for temperature in TEMPERATURES:
                found, texts = measure(llm, prompts, temperature)
                if texts != want[temperature]:
                    raise SystemExit(f"{drafter} writes other tokens than plain decoding")
                rows.append({"drafter": drafter, "drafts": drafts, **found})
                table.add_row(drafter, str(drafts), str(temperature), f"{found['per_step']:.2f}",
                              f"{found['accepted']} of {found['drafted']}")  # fmt: skip
    Console(width=140).print(table)
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
