"""KV selectors against a window and against chance at one budget, in pairs: rows F03, F04.

    PYTHONPATH=. python benchmarks/quality/selector_pairs.py nano --text BOOK.txt [--selectors h2o scissorhands]
        [--budget 20%] [--windows 60] [--limit 240] [--seeds 3] [--chat-tasks nq-open --data FOLDER] [--out FILE]

All configurations read the same windows of a text, with selections every 64 tokens within them, and answer the same
questions. *Text*: KL from the full cache (`eval.cap.text`) and nats, per counted token. *Tasks*: the share of right
answers. Each selector's difference from `window` and from `random` is taken window by window and question by question,
so what a text or a question is like falls out; intervals are 95 % (bootstrap). `random` is the mean of several seeds.
"better": the interval of the difference leaves 0 out.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.common import about, save, show
from rich.console import Console
from rich.progress import track

from penstock import LLM
from penstock.eval.cap.text import Reading, read, token_kl
from penstock.eval.intervals import bootstrap
from penstock.eval.run import Prepared, prepare, run
from penstock.eval.tasks import make_tasks

BASELINES = ("window", "random")
Found = dict[str, list[float]]
"""Measure -> a figure for each window or question."""


def figures(plain: Reading, own: Reading) -> Found:
    """KL and nats of each window, per counted token."""
    kl, nats = [], []
    for theirs, mine, scored in zip(plain.listed, own.listed, own.task.examples, strict=True):
        kl.append(math.fsum(token_kl(p, q) for p, q in zip(theirs, mine, strict=True)) / len(mine))
        nats.append(scored.scores["bits_per_byte"] / len(mine))
    return {"KL": kl, "nats": nats}


def measure(
    model: str, settings: Mapping[str, Any], text: Prepared, tasks: Sequence[Prepared], interval: int, bos: bool
) -> tuple[Reading, Found]:
    """A configuration's text and right answers. A selector forgets within a text only at `prompt_interval`."""
    reading = dict(settings)
    if "kv_selector" in settings:
        options = json.loads(settings.get("kv_selector_config", "{}"))
        reading["kv_selector_config"] = json.dumps(options | {"prompt_interval": interval})
    llm = LLM(model, enable_prefix_caching=False, **reading)
    own = read(llm, text, 64)
    close(llm)
    llm = LLM(model, enable_prefix_caching=False, **settings)
    answers = {
        task.name: [e.scores[next(iter(e.scores))] for e in task.examples] for task in run(llm, tasks, bos=bos).tasks
    }
    close(llm)
    return own, answers


def close(llm: LLM) -> None:
    llm.engine.core.executor.close()
    gc.collect()


def mean_of(found: Sequence[Found]) -> Found:
    """Of several seeds, window by window."""
    return {name: list(np.mean([f[name] for f in found], axis=0)) for name in found[0]}


def difference(own: Sequence[float], other: Sequence[float]) -> dict[str, Any]:
    d = np.asarray(own) - np.asarray(other)
    low, high = bootstrap(lambda x: x, list(d)) or (math.nan, math.nan)
    return {"mean": float(d.mean()), "low": low, "high": high}


def judged(name: str, d: Mapping[str, float]) -> str:
    """`better` or `worse` where the interval leaves 0 out."""
    good = d["high"] < 0 if name in ("KL", "nats") else d["low"] > 0
    bad = d["low"] > 0 if name in ("KL", "nats") else d["high"] < 0
    return "better" if good else "worse" if bad else "not sure"


def said(name: str, against: Mapping[str, dict[str, Any]] | None) -> str:
    if against is None:
        return ""
    d = against[name]
    return f"{d['mean']:+.4f} ({d['low']:+.4f} to {d['high']:+.4f}) {judged(name, d)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", required=True)
    parser.add_argument("--selectors", nargs="+", default=["h2o", "scissorhands"], metavar="NAME|NAME:JSON")
    parser.add_argument("--budget", default="20%")
    parser.add_argument("--windows", type=int, default=60)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--interval", type=int, default=64)
    parser.add_argument("--tasks", nargs="*", default=["needle", "lookup"])
    parser.add_argument("--chat-tasks", nargs="*", default=[], help="asked as a user's message")
    parser.add_argument("--data", type=Path, help="folder of the tasks' files")
    parser.add_argument("--bos", action=argparse.BooleanOptionalAction, default=True, help="before plain prompts")
    parser.add_argument("--engine", type=json.loads, default={"threads": 1}, help="settings of every engine, as JSON")
    parser.add_argument("--limit", type=int, default=240)
    parser.add_argument("--seeds", type=int, default=3, help="of `random`")
    parser.add_argument("--out")
    args = parser.parse_args()
    console = Console()
    half = args.window // 2
    spec = f"perplexity:{args.text}?window={args.window}&stride={half}&tokens={half * (args.windows + 1)}"
    llm = LLM(args.model, **args.engine)
    text, *tasks = prepare(llm, make_tasks([spec, *args.tasks], data=args.data), limit=args.limit, bos=args.bos)
    if args.chat_tasks:
        tasks += prepare(llm, make_tasks(args.chat_tasks, data=args.data), limit=args.limit, chat=True)
    close(llm)
    cases: dict[str, dict[str, Any]] = {"full": {}, "window": {"kv_selector": "window"}}
    for seed in range(args.seeds):
        cases[f"random {seed}"] = {"kv_selector": "random", "kv_selector_config": json.dumps({"seed": seed})}
    for selector in args.selectors:
        name, _, options = selector.partition(":")
        cases[selector] = {"kv_selector": name} | ({"kv_selector_config": options} if options else {})
    found: dict[str, Found] = {}
    plain: Reading | None = None
    for name, settings in track(cases.items(), "measuring", console=console):
        budget = {"kv_budget": args.budget} if settings else {}
        own, answers = measure(args.model, args.engine | settings | budget, text, tasks, args.interval, args.bos)
        plain = plain or own
        found[name] = figures(plain, own) | answers
    found["random"] = mean_of([found.pop(f"random {seed}") for seed in range(args.seeds)])
    rows, results = [], []
    for name, own_figures in found.items():
        means = {m: float(np.mean(v)) for m, v in own_figures.items()}
        against = {
            b: {m: difference(v, found[b][m]) for m, v in own_figures.items()}
            for b in BASELINES
            if name not in (b, "full")
        }
        results.append({"name": name, "means": means, "against": against})
        for measure_name, value in means.items():
            rows.append([name, measure_name, f"{value:.4f}", *(said(measure_name, against.get(b)) for b in BASELINES)])
    show(console, f"{args.model} at {args.budget}", ["", "", "mean", *BASELINES], rows, left=2)
    save(args.out, about(benchmark="selector_pairs", settings=vars(args) | {
        "model": Path(args.model).name, "text": Path(args.text).name, "data": args.data and args.data.name},
                         results=results))  # fmt: skip


if __name__ == "__main__":
    main()
