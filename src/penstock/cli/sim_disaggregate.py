"""`penstock sim disaggregate`: engines for prompts and for tokens, how many of each, beside engines that do both."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.sim_output import check_folders, write
from penstock.cli.sim_workload import add_workload, count, find_model, positive, share, workload_of

if TYPE_CHECKING:
    from penstock.sim.sizing import EngineLayout, Machines, Sized

_SHOWN = 12


def add_arguments(kinds: Any) -> None:
    """Mutates `kinds`, the subparsers of `penstock sim`."""
    from penstock.config.load import add_arguments as add_engine_arguments
    from penstock.route import ROUTERS

    parser = kinds.add_parser(
        "disaggregate",
        allow_abbrev=False,
        help="engines for prompts and engines for tokens: how many, and is it worth it",
    )
    parser.add_argument(
        "--device", dest="sim_device", required=True, metavar="NAME|FILE", help="of all engines, or of mixed ones"
    )
    parser.add_argument("--prefill-device", metavar="NAME|FILE", help="of engines for prompts (default: --device)")
    parser.add_argument("--decode-device", metavar="NAME|FILE", help="of engines for tokens (default: --device)")
    parser.add_argument(
        "--devices", type=devices, required=True, metavar="N|LEAST..MOST",
        help="N: the layout with most requests/s; LEAST..MOST: the cheapest that serves the workload as it comes",
    )  # fmt: skip
    parser.add_argument("--degrees", default="1", metavar="LIST", help="devices of one engine: 1,2,4 (default: 1)")
    parser.add_argument(
        "--chunks", default="", metavar="LIST", help="tokens of a step of mixed engines to try, too: 256,512"
    )
    parser.add_argument(
        "--mixed-pool",
        action="store_true",
        help="also try layouts with all three roles at once (Splitwise's third pool)",
    )
    parser.add_argument(
        "--link", type=positive, default=25e9, metavar="BYTES/S",
        help="of an engine to the memory that all have in common, each way (default: 25e9)",
    )  # fmt: skip
    parser.add_argument("--block-s", type=float, default=0.0, metavar="S", help="what a block costs besides its bytes")
    parser.add_argument(
        "--nodes", default="1", metavar="LIST", help="also try groups of engines, one for each node, that share nothing"
    )
    parser.add_argument("--node-link", type=positive, metavar="BYTES/S", help="of an engine within a node")
    parser.add_argument(
        "--prices", default="", metavar="LIST", help="of a device an hour: NAME=2.5 or those of known devices"
    )
    parser.add_argument("--router", choices=ROUTERS.names(), default="least-tokens", help="default: least-tokens")
    parser.add_argument("--ttft-slo-s", type=positive, default=1.0, metavar="S", help="limit of TTFT (default: 1)")
    parser.add_argument("--tpot-slo-s", type=positive, default=0.1, metavar="S", help="limit of TPOT (default: 0.1)")
    parser.add_argument(
        "--share", type=share, default=0.9, metavar="SHARE", help="of requests within both (default: 0.9)"
    )
    parser.add_argument("--spec", metavar="NAME", help="a built-in model instead of --model (default: llama-3.1-8b)")
    parser.add_argument("--json", type=Path, metavar="FILE.json", help="write all numbers")
    add_workload(parser)
    add_engine_arguments(parser)


def devices(text: str) -> tuple[int, int]:
    """`4`, or `2..8`."""
    least, dots, most = text.partition("..")
    found = (count(least), count(most)) if dots else (count(text), count(text))
    if found[0] > found[1]:
        raise argparse.ArgumentTypeError(f"{text!r}: the smaller number comes first")
    return found


def numbers(name: str, text: str) -> tuple[int, ...]:
    """Raises InputError."""
    from penstock.base.errors import InputError

    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() and int(part) >= 1 for part in parts):
        raise InputError(f"--{name}: {text!r} is no list of whole numbers from 1 on, such as 1,2,4", param=name)
    return tuple(int(part) for part in parts)


def disaggregate(args: argparse.Namespace) -> int:
    """Prints the best layouts with roles and without. Returns the exit status: 1 if nothing keeps the limits."""
    from rich.console import Console

    from penstock.sim.metrics import Slo
    from penstock.sim.sizing import checked, layouts

    check_folders(args.json)
    workload, slo = workload_of(args), Slo(args.ttft_slo_s, args.tpot_slo_s)
    degrees, chunks, nodes = (
        numbers("degrees", args.degrees),
        numbers("chunks", args.chunks),
        numbers("nodes", args.nodes),
    )
    machines = machines_of(args)
    least, most = args.devices
    tried = checked(
        layout
        for n in range(least, most + 1)
        for layout in layouts(n, degrees, chunks=(0, *chunks), nodes=nodes, pool_of_both=args.mixed_pool)
    )
    console = Console()
    by_rate = least == most
    found = _rates(machines, tried, workload, slo, args) if by_rate else _cheapest(machines, tried, workload, slo, args)
    console.print(_table(found, by_rate, workload.description, args), soft_wrap=True)
    console.print(verdict(found, by_rate), soft_wrap=True)
    if args.json is not None:
        _write(args, found, workload.description)
    return 0 if any((one.goodput or 0.0) > 0 if by_rate else one.attainment >= args.share for one in found) else 1


def machines_of(args: argparse.Namespace) -> Machines:
    """Raises ConfigError, InputError."""
    from penstock.base.errors import InputError
    from penstock.config.load import given_by
    from penstock.core.replica_roles import DECODE, MIXED, PREFILL
    from penstock.measure.cost import PRICES, find_price
    from penstock.plan.calibrated import is_calibration
    from penstock.plan.devices import find_device
    from penstock.sim.disaggregated import EngineLink
    from penstock.sim.sizing import Machines

    named = {PREFILL: args.prefill_device, DECODE: args.decode_device, MIXED: args.sim_device}
    names = {role: name or args.sim_device for role, name in named.items()}
    if any(is_calibration(name) for name in names.values()):
        raise InputError("--device: a calibration is of one machine as it is; name a device", param="device")
    given = dict(part.partition("=")[::2] for part in args.prices.split(",") if part)
    unknown = sorted(set(given) - set(names.values()))
    if unknown:
        raise InputError(f"--prices: no engine runs on {unknown[0]!r}", param="prices")
    known = {
        name: find_price(given.get(name, name)).per_hour for name in names.values() if name in PRICES or name in given
    }
    spec, model = find_model(args)
    settings = {name: one.value for name, one in given_by(args).items() if name != "model"}
    if args.block_s < 0:
        raise InputError("--block-s must be at least 0", param="block_s")
    node_link = None if args.node_link is None else EngineLink(args.node_link, args.block_s)
    return Machines(
        spec, model, {role: find_device(name) for role, name in names.items()},
        {role: known.get(name, 1.0) for role, name in names.items()}, EngineLink(args.link, args.block_s), node_link,
        settings, args.router,
    )  # fmt: skip


def _rates(
    machines: Machines, tried: list[EngineLayout], workload: Any, slo: Any, args: argparse.Namespace
) -> list[Sized]:
    from penstock.sim.sizing import goodputs

    return goodputs(machines, tried, workload, slo, args.share, said=_said)


def _cheapest(
    machines: Machines, tried: list[EngineLayout], workload: Any, slo: Any, args: argparse.Namespace
) -> list[Sized]:
    """The cheapest without roles, and the cheapest with them."""
    from penstock.sim.sizing import cheapest

    out = []
    for has_roles in (False, True):
        some = [layout for layout in tried if layout.has_roles == has_roles]
        best = cheapest(machines, some, workload, slo, args.share, said=_said)
        out += [best] if best is not None else []
    return sorted(out, key=lambda one: (one.price, one.layout))


def _said(sized: Sized) -> None:
    rate = "" if sized.goodput is None else f", {sized.goodput:.4g} requests/s"
    print(f"{sized.layout.label}: {sized.attainment:.1%}{rate}", flush=True)


def _table(found: list[Sized], by_rate: bool, what: str, args: argparse.Namespace) -> Any:
    from penstock.report.tables import table

    limits = f"TTFT {args.ttft_slo_s:g} s and TPOT {args.tpot_slo_s:g} s for {args.share:.0%}"
    rows = [
        (
            one.layout.label, str(one.layout.num_devices), f"{one.price:.4g}", f"{one.attainment:.1%}",
            f"{one.goodput:.4g}" if one.goodput is not None else "-",
        )
        for one in found[:_SHOWN]
    ]  # fmt: skip
    title = f"{what}; {limits}"
    return table(("engines", "devices", "an hour", "attained", "requests/s"), rows, title=title, box=True)


def verdict(found: list[Sized], by_rate: bool) -> str:
    """Whether it is worth it, in a sentence."""
    apart = next((one for one in found if one.layout.has_roles), None)
    mixed = next((one for one in found if not one.layout.has_roles), None)
    if apart is None or mixed is None:
        kept = "with roles" if apart is not None else "of mixed engines" if mixed is not None else "at all"
        return f"only layouts {kept} keep the limits" if apart or mixed else "no layout keeps the limits"
    if by_rate:
        ratio = (apart.goodput or 0.0) / max(1e-12, mixed.goodput or 0.0)
        return f"with roles {ratio:.2f} times the requests/s of mixed engines on as many devices"
    return f"with roles {apart.price / mixed.price:.2f} times the cost of mixed engines"


def _write(args: argparse.Namespace, found: list[Sized], what: str) -> None:
    import json

    from penstock.sim.sizing import plain

    report = {
        "workload": what, "seed": args.sim_seed, "ttft_slo_s": args.ttft_slo_s, "tpot_slo_s": args.tpot_slo_s,
        "share": args.share, "link_bytes_per_s": args.link, "found": [plain(one) for one in found],
    }  # fmt: skip
    write(args.json, json.dumps(report, indent=1) + "\n")
