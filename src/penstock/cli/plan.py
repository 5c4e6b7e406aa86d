"""`penstock plan MODEL`: what fits, how long and how fast, from the model's config alone."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from penstock.core.events import Decision
    from penstock.plan.operators import Operator
    from penstock.plan.report import Report, Speed


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
    add_engine_arguments(parser, model_positional=True)


def plan(args: argparse.Namespace) -> int:
    """Print the report. Returns 0; raises CapacityError, after printing, if the settings do not fit."""
    import msgspec

    from penstock.base.errors import CapacityError, ConfigError
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

    for flag, value in (("--memory", args.memory), ("--context", args.context)):
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
    console.print(f"on {escape(where)} with {_size(r.available_bytes)} of memory available\n", highlight=False)
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


def _table(title: str, *columns: str) -> Table:
    """Columns are right-aligned, except for the first one and those written with a leading "<"."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for i, column in enumerate(columns):
        left = i == 0 or column.startswith("<")
        table.add_column(column.removeprefix("<"), justify="left" if left else "right", overflow="fold")
    return table


def _memory_table(r: Report) -> Table:
    table = _table("Memory", "what", "bytes", "<remarks")
    by_size: dict[int, list[str]] = {}
    for dtype, num_bytes in r.weight_bytes.items():
        by_size.setdefault(num_bytes, []).append(dtype)
    for num_bytes, dtypes in by_size.items():
        remark = f"as planned ({r.dtype})" if r.dtype in dtypes and r.held_bytes is None else ""
        if num_bytes > r.available_bytes:
            remark = (remark + "; " if remark else "") + "[red]more than is available[/red]"
        table.add_row(f"weights, {' or '.join(dtypes)}", _size(num_bytes), remark)
    if r.held_bytes is not None:
        table.add_row("weights, as held", _size(r.held_bytes), f"as planned: {r.held}")
    for group in r.groups:
        what = "state per sequence" if group.kind == "slot" else "KV per token"
        kept = "" if group.window is None else f", the last {group.window:,} tokens of a sequence"
        whose = f" of the draft model {group.model}" if group.model else ""
        table.add_row(what, _size(group.num_bytes), f"{group.num_layers} layers{whose}, {group.planes}{kept}")
    if len(r.groups) > 1 and r.kv_bytes_per_token:
        table.add_row("KV per token, all", _size(r.kv_bytes_per_token), "")
    if r.kv_bytes is not None:
        remark = f"{r.max_num_seqs} sequences running, each at most {r.max_model_len:,} tokens"
        table.add_row("KV memory, planned", _size(r.kv_bytes), remark)
    return table


def _context_table(r: Report) -> Table:
    batches = [f"{n}" for n in r.batches]
    table = _table("Full-length sequences at once, and the KV they take", "context", *batches, "most")
    for line in r.contexts:
        cells = [
            _size(n * line.sequence_bytes) if fits else "[dim]no[/dim]"
            for n, fits in zip(r.batches, line.fits, strict=True)
        ]
        table.add_row(f"{line.context:,}", *cells, f"{line.most:,}" if line.most else "[red]none[/red]")
    return table


def _speed_table(speeds: tuple[Speed, ...]) -> Table:
    phases = ("layers", "attention", "head", "overhead")
    title = f"Speed at {speeds[0].context:,} tokens of context, and where the time goes"
    table = _table(title, "", "tokens/s", "time", *phases, "<limit")
    for s in speeds:
        what = f"decode x{s.batch}" if s.what == "decode" else "prefill"
        if s.fits:
            shares = [f"{s.shares[name]:.0%}" for name in phases]
            table.add_row(what, _three(s.tokens_per_s), _time(s.seconds), *shares, s.limit)
        else:
            table.add_row(what, *["[dim]-[/dim]"] * 6, "[dim]no room[/dim]")
    return table


def _operator_table(r: Report, step: str, found: tuple[Operator, ...]) -> Table:
    ridge = r.device.flops(r.dtype) / r.device.read_bytes_per_s
    title = f"Operators, {step} (all layers; {_three(ridge)} FLOPs for a byte keep {r.device.name} busy with both)"
    table = _table(title, "", "FLOPs", "bytes", "FLOPs/byte", "time", "<limit")
    for line in found:
        cells = (_short(line.flops), _size(line.num_bytes), _three(line.intensity), _time(line.seconds), line.limit)
        table.add_row(line.name, *cells)
    return table


def _decision_table(r: Report) -> Table:
    table = _table("Decisions", "decision", "<value", "<why")
    for d in r.decisions:
        table.add_row(d.name, str(d.value), d.why)
    return table


def _device_table(r: Report) -> Table:
    from rich.markup import escape

    d = r.device
    rates = ", ".join(f"{dtype} {_metric(rate)}FLOP/s" for dtype, rate in d.flops_per_s.items())
    table = _table(f"Device {d.name}", "figure", "<value", "<source")
    for name, value in (
        ("flops_per_s", rates),
        ("read_bytes_per_s", f"{_metric(d.read_bytes_per_s)}B/s"),
        ("memory_bytes", "this machine's" if d.memory_bytes is None else _size(d.memory_bytes)),
        ("host_copy_bytes_per_s", f"{_metric(d.host_copy_bytes_per_s)}B/s"),
        ("step_overhead_s", _time(d.step_overhead_s)),
        ("layer_overhead_s", _time(d.layer_overhead_s)),
    ):
        if name == "layer_overhead_s" and not d.layer_overhead_s:
            continue
        table.add_row(name, value, escape(d.sources.get(name, "")))
    return table


def _size(num_bytes: int) -> str:
    for unit, size in (("TiB", 1024**4), ("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if num_bytes >= size:
            return f"{_three(num_bytes / size)} {unit}"
    return f"{num_bytes} B"


def _metric(rate: float) -> str:
    """With the unit's prefix: 989e12 is "989 T"."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if rate >= size:
            return f"{rate / size:g} {prefix}"
    return f"{rate:g} "


def _short(count: int) -> str:
    """Three digits and a prefix; small counts as they are."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if count >= size:
            return f"{_three(count / size)} {prefix}"
    return f"{count:,}"


def _three(value: float) -> str:
    """Three digits that count."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{_three(seconds)} s"
    return f"{_three(seconds * 1e3)} ms" if seconds >= 1e-4 or not seconds else f"{_three(seconds * 1e6)} us"
