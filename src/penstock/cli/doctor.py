"""`penstock doctor`: what this machine can run, what is missing, and, with `--all`, every part."""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from penstock.report.tables import table

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.config import EngineConfig
    from penstock.core.machine import Machine
    from penstock.launch.inventory import Part

_PROBE_BYTES = 256 << 20
_BILLIONS = (0.5, 1.5, 4, 8, 14, 32, 70)
_STORED = ((4.5, "4 bits"), (8.5, "8 bits"), (16.0, "16 bits"))
"""Bits of a weight, scales included, and the format."""
_EXTRAS = {
    "opentelemetry": "OpenTelemetry traces (--otlp-traces-endpoint): pip install 'penstock[otel]'",
    "zmq": "events of KV blocks (--kv-events-config): pip install 'penstock[events]'",
}
"""Package -> what is not there without it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="also say whether and how this model would run")
    parser.add_argument("--all", action="store_true", help="also every part and library, and what is not available")
    parser.add_argument("--kv-offload", metavar="STORES", help="also say whether these can be used, as serve would")
    parser.add_argument("--kv-offload-secret-file", metavar="FILE", help="of its remotes")


def doctor(args: argparse.Namespace) -> int:
    """What can be run here and how fast, what is missing, and what to type next; every part with `--all`."""
    from rich.console import Console

    from penstock import __version__
    from penstock.backends.gpu.graph_plan import graphs_state
    from penstock.backends.gpu.state import gpu_state
    from penstock.bench.bandwidth import ReadProbe
    from penstock.cli.doctor_stores import lines_of
    from penstock.launch.inventory import inventory
    from penstock.ops.native.library import best_library
    from penstock.plan.probe import probe

    # A table that is cut off says nothing: into a file or a pipe goes all of it.
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    machine, library = probe(), best_library()
    with ReadProbe(_PROBE_BYTES) as reading:
        read = reading.measure(3).median
    console.print(
        f"penstock {__version__}: {machine.arch}, {machine.num_cores} usable cores, "
        f"{machine.available_bytes / 2**30:.1f} of {machine.memory_bytes / 2**30:.1f} GiB of memory free, "
        f"read at {read / 1e9:.1f} GB/s; {_kernels(library)}"
    )
    console.print(f"GPU: {gpu_state()}", markup=False)
    console.print(f"Decode graphs on a GPU: {graphs_state()}", markup=False)
    if args.model is None:
        _sizes(console, machine, read)
    else:
        _model(_config(args.model, args), console, read)
    console.print(f"\n{_names()}", markup=False)
    for line in _several():
        console.print(line, markup=False)
    console.print(_other_hosts(), markup=False)
    stores, are_good = lines_of(_config(args.model or "nano", args))
    for line in stores:
        console.print(line, markup=False)
    parts = inventory()
    bad = [part for part in parts if part.problem is not None]
    lines = [*_missing(library), *(f"{part.kind} {part.name}: {part.problem}" for part in bad)]
    console.print("\nMissing: " + ("nothing" if not lines else ""), markup=False)
    for line in lines:
        console.print(f"  {line}", markup=False)
    console.print(f"\nNext: {_next(args.model)}", markup=False)
    if args.all:
        _all(console, parts, machine, library)
    return 1 if bad or not are_good else 0


def _kernels(library: object) -> str:
    from penstock.backends.native.backend import NOT_BUILT

    return NOT_BUILT if library is None else f"native kernels for {library.pst_isa_name().decode()}"  # type: ignore[attr-defined]


def _sizes(console: Console, machine: Machine, read: float) -> None:
    """Which sizes of models fit, and what reading their weights once per token allows one answer.

    Source of the bound: Williams et al., Roofline, CACM 52(4), 2009.
    """
    title = "What can run here: memory for weights, and how fast one answer comes at most"
    rows = table(("parameters", *(f"in {name}" for _, name in _STORED)), title=title)
    for billions in _BILLIONS:
        sizes = [billions * 1e9 * bits / 8 for bits, _ in _STORED]
        cells = [
            f"{n / 2**30:.1f} GiB, {read / n:.0f} tokens/s" if n < 0.8 * machine.available_bytes else "too large"
            for n in sizes
        ]
        rows.add_row(f"{billions:g} B", *cells)
    console.print(rows)


def _names() -> str:
    """Models by name: how many, where, what they take, and what bounds that."""
    import shutil
    from pathlib import Path

    from huggingface_hub import constants

    from penstock.cli.models import size_text
    from penstock.launch.store import ModelStore

    store, cache = ModelStore(), Path(constants.HF_HUB_CACHE)
    records = store.all()
    held = sum(record.num_bytes for record in records if record.repo)
    place = next(path for path in (cache, *cache.parents) if path.exists())
    free = size_text(shutil.disk_usage(place).free)
    return (
        f"Models by name: {len(records)}, named in {store.folder}; pulled ones take {size_text(held)} in {cache}, and "
        f"may take the {free} that are free there (penstock pull --max-disk SIZE bounds a pull)"
    )


def _several() -> list[str]:
    """A line for each server of several models that runs."""
    from penstock.launch.running import running

    return [
        f"Several models at {entry.where}: " + ", ".join(f"{name} {state}" for name, state in entry.models.items())
        for entry in running() if entry.models
    ]  # fmt: skip


def _other_hosts() -> str:
    """With whom this machine can have ranks or engines of one server."""
    from importlib.util import find_spec

    from penstock.executor.node_wire import terms

    ray = "is" if find_spec("ray") is not None else "isn't"
    return (
        f"Other hosts, for engines (--data-parallel-size) and ranks (--nnodes) of one server: those with {terms()} and "
        f"the same model; Ray {ray} installed here"
    )


def _missing(library: object) -> list[str]:
    """What an installation may lack, and what brings it."""
    from importlib.util import find_spec

    lines = []
    if library is None:
        lines.append("native kernels: answers are many times slower; install a C++ compiler and penstock again")
    for package, text in _EXTRAS.items():
        if find_spec(package) is None:
            lines.append(text)
    return lines


def _next(model: str | None) -> str:
    if model is not None:
        return f"penstock serve {model}   (every figure: penstock plan {model})"
    return "penstock serve   (another model: penstock doctor MODEL; every part and library: penstock doctor --all)"


def _all(console: Console, parts: list[Part], machine: Machine, library: object) -> None:
    packages = table(("package", "version"), title="Libraries", left=2, box=True)
    for name in ("numpy", "msgspec", "tokenizers", "jinja2", "rich"):
        try:
            packages.add_row(name, version(name))
        except PackageNotFoundError:
            packages.add_row(name, "[red]missing[/red]: reinstall with pip install penstock")
    console.print(packages)
    rows = table(("kind", "name", "state"), title="Parts", left=3, box=True)
    for part in parts:
        rows.add_row(part.kind, part.name, "available" if part.problem is None else f"[red]{part.problem}[/red]")
    console.print(rows)
    console.print(
        f"Kernels: {_kernels(library)}. In numpy: ref (row by row, exact in every batch) and blas (whole batches, "
        "faster); these compute in float32 and widen bfloat16 and float16 weights."
    )
    if library is not None:
        _stored_weights(console, machine)


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
        f"{gib(most_copied(machine))} into memory now, and maps larger ones. --weight-memory-bytes "
        "keeps so many in memory, and reads the other layers from there in every step; --memory-bytes shares one "
        "budget out between weights, keys and values.",
        highlight=False, markup=False,
    )  # fmt: skip


def _config(model: str, args: argparse.Namespace) -> EngineConfig:
    from penstock.config import from_args

    names = ("kv_offload", "kv_offload_secret_file")
    said = {name: value for name in names if (value := getattr(args, name)) is not None}
    return from_args(argparse.Namespace(model=model, **said))


def _model(config: EngineConfig, console: Console, read: float) -> None:
    from penstock.families.registry import open_model
    from penstock.launch.backend import choose_ops, packed_decision
    from penstock.launch.build import plan_of
    from penstock.launch.hub import local_path
    from penstock.plan.experts import expert_sizes
    from penstock.plan.flops import num_active_params
    from penstock.plan.memory import gib
    from penstock.plan.ranks import possible_sizes, rank_bytes, shares_tokens
    from penstock.plan.stages import cut_places, even_cuts, layer_weights, stage_share

    path = config.model.model
    checkpoint = open_model(local_path(path))
    plan = plan_of(config)
    kept = packed_decision(choose_ops(config, checkpoint.spec)[0], checkpoint, plan)
    spec = checkpoint.spec
    active = plan.weight_bytes * num_active_params(spec) / spec.num_params
    title = (
        f"{path}: {spec.family}, {spec.num_params:,} parameters, {plan.weight_bytes / 2**30:.1f} GiB of weights; one "
        f"answer comes at {read / active:.0f} tokens/s at most"
    )
    rows = ((d.name, str(d.value), d.why) for d in (*plan.decisions, kept))
    console.print(table(("decision", "value", "why"), rows, title=title, left=3, box=True))
    console.print(
        f"Beside other models (penstock serve --model NAME={path}) it takes {gib(plan.weight_bytes)} of weights and "
        f"{gib(plan.kv_bytes)} for KV while it is in memory.", highlight=False, markup=False,
    )  # fmt: skip
    sizes = [n for n in possible_sizes(spec) if n > 1]
    if sizes:
        fits = ", ".join(map(str, sizes[:6])) + (", ..." if len(sizes) > 6 else "")
        part = gib(rank_bytes(spec, plan.held, plan.weight_bytes, sizes[0]))
        console.print(
            f"Over processes of this machine: --tensor-parallel-size {fits}; with {sizes[0]} each holds about {part} "
            "of weights.", highlight=False, markup=False,
        )  # fmt: skip
        if shares_tokens(spec, plan.own_groups, sizes[0]):
            console.print(
                f"With --context-parallel-size {sizes[0]} each keeps 1 of {sizes[0]} tokens, so the same memory holds "
                f"{sizes[0]} times as many.", highlight=False, markup=False,
            )  # fmt: skip
    if most := len(cut_places(spec)):
        two = stage_share(spec, even_cuts(layer_weights(spec), cut_places(spec), 2))
        console.print(
            f"In stages: --pipeline-parallel-size 2 to {most + 1}; with 2 the larger one holds about "
            f"{gib(int(plan.weight_bytes * two))} of weights.", highlight=False, markup=False,
        )  # fmt: skip
    total, least = expert_sizes(spec, plan.held)
    if total:
        console.print(
            f"Its experts take {gib(total)}: --expert-memory-bytes, {least} at least, leaves others on the disk.",
            highlight=False,
        )
    if total and sizes:
        apart = gib(rank_bytes(spec, plan.held, plan.weight_bytes, sizes[0], whole_experts=True))
        console.print(
            f"With --enable-expert-parallel each of {sizes[0]} ranks has whole experts, about {apart} of weights.",
            highlight=False,
        )
