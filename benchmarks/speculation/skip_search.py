"""Which layers a draft may leave out (catalogue row D31): a local random search over sets of layers.

    python benchmarks/speculation/skip_search.py MODEL [--text FILE] [--evaluations 24] [--out FILE]

Draft & Verify (Zhang et al., arXiv 2309.08168, section 3.2) searches by Bayesian optimisation; this starts from the
default set and flips one or two layers of the best set so far, as long as evaluations are left.

A set is worth: tokens per step over the cost of a step, against one token per step of cost 1. Tokens per step are
measured: text through the engine with this draft, K drafts, no early stop by the controller. The cost is a
model: a draft token costs the share of the model's weights that it reads (bound by memory, one sequence), verifying
costs one step whatever K is. A value below 1 does not pay; the adaptive controller leaves such a draft alone.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from penstock import LLM, SamplingParams
from penstock.core.model_spec import ModelSpec, weight_shapes
from penstock.drafters.self_draft import skipped_layers
from penstock.eval.sample import SAMPLE

Skips = frozenset[int]


class Score(NamedTuple):
    """`value`: predicted speed over that of plain decoding. `calls`: draft tokens run per step, and sequence."""

    skips: Skips
    share: float
    accepted: float
    calls: float
    tokens_per_step: float
    value: float


def weights_read(spec: ModelSpec, skips: Skips) -> float:
    """Share of the model's weights (embedding left out unless it is the output matrix) that the draft reads."""
    whole = kept = 0
    for name, shape in weight_shapes(spec).items():
        if name in ("positions", "embed_in") or (name == "embed" and not spec.tie_embeddings):
            continue
        size = 1
        for n in shape:
            size *= n
        whole += size
        part = name.split(".")
        kept += size if part[0] != "layers" or int(part[1]) not in skips else 0
    return kept / whole


def evaluate(
    model: str, skips: Skips, prompts: list[list[int]], tokens: int, num_drafts: int, temperature: float
) -> Score:
    """Writes text with the engine. Counts only: nothing here depends on how busy the machine is."""
    config = {
        "method": "self-draft", "controller": "fixed", "num_speculative_tokens": num_drafts,
        "skip_layers": ",".join(map(str, sorted(skips))),
    }  # fmt: skip
    llm = LLM(model=model, max_model_len=512, speculative_config=json.dumps(config))
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=tokens, ignore_eos=True, detokenize=False)
        for i in range(len(prompts))
    ]
    llm.generate([{"prompt_token_ids": p} for p in prompts], params)
    stats = llm.engine.core.stats
    steps = stats.num_drafts
    share = weights_read(llm.engine.spec, skips)
    per_step, calls = 1 + stats.num_accepted_tokens / steps, stats.num_draft_tokens / steps
    accepted = stats.num_accepted_tokens / max(1, stats.num_draft_tokens)
    return Score(skips, share, accepted, calls, per_step, per_step / (1 + calls * share))


def search(spec: ModelSpec, measure: Callable[[Skips], Score], evaluations: int, seed: int) -> list[Score]:
    """All that was tried, the best first."""
    rng, count = random.Random(seed), len(spec.layers)
    seen: dict[Skips, Score] = {}
    start = skipped_layers(None, count)
    best = seen[start] = measure(start)
    misses = 0
    while len(seen) < min(evaluations, 2**count - 2) and misses < 200:
        flips = rng.sample(range(count), rng.choice((1, 1, 2)))
        skips = best.skips.symmetric_difference(flips)
        if not 0 < len(skips) < count or skips in seen:
            misses += 1
            continue
        misses = 0
        found = seen[skips] = measure(skips)
        best = max(best, found, key=lambda score: score.value)
    return sorted(seen.values(), key=lambda score: -score.value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--drafts", type=int, default=2, help="drafts in a step, at most")
    parser.add_argument("--evaluations", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    text = SAMPLE if args.text is None else args.text.read_text(encoding="utf-8")
    plain = LLM(model=args.model, max_model_len=512)
    tokenizer = plain.engine.tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode(text)
    every = max(24, len(ids) // args.prompts)
    prompts = [list(ids[i : i + 24]) for i in range(0, len(ids) - 24, every)][: args.prompts]
    found = search(
        plain.engine.spec,
        lambda skips: evaluate(args.model, skips, prompts, args.tokens, args.drafts, args.temperature),
        args.evaluations,
        args.seed,
    )
    table = Table("skipped", "weights read", "accepted", "drafts/step", "tokens/step", "predicted speed")
    for s in found[:12]:
        skipped = ",".join(map(str, sorted(s.skips)))
        table.add_row(
            skipped, f"{s.share:.2f}", f"{s.accepted:.1%}", f"{s.calls:.2f}", f"{s.tokens_per_step:.2f}",
            f"{s.value:.3f}",
        )  # fmt: skip
    Console().print(
        f"{len(found)} sets tried, {len(prompts)} prompts, {args.tokens} tokens each, temperature {args.temperature}"
    )
    Console().print(table)
    if args.out is not None:
        rows = [score._asdict() | {"skips": sorted(score.skips)} for score in found]
        result = {
            "model": args.model,
            "prompts": len(prompts),
            "tokens": args.tokens,
            "drafts": args.drafts,
            "temperature": args.temperature,
        }
        args.out.write_text(json.dumps(result | {"found": rows}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
