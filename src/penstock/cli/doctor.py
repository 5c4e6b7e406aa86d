"""`penstock doctor`: the machine, the parts, and why a part is not available."""

from __future__ import annotations

import argparse
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from penstock.report.tables import table

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.core.machine import Machine


def doctor(args: argparse.Namespace) -> int:
    from rich.console import Console

    from penstock import __version__
    from penstock.backends.native.backend import NOT_BUILT
    from penstock.launch.inventory import inventory
    from penstock.ops.native.library import best_library
    from penstock.plan.probe import probe

    console = Console()
    machine = probe()
    console.print(f"penstock {__version__}, {machine.arch}, {machine.num_cores} usable cores")
    console.print(
        f"memory: {machine.available_bytes / 2**30:.1f} GiB available of {machine.memory_bytes / 2**30:.1f} GiB"
    )
    packages = table(("package", "version"), title="Libraries", left=2, box=True)
    for name in ("numpy", "msgspec", "tokenizers", "jinja2", "rich"):
        try:
            packages.add_row(name, version(name))
        except PackageNotFoundError:
            packages.add_row(name, "[red]missing[/red]: reinstall with pip install penstock")
    console.print(packages)
    parts = table(("kind", "name", "state"), title="Parts", left=3, box=True)
    bad = 0
    for part in inventory():
        bad += part.problem is not None
        parts.add_row(part.kind, part.name, "available" if part.problem is None else f"[red]{part.problem}[/red]")
    console.print(parts)
    library = best_library()
    native = NOT_BUILT if library is None else f"native for {library.pst_isa_name().decode()}"
    console.print(
        f"Kernels: {native}. In numpy: ref (row by row, exact in every batch) and blas (whole batches, faster); these "
        "compute in float32 and widen bfloat16 and float16 weights."
    )
    if library is not None:
        _stored_weights(console, machine)
    if args.model is not None:
        _model(args.model, console)
    return 1 if bad else 0


def _stored_weights(console: Console, machine: Machine) -> None:
    """What `--activation-quantization` and `--packed-weights` are here, whatever the model."""
    from penstock.core.panels import ROW_BLOCKS
    from penstock.ops.native.packed_file import PackedStore
    from penstock.plan.memory import gib
    from penstock.plan.weights import most_copied

    store = PackedStore()
    blocks = " or ".join(map(str, ROW_BLOCKS))
    console.print(
        "Weights stored as codes: --activation-quantization int8, the default, rounds activations to 8 bits with a "
        f"scale per {blocks} inputs, as their groups allow. Packed once, they are kept in {store.folder} "
        f"({gib(store.num_bytes())} now). --packed-weights auto copies those of up to "
        f"{gib(most_copied(machine))} into memory now, and maps larger ones.",
        highlight=False, markup=False,
    )  # fmt: skip


def _model(path: str, console: Console) -> None:
    from penstock.config import from_kwargs
    from penstock.families.registry import open_model
    from penstock.launch.backend import choose_ops, packed_decision
    from penstock.launch.build import plan_of
    from penstock.launch.hub import local_path

    checkpoint = open_model(local_path(path))
    config = from_kwargs(model=path)
    plan = plan_of(config)
    kept = packed_decision(choose_ops(config, checkpoint.spec)[0], checkpoint, plan)
    title = f"{path}: {checkpoint.spec.family}, {checkpoint.spec.num_params:,} parameters"
    rows = ((d.name, str(d.value), d.why) for d in (*plan.decisions, kept))
    console.print(table(("decision", "value", "why"), rows, title=title, left=3, box=True))
