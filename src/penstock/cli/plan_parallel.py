"""`penstock plan MODEL --devices N`: how to cut a model up for several devices, and what that gives."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from penstock.cli.plan_text import size_text, text_table, three_digits, time_text

if TYPE_CHECKING:
    from penstock.config import EngineConfig
    from penstock.core.model_spec import ModelSpec
    from penstock.plan.parallel import ParallelPlan
    from penstock.plan.report import Report

_SEQUENCES = 64  # what max_num_seqs is, if nothing is said


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from penstock.config.environment import parse_size

    group = parser.add_argument_group("several devices (a prediction)")
    group.add_argument(
        "--devices", type=int, metavar="N",
        help="plan for up to N of the device instead: stages of layers, ranks of each, micro-batches and batch with "
        "the most tokens per second. Of --context tokens a quarter is output; --max-num-seqs sequences wait "
        f"(default: {_SEQUENCES})",
    )  # fmt: skip
    group.add_argument(
        "--link-bandwidth", type=parse_size, default=25_000_000_000, metavar="BYTES",
        help="bytes that a device can give to others in a second, such as 300g (default: 25g)",
    )  # fmt: skip
    group.add_argument(
        "--link-latency-us", type=float, default=10.0, metavar="US",
        help="microseconds that an exchange takes at least (default: 10)",
    )  # fmt: skip
    group.add_argument(
        "--device-memory", type=parse_size, metavar="BYTES",
        help="memory of each for weights and KV (default: the device's)",
    )  # fmt: skip
    group.add_argument("--max-token-ms", type=float, metavar="MS", help="milliseconds that a token may take at most")


def print_parallel(args: argparse.Namespace, config: EngineConfig, spec: ModelSpec, r: Report) -> None:
    """Search for the plan and print it. Raises ConfigError or CapacityError as `plan_parallel`."""
    import msgspec

    from penstock.plan.parallel import plan_parallel
    from penstock.plan.parallel_cost import DeviceLink, SequenceLoad

    output = max(1, args.context // 4)
    load = SequenceLoad(max(1, args.context - output), output, config.scheduler.max_num_seqs or _SEQUENCES)
    memory = args.device_memory if args.device_memory is not None else r.available_bytes
    found = plan_parallel(
        spec, r.device, args.devices, memory, DeviceLink(args.link_bandwidth, args.link_latency_us / 1e6), load,
        dtype=r.dtype, kv_dtype=r.kv_dtype, max_token_s=None if args.max_token_ms is None else args.max_token_ms / 1e3,
    )  # fmt: skip
    if args.json:
        data = {"model": config.model.model, **msgspec.to_builtins(found), "load": load._asdict()}
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(data)).decode() + "\n")
    else:
        _print(found, r, args.devices, memory)
    sys.stdout.flush()


def _print(p: ParallelPlan, r: Report, devices: int, memory: int) -> None:
    from rich.console import Console

    title = f"{p.num_devices} of {devices} x {r.device.name} with {size_text(memory)} each"
    table = text_table(title, "stage", "layers", "devices", "time", "memory of each", "on the wire")
    for i, s in enumerate(p.stages):
        layers = f"{s.first}-{s.last - 1}"
        cells = (layers, f"{s.degree}", time_text(s.seconds), size_text(s.memory_bytes), size_text(s.wire_bytes))
        table.add_row(f"{i + 1}", *cells)
    console = Console()
    console.print(table)
    parts = f"{p.micro_batches} micro-batches" if p.micro_batches > 1 else "one micro-batch"
    console.print(
        f"[bold]{three_digits(p.tokens_per_s)}[/bold] tokens/s: a batch of {p.batch} in {parts} gets a token every "
        f"{time_text(p.step_s)}; {p.bubble_share:.0%} of that is the pipeline filling and draining, and "
        f"{size_text(p.wire_bytes)} go over the links.\nLimit: {p.limit}.\nPredicted from what {r.device.name} reads "
        "and computes at its best, not measured.",
        highlight=False,
    )
