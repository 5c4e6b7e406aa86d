"""Adaptive mode beside settings that stay, over a load that turns from chat to long documents and back.

    python -m benchmarks.serving.adaptive --table steps.json [--rounds 3] [--engine MODEL] [--out JSON] [--page HTML]

Simulated on step times that `penstock sim calibrate` has measured, and with `--engine` on that model as well: adaptive
mode, the best of the settings that stay by the simulation, and the defaults, in turns. What counts is the share of
requests whose first token is there in `--ttft` seconds and whose tokens after it take `--tpot` on average. The page
shows that share over time. With a real engine every request must have the same tokens under all settings.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from benchmarks.speculation.breakeven import STYLE, drawing
from rich.console import Console
from rich.progress import track

from penstock import __version__
from penstock.plan.calibrated import Calibration, load
from penstock.report.chart import Chart, Line
from penstock.report.numbers import percent, seconds
from penstock.report.tables import table as make_table
from penstock.sim.calibrated import run_calibrated
from penstock.sim.metrics import Slo, within
from penstock.sim.real import run_real
from penstock.sim.result import SimResult
from penstock.sim.workload import TimedRequest, Workload

PHASES = ("chat", "documents", "chat again")
SLO = "slo:ttft_s={ttft:g},tpot_s={tpot:g}"
POLICIES = ("fcfs", "prefill-first", "splitfuse", SLO, f"{SLO},whole=1")
TOKENS, SEQS = (32, 128, 512), (8, 16)
ADAPTIVE = "adaptive"
WINDOW_S = 20.0
FAINT = ".c4{stroke:#bbb;stroke-width:1;stroke-dasharray:none}"


class Kind(NamedTuple):
    """Requests of one kind: how many a second, mean tokens of prompt and output, and their variation."""

    rate: float
    prompt: int
    prompt_cv: float
    output: int
    output_cv: float


CHAT, DOCUMENTS = Kind(1.3, 64, 0.5, 64, 0.8), Kind(0.45, 600, 0.6, 24, 0.5)
LONGEST = 1500


def turning(seed: int, phase_s: float, scale: float) -> list[TimedRequest]:
    """Chat, documents, chat: each for `phase_s` seconds, `scale` times as many requests a second."""
    rng, out = np.random.default_rng(seed), []

    def length(mean: float, cv: float, most: int) -> int:
        s = float(np.sqrt(np.log(1 + cv * cv)))
        return int(min(most, max(1, mean * np.exp(rng.normal(-s * s / 2, s)))))

    for number, kind in enumerate((CHAT, DOCUMENTS, CHAT)):
        at_s = number * phase_s
        while (at_s := at_s + float(rng.exponential(1 / (scale * kind.rate)))) < (number + 1) * phase_s:
            prompt, output = length(kind.prompt, kind.prompt_cv, LONGEST), length(kind.output, kind.output_cv, 400)
            out.append(TimedRequest(at_s, prompt, output, tenant=PHASES[number]))
    return out


def workload(requests: list[TimedRequest]) -> Workload:
    return Workload("turning", "chat, documents, chat", lambda: iter(requests), num_requests=len(requests))


class Scored(NamedTuple):
    """`phases`: the share of each; `over`: (time, share) of requests that came around then."""

    share: float
    phases: list[float]
    mean_s: float
    over: list[tuple[float, float]]
    moves: int


def scored(result: SimResult, requests: list[TimedRequest], slo: Slo) -> Scored:
    good = within(result, slo)
    at_s, phase = np.array([r.arrival_s for r in requests]), np.array([r.tenant for r in requests])
    over = []
    for middle in np.arange(WINDOW_S / 2, at_s[-1], WINDOW_S / 4):
        near = np.abs(at_s - middle) <= WINDOW_S / 2
        if near.any():
            over.append((float(middle), float(good[near].mean())))
    mean_s = float((result.requests.finish_s - result.requests.arrival_s).mean())
    phases = [float(good[phase == name].mean()) for name in PHASES]
    return Scored(float(good.mean()), phases, mean_s, over, result.stats.num_moves)


def variants(slo: Slo) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {
        ADAPTIVE: {"adaptive": True, "adaptive_slo": f"ttft={slo.ttft_s:g},tpot={slo.tpot_s:g}"}
    }
    for policy, tokens, seqs in itertools.product(POLICIES, TOKENS, SEQS):
        name = policy.format(ttft=slo.ttft_s, tpot=slo.tpot_s)
        kind = policy.partition(":")[0] + (" in whole pieces" if policy.endswith("whole=1") else "")
        label = f"{kind}, {tokens} tokens, {seqs} at once"
        found[label] = {"scheduling_policy": name, "max_num_batched_tokens": tokens, "max_num_seqs": seqs}
    return found


def mean(found: list[Scored]) -> dict[str, Any]:
    return {
        "share": statistics.mean(s.share for s in found), "shares": [s.share for s in found],
        "phases": [statistics.mean(s.phases[k] for s in found) for k in range(len(PHASES))],
        "mean_s": statistics.mean(s.mean_s for s in found), "over": found[0].over, "moves": found[0].moves,
    }  # fmt: skip


def simulate(steps: Calibration, given: dict[str, dict[str, Any]], loads: list[list[TimedRequest]], slo: Slo) -> Any:
    def one(settings: dict[str, Any], requests: list[TimedRequest]) -> Scored:
        return scored(run_calibrated(steps, settings, workload(requests), truncate=True), requests, slo)

    return {
        name: mean([one(settings, requests) for requests in loads])
        for name, settings in track(given.items(), description="simulating")
    }


def measure(
    model: str, steps: Calibration, given: dict[str, dict[str, Any]], loads: list[list[TimedRequest]], slo: Slo
) -> Any:
    """In turns, in another order each round. Raises SystemExit if a token differs."""
    found: dict[str, list[Scored]] = {name: [] for name in given}
    base = {key: value for key, value in steps.settings.items() if key != "ops"}
    for number, requests in enumerate(loads):
        tokens = None
        for name in random.Random(number).sample(list(given), len(given)):
            result = run_real(model, {**base, **given[name]}, workload(requests), truncate=True)
            if tokens is not None and result.tokens != tokens:
                raise SystemExit(f"{name} has other tokens: a defect")
            tokens = result.tokens
            found[name].append(scored(result, requests, slo))
            print(f"round {number + 1}, {name}: {found[name][-1].share:.1%}", flush=True)
    return {name: mean(scores) for name, scores in found.items()}


def chart(found: dict[str, Any], title: str) -> Chart:
    drawn = Chart(title, seconds, percent, y_max=1.0, note="share of requests within the limits, by arrival")
    for name, one in found.items():
        if name != ADAPTIVE:
            xs, ys = zip(*one["over"], strict=True)
            drawn.lines.append(Line("settings that stay", xs, ys, 4))
    xs, ys = zip(*found[ADAPTIVE]["over"], strict=True)
    drawn.lines.append(Line(ADAPTIVE, xs, ys, 1))
    return drawn


def page(charts: list[Chart]) -> str:
    style = f"body{{font:15px sans-serif;max-width:60em;margin:2em auto}}svg{{width:100%}}{STYLE}{FAINT}"
    parts = ["<!doctype html><meta charset=utf-8><title>Adaptive mode</title>", f"<style>{style}</style>"]
    parts += [f"<h2>{one.title}</h2><p>{one.note}</p>{one.svg()}" for one in charts]
    return "\n".join(parts)


def show(found: dict[str, Any], title: str, console: Console) -> None:
    made = make_table(("settings", "all", *PHASES, "mean s", "moves"), title=title, left=1)
    for name, one in sorted(found.items(), key=lambda item: -item[1]["share"]):
        cells = [f"{one['share']:.1%}", *(f"{share:.0%}" for share in one["phases"]), f"{one['mean_s']:.3g}"]
        made.add_row(name, *cells, str(one["moves"]))
    console.print(made)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--table", type=Path, required=True, metavar="FILE", help="step times")
    parser.add_argument("--ttft", type=float, default=3.0)
    parser.add_argument("--tpot", type=float, default=0.15)
    parser.add_argument("--phase", type=float, default=120.0, help="seconds of each of the three")
    parser.add_argument("--scale", type=float, default=1.0, help="so many times the requests a second")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engine", metavar="MODEL", help="also run on this model")
    parser.add_argument("--engine-rounds", type=int, default=1)
    parser.add_argument("--engine-phase", type=float, default=60.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--image", type=Path, help="the last chart as a file")
    args = parser.parse_args()
    console, slo, steps = Console(), Slo(args.ttft, args.tpot), load(args.table)
    given = variants(slo)
    loads = [turning(seed, args.phase, args.scale) for seed in range(args.rounds)]
    simulated = simulate(steps, given, loads, slo)
    show(simulated, f"simulated, {args.rounds} rounds, {len(loads[0])} requests in the first", console)
    report: dict[str, Any] = {"version": __version__, "table": steps.model, "slo": [slo.ttft_s, slo.tpot_s],
                              "phase_s": args.phase, "scale": args.scale, "simulated": simulated}  # fmt: skip
    charts = [chart(simulated, "Simulated")]
    if args.engine is not None:
        still = sorted((name for name in given if name != ADAPTIVE), key=lambda name: -simulated[name]["share"])
        chosen = [
            ADAPTIVE,
            still[0],
            next(name for name in still if name.startswith("fcfs")),
            "fcfs, 512 tokens, 16 at once",
        ]
        real = [turning(seed, args.engine_phase, args.scale) for seed in range(args.engine_rounds)]
        report["measured"] = measure(args.engine, steps, {name: given[name] for name in chosen}, real, slo)
        show(report["measured"], "measured", console)
        charts.append(chart(report["measured"], "Measured"))
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    if args.page is not None:
        args.page.write_text(page(charts), "utf-8")
    if args.image is not None:
        args.image.write_text(drawing(charts[-1]).replace("</style>", FAINT + "</style>"), "utf-8")


if __name__ == "__main__":
    main()
