"""When speculation stops to pay: quality of the draft x length x batch x temperature, and where the gain is gone.

    python -m benchmarks.speculation.breakeven --model nano --draft pico,random --out FILE.json --html FILE.html

Quality is varied in two ways. Drafts are models (--draft pico,FOLDER,...; `random`: the first one's
shape with weights at random). And for the curve, drafts of the first draft are exchanged for random tokens with a
given probability (`Spoiled`): the same cost, any acceptance. Speculation on and off take turns in one engine, in pairs;
their tokens must be equal, or the run fails.

Symbols: K drafts a step; a share of first drafts that are accepted, so 1 - a is the share of steps that fall back to
one token of the model's own; gain = tokens/s with drafts over tokens/s without, median of pairs. The break-even point
of a (K, batch, temperature) is the a at which gain is 1, between the two neighbouring measured points.
"""

from __future__ import annotations

import argparse
import html
import json
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.common import about
from rich.console import Console
from rich.progress import track
from rich.table import Table

from penstock import LLM, SamplingParams
from penstock.core.batch import SchedulerOutput
from penstock.core.draft import DraftJob, DraftTree, Outcome
from penstock.core.protocols import Drafter
from penstock.formats.safetensors import read_safetensors
from penstock.report.chart import Chart, Line
from penstock.sched.drafts.fixed import FixedDrafts

PROMPTS = (
    "Once upon a time there was a little girl who lived near the sea. One day she",
    "The old man looked at the house for a long time. Then he said",
    "In the morning the children went to the river, and the boy",
    "It was a cold day in winter. The small bird sat on the tree and",
    "The king had three sons. The eldest of them",
    '"Where are you going?" asked the cat. The dog',
    "Far away in the mountains there was a village where",
    "She opened the door slowly, and behind it",
)
SPOILS = (0.0, 0.25, 0.5, 0.75, 1.0)


Run = tuple[float, list[list[int]], dict[str, float]]


class Spoiled:
    """A drafter some of whose drafts are made at random: its cost, another quality. `share` of them are spoiled."""

    name = "spoiled"

    def __init__(self, inner: Drafter, vocab_size: int) -> None:
        self.inner, self.vocab_size, self.share = inner, vocab_size, 0.0
        self.wants_hidden = inner.wants_hidden
        self._rng = random.Random(1)

    def track(self, output: SchedulerOutput) -> None:
        self.inner.track(output)

    def propose(self, jobs: Sequence[DraftJob]) -> list[DraftTree]:
        return [self._spoil(tree) for tree in self.inner.propose(jobs)]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        self.inner.observe(outcomes)

    def _spoil(self, tree: DraftTree) -> DraftTree:
        ids = [self._rng.randrange(self.vocab_size) if self._rng.random() < self.share else t for t in tree.token_ids]
        return tree._replace(token_ids=ids)


def with_random_weights(model: str, folder: Path) -> str:
    """A copy of a checkpoint whose matrices are noise of their own size."""
    from penstock.launch.hub import local_path

    source = Path(local_path(model))
    shutil.copytree(source, folder)
    path = folder / "model.safetensors"
    rng = np.random.default_rng(0)
    with path.open("r+b") as file:
        for tensor in read_safetensors(path).values():
            if len(tensor.shape) < 2:
                continue
            file.seek(tensor.offset)
            raw = np.frombuffer(file.read(tensor.nbytes), np.uint16).copy()
            rng.shuffle(raw)
            file.seek(tensor.offset)
            file.write(raw.tobytes())
    return str(folder)


