"""Prompt compression on nano (catalogue rows G38, G39): what is still answered, against random drop and all tokens.

    PYTHONPATH=. python benchmarks/quality/compression.py [--n 120] [--compressors pico] [--parts quality time]

quality: exercises of the test half. passage: a story of five facts and a question (EM, F1). needle: a number told once
in about 400 tokens of prose. lookup: one of 30 keys with values.
The context is compressed, the question is not; the share of the context's tokens that stays is exact, and checked. All
methods answer the same questions, greedily; intervals (95 %, bootstrap over questions) are of figures and of paired
differences: from all tokens, from random drop at the same rate, and of LLMLingua from Selective Context.
time: seconds of one request at a time at about 1900 tokens: in the compressor, and from arrival to the first token.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from penstock import LLM
from penstock.core.compression import PromptCompression
from penstock.core.sampling import SamplingParams
from penstock.eval.answers import exact, f1, said
from penstock.eval.exercises import Noise, hidden, lookup, passage
from penstock.eval.intervals import bootstrap
from penstock.eval.tasks.prose import noise_of, prose
from penstock.launch.compressor import Compressor

RATES = (0.75, 0.5, 0.25)
METHODS: dict[str, dict[str, Any]] = {
    "random": {"method": "random"},
    "random sentences": {"method": "random", "unit": "sentence"},
    "selective-context": {"method": "selective-context"},
    "selective-context sentences": {"method": "selective-context", "unit": "sentence"},
    "llmlingua": {"method": "llmlingua"},
    "llmlingua coarse-1.2": {"method": "llmlingua", "coarse": 1.2},
}
OUT = Path("benchmarks/results/compression.json")
console = Console(stderr=True)


@dataclass(frozen=True)
class Question:
    context: str
    asked: str
    answer: str


def questions(task: str, n: int, noise: Noise) -> list[Question]:
    rng = random.Random(f"compression {task}")
    return [_question(task, rng, noise, i / max(1, n - 1)) for i in range(n)]


def _question(task: str, rng: random.Random, noise: Noise, depth: float) -> Question:
    if task == "needle":
        made = hidden(rng, "test", 1500, noise, depth)
    elif task == "lookup":
        made = lookup(rng, "test", 30 * 14, noise)
    else:
        made = passage(rng, "test", 0, noise)
    context, asked = made.prompt.rsplit("\n\n", 1)
    return Question(context, "\n\n" + asked, made.answer)


@dataclass(frozen=True)
class Cell:
    """Scores of every question, and what share of the contexts' tokens stayed."""

    em: list[float]
    f1: list[float]
    kept: float


def ask(llm: LLM, compressor: Compressor, asked: Sequence[Question], options: PromptCompression | None) -> Cell:
    tokenizer = llm.get_tokenizer()
    prompts, before, after = [], 0, 0
    for q in asked:
        ids = [tokenizer.bos_id, *tokenizer.encode(q.context + q.asked)]
        if options is not None:
            found = compressor.compress(ids, replace_context(options, q.context))
            fixed = len(ids) - context_tokens(tokenizer, ids, q.context)
            assert len(found.ids) - fixed == exact_share(options.rate or 1.0, len(ids) - fixed), "the ratio is exact"
            before, after, ids = before + len(ids) - fixed, after + len(found.ids) - fixed, found.ids
        prompts.append({"prompt_token_ids": ids})
    params = SamplingParams(temperature=0, max_tokens=16, stop=["\n"])
    texts = [said(o.outputs[0].text) for o in llm.generate(prompts, params)]
    pairs = [(text, [said(q.answer)]) for text, q in zip(texts, asked, strict=True)]
    return Cell([exact(*p) for p in pairs], [f1(*p) for p in pairs], after / before if before else 1.0)


def replace_context(options: PromptCompression, context: str) -> PromptCompression:
    return PromptCompression(**{**{f: getattr(options, f) for f in options.__struct_fields__}, "context": context})


def context_tokens(tokenizer: Any, ids: Sequence[int], context: str) -> int:
    """Tokens wholly within the context, counted in another way than the code that is measured."""
    at, end, count = 0, len(context.encode()), 0
    for i in ids[1:]:
        at += len(tokenizer.table[i])
        count += at <= end
    return count


def exact_share(rate: float, num: int) -> int:
    """The least whole number that is at least the share."""
    return next(k for k in range(num + 1) if k >= rate * num - 1e-6)


def quality(llm: LLM, names: Sequence[str], n: int) -> dict[str, Any]:
    noise = noise_of(prose(None))
    out: dict[str, Any] = {}
    for task in ("passage", "needle", "lookup"):
        asked = questions(task, n, noise)
        cells = {"all tokens": ask(llm, compressor_of(llm, names[0]), asked, None)}
        for name, how, rate, compressor in _settings(llm, names):
            cells[name] = ask(llm, compressor, asked, PromptCompression(rate=rate, **how))
        out[task] = {name: _row(name, cell, cells) for name, cell in cells.items()}
        for name, row in out[task].items():
            console.print(f"{task} {name}: EM {row['em']['value']:.3f} F1 {row['f1']['value']:.3f}")
    return out


