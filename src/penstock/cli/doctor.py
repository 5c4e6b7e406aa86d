"""`penstock doctor`: the machine, the parts, and why a part is not available."""

from __future__ import annotations

import argparse
from importlib.metadata import PackageNotFoundError, version

from penstock.report.tables import table


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
    if args.model is not None:
        _model(args.model, console)
    return 1 if bad else 0


def _model(path: str, console: object) -> None:
    from rich.console import Console

    from penstock.config import from_kwargs
    from penstock.families.registry import open_model
    from penstock.launch.build import plan_of
    from penstock.launch.hub import local_path

    assert isinstance(console, Console)
    checkpoint = open_model(local_path(path))
    plan = plan_of(from_kwargs(model=path))
    title = f"{path}: {checkpoint.spec.family}, {checkpoint.spec.num_params:,} parameters"
    rows = ((d.name, str(d.value), d.why) for d in plan.decisions)
    console.print(table(("decision", "value", "why"), rows, title=title, left=3, box=True))
