"""`penstock tune MODEL --trace T --slo ttft=1,tpot=0.1`: settings for a load, with reasons, as a file to serve with."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.sim_measured import measure_steps
from penstock.cli.sim_output import check_folders, write
from penstock.cli.sim_workload import add_workload, positive, workload_of

if TYPE_CHECKING:
    from penstock.config import EngineConfig
    from penstock.sim.metrics import Slo
    from penstock.sim.tune import LoadScore, TunedSettings
    from penstock.sim.workload import Workload


_LONGEST = 1024
"""Tokens of the longest request whose steps are measured."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from penstock.config.load import add_arguments as add_engine_arguments

    limits = "of a good answer, in seconds or with ms: ttft=500ms,tpot=0.1 (default: ttft=1,tpot=0.1)"
    parser.add_argument("--slo", default="ttft=1,tpot=0.1", metavar="LIMITS", help=limits)
    out = "where the settings go, for --config (default: tuned.toml)"
    parser.add_argument("--out", type=Path, metavar="FILE.toml", default=Path("tuned.toml"), help=out)
    steps = "step times that penstock sim calibrate wrote (default: they are measured first, for --minutes)"
    parser.add_argument("--steps", type=Path, metavar="FILE.json", help=steps)
    parser.add_argument("--minutes", type=positive, default=1.0, metavar="M", help="of measuring (default: 1)")
    verify = "requests that the real engine answers with each of the best settings; 0: it is not asked (default: 100)"
    parser.add_argument("--verify", type=int, default=100, metavar="N", help=verify)
    parser.add_argument("--json", type=Path, metavar="FILE.json", help="write what every value came to")
    add_workload(parser)
    add_engine_arguments(parser, model_positional=True)


def slo_of(text: str) -> Slo:
    """Raises InputError."""
    from penstock.base.latency import latency_limits
    from penstock.sim.metrics import Slo

    return Slo(**latency_limits(text, "--slo"))


def tune(args: argparse.Namespace) -> int:
    """Returns the exit status. Raises PenstockError."""
    from rich.console import Console

    from penstock.base.errors import InputError
    from penstock.cli.run import with_default_model
    from penstock.config.load import engine_config, given_by
    from penstock.launch.hub import local_path
    from penstock.launch.tuned import tuned_for
    from penstock.plan.calibrated import check_spec, load
    from penstock.plan.probe import probe
    from penstock.report.tables import table
    from penstock.sim.calibrated import run_calibrated
    from penstock.sim.tune import tune as search

    check_folders(args.out, args.json)
    slo = slo_of(args.slo)
    if args.verify < 0:
        raise InputError("--verify must not be negative", param="verify")
    if args.trace is None:
        example = "synthetic:poisson?rate=2&prompt=512&output=128"
        raise InputError(f"--trace: name the load to tune for: a file, or {example}", param="trace")
    workload = workload_of(args)
    named = given_by(with_default_model(args))
    config = engine_config(named)
    given = {name: one.value for name, one in named.items() if name not in ("model", "preset")}
    console = Console()
    if args.steps is None:
        measured = measure_steps(config, args.minutes * 60, _LONGEST, 0)
    else:
        measured = load(args.steps)
        check_spec(measured, _spec(config), str(args.steps))
    with console.status("searching") as status:
        found = search(
            lambda more: run_calibrated(measured, {**given, **more}, workload, truncate=args.truncate),
            slo, given, measured.kv_bytes, say=status.update,
        )  # fmt: skip
        tried = _verified(config, found, workload, slo, args, status.update) if args.verify else {}
    chosen = dict(found.settings)
    best = _best(tried)
    if best is not None:
        chosen = tried[best][1]
    shown = table(("settings", "simulated", f"measured, first {args.verify}"), title=workload.description, left=3)
    shown.add_row("as given", str(found.first), str(tried["as given"][0]) if tried else "-")
    shown.add_row(_flags(found.settings) or "(the same)", str(found.score), str(tried["tuned"][0]) if tried else "-")
    for name, (score, settings) in tried.items():
        if name not in ("as given", "tuned"):
            shown.add_row(_flags(settings), "-", str(score))
    console.print(shown)
    path = local_path(config.model.model, config.model.revision)
    mark = tuned_for(path, measured.spec, probe())
    told = {f"first {args.verify} requests, {name}": str(score) for name, (score, _) in tried.items()}
    write(args.out, toml_of(given, chosen, found, told, best, mark, workload.description, slo))
    print(f"serve with it: penstock serve {config.model.model} --config {args.out}", file=sys.stderr)
    if args.json is not None:
        write(args.json, json.dumps(_report(found, tried, chosen, mark), indent=1) + "\n")
    return 0


