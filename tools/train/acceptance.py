"""How good a drafter one model is for another under greedy decoding, without any machinery of speculation.

    PYTHONPATH=tools python -m train.acceptance build/nano build/pico --corpus ../shared/data/corpus

The target writes; the drafter reads what was written and says at each token whether it would have said the same. A
draft is made behind accepted text only, so the drafter's choices on the target's text are all that is needed: of K
drafted tokens those before the first wrong one are accepted, then the target adds one of its own.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from penstock import LLM, SamplingParams
from train import skills
from train.evaluate import Reader, prose_noise
from train.text import held_out_prose

LENGTHS = range(1, 9)
QUESTIONS = (
    "Tell me a story about a dog.", "Who are you?", "What is 12 + 30?", "I would like to order a pizza.",
    "What is the capital of France?", "Can you help me?", "Write three words.", "Good night!",
)  # fmt: skip


@dataclass(frozen=True)
class Acceptance:
    """`share`: of the target's tokens that the drafter's greedy choice predicts. `runs`: draft length -> mean number of
    accepted tokens per draft (None if no text was long enough)."""

    tokens: int
    share: float
    runs: dict[int, float | None]


def accepted_runs(hits: Sequence[bool], length: int) -> list[int]:
    """What each draft of `length` tokens gets accepted on a text where the drafter is right at `hits`.

    The last draft counts only if the text is long enough to judge all of it.
    """
    out = []
    at = 0
    while at + length <= len(hits):
        run = next((i for i in range(length) if not hits[at + i]), length)
        out.append(run)
        at += run + 1
    return out


def acceptance(texts: Sequence[Sequence[bool]]) -> Acceptance:
    """Over several texts, one after another."""
    tokens = sum(len(text) for text in texts)
    runs: dict[int, float | None] = {}
    for length in LENGTHS:
        found = [run for text in texts for run in accepted_runs(text, length)]
        runs[length] = sum(found) / len(found) if found else None
    return Acceptance(tokens, sum(map(sum, texts)) / max(1, tokens), runs)


def hits_of(target: LLM, drafter: LLM, prompts: Sequence[Sequence[int]], length: int) -> list[list[bool]]:
    """For each prompt and each of the target's greedy tokens behind it: whether the drafter says the same."""
    if target.engine.spec.vocab_size != drafter.engine.spec.vocab_size:
        raise ValueError("a drafter needs the vocabulary of its target")
    params = SamplingParams(temperature=0, max_tokens=length, detokenize=False)
    written = [
        [int(token) for token in output.outputs[0].token_ids]
        for output in target.generate([{"prompt_token_ids": list(p)} for p in prompts], params)
    ]
    read = drafter.generate(
        [{"prompt_token_ids": [*p, *text]} for p, text in zip(prompts, written, strict=True)],
        SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False),
    )
    out = []
    for prompt, text, output in zip(prompts, written, read, strict=True):
        entries = (output.prompt_logprobs or [])[len(prompt) :]
        # The likeliest token comes first, ties by the lower id, as greedy decoding takes it.
        out.append([next(iter(entry or {})) == token for entry, token in zip(entries, text, strict=True)])
    return out


def prompts_of(reader: Reader, prose: str, n: int, seed: int = 0) -> dict[str, list[list[int]]]:
    """`n` prompts of each kind: beginnings of prose that nobody was trained on, exercises, questions."""
    rng = random.Random(seed)
    noise = prose_noise(prose)
    made = [skills.exercise(rng, "test", rng.randint(100, 600), noise).prompt for _ in range(n)]
    out = {
        "prose": [reader.ids(noise(rng, 400)) for _ in range(n)],
        "skills": [reader.ids(prompt) for prompt in made],
    }
    if reader.llm.engine.chat_template is not None:
        out["chat"] = [
            reader.ids(f"<|im_start|>user\n{QUESTIONS[i % len(QUESTIONS)]}<|im_end|>\n<|im_start|>assistant\n")
            for i in range(min(n, len(QUESTIONS)))
        ]
    return out


def markdown(found: dict[str, Acceptance]) -> str:
    lines = [
        "| prompts | tokens | predicted | " + " | ".join(f"K={k}" for k in LENGTHS) + " |",
        "|---" * (3 + len(LENGTHS)) + "|",
    ]
    for kind, a in found.items():
        runs = " | ".join("-" if run is None else f"{run:.2f}" for run in a.runs.values())
        lines.append(f"| {kind} | {a.tokens} | {a.share:.1%} | {runs} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("drafter", type=Path)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--n", type=int, default=32, help="prompts of each kind")
    parser.add_argument("--length", type=int, default=64, help="tokens written behind each")
    parser.add_argument("--out", type=Path, help="folder for acceptance.json and acceptance.md")
    args = parser.parse_args()
    console = Console(stderr=True)
    target, drafter = (LLM(path) for path in (args.target, args.drafter))
    found: dict[str, Acceptance] = {}
    for kind, prompts in prompts_of(Reader(target), held_out_prose(args.corpus), args.n).items():
        with console.status(kind):
            found[kind] = acceptance(hits_of(target, drafter, prompts, args.length))
    text = markdown(found)
    print(text, end="")
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "acceptance.md").write_text(text, "utf-8")
        (args.out / "acceptance.json").write_text(json.dumps({k: vars(a) for k, a in found.items()}, indent=1), "utf-8")


if __name__ == "__main__":
    main()
