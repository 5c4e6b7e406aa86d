"""`penstock study NAME`: one question, the runs that answer it, one page."""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from penstock.sim.studies import STUDIES

    parser.add_argument("name", choices=STUDIES.names(), help="which study")
    parser.add_argument("--spec", default="llama-3.1-8b", help="built-in model spec (default: llama-3.1-8b)")
    parser.add_argument("--device", default="a100-80g", help="device preset or file (default: a100-80g)")
    parser.add_argument("--scale", type=float, default=1.0, metavar="X", help="fraction of the full study (default: 1)")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--out", metavar="PAGE.html", help="write the page")
    parser.add_argument("--json", metavar="FILE", help="write the numbers")


def study(args: argparse.Namespace) -> int:
    from rich.console import Console

    from penstock.base.errors import InputError
    from penstock.plan.devices import find_device
    from penstock.report.tables import table
    from penstock.sim.specs import find_spec
    from penstock.sim.studies import STUDIES
    from penstock.sim.studies.study import Bench, Study, page

    if not 0 < args.scale <= 10:
        raise InputError(f"scale must be above 0 and at most 10, not {args.scale}", param="scale")
    console = Console()
    bench = Bench(find_spec(args.spec), find_device(args.device), args.scale, args.seed)
    with console.status("starting") as status:
        done: Study = STUDIES.get(args.name)(bench, lambda line: status.update(f"{args.name}: {line}"))
    console.print(f"[bold]{done.title}[/bold]\n{done.question}\n")
    for found in done.tables:
        console.print(table(found.columns, found.rows, title=found.title, box=True))
    for line in done.findings:
        console.print(f"- {line}")
    for line in done.setup:
        console.print(f"[dim]{line}[/dim]")
    if args.out:
        Path(args.out).write_text(page(done), encoding="utf-8")
        console.print(f"page: {args.out}")
    if args.json:
        Path(args.json).write_text(json.dumps(done.data, indent=1), encoding="utf-8")
    return 0
