"""`penstock sim --trace FILE --device NAME`: a service on a virtual clock, compared over settings, as one page."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.config import EngineConfig
    from penstock.core.model_spec import ModelSpec
    from penstock.plan.devices import Device
    from penstock.plan.resolve import Plan
    from penstock.sim.metrics import Slo
    from penstock.sim.result import SimResult
    from penstock.sim.workload import Workload

DEFAULT_SPEC = "llama-3.1-8b"
MAX_RUNS = 32


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 1e-9 <= value <= 1e12:
        raise argparse.ArgumentTypeError(f"{text!r} must be positive and finite")
    return value


def _time(text: str) -> float:
    return 0.0 if text.strip() in ("0", "0.0") else _positive(text)


def _count(text: str) -> int:
    from penstock.config.environment import parse_size

    value = parse_size(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be at least 1")
    return value


def _share(text: str) -> float:
    value = _positive(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be at most 1")
    return value


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
    from penstock.config import SETTINGS
    from penstock.config.load import add_arguments as add_engine_arguments

    parser.add_argument(
        "--trace", required=True, metavar="FILE", help="a trace, or synthetic:poisson?rate=2&prompt=512&output=128"
    )
    parser.add_argument("--format", metavar="NAME", help="format of the trace; by default recognised by its content")
    parser.add_argument(
        "--device",
        required=True,
        dest="simulated_device",
        metavar="NAME",
        help="the simulated device, for example h100-sxm",
    )
    parser.add_argument("--spec", metavar="NAME", help=f"a built-in model instead of --model (default: {DEFAULT_SPEC})")
    load = parser.add_argument_group("workload")
    load.add_argument("--limit", type=_count, metavar="N", help="only the first N requests")
    load.add_argument("--duration", type=_positive, metavar="S", help="only what arrives in the first S seconds")
    load.add_argument("--scale-rate", type=_positive, metavar="X", help="requests arrive X times as fast")
    load.add_argument(
        "--arrivals",
        metavar="PROCESS",
        help="other arrival times: poisson:rate=2, gamma:rate=2,cv=3, constant:rate=1, bursts:rate=2,on=5,off=20",
    )
    load.add_argument(
        "--sim-seed", type=int, default=0, metavar="N", help="seed of made-up times and lengths (default: 0)"
    )
    load.add_argument(
        "--prompt", type=_count, default=512, metavar="N", help="prompt tokens, for traces without lengths"
    )
    load.add_argument(
        "--output", type=_count, default=128, metavar="N", help="output tokens, for traces without lengths"
    )
    load.add_argument("--skip-broken", action="store_true", help="count broken lines of a trace instead of refusing it")
    load.add_argument(
        "--truncate", action="store_true", help="shorten requests that do not fit instead of refusing them"
    )
    load.add_argument(
        "--disk-rates", metavar="RATES", help="of the simulated disk of --kv-offload: read=2e9,write=1e9,seconds=1e-4 "
        "(bytes/s, and seconds for each file besides)",
    )  # fmt: skip
    goal = parser.add_argument_group("what is good, and where the results go")
    goal.add_argument("--ttft-slo-s", type=_positive, default=1.0, metavar="S", help="limit of TTFT (default: 1)")
    goal.add_argument("--tpot-slo-s", type=_positive, default=0.1, metavar="S", help="limit of TPOT (default: 0.1)")
    goal.add_argument(
        "--expected-ttft",
        type=_time,
        default=1.0,
        metavar="S",
        help="seconds to the first token that readers expect (1)",
    )
    goal.add_argument(
        "--expected-tds", type=_positive, default=4.8, metavar="N", help="tokens per second that readers read (4.8)"
    )
    goal.add_argument(
        "--find-rate", type=_share, nargs="?", const=0.9, metavar="SHARE",
        help="instead of one run: search the highest request rate at which this share of requests meets both limits "
        "(default: 0.9)",
    )  # fmt: skip
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


def sim(args: argparse.Namespace) -> int:
    """Run every combination of the settings given as lists. Returns the exit status."""
    from penstock.base.errors import InputError
    from penstock.plan.devices import find_device
    from penstock.sim.build import device_plan
    from penstock.sim.metrics import Slo
    from penstock.sim.report import html_page, json_report, table

    for path in (args.out, args.json):
        if path is not None and not path.absolute().parent.is_dir():
            raise InputError(f"{path}: there is no such folder to write to", param="out")
    workload = _workload(args)
    slo = Slo(args.ttft_slo_s, args.tpot_slo_s)
    device = find_device(args.simulated_device)
    # All plans before the first run: what does not fit is said at once, not after an hour.
    planned = [(label, spec, *device_plan(config, spec, device)) for config, spec, label in _configs(args)]
    if args.find_rate is not None:
        _find_rates(planned, device, workload, slo, args)
        return 0
    results = [_run(label, spec, config, plan, device, workload, args) for label, spec, config, plan in planned]
    from rich.console import Console

    Console().print(table(results, slo))
    if args.json is not None:
        _write(args.json, json_report(results, slo))
    if args.out is not None:
        model = results[0].settings["model"]
        _write(args.out, html_page(results, slo, title=f"{workload.name}: {model} on {device.name}"))
    return 0


def _find_rates(
    planned: list[tuple[str, ModelSpec, EngineConfig, Plan]], device: Device, workload: Workload, slo: Slo,
    args: argparse.Namespace,
) -> None:  # fmt: skip
    """One search per combination; prints a row for each."""
    import json

    from rich.console import Console

    from penstock.report.tables import table
    from penstock.sim.goodput import find_goodput

    limits = f"TTFT {slo.ttft_s:g} s and TPOT {slo.tpot_s:g} s"
    title = f"highest rate at which {args.find_rate:.0%} of requests meet {limits}"
    shown = table(("settings", "requests/s", "attained there", "simulated rates"), title=title, box=True)
    report = []
    for label, spec, config, plan in planned:
        run = partial(_run_scaled, label, spec, config, plan, device, workload, args)
        found = find_goodput(run, slo, attainment=args.find_rate)
        best = found.best
        cells = ("none", "-") if best is None else (f"{best.rate:.4g}", f"{best.attainment:.1%}")
        shown.add_row(label, *cells, str(len(found.trials)))
        trials = [{"rate": t.rate, "attainment": t.attainment} for t in found.trials]
        report.append({"label": label, "goodput": None if best is None else best.rate, "trials": trials})
    Console().print(shown)
    if args.json is not None:
        _write(args.json, json.dumps(report, indent=1))


def _run_scaled(
    label: str, spec: ModelSpec, config: EngineConfig, plan: Plan, device: Device, workload: Workload,
    args: argparse.Namespace, factor: float,
) -> SimResult:  # fmt: skip
    return _run(label, spec, config, plan, device, workload.scaled(factor), args)


def _write(path: Path, text: str) -> None:
    from penstock.base.errors import InputError

    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}", param="out") from None
    print(f"wrote {path}", file=sys.stderr)


def _workload(args: argparse.Namespace) -> Workload:
    from penstock.base.errors import InputError
    from penstock.sim.arrivals import parse, seeded
    from penstock.sim.synthetic import PREFIX, synthetic
    from penstock.sim.traces import TraceOptions, open_trace

    if args.sim_seed < 0:
        raise InputError("sim-seed must not be negative", param="sim_seed")
    workload: Workload
    if args.trace.startswith(PREFIX):
        workload = synthetic(args.trace, args.sim_seed)
    else:
        options = TraceOptions(args.skip_broken, args.sim_seed, args.prompt, args.output)
        workload = open_trace(args.trace, options, format=args.format)
    if args.arrivals is not None:
        workload = workload.timed(seeded(parse(args.arrivals), args.sim_seed), args.arrivals)
    elif not workload.has_times:
        raise InputError(f"{args.trace}: has lengths but no times; add for example --arrivals poisson:rate=2")
    if args.scale_rate is not None:
        workload = workload.scaled(args.scale_rate)
    if args.duration is not None:
        workload = workload.until(args.duration)
    return workload if args.limit is None else workload.limited(args.limit)


def _configs(args: argparse.Namespace) -> list[tuple[EngineConfig, ModelSpec, str]]:
    """(settings, spec, label) of every run. Raises ConfigError for settings, ModelError for a broken config.json."""
    from penstock.base.errors import ConfigError
    from penstock.config import SETTINGS, from_args
    from penstock.families.stretch import stretched
    from penstock.launch.names import check_names

    spec, name = _spec(args)
    given = {key: value for key, value in vars(args).items() if key != "model"}
    lists = {key: value for key, value in given.items() if key in SETTINGS and isinstance(value, list)}
    out: list[tuple[EngineConfig, ModelSpec, str]] = []
    for values in itertools.product(*lists.values()):
        if len(out) == MAX_RUNS:
            raise ConfigError(f"more than {MAX_RUNS} combinations to compare; give shorter lists")
        chosen = dict(zip(lists, values, strict=True))
        config = from_args(argparse.Namespace(**(given | chosen), model=name))
        check_names(config)
        label = ", ".join(_labelled(key, value) for key, value in chosen.items())
        out.append((config, stretched(spec, config.model), label or name))
    return out


def _labelled(key: str, value: Any) -> str:
    short = {
        "max_num_batched_tokens": "tokens",
        "max_num_seqs": "seqs",
        "block_size": "block",
        "max_model_len": "context",
    }
    return str(value) if isinstance(value, str) else f"{short.get(key, key.replace('_', ' '))} {value}"


def _spec(args: argparse.Namespace) -> tuple[ModelSpec, str]:
    from penstock.base.errors import ConfigError
    from penstock.families.registry import read_spec
    from penstock.sim.specs import find_spec

    model = getattr(args, "model", None)
    if model is None:
        name = args.spec or DEFAULT_SPEC
        return find_spec(name), name
    if args.spec is not None:
        raise ConfigError("--model and --spec both name a model; give one of them", field="spec")
    path = Path(model)
    return read_spec(model), path.parent.name if path.name == "config.json" else path.name.removesuffix(".config.json")


def _run(
    label: str,
    spec: ModelSpec,
    config: EngineConfig,
    plan: Plan,
    device: Device,
    workload: Workload,
    args: argparse.Namespace,
) -> SimResult:
    from dataclasses import replace

    from penstock.base.clock import VirtualClock
    from penstock.core.qoe import Expected
    from penstock.executor.sim_files import SimFolder
    from penstock.plan.cost import RooflineTimer
    from penstock.sim.build import build_sim
    from penstock.sim.driver import SimLimits, simulate
    from penstock.sim.store import parse_rates

    timer = RooflineTimer(spec, device, dtype=plan.dtype, kv_dtype=plan.kv_dtype)
    clock = VirtualClock()
    core = build_sim(
        config, spec, plan, timer, clock, depth=config.execution.depth, seconds_budget=args.seconds_budget,
        folder=None if args.disk_rates is None else SimFolder(parse_rates(args.disk_rates)),
    )  # fmt: skip
    limits = SimLimits(plan.max_model_len, plan.kv_capacity_tokens, spec.vocab_size, truncate=args.truncate)
    reader = Expected(args.expected_ttft, args.expected_tds).check()
    with _Bar(label, workload.num_requests) as bar:
        result = simulate(core, clock, workload, limits, label=label, reader=reader, progress=bar.show)
    settings = {
        "model": config.model.model,
        "device": device.name,
        "parameters": f"{spec.num_params:,}",
        "cost model": timer.name,
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
        "steps in flight": config.execution.depth,
    }
    return replace(result, settings=settings, decisions=plan.decisions)


class _Bar:
    """Requests done, virtual time and how much faster it passes than real time; only where a person is looking."""

    def __init__(self, label: str, total: int | None) -> None:
        self._label = label
        self._total = total
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> _Bar:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.markup import escape
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            self._bar = Progress(
                TextColumn(escape(self._label)),
                BarColumn(),
                TextColumn("{task.completed:,.0f} requests"),
                TextColumn("{task.fields[note]}"),
                TimeElapsedColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task("simulating", total=self._total, note="")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, progress: Any) -> None:
        if self._bar is not None:
            fast = progress.now_s / progress.wall_s if progress.wall_s > 0 else 0.0
            note = f"{progress.now_s:,.0f} s of service, {fast:,.0f} x real time"
            self._bar.update(self._task, completed=progress.done, note=note)