class Engine:
    """One model with one draft; drafts on and off, K and spoiling are switched between runs."""

    def __init__(self, model: str, draft: str, options: dict[str, Any], max_tokens: int) -> None:
        config: dict[str, Any] = {"method": "draft-model", "model": draft, "controller": "fixed"}
        self.llm = LLM(model, speculative_config=config, enable_prefix_caching=False, **options)
        core = self.llm.engine.core
        runner: Any = core.executor.runner  # type: ignore[attr-defined]
        self.core = core
        self.spoiled = runner.drafter = Spoiled(runner.drafter, runner.vocab_size)
        self.max_tokens = max_tokens

    def run(self, drafts: int, spoil: float, batch: int, temperature: float) -> Run:
        """(seconds, tokens of each request, what its counters say)."""
        self.spoiled.share = spoil
        self.core.scheduler.drafts = FixedDrafts(drafts, drafts) if drafts else None
        before = self.core.stats.counters()
        params = [
            SamplingParams(
                temperature=temperature, seed=i, max_tokens=self.max_tokens, ignore_eos=True, detokenize=False
            )
            for i in range(batch)
        ]
        began = time.perf_counter()
        outputs = self.llm.generate([PROMPTS[i % len(PROMPTS)] for i in range(batch)], params)
        seconds = time.perf_counter() - began
        after = self.core.stats.counters()
        delta = {name: after[name] - before.get(name, 0.0) for name in after}
        return seconds, [list(o.outputs[0].token_ids) for o in outputs], delta


