"""The workload of a simulation as flags: a trace or a formula, cut, sped up or given other arrival times."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.core.model_spec import ModelSpec
    from penstock.sim.workload import Workload

DEFAULT_SPEC = "llama-3.1-8b"


def positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 1e-9 <= value <= 1e12:
        raise argparse.ArgumentTypeError(f"{text!r} must be positive and finite")
    return value


def count(text: str) -> int:
    from penstock.config.environment import parse_size

    value = parse_size(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be at least 1")
    return value


def share(text: str) -> float:
    value = positive(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be at most 1")
    return value


def add_workload(parser: argparse.ArgumentParser) -> Any:
    """Returns the group of flags."""
    load = parser.add_argument_group("workload")
    load.add_argument(
        "--expected-ttft",
        type=float,
        default=1.0,
        metavar="S",
        help="seconds to the first token that readers expect (1)",
    )
    load.add_argument(
        "--expected-tds", type=float, default=4.8, metavar="N", help="tokens per second that readers read (4.8)"
    )
    load.add_argument("--trace", metavar="FILE", help="a trace, or synthetic:poisson?rate=2&prompt=512&output=128")
    load.add_argument("--format", metavar="NAME", help="format of the trace; by default recognised by its content")
    load.add_argument("--limit", type=count, metavar="N", help="only the first N requests")
    load.add_argument("--duration", type=positive, metavar="S", help="only what arrives in the first S seconds")
    load.add_argument("--scale-rate", type=positive, metavar="X", help="requests arrive X times as fast")
    load.add_argument("--repeat", type=count, metavar="N", help="the whole trace N times in a row")
    load.add_argument("--scale-lengths", type=positive, metavar="X", help="prompts and outputs are X times as long")
    load.add_argument(
        "--arrivals",
        metavar="PROCESS",
        help="other arrival times: poisson:rate=2, gamma:rate=2,cv=3, constant:rate=1, bursts:rate=2,on=5,off=20, "
        "daily:rate=2,peak=4,period=86400",
    )
    load.add_argument(
        "--sim-seed", type=int, default=0, metavar="N", help="seed of made-up times and lengths (default: 0)"
    )
    load.add_argument(
        "--prompt", type=count, default=512, metavar="N", help="prompt tokens, for traces without lengths"
    )
    load.add_argument(
        "--output", type=count, default=128, metavar="N", help="output tokens, for traces without lengths"
    )
    load.add_argument("--skip-broken", action="store_true", help="count broken lines of a trace instead of refusing it")
    load.add_argument(
        "--truncate", action="store_true", help="shorten requests that do not fit instead of refusing them"
    )
    return load


def workload_of(args: argparse.Namespace) -> Workload:
    from penstock.base.errors import InputError
    from penstock.core.qoe import Expected
    from penstock.sim.arrivals import parse, seeded
    from penstock.sim.synthetic import PREFIX, synthetic
    from penstock.sim.traces import TraceOptions, open_trace

    if args.sim_seed < 0:
        raise InputError("sim-seed must not be negative", param="sim_seed")
    if args.trace is None:
        raise InputError("--trace names the requests: a file, or synthetic:poisson?rate=2", param="trace")
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
    if args.repeat is not None:
        workload = workload.repeated(args.repeat)
    if args.scale_lengths is not None:
        workload = workload.resized(args.scale_lengths)
    if args.scale_rate is not None:
        workload = workload.scaled(args.scale_rate)
    if args.duration is not None:
        workload = workload.until(args.duration)
    workload = workload.read_by(Expected(args.expected_ttft, args.expected_tds).check())
    return workload if args.limit is None else workload.limited(args.limit)


def find_model(args: argparse.Namespace) -> tuple[ModelSpec, str]:
    """The model that --model or --spec names, and its name. Raises ConfigError, ModelError."""
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
