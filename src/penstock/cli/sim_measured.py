"""`penstock sim calibrate MODEL`: what steps cost on this machine; `penstock sim compare MODEL`: is it true?"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.sim_output import check_folders, write
from penstock.cli.sim_workload import add_workload, count, positive, workload_of

if TYPE_CHECKING:
    from penstock.config import EngineConfig
    from penstock.plan.calibrated import Calibration


def add_arguments(kinds: Any) -> None:
    """Mutates `kinds`, the subparsers of `penstock sim`."""
    from penstock.config.load import add_arguments as add_engine_arguments

    calibrate = kinds.add_parser("calibrate", allow_abbrev=False, help="measure what steps of a model cost here")
    calibrate.add_argument("--out", type=Path, required=True, metavar="FILE.json", help="where the step times go")
    calibrate.add_argument("--minutes", type=positive, default=1.0, metavar="M", help="how long (default: 1)")
    calibrate.add_argument(
        "--longest", type=count, default=1024, metavar="N", help="tokens of the longest request (default: 1024)"
    )
    calibrate.add_argument("--sim-seed", type=int, default=0, metavar="N", help="of the rounds drawn (default: 0)")
    add_engine_arguments(calibrate, model_positional=True)
    compare = kinds.add_parser("compare", allow_abbrev=False, help="a workload on the real engine and as simulated")
    compare.add_argument(
        "--steps", type=Path, metavar="FILE.json", help="step times (default: they are measured first, for --minutes)"
    )
    compare.add_argument("--minutes", type=positive, default=0.5, metavar="M", help="of measuring (default: 0.5)")
    compare.add_argument(
        "--rounds", type=count, default=1, metavar="N", help="runs of every policy on the real engine, in turns"
    )
    compare.add_argument(
        "--policies", metavar="NAMES", help="scheduling policies to run one after the other, with spaces or commas"
    )
    for one in (calibrate, compare):
        one.add_argument(
            "--most-stolen", type=float, default=0.02, metavar="X",
            help="what was measured while a virtual machine's host took away more of the processors' time is measured "
            "again (default: 0.02)",
        )  # fmt: skip
    compare.add_argument("--out", type=Path, metavar="FILE.html", help="write a page with both curves")
    compare.add_argument("--json", type=Path, metavar="FILE.json", help="write all numbers")
    add_workload(compare)
    add_engine_arguments(compare, model_positional=True)


def calibrate(args: argparse.Namespace) -> int:
    """Returns the exit status."""
    from rich.console import Console

    from penstock.base.errors import InputError
    from penstock.config import from_args
    from penstock.plan.calibrated import save

    check_folders(args.out)
    if args.sim_seed < 0:
        raise InputError("sim-seed must not be negative", param="sim_seed")
    config = from_args(args)
    found = measure_steps(config, args.minutes * 60, args.longest, args.sim_seed, args.most_stolen)
    save(found, args.out)
    console = Console()
    errors = found.errors
    console.print(
        f"{found.num_samples} steps of {found.model}; {errors.num_samples} others are predicted with an error of "
        f"{errors.median:.1%} (median), {errors.p90:.1%} (p90), their sum with {errors.total:+.1%}"
    )
    print(f"wrote {args.out}", file=sys.stderr)
    return 0


def measure_steps(
    config: EngineConfig, seconds: float, longest: int, seed: int, most_stolen: float = 1.0
) -> Calibration:  # fmt: skip
    from penstock.sim.calibrate import collect, plain
    from penstock.sim.calibrated import calibration_of
    from penstock.sim.real import real_engine

    config = plain(config)
    with real_engine(config) as engine, _measuring() as show:
        fitted, held = collect(
            engine, seconds=seconds, longest=longest, seed=seed, progress=show, most_stolen=most_stolen
        )
        return calibration_of(engine, config, fitted, held)


@contextmanager
def _measuring() -> Iterator[Callable[[float, int], None] | None]:
    """A bar for the share of the time that has passed; None where nobody is looking."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("measuring steps"), BarColumn(), TextColumn("{task.fields[steps]:,} steps")
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0, steps=0)
        yield lambda share, steps: bar.update(task, completed=share, steps=steps)


def compare(args: argparse.Namespace) -> int:
    """Every policy on the real engine, then simulated; prints both. Returns the exit status."""
    import json
    from dataclasses import asdict

    from rich.console import Console

    from penstock.base.errors import InputError
    from penstock.config import from_args
    from penstock.config.load import given_by
    from penstock.plan.calibrated import load
    from penstock.report.tables import table
    from penstock.sched.policy import make_policy
    from penstock.sim.fidelity import fidelity
    from penstock.sim.report import html_page

    check_folders(args.out, args.json)
    if args.limit is None and args.duration is None and not (args.trace or "synthetic:").startswith("synthetic:"):
        raise InputError("on the real engine a trace takes its own time: say --limit N or --duration S", param="limit")
    workload = workload_of(args)
    config = from_args(args)
    policies = _policies(args.policies) or [config.scheduler.scheduling_policy]
    for policy in policies:
        make_policy(policy)
    given = {name: one.value for name, one in given_by(args).items() if name != "model"}
    longest = max((r.num_prompt + r.num_output for r in workload), default=1)  # a step beyond what was drawn is guessed
    console = Console()
    with console.status("starting") as status:
        found = fidelity(
            config, given, policies, workload, steps=None if args.steps is None else load(args.steps),
            rounds=args.rounds, most_stolen=args.most_stolen, seconds=args.minutes * 60, longest=longest,
            truncate=args.truncate, say=status.update,
        )  # fmt: skip
    shown = table(
        ("policy", "figure", "measured", "rounds", "simulated", "ratio"), title=workload.description, left=2, box=True
    )
    for line in found.lines:
        spread = f"{line.low:.4g} to {line.high:.4g}" if args.rounds > 1 else ""
        cells = f"{line.measured:.4g}", spread, f"{line.simulated:.4g}", f"{line.ratio:.3f}"
        shown.add_row(line.policy, line.figure, *cells)
    console.print(shown)
    errors = found.steps.errors
    console.print(f"steps that were not fitted to: error {errors.median:.1%} (median), their sum {errors.total:+.1%}")
    console.print(f"the figure that is furthest off is off by {found.worst:.1%}")
    if any(found.stolen):
        console.print(
            f"the host took at most {max(found.stolen):.1%} of the processors' time in a run; {found.repeated} runs "
            "with more were repeated"
        )
    if args.json is not None:
        lines = [asdict(line) | {"ratio": line.ratio} for line in found.lines]
        about = {"model": found.steps.model, "workload": workload.description, "worst": found.worst}
        about |= {"stolen": list(found.stolen), "repeated": found.repeated}
        write(args.json, json.dumps(about | {"steps": _plain(errors), "lines": lines}, indent=1) + "\n")
    if args.out is not None:
        write(args.out, html_page(found.runs, title=f"{workload.name}: {found.steps.model}, measured and simulated"))
    return 0


def _plain(errors: Any) -> dict[str, float]:
    import msgspec

    found: dict[str, float] = msgspec.to_builtins(errors)
    return found


def _policies(text: str | None) -> list[str]:
    """Names may have knobs, which have commas; policies with knobs are told apart by spaces."""
    if text is None:
        return []
    return text.split() if " " in text or ":" in text else [name for name in text.split(",") if name]
