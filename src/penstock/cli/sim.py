"""`penstock sim --trace FILE --device NAME`: a service on a virtual clock, compared over settings, as one page."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli import sim_disaggregate, sim_measured, sim_search
from penstock.cli.sim_output import Bar, check_folders, write
from penstock.cli.sim_workload import DEFAULT_SPEC, add_workload, count, find_model, positive, share, workload_of

if TYPE_CHECKING:
    from penstock.sim.autoscale import ScaledRun
    from penstock.sim.metrics import Slo
    from penstock.sim.result import Charges, SimResult
    from penstock.sim.service import SimulatedService
    from penstock.sim.workload import Workload

MAX_RUNS = 32
ACTIONS = {"calibrate": sim_measured.calibrate, "compare": sim_measured.compare, "search": sim_search.search,
           "disaggregate": sim_disaggregate.disaggregate}  # fmt: skip


def _several(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """`a,b` is two values to compare; one value stays itself."""

    def read(text: str) -> Any:
        parts: list[str] = []
        for part in text.split(","):
            # `dynamic:size=8,timeout_s=1` and `disk:FOLDER,20GiB` are one value each: it belongs to the name before it.
            knob = "=" in part and ":" not in part
            if parts and ":" in parts[-1] and (knob or (parts[-1].startswith("disk:") and part[:1].isdigit())):
                parts[-1] += "," + part
            else:
                parts.append(part)
        values = [convert(part) for part in parts]
        return values if len(values) > 1 else values[0]

    read.__name__ = getattr(convert, "__name__", "value")
    return read


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from penstock.cli import money
    from penstock.config import SETTINGS
    from penstock.config.load import add_arguments as add_engine_arguments

    kinds = parser.add_subparsers(dest="sim_action", metavar="{calibrate,compare,search,disaggregate}", required=False)
    sim_measured.add_arguments(kinds)
    sim_search.add_arguments(kinds)
    sim_disaggregate.add_arguments(kinds)
    parser.add_argument(
        "--device", dest="sim_device", metavar="NAME|FILE",
        help="the simulated device, for example h100-sxm, or a file that penstock sim calibrate has written",
    )  # fmt: skip
    parser.add_argument("--spec", metavar="NAME", help=f"a built-in model instead of --model (default: {DEFAULT_SPEC})")
    load = add_workload(parser)
    load.add_argument(
        "--disk-rates", metavar="RATES", help="of the simulated disk of --kv-offload: read=2e9,write=1e9,seconds=1e-4 "
        "(bytes/s, and seconds for each file besides)",
    )  # fmt: skip
    add_replicas(parser)
    goal = parser.add_argument_group("what is good, and where the results go")
    goal.add_argument("--ttft-slo-s", type=positive, default=1.0, metavar="S", help="limit of TTFT (default: 1)")
    goal.add_argument("--tpot-slo-s", type=positive, default=0.1, metavar="S", help="limit of TPOT (default: 0.1)")
    goal.add_argument(
        "--find-rate", type=share, nargs="?", const=0.9, metavar="SHARE",
        help="instead of one run: search the highest request rate at which this share of requests meets both limits "
        "(default: 0.9)",
    )  # fmt: skip
    goal.add_argument("--warmup", type=positive, metavar="S", help="seconds that steady rates leave out (MSER-5 finds)")
    money.add_arguments(goal)
    goal.add_argument("--out", type=Path, metavar="FILE.html", help="write a page with charts")
    goal.add_argument("--json", type=Path, metavar="FILE.json", help="write all numbers")
    goal.add_argument(
        "--seconds-budget", action="store_true", help="also bound each step in seconds by the device's cost model"
    )
    add_engine_arguments(parser)
    for action in parser._actions:
        setting = SETTINGS.get(action.dest)
        if setting is not None and action.type is not None and action.dest not in ("model", "tokenizer", "plugin"):
            action.type = _several(action.type)  # type: ignore[arg-type]


def add_replicas(parser: argparse.ArgumentParser) -> None:
    from penstock.route import ROUTERS  # nobody else of the command line needs it

    group = parser.add_argument_group("several engines")
    group.add_argument(
        "--replicas", type=replicas, metavar="N|LEAST..MOST",
        help="so many engines behind a router; from LEAST to MOST, with --autoscale",
    )  # fmt: skip
    group.add_argument(
        "--autoscale", metavar="NAME",
        help="adds and removes engines, as --autoscale of a server: fixed, reactive, predictive, with knobs "
        "(reactive:target=12,down_s=120)",
    )  # fmt: skip
    group.add_argument(
        "--start-s", type=positive, default=20.0, metavar="S", help="from an engine's order to ready (default: 20)"
    )
    group.add_argument(
        "--router", choices=ROUTERS.names(), default="round-robin",
        help="who gets a request, as --route-policy of a server (default: round-robin). All others look at the loads "
        "of engines, for which these run in one process",
    )  # fmt: skip
    group.add_argument("--processes", type=count, metavar="N", help="that simulate (default: one for each core)")


def replicas(text: str) -> int | tuple[int, int]:
    """`4`, or `1..8`."""
    least, dots, most = text.partition("..")
    return (count(least), count(most)) if dots else count(text)


def _check_autoscale(args: argparse.Namespace) -> None:
    """Raises InputError, ConfigError."""
    from penstock.base.errors import InputError

    if isinstance(args.replicas, tuple) != (args.autoscale is not None):
        raise InputError("--autoscale goes with a range, for example --replicas 1..8", param="autoscale")
    if isinstance(args.replicas, tuple):
        from penstock.sim.autoscale import ScaledReplicas

        least, most = args.replicas
        ScaledReplicas(None, args.autoscale, least, most).check()  # type: ignore[arg-type]
        if args.find_rate is not None:
            raise InputError(
                "--find-rate is of a number of engines that stays; leave --autoscale away", param="find_rate"
            )


def sim(args: argparse.Namespace) -> int:
    """Run every combination of the settings given as lists. Returns the exit status."""
    from dataclasses import replace

    from penstock.base.errors import InputError
    from penstock.sim.metrics import Slo
    from penstock.sim.report import html_page, json_report, table

    if args.sim_action is not None:
        return ACTIONS[args.sim_action](args)
    check_folders(args.out, args.json)
    if args.sim_device is None:
        raise InputError("--device names what is simulated, for example --device h100-sxm", param="device")
    workload = workload_of(args)
    slo = Slo(args.ttft_slo_s, args.tpot_slo_s)
    if args.replicas is not None and args.disk_rates is not None:
        raise InputError("--disk-rates is of one engine's folder; leave it away with --replicas", param="replicas")
    _check_autoscale(args)
    bill = _bill(args)
    # All plans before the first run: what does not fit is said at once, not after an hour.
    planned = _planned(args)
    if args.find_rate is not None:
        _find_rates(planned, workload, slo, args)
        return 0
    results = [replace(_run(service, workload, args), bill=bill) for service in planned]
    from rich.console import Console

    Console().print(table(results, slo))
    if args.json is not None:
        write(args.json, json_report(results, slo))
    if args.out is not None:
        model = results[0].settings["model"]
        write(args.out, html_page(results, slo, title=f"{workload.name}: {model} on {planned[0].device_name}"))
    return 0


def _bill(args: argparse.Namespace) -> Charges:
    """Prices and watts that are known, before anything runs. Raises ConfigError."""
    from penstock.measure.cost import find_price
    from penstock.measure.energy import POWERS, find_carbon, find_power
    from penstock.sim.result import Charges

    named = args.power or (args.sim_device if args.sim_device in POWERS else None)
    return Charges(
        price=None if args.machine_price is None else find_price(args.machine_price),
        power=None if named is None else find_power(named),
        carbon=find_carbon(args.carbon_intensity), warmup_s=args.warmup,
    )  # fmt: skip


def _find_rates(planned: list[SimulatedService], workload: Workload, slo: Slo, args: argparse.Namespace) -> None:
    """One search per combination; prints a row for each."""
    import json

    from rich.console import Console

    from penstock.report.tables import table
    from penstock.sim.goodput import find_goodput

    limits = f"TTFT {slo.ttft_s:g} s and TPOT {slo.tpot_s:g} s"
    title = f"highest rate at which {args.find_rate:.0%} of requests meet {limits}"
    shown = table(("settings", "requests/s", "attained there", "simulated rates"), title=title, box=True)
    report = []
    for service in planned:
        run = partial(_run_scaled, service, workload, args)
        found = find_goodput(run, slo, attainment=args.find_rate)
        best = found.best
        cells = ("none", "-") if best is None else (f"{best.rate:.4g}", f"{best.attainment:.1%}")
        shown.add_row(service.label, *cells, str(len(found.trials)))
        trials = [{"rate": t.rate, "attainment": t.attainment} for t in found.trials]
        report.append({"label": service.label, "goodput": None if best is None else best.rate, "trials": trials})
    Console().print(shown)
    if args.json is not None:
        write(args.json, json.dumps(report, indent=1))


def _run_scaled(service: SimulatedService, workload: Workload, args: argparse.Namespace, factor: float) -> SimResult:
    return _run(service, workload.scaled(factor), args)


def _planned(args: argparse.Namespace) -> list[SimulatedService]:
    """Of every combination. Raises ConfigError for settings, CapacityError, ModelError for a broken config.json."""
    from penstock.base.errors import ConfigError
    from penstock.config import SETTINGS

    given = {key: value for key, value in vars(args).items() if key != "model"}
    lists = {key: value for key, value in given.items() if key in SETTINGS and isinstance(value, list)}
    if prod(len(values) for values in lists.values()) > MAX_RUNS:
        raise ConfigError(f"more than {MAX_RUNS} combinations to compare; give shorter lists")
    out: list[SimulatedService] = []
    plan = _planner(args)
    for values in itertools.product(*lists.values()):
        chosen = dict(zip(lists, values, strict=True))
        label = ", ".join(_labelled(key, value) for key, value in chosen.items())
        out.append(plan(label, given | chosen))
    return out


def _planner(args: argparse.Namespace) -> Callable[[str, dict[str, Any]], SimulatedService]:
    """Makes a service of a label and what is given."""
    from penstock.config import from_args
    from penstock.config.load import given_by
    from penstock.families.stretch import stretched
    from penstock.launch.names import check_names
    from penstock.plan.calibrated import check_spec, is_calibration, load
    from penstock.plan.devices import find_device
    from penstock.plan.simulated import device_plan
    from penstock.sim.calibrated import config_for, plan_for
    from penstock.sim.service import SimulatedService

    def on_device(label: str, given: dict[str, Any]) -> SimulatedService:
        config = from_args(argparse.Namespace(**given, model=name))
        check_names(config)
        own = stretched(spec, config.model)
        return SimulatedService(label or name, own, *device_plan(config, own, device), device, args.seconds_budget)

    def on_measured(label: str, given: dict[str, Any]) -> SimulatedService:
        values = {key: one.value for key, one in given_by(argparse.Namespace(**given)).items()}
        config = config_for(measured, values)
        plan = plan_for(measured, config)
        return SimulatedService(label or measured.model, measured.spec, config, plan, measured, args.seconds_budget)

    if is_calibration(args.sim_device):
        measured = load(args.sim_device)
        if getattr(args, "model", None) is not None or args.spec is not None:
            check_spec(measured, find_model(args)[0], args.sim_device)
        return on_measured
    spec, name = find_model(args)
    device = find_device(args.sim_device)
    return on_device


def _labelled(key: str, value: Any) -> str:
    short = {
        "max_num_batched_tokens": "tokens",
        "max_num_seqs": "seqs",
        "block_size": "block",
        "max_model_len": "context",
    }
    return str(value) if isinstance(value, str) else f"{short.get(key, key.replace('_', ' '))} {value}"


def _run_scaled_fleet(
    service: SimulatedService, workload: Workload, args: argparse.Namespace, bar: Bar
) -> tuple[SimResult, ScaledRun]:
    """Prints every step that the scaler took."""
    from penstock.sim.autoscale import ScaledReplicas

    least, most = args.replicas
    fleet = ScaledReplicas(service, args.autoscale, least, most, args.start_s, router=args.router)
    scaled = fleet.run(workload, truncate=args.truncate, progress=bar.show)
    for step in scaled.steps:
        print(f"{step.at_s:10.0f} s: {step.had} -> {step.wanted} engines: {step.why}")
    print(f"{scaled.replica_s:,.0f} replica-seconds, {scaled.most} engines at once, in {service.label}")
    return scaled.result, scaled


def _run(service: SimulatedService, workload: Workload, args: argparse.Namespace) -> SimResult:
    from dataclasses import replace

    from penstock.executor.sim_files import SimFolder
    from penstock.plan.probe import probe
    from penstock.sim.alone import with_alone
    from penstock.sim.replicas import Replicas
    from penstock.sim.store import parse_rates

    config, plan = service.config, service.plan
    folder = None if args.disk_rates is None else SimFolder(parse_rates(args.disk_rates))
    with Bar(service.label, workload.num_requests) as bar:
        scaled = None
        if isinstance(args.replicas, tuple):
            result, scaled = _run_scaled_fleet(service, workload, args, bar)
        elif args.replicas is None:
            result = service.run(workload, truncate=args.truncate, folder=folder, progress=bar.show)
        else:
            group = Replicas(service, args.replicas, args.router, args.processes or probe().num_cores)
            result = group.run(workload, truncate=args.truncate, progress=bar.show)
    result = with_alone(result, service.timer, plan.max_num_batched_tokens)
    settings = {
        "model": config.model.model,
        "device": service.device_name,
        "parameters": f"{service.spec.num_params:,}",
        "cost model": service.timer_name,
        "dtype": plan.dtype,
        "kv_cache_dtype": plan.kv_dtype,
        "scheduling_policy": config.scheduler.scheduling_policy,
        "max_num_seqs": plan.max_num_seqs,
        "max_num_batched_tokens": plan.max_num_batched_tokens,
        "enable_chunked_prefill": config.scheduler.enable_chunked_prefill,
        "long_prefill_token_threshold": plan.long_prefill_token_threshold,
        "seconds budget": args.seconds_budget,
        "max_model_len": plan.max_model_len,
        "block_size": plan.block_size,
        "KV pool, tokens": f"{plan.kv_capacity_tokens:,}",
        "prefix cache": config.cache.prefix_cache if config.cache.enable_prefix_caching else "off",
        "eviction": config.cache.eviction,
        "preemption_mode": config.scheduler.preemption_mode,
        "swap_space, GiB": config.cache.swap_space,
        "kv_offload": config.cache.kv_offload,
        "replicas": "{}..{}".format(*args.replicas) if scaled else args.replicas or 1,
        "router": args.router if args.replicas else "none",
        **(
            {}
            if scaled is None
            else {
                "autoscale": args.autoscale,
                "start, s": args.start_s,
                "replica-seconds": f"{scaled.replica_s:,.0f}",
                "engines at once": scaled.most,
                "times scaled": len(scaled.steps),
            }
        ),
        "steps in flight": config.execution.depth,
    }
    return replace(result, settings=settings, decisions=plan.decisions)
