"""What sampling defaults do to the answers of a model: loops, variety, length, foreign script, and how likely they are.

    python tools/answers.py ~/.cache/penstock/smollm2-135m-instruct.gguf --seeds 3

Twenty questions, each asked with every setting and seed. `ended`: the model ended by itself within --max-tokens.
`loops`: answers with a pattern of up to 32 tokens, four times in a row. `distinct`: different runs of 2 and of 4
tokens, of all of them. `foreign`: answers with letters of another script. `logprob`: mean of the chosen
tokens' under the model itself, before any setting. `--show N` prints the first answers too.
"""

from __future__ import annotations

import argparse
import unicodedata
from array import array
from collections.abc import Sequence
from statistics import fmean

import msgspec
from rich.console import Console

from penstock import LLM, SamplingParams
from penstock.core.sampling import RepetitionDetectionParams
from penstock.report.tables import table

QUESTIONS = (
    "What is the capital of France?", "Explain what a hash table is.", "Write a short poem about rain.",
    "How do I boil an egg?", "Write a Python function that reverses a string.", "Who wrote Hamlet?",
    "Give me three tips for learning a language.", "What is the difference between TCP and UDP?",
    "Tell me a story about a lost dog.", "Summarise what photosynthesis is in two sentences.",
    "What can I cook with rice, eggs and spinach?", "Write an email to my landlord about a broken heater.",
    "Why is the sky blue?", "List five European countries and their capitals.", "What is 17 times 6?",
    "Translate 'good morning' into Spanish and German.", "Explain recursion to a child.",
    "What should I pack for a weekend in the mountains?", "Write a SQL query that counts orders per customer.",
    "What are the benefits of walking every day?",
)  # fmt: skip
SETTINGS = {
    "greedy": {"temperature": 0.0},
    "neutral (1.0)": {"temperature": 1.0},
    "0.7": {"temperature": 0.7},
    "0.7, top_p 0.95, min_p 0.05": {"temperature": 0.7, "top_p": 0.95, "min_p": 0.05},
    "0.8, top_p 0.95, min_p 0.05": {"temperature": 0.8, "top_p": 0.95, "min_p": 0.05},
}
LOOP = RepetitionDetectionParams(max_pattern_size=32, min_count=4)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--show", type=int, default=0, metavar="N")
    args = parser.parse_args(arguments)
    llm, console = LLM(args.model), Console()
    rows = []
    for name, given in SETTINGS.items():
        seeds = range(1 if given["temperature"] == 0 else args.seeds)
        params = SamplingParams(max_tokens=args.max_tokens, logprobs=0, **given)
        talks = [[{"role": "user", "content": q}] for _ in seeds for q in QUESTIONS]
        each = [msgspec.structs.replace(params, seed=s) for s in seeds for _ in QUESTIONS]
        outs = [out.outputs[0] for out in llm.chat(talks, each)]
        rows.append([
            name, f"{len(outs)}", f"{fmean(o.finish_reason == 'stop' for o in outs):.0%}",
            f"{fmean(loops(o.token_ids) for o in outs):.0%}",
            *(f"{fmean(distinct(o.token_ids, n) for o in outs):.2f}" for n in (2, 4)),
            f"{fmean(len(o.token_ids) for o in outs):.0f}", f"{fmean(foreign(o.text) for o in outs):.0%}",
            f"{fmean((o.cumulative_logprob or 0.0) / max(1, len(o.token_ids)) for o in outs):.2f}",
        ])  # fmt: skip
        for question, out in zip(QUESTIONS[: args.show], outs, strict=False):
            console.print(f"[bold]{name}[/]: {question}", out.text, sep="\n", end="\n\n")
    columns = ["setting", "answers", "ended", "loops", "distinct-2", "distinct-4", "tokens", "foreign", "logprob"]
    console.print(table(columns, rows, left=1))


def loops(token_ids: Sequence[int]) -> bool:
    """Whether `LOOP` would have ended it."""
    ids = array("I", token_ids)
    return any(LOOP.found(ids[:n], 0) for n in range(1, len(ids) + 1))


def distinct(token_ids: Sequence[int], n: int) -> float:
    grams = [tuple(token_ids[i : i + n]) for i in range(len(token_ids) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def foreign(text: str) -> bool:
    return any(c.isalpha() and not unicodedata.name(c, "LATIN").startswith("LATIN") for c in text)


if __name__ == "__main__":
    main()
