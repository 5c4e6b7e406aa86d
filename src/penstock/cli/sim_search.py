"""`penstock sim search`: the batch, chunk and tensor degree with most requests/s within a latency."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from penstock.cli.sim_output import check_folders, write
from penstock.cli.sim_workload import add_workload, count, find_model, positive, workload_of


def add_arguments(kinds: Any) -> None:
    """Mutates `kinds`, the subparsers of `penstock sim`."""
    from penstock.config.load import add_arguments as add_engine_arguments

    parser = kinds.add_parser("search", allow_abbrev=False, help="settings with most requests/s within a latency")
    parser.add_argument(
        "--latency", type=positive, required=True, metavar="S",
        help="seconds from a request's first step to its last token, for 99 of 100 of them",
    )  # fmt: skip
    parser.add_argument(
        "--device", dest="sim_device", required=True, metavar="NAME|FILE",
        help="a device, or a file that penstock sim calibrate has written",
    )  # fmt: skip
    parser.add_argument("--spec", metavar="NAME", help="a built-in model instead of --model (default: llama-3.1-8b)")
    parser.add_argument("--devices", type=count, default=1, metavar="N", help="how many there are (default: 1)")
    parser.add_argument(
        "--degrees", default="1", metavar="LIST", help="devices that share one engine's layers: 1,2,4 (default: 1)"
    )
    parser.add_argument(
        "--schedules", metavar="LIST",
        help="of chunked (prompts beside tokens), apart (in turns), placed (on devices of their own); "
        "default: all that the device can have",
    )  # fmt: skip
    parser.add_argument(
        "--link", type=positive, default=25e9, metavar="BYTES/S",
        help="of an engine to the memory by which keys and values go from device to device (default: 25e9)",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE.json", help="write all numbers")
    add_workload(parser)
    add_engine_arguments(parser)


def search(args: argparse.Namespace) -> int:
    """Prints the settings, what the cost model says of them, and what a simulation does. Returns the exit status."""
    import json
    from dataclasses import asdict

    from rich.console import Console

    from penstock.report.tables import table
    from penstock.sim.search_run import find, latency_of, rate_of, replay

    check_folders(args.json)
    workload = workload_of(args)
    if workload.num_requests is None or workload.num_requests > 2000:
        workload = workload.limited(2000)
    target = _target(args)
    found = find(target, workload, args.latency)
    best = found.best
    assert best is not None
    played = replay(target, best, workload, truncate=args.truncate)
    rate = rate_of(target, best, played)
    latency_s = latency_of(played)
    shown = table(("", "cost model", "simulated"), title=f"{workload.description}, within {args.latency:g} s", box=True)
    shown.add_row("requests/s", f"{best.requests_per_s:.4g}", f"{rate:.4g}")
    shown.add_row("latency p99, s", f"{best.latency_s:.4g}", f"{latency_s:.4g}")
    console = Console()
    console.print(shown)
    if best.prompt_engines:
        console.print(
            _line("for prompts", best.prompt_engines, best.prompt_degree, best.prompt_settings), soft_wrap=True
        )
    what = "for tokens" if best.prompt_engines else best.schedule
    console.print(_line(what, best.engines, best.degree, best.settings), soft_wrap=True)
    console.print(f"the cost model was asked {found.num_evaluated} times")
    if args.json is not None:
        simulated = {"requests_per_s": rate, "latency_s": latency_s}
        report = {"best": asdict(best), "settings": best.settings, "asked": found.num_evaluated, "simulated": simulated}
        write(args.json, json.dumps(report, indent=1) + "\n")
    if latency_s > args.latency:
        console.print("the simulation does not meet the latency: its lengths are not what the cost model expects")
        return 1
    return 0


def _line(what: str, engines: int, degree: int, settings: dict[str, object]) -> str:
    flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in settings.items())
    return f"{engines} engine(s) of {degree} device(s) each, {what}: {flags}"


def _target(args: argparse.Namespace) -> Any:
    from penstock.base.errors import ConfigError
    from penstock.config.load import given_by
    from penstock.plan.calibrated import check_spec, is_calibration, load
    from penstock.plan.devices import find_device
    from penstock.sim.search import PLACED, POLICIES
    from penstock.sim.search_run import SearchTarget

    given = {name: one.value for name, one in given_by(args).items() if name != "model"}
    for name in ("scheduling_policy", "max_num_seqs", "max_num_batched_tokens"):
        if name in given:
            raise ConfigError(f"{name}: the search decides it; leave it away", field=name)
    try:
        degrees = tuple(sorted({int(part) for part in args.degrees.split(",")}))
    except ValueError:
        degrees = ()
    if not degrees or degrees[0] < 1:
        raise ConfigError(
            f"degrees: {args.degrees!r} must be whole numbers with commas, such as 1,2,4", field="degrees"
        )
    if is_calibration(args.sim_device):
        measured = load(args.sim_device)
        if getattr(args, "model", None) is not None or args.spec is not None:
            check_spec(measured, find_model(args)[0], args.sim_device)
        own = _schedules(args.schedules, tuple(name for name in POLICIES if name != PLACED))
        return SearchTarget(measured.spec, measured.model, given, measured, args.devices, degrees, schedules=own)
    spec, name = find_model(args)
    schedules = _schedules(args.schedules, tuple(POLICIES))
    return SearchTarget(spec, name, given, find_device(args.sim_device), args.devices, degrees, args.link, schedules)


def _schedules(text: str | None, default: tuple[str, ...]) -> tuple[str, ...]:
    """Raises ConfigError."""
    from penstock.base.errors import ConfigError
    from penstock.sim.search import POLICIES

    if text is None:
        return default
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    if unknown := [name for name in names if name not in POLICIES]:
        raise ConfigError(f"schedules: {unknown[0]!r} is none of {', '.join(POLICIES)}", field="schedules")
    return names
