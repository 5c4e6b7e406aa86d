"""What each drafter is worth: speed-up over plain decoding, by kind of text and number of sequences; row K12.

    python -m benchmarks.speculation.speedup [--drafters ngram suffix ...] [--texts stories code ...]
        [--batches 1,8,32] [--pairs 8] [--max-tokens 128] [--model nano] [--quantization none] [--threads N]
        [--temperatures 0,0.8] [--tokenizer MODEL] [--time-budget SECONDS] [--out results.json] [--markdown results.md]

A drafter is a method, or a whole `speculative_config` as JSON. For each one two engines stand in one process, one that
drafts (B) and one that does not (A), and take turns: A B, B A, A B, ... Every pair has prompts of its own, so no
drafter meets an answer that it has seen (where a set has too few prompts they come again: `repeats`). The speed-up is
the median over pairs of A's seconds over B's, from prompts to last token; its 95 % interval is that of a bootstrap
over pairs. "decode" is the same from the first token on, "settled" compares tokens per second once every sequence has
SETTLED of them: what drafting costs where it has turned itself off by then. All tokens of A and B are compared in the
same run: one that differs is an error (exit status 1). Once --time-budget is over no further cell begins: those left
are named. Acceptance is counted over B's measured runs; definitions:
docs/concepts/speculation.md. MODEL may be a folder that `tools/widen.py` has made: nano's text in a larger shape.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from benchmarks.common import about, save, show
from benchmarks.speculation.texts import TEXTS, Missing, TextSet
from rich.console import Console

from penstock import LLM, SamplingParams
from penstock.base.errors import PenstockError
from penstock.bench.offline import acceptance_of
from penstock.core.acceptance import Acceptance

BLOCK = 32
RESAMPLES = 4000
SETTLED = 16
"""Tokens within which drafting that does not pay is to turn itself off."""
COLUMNS = (
    "drafter", "text", "batch", "temperature", "speed-up", "95 %", "decode", "settled", "tokens/step", "accepted",
    "at 1, 2, 3, 4", "drafting", "tokens equal",
)  # fmt: skip


class Run(NamedTuple):
    """One batch. `decode_s`: from the first token of any to the last of all; `settled`: tokens per second from the step
    on after which every sequence that is to have SETTLED tokens has them."""

    seconds: float
    decode_s: float
    settled: float | None
    tokens: list[list[int]]


def config_of(drafter: str) -> dict[str, Any]:
    return json.loads(drafter) if drafter.startswith("{") else {"method": drafter}


def engine(args: argparse.Namespace, batches: Sequence[int], drafter: str | None) -> LLM:
    blocks = -(-args.max_model_len // BLOCK) + 2
    settings: dict[str, Any] = {
        "max_model_len": args.max_model_len, "max_num_seqs": max(batches), "block_size": BLOCK,
        "num_gpu_blocks_override": blocks * max(batches), "quantization": args.quantization, "threads": args.threads,
        "enable_prefix_caching": False,  # the plain engine stays from drafter to drafter, and would know the prompts
    }  # fmt: skip
    # A model whose checkpoint has a head would draft unasked.
    settings["speculative_config"] = config_of(drafter or "none")
    return LLM(args.model, tokenizer=args.tokenizer, **settings)


def generate(llm: LLM, texts: TextSet, prompts: Sequence[Any], args: argparse.Namespace, temperature: float) -> Run:
    params = [
        SamplingParams(temperature=temperature, max_tokens=args.max_tokens, seed=i, ignore_eos=args.ignore_eos)
        for i in range(len(prompts))
    ]
    steps, core = [], llm.engine.core
    step = core.step

    def timed() -> Any:
        out = step()
        steps.append((time.perf_counter(), [(one.request_id, len(one.token_ids)) for one in out]))
        return out

    core.step = timed  # type: ignore[method-assign]
    began_s = time.perf_counter()
    if texts.chat:
        outputs = llm.chat([[{"role": "user", "content": text}] for text in prompts], params)
    else:
        listed = [{"prompt_token_ids": p} if isinstance(p, list) else p for p in prompts]
        outputs = llm.generate(listed, params)
    seconds = time.perf_counter() - began_s
    del core.step
    for output in outputs:
        assert output.error is None, output.error
    first = min(o.metrics.first_token_s or 0.0 for o in outputs)
    last = max(o.metrics.finished_s or 0.0 for o in outputs)
    return Run(seconds, last - first, settled_rate(steps), [o.outputs[0].token_ids for o in outputs])


def settled_rate(steps: Sequence[tuple[float, list[tuple[str, int]]]]) -> float | None:
    """See `Run.settled`; None if less than two steps are left. `steps`: when each ended, and the tokens it gave."""
    totals: dict[str, int] = {}
    for _, given in steps:
        for request, count in given:
            totals[request] = totals.get(request, 0) + count
    waiting, had = {request for request, count in totals.items() if count > SETTLED}, dict.fromkeys(totals, 0)
    for at, (begin_s, given) in enumerate(steps):
        for request, count in given:
            had[request] += count
            if had[request] >= SETTLED:
                waiting.discard(request)
        if not waiting and steps[-1][0] > begin_s and at + 2 < len(steps):
            return (sum(totals.values()) - sum(had.values())) / (steps[-1][0] - begin_s)
    return None


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """95 % of the medians of resampled pairs."""
    rng = np.random.default_rng(0)
    drawn = rng.choice(np.asarray(ratios), (RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(drawn, axis=1), (2.5, 97.5))
    return float(low), float(high)


def measure(
    plain: LLM, drafting: LLM, texts: TextSet, batch: int, args: argparse.Namespace, temperature: float
) -> dict[str, Any]:
    """One cell of the table."""
    prompts = [texts.prompts[i % len(texts.prompts)] for i in range((args.pairs + 1) * batch)]
    ratios, decode, settled, seconds = [], [], [], []
    different, num_tokens, counted, num_steps = 0, 0, Acceptance(), 0
    for pair in range(-1, args.pairs):  # the first one warms up
        mine = prompts[(pair + 1) * batch : (pair + 2) * batch]
        order = (plain, drafting) if pair % 2 == 0 else (drafting, plain)
        runs = {id(llm): generate(llm, texts, mine, args, temperature) for llm in order}
        a, b = runs[id(plain)], runs[id(drafting)]
        different += sum(x != y for x, y in zip(a.tokens, b.tokens, strict=True))
        if pair < 0:
            counted, num_steps = acceptance_of(drafting), drafting.engine.core.stats.num_steps
            continue
        num_tokens += sum(map(len, b.tokens))
        ratios.append(a.seconds / b.seconds)
        if min(a.decode_s, b.decode_s) > 0:
            decode.append(a.decode_s / b.decode_s)
        if a.settled and b.settled:
            settled.append(b.settled / a.settled)
        seconds.append((a.seconds, b.seconds))
    acceptance = acceptance_of(drafting) - counted
    return {
        "batch": batch,
        "temperature": temperature,
        "pairs": args.pairs,
        "repeats": len(prompts) > len(texts.prompts),
        "speedup": statistics.median(ratios),
        "interval": interval(ratios),
        "decode_speedup": statistics.median(decode) if decode else None,
        "decode_interval": interval(decode) if decode else None,
        "settled_speedup": statistics.median(settled) if settled else None,
        "settled_interval": interval(settled) if settled else None,
        "seconds": seconds,
        "num_tokens": num_tokens,
        "num_steps": drafting.engine.core.stats.num_steps - num_steps,
        "different": different,
        **acceptance.figures(),
    }


def cells(found: dict[str, Any]) -> list[str]:
    def number(value: float | None, shape: str) -> str:
        return "-" if value is None else format(value, shape)

    low, high = found["interval"]
    rate = found["spec_decode_acceptance_rate"]
    positions = found["spec_decode_per_position_acceptance_rates"][:4]
    return [
        found["drafter"], found["text"], str(found["batch"]), f"{found['temperature']:g}",
        f"{found['speedup']:.2f}", f"{low:.2f} to {high:.2f}",
        number(found["decode_speedup"], ".2f"), number(found["settled_speedup"], ".2f"),
        number(found["spec_decode_acceptance_length"], ".2f"),
        "-" if rate is None else f"{rate:.0f} %", " ".join(f"{share:.2f}" for share in positions) or "-",
        number(found["spec_decode_draft_share"], ".1%"), "no" if found["different"] else "yes",
    ]  # fmt: skip


def markdown(rows: Sequence[dict[str, Any]], skipped: Sequence[str]) -> str:
    lines = ["| " + " | ".join(COLUMNS) + " |", "| " + " | ".join("---" for _ in COLUMNS) + " |"]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in rows]
    return "\n".join([*lines, *(["", *(f"Not measured: {text}." for text in skipped)] if skipped else [])]) + "\n"


def text_sets(args: argparse.Namespace, tokenizer: Any, skipped: list[str]) -> dict[str, TextSet]:
    room = args.max_model_len - args.max_tokens - 64  # the chat template takes some
    found = {}
    for name in args.texts:
        try:
            found[name] = TEXTS[name](tokenizer, room, random.Random(0))
        except Missing as error:
            skipped.append(f"{name}: {error}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafters", nargs="+", default=["ngram"], metavar="METHOD|JSON")
    parser.add_argument("--texts", nargs="+", default=list(TEXTS), choices=list(TEXTS))
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--model", default="nano")
    parser.add_argument("--tokenizer", help="where the tokenizer is, if not with the model")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--temperatures", default="0")
    parser.add_argument("--time-budget", type=float, metavar="SECONDS", help="begin no cell behind it")
    parser.add_argument("--ignore-eos", action="store_true", help="go on after the end: equal lengths, odder text")
    parser.add_argument("--out", help="write everything as JSON")
    parser.add_argument("--markdown", help="write the table")
    args = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 160)
    batches, skipped = [int(n) for n in args.batches.split(",")], []
    plain = engine(args, batches, None)
    texts = text_sets(args, plain.get_tokenizer(), skipped)
    rows: list[dict[str, Any]] = []
    temperatures, began_s = [float(t) for t in args.temperatures.split(",")], time.perf_counter()
    for drafter in args.drafters:
        try:
            drafting = engine(args, batches, drafter)
        except PenstockError as error:
            skipped.append(f"{drafter}: {error}")
            continue
        for name, chosen in texts.items():
            for batch, temperature in product(batches, temperatures):
                if args.time_budget is not None and time.perf_counter() - began_s > args.time_budget:
                    skipped.append(f"{drafter}, {name}, batch {batch}, temperature {temperature:g}: no time left")
                    continue
                found = measure(plain, drafting, chosen, batch, args, temperature)
                rows.append({"drafter": drafter, "text": name, "source": chosen.source, **found})
                console.print("  ".join(cells(rows[-1])), highlight=False)
        del drafting
    show(console, f"Speculation: {args.model}, {args.max_tokens} tokens", COLUMNS, [cells(row) for row in rows], left=2)
    for text in skipped:
        console.print(f"not measured: {text}")
    save(args.out, {**about(command=sys.argv[1:], settings=vars(args)), "skipped": skipped, "rows": rows})
    if args.markdown:
        Path(args.markdown).write_text(markdown(rows, skipped), "utf-8")
    return 1 if any(row["different"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