def _spec(config: EngineConfig) -> Any:
    from penstock.families.registry import read_spec
    from penstock.launch.hub import local_path

    return read_spec(local_path(config.model.model, config.model.revision))


def _verified(
    config: EngineConfig, found: TunedSettings, workload: Workload, slo: Slo, args: argparse.Namespace, say: Any
) -> dict[str, tuple[LoadScore, dict[str, Any]]]:
    """What the real engine makes of the first requests: as given, tuned, and tuned with drafts. A candidate that cannot
    run says why in the log and is left out."""
    import logging

    from penstock.base.errors import PenstockError
    from penstock.config.load import from_kwargs
    from penstock.sim.real import real_engine, run_on
    from penstock.sim.tune import DRAFTS, LoadScore

    part = workload.limited(args.verify)
    candidates: dict[str, dict[str, Any]] = {"as given": {}, "tuned": found.settings}
    if config.speculation is None:
        candidates |= {f"tuned, {d}": found.settings | {"speculative_config": d} for d in DRAFTS}
    out: dict[str, tuple[LoadScore, dict[str, Any]]] = {}
    for name, settings in candidates.items():
        say(f"the real engine, {name}")
        try:
            with real_engine(from_kwargs(**(config.as_kwargs() | settings))) as engine:
                out[name] = LoadScore.of(run_on(engine, part, truncate=args.truncate), slo), settings
        except PenstockError as error:
            if name in ("as given", "tuned"):
                raise
            logging.getLogger("penstock.tune").warning("%s: %s", name, error)
    return out


def _best(tried: Mapping[str, tuple[LoadScore, dict[str, Any]]]) -> str | None:
    """The first of those that none beats by more than runs differ; so what was given stays unless others are better."""
    best: str | None = None
    for name, (score, _) in tried.items():
        if best is None or score.beats(tried[best][0]):
            best = name
    return best


def _flags(settings: Mapping[str, Any]) -> str:
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in settings.items())


def toml_of(
    given: Mapping[str, Any], chosen: Mapping[str, Any], found: TunedSettings, measured: Mapping[str, str],
    best: str | None, mark: Mapping[str, str], load: str, slo: Slo,
) -> str:  # fmt: skip
    """Settings with the reason of each above it, in tables as `--config` reads them."""
    from penstock.config.engine import SECTIONS, SETTINGS

    lines = [
        f"# Settings for: {load}", f"# Limits: TTFT {slo.ttft_s:g} s, TPOT {slo.tpot_s:g} s.",
        f"# Simulated: {found.score}; with the settings given: {found.first}; {found.num_runs} settings tried.",
        *(f"# Measured, {name}: {score}" for name, score in measured.items()),
        *([f"# Chosen by measurement: {best}."] if best is not None else ["# Not tried on the real engine."]),
        "# Made by `penstock tune`; on another machine, version or model it is refused (tuned_for).",
    ]  # fmt: skip
    values = {**given, **chosen, "tuned_for": json.dumps(dict(mark))}
    for section in SECTIONS:
        names = [name for name in values if name in SETTINGS and SETTINGS[name].section == section]
        if not names:
            continue
        lines += ["", f"[{section}]"]
        for name in names:
            if name in chosen:
                lines += [f"# {line}" for line in reasons_of(found, name)]
            lines.append(f"{name} = {_toml(values[name])}")
    return "\n".join([*lines, ""])


def reasons_of(found: TunedSettings, name: str) -> list[str]:
    tried = found.reasons.get(name, [])
    if not tried:
        return ["by measurement on the real engine"]
    return [f"{one.value}: {one.score if one.score is not None else one.why}" for one in tried]


def _toml(value: Any) -> str:
    """Numbers and truth values are written as in JSON, texts too, unless they have quotes themselves."""
    if isinstance(value, str) and '"' in value and "'" not in value and value.isprintable():
        return f"'{value}'"
    return json.dumps(value)


def _report(found: TunedSettings, tried: Mapping[str, Any], chosen: Mapping[str, Any], mark: Mapping[str, str]) -> Any:
    return {
        "settings": dict(chosen), "tuned_for": dict(mark), "simulated": vars(found.score), "given": vars(found.first),
        "runs": found.num_runs, "measured": {name: vars(score) for name, (score, _) in tried.items()},
        "reasons": {
            name: [{"value": t.value, "why": t.why} | (vars(t.score) if t.score else {}) for t in values]
            for name, values in found.reasons.items()
        },
    }  # fmt: skip