def measure(engine: Engine, draft: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of the study for one draft."""
    cells = [
        (k, batch, temperature, spoil)
        for k in args.lengths
        for batch in args.batches
        for temperature in args.temperatures
        for spoil in (SPOILS if draft == args.drafts[0] else (0.0,))
    ]
    rows = []
    for k, batch, temperature, spoil in track(cells, description=draft):
        engine.run(k, spoil, batch, temperature)
        chances, shares, counts = [], [], {}
        for pair in range(args.pairs):
            order = (0, k) if pair % 2 else (k, 0)
            taken = {n: engine.run(n, spoil, batch, temperature) for n in order}
            if taken[0][1] != taken[k][1]:
                raise SystemExit(f"{draft}, K {k}, batch {batch}, temperature {temperature}: the tokens differ")
            chances.append(taken[0][0] / taken[k][0])
            counts = taken[k][2]
            shares.append(counts["draft_s"] / max(counts["spec_step_s"], 1e-9))
        drafted = max(counts["num_drafts"], 1.0)
        rows.append(
            {
                "draft": draft, "K": k, "batch": batch, "temperature": temperature, "spoiled": spoil,
                "gain": statistics.median(chances), "gain_low": min(chances), "gain_high": max(chances),
                "first_accepted": counts.get("num_accepted_at_0", 0.0) / drafted,
                "tokens_per_step": 1 + counts["num_accepted_tokens"] / drafted,
                "draft_share": statistics.median(shares),
            }
        )  # fmt: skip
    return rows


def break_even(rows: list[dict[str, Any]], k: int, batch: int, temperature: float) -> float | None:
    """The share of accepted first drafts at which nothing is won; None: it always or never pays."""
    points = sorted(
        (r["first_accepted"], r["gain"])
        for r in rows
        if (r["K"], r["batch"], r["temperature"]) == (k, batch, temperature) and r["draft"] == rows[0]["draft"]
    )
    for (a, low), (b, high) in pairwise(points):
        if low < 1 <= high:
            return float(a + (1 - low) / (high - low) * (b - a))
    return None


STYLE = """text{font:12px sans-serif;fill:#444}.grid{stroke:#ddd}.axis{stroke:#888}.line{fill:none;stroke-width:2}
.c0{stroke:#1b6ca8}.c1{stroke:#c8501e}.c2{stroke:#2f8f4e}.c3{stroke:#8a4fa3}.c4{stroke:#777;stroke-dasharray:5 4}
.dot{fill:#fff;stroke-width:2}"""


def charts(result: dict[str, Any]) -> list[Chart]:
    """Gain over acceptance for each K: one chart per batch and temperature, of the first draft, spoiled."""
    rows = [r for r in result["rows"] if r["draft"] == result["rows"][0]["draft"]]
    out = []
    for batch, temperature in sorted({(r["batch"], r["temperature"]) for r in rows}):
        chart = Chart(f"batch {batch}, temperature {temperature:g}: gain over the share of accepted first drafts")
        own = [r for r in rows if (r["batch"], r["temperature"]) == (batch, temperature)]
        for style, k in enumerate(sorted({r["K"] for r in own})):
            points = sorted((r["first_accepted"], r["gain"]) for r in own if r["K"] == k)
            xs, ys = [p[0] for p in points], [p[1] for p in points]
            dots = [(xs[-1], ys[-1], f"K = {k}"), *((x, y, "") for x, y in points[:-1])]
            chart.lines.append(Line(f"K = {k}", xs, ys, style, dots))
        chart.lines.append(Line("off", [0.0, max(r["first_accepted"] for r in own)], [1.0, 1.0], 4))
        out.append(chart)
    return out


def drawing(chart: Chart) -> str:
    """A chart as a file of its own."""
    head, rest = chart.svg().split(">", 1)
    ground = '<rect width="100%" height="100%" fill="#fff"/>'
    return f'{head} xmlns="http://www.w3.org/2000/svg"><style>{STYLE}</style>{ground}{rest}'


def page(result: dict[str, Any]) -> str:
    parts = [
        "<!doctype html><meta charset=utf-8><title>Break-even of speculation</title>",
        f"<style>body{{font:15px sans-serif;max-width:60em;margin:2em auto}}svg{{width:100%}}{STYLE}</style>",
        f"<h1>Break-even of speculation</h1><p>{html.escape(json.dumps(result['about']))}</p>",
    ]
    parts += [f"<h2>{html.escape(chart.title)}</h2>{chart.svg()}" for chart in charts(result)]
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="nano")
    parser.add_argument("--draft", default="pico,random", help="models, with commas; random: the first one as noise")
    parser.add_argument("--lengths", default="1,2,4,8")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--temperatures", default="0,0.8")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--html", type=Path)
    parser.add_argument("--images", type=Path, help="folder for the charts as files")
    args = parser.parse_args()
    args.drafts = args.draft.split(",")
    args.lengths = [int(n) for n in args.lengths.split(",")]
    args.batches = [int(n) for n in args.batches.split(",")]
    args.temperatures = [float(n) for n in args.temperatures.split(",")]
    options = {"threads": args.threads, "quantization": args.quantization}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for draft in args.drafts:
            path = with_random_weights(args.drafts[0], Path(folder) / "random") if draft == "random" else draft
            engine = Engine(args.model, path, options, args.max_tokens)
            rows += measure(engine, draft, args)
            del engine
    points = [
        {"K": k, "batch": b, "temperature": t, "first_accepted": break_even(rows, k, b, t)}
        for k in args.lengths for b in args.batches for t in args.temperatures
    ]  # fmt: skip
    settings = {name: value for name, value in vars(args).items() if name not in ("out", "html", "images")}
    result = {"about": about(**settings), "rows": rows, "break_even": points}
    show(result)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    if args.html:
        args.html.write_text(page(result))
    for i, chart in enumerate(charts(result) if args.images else ()):
        (args.images / f"break-even-{i}.svg").write_text(drawing(chart))


def show(result: dict[str, Any]) -> None:
    table = Table("draft", "K", "batch", "temperature", "spoiled", "accepted first", "tokens/step", "draft", "gain")
    for r in result["rows"]:
        table.add_row(
            str(r["draft"]), str(r["K"]), str(r["batch"]), str(r["temperature"]), f"{r['spoiled']:.2f}",
            f"{r['first_accepted']:.2f}", f"{r['tokens_per_step']:.2f}", f"{r['draft_share']:.0%}",
            f"{r['gain']:.2f} ({r['gain_low']:.2f} to {r['gain_high']:.2f})",
        )  # fmt: skip
    Console().print(table)
    for p in result["break_even"]:
        at = "always or never" if p["first_accepted"] is None else f"{p['first_accepted']:.2f}"
        print(f"K {p['K']}, batch {p['batch']}, temperature {p['temperature']}: pays from {at} accepted first drafts")


if __name__ == "__main__":
    main()
