"""What a prompt beside them costs those who decode, and they it: steps of the real engine, in turns.

    python -m benchmarks.engine.interference MODEL [--batch 4] [--chunks 32,128,512] [--rounds 20] [--out FILE]

`--batch` sequences decode. Each round has, for every size of chunk, in an order that changes: a step of decodes alone,
a step in which a prompt of that size is computed beside them, and, on a second engine with nothing else to do, the same
prompt alone. Of each the median, and the ratios round by round: decode beside over decode alone is what a token of
those who decode waits longer for (what DistServe, arXiv 2401.09670, section 2.3, calls interference), prompt beside
over prompt alone what a first token does.
`together`: the step with both over the sum of both alone; 1: nothing overlaps. With --threads 1 it is that thread's own
time, whatever else the machine does.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

from benchmarks.common import Clock, about, clock_of, figures, ratios, save
from rich.console import Console

from penstock import LLM
from penstock.core.request import Request
from penstock.core.sampling import TokenRules
from penstock.engine.core import EngineCore
from penstock.report.tables import table

SEED = 0
_GREEDY = TokenRules(temperature=0.0)


class Bench:
    """Two engines: one that decodes, and one that does not."""

    def __init__(self, model: str, batch: int, context: int, most: int, rounds: int, threads: int | None) -> None:
        tokens = context + most + 8 * rounds * 40
        how: dict[str, Any] = {
            "max_num_seqs": batch + 1, "max_num_batched_tokens": batch + most, "enable_prefix_caching": False,
            "max_model_len": min(2048, tokens), "skip_tokenizer_init": True,
        }  # fmt: skip
        how |= {} if threads is None else {"threads": threads}
        self._llms = [LLM(model, **how) for _ in range(2)]
        self.busy, self.idle = (llm.engine.core for llm in self._llms)
        self._batch, self._context = batch, context
        self._clock = clock_of(threads or 0)
        self._rng, self._number = random.Random(SEED), 0
        self._longest = how["max_model_len"] - context - 1

    def request(self, num_prompt: int, max_tokens: int) -> Request:
        self._number += 1
        ids = [self._rng.randrange(10, 4000) for _ in range(num_prompt)]
        return Request(request_id=str(self._number), prompt_token_ids=ids, rules=_GREEDY, max_tokens=max_tokens)

    def fill(self) -> None:
        """So many decode as should."""
        while self.busy.stats.num_steps == 0 or len(self.busy.groups) < self._batch:
            self.busy.add(self.request(self._context, self._longest))
            step(self.busy, self._context)
        timed(self.busy, self._batch, self._clock)

    def round(self, chunk: int) -> tuple[float, float, float]:
        """Seconds of a step alone, of one with a prompt of `chunk` tokens, of the prompt alone."""
        self.fill()
        alone = timed(self.busy, self._batch, self._clock)
        self.busy.add(self.request(chunk, 1))
        beside = timed(self.busy, self._batch + chunk, self._clock)
        self.idle.add(self.request(chunk, 1))
        return alone, beside, timed(self.idle, chunk, self._clock)


def step(core: EngineCore, least: int) -> None:
    before = core.stats.num_scheduled_tokens
    core.step()
    assert core.stats.num_scheduled_tokens - before >= least, "the prompt was computed in one step"


def timed(core: EngineCore, expected: int, clock: Clock) -> float:
    """Seconds of a step that has to compute so many tokens."""
    before, began = core.stats.num_scheduled_tokens, clock()
    core.step()
    took_s = clock() - began
    assert core.stats.num_scheduled_tokens - before == expected, "a step of what was asked for, and of nothing else"
    return took_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--context", type=int, default=128, help="tokens of the prompts of those who decode")
    parser.add_argument("--chunks", default="32,128,512")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out")
    args = parser.parse_args()
    chunks = [int(part) for part in args.chunks.split(",")]
    bench = Bench(args.model, args.batch, args.context, max(chunks), args.rounds, args.threads)
    for chunk in chunks:
        bench.round(chunk)
    seen: dict[int, list[tuple[float, float, float]]] = {chunk: [] for chunk in chunks}
    for turn in range(args.rounds):
        at = turn % len(chunks)
        for chunk in chunks[at:] + chunks[:at]:
            seen[chunk].append(bench.round(chunk))
    found = {}
    for chunk, rounds in seen.items():
        alone, beside, prompt = (list(column) for column in zip(*rounds, strict=True))
        found[chunk] = {
            "decode_alone_s": figures(alone), "beside_s": figures(beside), "prompt_alone_s": figures(prompt),
            "together": ratios(beside, [a + p for a, p in zip(alone, prompt, strict=True)]),
            "decode_slower": ratios(beside, alone), "prompt_slower": ratios(beside, prompt),
        }  # fmt: skip
    heads = (
        "prompt tokens beside",
        "decode alone, ms",
        "with it, ms",
        "times",
        "prompt alone, ms",
        "times",
        "together",
    )
    rows = [
        (
            str(chunk), *(f"{1e3 * of[name]['median']:.3g}" for name in ("decode_alone_s", "beside_s")),
            f"{of['decode_slower']['median']:.2f}", f"{1e3 * of['prompt_alone_s']['median']:.3g}",
            f"{of['prompt_slower']['median']:.2f}",
            f"{of['together']['median']:.2f}",
        )
        for chunk, of in found.items()
    ]  # fmt: skip
    Console().print(table(heads, rows))
    asked = {"model": Path(args.model).name, "batch": args.batch, "context": args.context, "rounds": args.rounds,
             "threads": args.threads, "seed": SEED}  # fmt: skip
    save(args.out, about(asked=asked, found={str(chunk): of for chunk, of in found.items()}))


if __name__ == "__main__":
    main()