def _settings(llm: LLM, names: Sequence[str]) -> Iterator[tuple[str, dict[str, Any], float, Compressor]]:
    for model in names:
        compressor = compressor_of(llm, model)
        for rate in RATES:
            for name, how in METHODS.items():
                if model == names[0] or not name.startswith("random"):
                    yield label(name, rate, "" if model == names[0] else model), how, rate, compressor


def label(name: str, rate: float, model: str = "") -> str:
    return f"{name} {rate}" + (f" by {model}" if model else "")


def compressor_of(llm: LLM, name: str) -> Compressor:
    config = replace(llm.config, model=replace(llm.config.model, prompt_compressor=name))
    return Compressor(config, llm.get_tokenizer())


def _row(name: str, cell: Cell, cells: Mapping[str, Cell]) -> dict[str, Any]:
    row: dict[str, Any] = {"kept": round(cell.kept, 4)}
    rivals = {"all tokens"}
    if name != "all tokens":
        words = name.split(" by ")[0].split()
        rivals |= {label(rival, float(words[-1])) for rival in ("random", "random sentences")}
        if words[0] == "llmlingua":
            own = " ".join(words[:-1])
            rivals |= {name.replace(own, rival, 1) for rival in ("selective-context", "selective-context sentences")}
    for metric in ("em", "f1"):
        mine = getattr(cell, metric)
        row[metric] = {
            "value": round(statistics.mean(mine), 4), "interval": _rounded(bootstrap(lambda a: a, mine)),
            "minus": {
                rival: {
                    "value": round(statistics.mean(mine) - statistics.mean(theirs), 4),
                    "interval": _rounded(bootstrap(lambda a, b: a - b, mine, theirs)),
                }
                for rival in sorted(rivals - {name}) for theirs in [getattr(cells[rival], metric)]
            },
        }  # fmt: skip
    return row


def _rounded(found: tuple[float, float] | None) -> list[float] | None:
    return None if found is None else [round(v, 4) for v in found]


def times(llm: LLM, n: int = 8) -> dict[str, Any]:
    """Medians, in milliseconds, of one request at a time, methods in turn."""
    noise, tokenizer = noise_of(prose(None)), llm.get_tokenizer()
    asked = [hidden(random.Random(i), "test", 6600, noise, 0.5).prompt.rsplit("\n\n", 1) for i in range(n)]
    asked = [(context, "\n\n" + question) for context, question in asked]
    load = os.getloadavg()[0]
    compressor = compressor_of(llm, "pico")
    taken: dict[str, list[tuple[float, ...]]] = {}
    lengths = []
    params = SamplingParams(temperature=0, max_tokens=1)
    for context, question in asked:
        ids = [tokenizer.bos_id, *tokenizer.encode(context + question)]
        lengths.append(len(ids))
        for name, how in {"all tokens": None, **METHODS}.items():
            for rate in RATES if how is not None else (1.0,):
                options = None if how is None else PromptCompression(rate=rate, context=context, **how)
                seconds = 0.0 if options is None else compressor.compress(ids, options).seconds
                made = ids if options is None else compressor.compress(ids, options).ids
                out = llm.generate({"prompt_token_ids": made}, params)[0]
                whole = llm.generate({"prompt_token_ids": ids}, params, prompt_compression=options)[0]
                taken.setdefault(name if how is None else label(name, rate), []).append((
                    seconds, out.metrics.ttft_s or 0.0, whole.metrics.ttft_s or 0.0,
                ))  # fmt: skip
    parts = ("compressor_ms", "ttft_of_what_is_left_ms", "ttft_ms")
    rows = {
        name: {p: round(statistics.median(t[i] for t in found) * 1e3, 2) for i, p in enumerate(parts)}
        for name, found in taken.items()
    }
    return {"load": load, "prompts": n, "mean_tokens": statistics.mean(lengths), "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--n", type=int, default=120)
    parser.add_argument("--compressors", nargs="+", default=["pico"])
    parser.add_argument("--parts", nargs="+", default=["quality", "time"], choices=("quality", "time"))
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    llm = LLM("nano", threads=1, enable_prefix_caching=False)
    found = json.loads(args.out.read_text("utf-8")) if args.out.is_file() else {}
    found |= {"model": "nano", "compressors": args.compressors, "questions": args.n}
    if "quality" in args.parts:
        found["quality"] = quality(llm, args.compressors, args.n)
    if "time" in args.parts:
        found["time"] = times(llm)
    args.out.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
