"""`penstock plan MODEL`: what fits, how long and how fast, from the model's config alone."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.plan_text import metric_text, short_text, size_text, text_table, three_digits, time_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from penstock.core.events import Decision
    from penstock.plan.operators import Operator
    from penstock.plan.report import Report, Speed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from penstock.cli.plan_parallel import add_arguments as add_parallel_arguments
    from penstock.config.environment import parse_size
    from penstock.config.load import add_arguments as add_engine_arguments

    parser.description = (
        "Say what fits, how long and how fast, before a weight is read. MODEL: a model folder, a folder that has only "
        "a config.json, or a config.json. Exit status 1 if the settings do not fit."
    )
    parser.add_argument(
        "--device", metavar="NAME|FILE", dest="planned_device",
        help="plan for another device: a100-80g, cpu-2core, cpu-ref, h100-sxm, h200, l4, or a .toml or .json file with "
        "its figures (default: this machine with the operations that would run)",
    )  # fmt: skip
    parser.add_argument(
        "--memory", type=parse_size, metavar="BYTES", help="memory to plan for, instead of what is available here"
    )
    parser.add_argument(
        "--context", type=parse_size, default=2048, metavar="N",
        help="tokens of a sequence when its speed is predicted (default: 2048, or what fits)",
    )  # fmt: skip
    parser.add_argument("--explain", action="store_true", help="also print every decision, and where figures come from")
    parser.add_argument(
        "--operators",
        action="store_true",
        help="also print FLOPs and bytes of every operator, of a prompt and of decodes",
    )
    parser.add_argument("--json", action="store_true", help="print the whole report as one JSON object")
    add_parallel_arguments(parser)
    add_engine_arguments(parser, model_positional=True)


def plan(args: argparse.Namespace) -> int:
    """Print the report, or with --devices the plan for several. Returns 0; raises CapacityError, after printing, if the
    settings do not fit."""
    import msgspec

    from penstock.base.errors import CapacityError, ConfigError
    from penstock.cli.plan_parallel import print_parallel
    from penstock.config.load import from_args
    from penstock.core.machine import Machine
    from penstock.families.registry import read_model
    from penstock.families.stretch import stretched
    from penstock.launch.backend import choose_ops, device_of, traits_of
    from penstock.launch.drafts import choose_mtp, draft_specs
    from penstock.launch.hub import local_path
    from penstock.launch.names import check_names
    from penstock.launch.selection import keeping_of
    from penstock.plan.devices import find_device
    from penstock.plan.probe import probe
    from penstock.plan.report import report

    given = {"--memory": args.memory, "--context": args.context}
    for flag, value in (given | {"--devices": args.devices, "--device-memory": args.device_memory}).items():
        if value is not None and value < 1:
            raise ConfigError(f"{flag}: must be at least 1, not {value}")
    config = from_args(args)
    check_names(config)
    own, stored, _, heads = read_model(local_path(config.model.model, config.model.revision, weights=False))
    spec = stretched(own, config.model)
    machine = probe()
    chosen: tuple[Decision, ...] = ()
    traits = None
    if args.planned_device is None:
        config, chosen = choose_ops(config, spec)
        config, speculates = choose_mtp(config, bool(heads))
        chosen = (*chosen, *speculates)
        if config.execution.memory_bytes is not None:
            from penstock.launch.offload import choose_offload

            config, shared = choose_offload(config, spec, machine, stored)
            chosen = (*chosen, *shared)
        device, traits = device_of(config, machine.num_cores), traits_of(config)
    elif config.execution.memory_bytes is not None:
        raise ConfigError("memory_bytes: it is shared out for this machine; leave it or --device away")
    else:
        device = find_device(args.planned_device)
    memory = args.memory or device.memory_bytes
    if memory is not None:
        machine = Machine(num_cores=machine.num_cores, memory_bytes=memory, available_bytes=memory)
    result = report(
        config, spec, machine, device, args.context, draft_specs(config, heads), keeping_of(config), stored, traits
    )
    result = msgspec.structs.replace(result, decisions=(*chosen, *result.decisions))
    if args.devices is not None:
        print_parallel(args, config, spec, result)
        return 0
    if args.json:
        _print_json(config.model.model, result)
    else:
        from rich.console import Console

        _print(Console(), config.model.model, result, explain=args.explain, by_operator=args.operators)
    sys.stdout.flush()  # before the refusal on stderr
    if result.refusal is not None:
        raise CapacityError(result.refusal)
    return 0


def _print_json(model: str, result: Report) -> None:
    import msgspec

    data = {"model": model, **msgspec.to_builtins(result)}
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(data)).decode() + "\n")


def _print(console: Console, model: str, r: Report, *, explain: bool, by_operator: bool) -> None:
    from rich.markup import escape

    name = Path(model).name.removesuffix(".config.json")
    if name == "config.json":
        name = Path(model).resolve().parent.name
    active = f" ({r.num_active_params:,} active per token)" if r.num_active_params < r.num_params else ""
    console.print(
        f"[bold]{escape(name or model)}[/bold]: {r.family}, {r.num_layers} layers, "
        f"{r.num_params:,} parameters{active}, context up to {r.max_position:,} tokens",
        highlight=False,
    )
    where = f"device {r.device.name}" if r.device.memory_bytes is not None else f"this machine ({r.device.name})"
    console.print(f"on {escape(where)} with {size_text(r.available_bytes)} of memory available\n", highlight=False)
    console.print(_memory_table(r))
    if r.contexts:
        console.print(_context_table(r))
        bound = ", all that the model was made for" if r.longest_context == r.max_position else ""
        console.print(
            f"One sequence alone can have up to [bold]{r.longest_context:,}[/bold] tokens{bound}.\n", highlight=False
        )
        console.print(_speed_table(r.speeds))
        console.print(
            f"Predicted from what {escape(r.device.name)} reads and computes at its best, not measured "
            "(--explain: sources).",
            style="dim",
            highlight=False,
        )
        if not r.device.name.startswith(("cpu", "native")):
            console.print("This version of Penstock itself runs on CPUs only.", style="dim")
    if by_operator:
        for step, found in r.operators.items():
            console.print()
            console.print(_operator_table(r, step, found))
    if explain:
        for table in (_decision_table(r), _device_table(r)):
            console.print()
            console.print(table)


def _memory_table(r: Report) -> Table:
    table = text_table("Memory", "what", "bytes", "<remarks")
    by_size: dict[int, list[str]] = {}
    for dtype, num_bytes in r.weight_bytes.items():
        by_size.setdefault(num_bytes, []).append(dtype)
    for num_bytes, dtypes in by_size.items():
        remark = f"as planned ({r.dtype})" if r.dtype in dtypes and r.held_bytes is None else ""
        if num_bytes > r.available_bytes:
            remark = (remark + "; " if remark else "") + "[red]more than is available[/red]"
        table.add_row(f"weights, {' or '.join(dtypes)}", size_text(num_bytes), remark)
    if r.held_bytes is not None:
        table.add_row("weights, as held", size_text(r.held_bytes), f"as planned: {r.held}")
    for group in r.groups:
        what = "state per sequence" if group.kind == "slot" else "KV per token"
        kept = "" if group.window is None else f", the last {group.window:,} tokens of a sequence"
        whose = f" of the draft model {group.model}" if group.model else ""
        table.add_row(what, size_text(group.num_bytes), f"{group.num_layers} layers{whose}, {group.planes}{kept}")
    if len(r.groups) > 1 and r.kv_bytes_per_token:
        table.add_row("KV per token, all", size_text(r.kv_bytes_per_token), "")
    if r.kv_bytes is not None:
        remark = f"{r.max_num_seqs} sequences running, each at most {r.max_model_len:,} tokens"
        table.add_row("KV memory, planned", size_text(r.kv_bytes), remark)
    return table


def _context_table(r: Report) -> Table:
    batches = [f"{n}" for n in r.batches]
    table = text_table("Full-length sequences at once, and the KV they take", "context", *batches, "most")
    for line in r.contexts:
        cells = [
            size_text(n * line.sequence_bytes) if fits else "[dim]no[/dim]"
            for n, fits in zip(r.batches, line.fits, strict=True)
        ]
        table.add_row(f"{line.context:,}", *cells, f"{line.most:,}" if line.most else "[red]none[/red]")
    return table


def _speed_table(speeds: tuple[Speed, ...]) -> Table:
    phases = ("layers", "attention", "head", "overhead")
    title = f"Speed at {speeds[0].context:,} tokens of context, and where the time goes"
    table = text_table(title, "", "tokens/s", "time", *phases, "<limit")
    for s in speeds:
        what = f"decode x{s.batch}" if s.what == "decode" else "prefill"
        if s.fits:
            shares = [f"{s.shares[name]:.0%}" for name in phases]
            table.add_row(what, three_digits(s.tokens_per_s), time_text(s.seconds), *shares, s.limit)
        else:
            table.add_row(what, *["[dim]-[/dim]"] * 6, "[dim]no room[/dim]")
    return table


def _operator_table(r: Report, step: str, found: tuple[Operator, ...]) -> Table:
    ridge = r.device.flops(r.dtype) / r.device.read_bytes_per_s
    title = (
        f"Operators, {step} (all layers; {three_digits(ridge)} FLOPs for a byte keep {r.device.name} busy with both)"
    )
    table = text_table(title, "", "FLOPs", "bytes", "FLOPs/byte", "time", "<limit")
    for line in found:
        cells = (
            short_text(line.flops),
            size_text(line.num_bytes),
            three_digits(line.intensity),
            time_text(line.seconds),
            line.limit,
        )
        table.add_row(line.name, *cells)
    return table


def _decision_table(r: Report) -> Table:
    table = text_table("Decisions", "decision", "<value", "<why")
    for d in r.decisions:
        table.add_row(d.name, str(d.value), d.why)
    return table


def _device_table(r: Report) -> Table:
    from rich.markup import escape

    d = r.device
    rates = ", ".join(f"{dtype} {metric_text(rate)}FLOP/s" for dtype, rate in d.flops_per_s.items())
    table = text_table(f"Device {d.name}", "figure", "<value", "<source")
    for name, value in (
        ("flops_per_s", rates),
        ("read_bytes_per_s", f"{metric_text(d.read_bytes_per_s)}B/s"),
        ("memory_bytes", "this machine's" if d.memory_bytes is None else size_text(d.memory_bytes)),
        ("host_copy_bytes_per_s", f"{metric_text(d.host_copy_bytes_per_s)}B/s"),
        ("step_overhead_s", time_text(d.step_overhead_s)),
        ("layer_overhead_s", time_text(d.layer_overhead_s)),
    ):
        if name == "layer_overhead_s" and not d.layer_overhead_s:
            continue
        table.add_row(name, value, escape(d.sources.get(name, "")))
    return table
