"""int8 keys and values against bfloat16 ones (catalogue row F36): perplexity, divergence and greedy tokens.

    python benchmarks/quality/kv.py MODEL [--text FILE] [--max-tokens 4096] [--prompts 32] [--tokens 64]

Weights and products are the same in both; the windows are those of `penstock quantize`. Greedy: beginnings of 24 tokens
from all over the text, continued with either cache; a continuation agrees up to the first token that differs.
"""

from __future__ import annotations

import argparse
from itertools import takewhile
from pathlib import Path

from penstock import LLM, SamplingParams
from penstock.config import from_kwargs
from penstock.core.matrix_format import NONE
from penstock.eval.compare import compare
from penstock.eval.perplexity import Passage, passage
from penstock.eval.sample import SAMPLE
from penstock.eval.scorer import load, make_scorer

PROMPT = 24
KINDS = ("float32", "bfloat16", "int8")


def generated(model: str, kind: str, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    llm = LLM(model=model, kv_cache_dtype=kind)
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    return [list(out.outputs[0].token_ids) for out in llm.generate([{"prompt_token_ids": p} for p in prompts], params)]


def prompts_of(read: Passage, count: int) -> list[list[int]]:
    """As many as there are room for, at even distances."""
    every = [list(w.token_ids[i : i + PROMPT]) for w in read.windows for i in range(0, len(w.token_ids) - PROMPT, 64)]
    return every[:: max(1, len(every) // count)][:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--max-tokens", type=int, default=4096)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    text = SAMPLE if options.text is None else options.text.read_text(encoding="utf-8")
    models = {kind: load(from_kwargs(model=options.model, kv_cache_dtype=kind)) for kind in KINDS}
    scorers = {kind: make_scorer(model, NONE) for kind, model in models.items()}
    tokenizer = models["int8"].tokenizer
    assert tokenizer is not None
    read = passage(text, tokenizer, scorers["int8"], max_tokens=options.max_tokens)
    print(f"{options.model}, {models['int8'].dtype}: {read.num_tokens} tokens in {len(read.windows)} windows")
    prompts = prompts_of(read, options.prompts)
    greedy = {kind: generated(options.model, kind, prompts, options.tokens) for kind in KINDS}
    for kind, base in (("bfloat16", "float32"), ("int8", "float32"), ("int8", "bfloat16")):
        found = compare(scorers[base], scorers[kind], read)
        same = [
            sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=True)))
            for a, b in zip(greedy[kind], greedy[base], strict=True)
        ]
        more = found.score.difference(found.reference)
        between = "" if more is None else f" ({more[0]:+.4f} to {more[1]:+.4f})"
        print(
            f"{kind} against {base}: perplexity {found.score.perplexity:.4f} - {found.reference.perplexity:.4f} = "
            f"{found.score.perplexity - found.reference.perplexity:+.4f}{between}; KL mean {found.mean_kl:.6f}, p99 "
            f"{found.p99_kl:.5f}, largest {found.max_kl:.4f}; same top token {found.agreement:.2%}; greedy: "
            f"{sum(n == options.tokens for n in same)} of {len(same)} texts of {options.tokens} tokens are equal, "
            f"{sum(same) / len(same):.1f} tokens on average before they part"
        )


if __name__ == "__main__":
    main()
