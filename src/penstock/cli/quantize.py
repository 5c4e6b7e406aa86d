"""`penstock quantize MODEL`: what every scheme of quantisation would cost and save, on a text; or a fine-tuned model's
difference to MODEL, in few bits, as an adapter."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.core.matrix_format import Scheme
    from penstock.eval.perplexity import Interval, Passage
    from penstock.eval.schemes import Measured
    from penstock.eval.scorer import LoadedModel

EXIT_OK, EXIT_FAILED = 0, 1
DEFAULT = "int8-w8a8,int8-wo,int4-w4a8,int4-wo"
MAX_TEXT_BYTES = 64 << 20
_SHOWN = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from penstock.config.load import add_arguments as add_engine_arguments

    parser.add_argument(
        "--schemes", default=DEFAULT, metavar="LIST", help=f"comma-separated; int4 may say a group (default: {DEFAULT})"
    )
    parser.add_argument("--text", metavar="FILE", help="text to read, UTF-8; by default a short one that comes with it")
    parser.add_argument("--max-tokens", type=int, default=4096, metavar="N", help="of the text (default: 4096)")
    parser.add_argument("--window", type=int, metavar="N", help="tokens of a window (default: 512 or the model's)")
    parser.add_argument("--stride", type=int, metavar="N", help="tokens between windows (default: half a window)")
    parser.add_argument("--json", metavar="FILE", help="write the figures here; -: print them instead of the table")
    parser.add_argument(
        "--prepare", action="store_true", help="measure nothing: pack the weights, so that the next start maps them"
    )
    parser.add_argument(
        "--delta-of",
        metavar="TUNED",
        help="measure nothing: write what this fine-tuned model has more than MODEL to --out",
    )
    parser.add_argument("--delta-bits", type=int, default=1, choices=(1, 2, 4, 8), help="of its codes (default: 1)")
    parser.add_argument(
        "--delta-group", type=int, default=0, choices=(0, 32, 64, 128),
        help="inputs that share a scale there; 0: all of a row (default: 0)",
    )  # fmt: skip
    parser.add_argument(
        "--out", metavar="FOLDER", help="where --prepare puts packed weights (default: the cache), --delta-of a delta"
    )
    add_engine_arguments(parser, model_positional=True)


def quantize(args: argparse.Namespace) -> int:
    """Raises PenstockError. What can be known to be wrong is said before the model is read."""
    from penstock.base.errors import InputError
    from penstock.cli.run import with_default_model
    from penstock.config.load import from_args
    from penstock.eval.scorer import load

    schemes = _schemes(args.schemes)
    if args.prepare:
        return _prepare(args, schemes)
    if args.delta_of is not None:
        if args.out is None:
            raise InputError("--delta-of needs --out, the folder of the adapter that is written", param="out")
        return _write_delta(args)
    if args.out is not None:
        raise InputError("--out is for --prepare and --delta-of; add one of them, or leave it away", param="out")
    name, text = _text(args.text)
    model = load(from_args(with_default_model(args)))
    return _measure(args, model, schemes, name, text)


def _schemes(listed: str) -> list[Scheme]:
    """As named, each once. Raises PenstockError."""
    from penstock.base.errors import ConfigError
    from penstock.core.matrix_format import SCHEMES, parse_scheme

    names = [name.strip() for name in listed.split(",") if name.strip()]
    if not names:
        raise ConfigError(f"--schemes names none; there are {SCHEMES}", field="schemes")
    return list(dict.fromkeys(parse_scheme(name) for name in names))


def _text(file: str | None) -> tuple[str, str]:
    """What the text is called, and the text. Raises PenstockError."""
    from penstock.base.errors import InputError
    from penstock.eval.sample import SAMPLE
    from penstock.formats.files import read_text

    if file is None:
        return "built-in sample", SAMPLE
    text = read_text(Path(file), MAX_TEXT_BYTES)
    if not text.strip():
        raise InputError(f"--text {file!r} is empty", param="text")
    return file, text


def _measure(args: argparse.Namespace, model: LoadedModel, schemes: Sequence[Scheme], name: str, text: str) -> int:
    from penstock.base.errors import InputError
    from penstock.core.matrix_format import NONE
    from penstock.eval.perplexity import passage
    from penstock.eval.schemes import measure
    from penstock.eval.scorer import make_scorer
    from penstock.report.files import progress

    if model.tokenizer is None:
        raise InputError("without a tokenizer no text can be read; name one with --tokenizer", param="tokenizer")
    reference = make_scorer(model, NONE)
    read = passage(text, model.tokenizer, reference, window=args.window, stride=args.stride, max_tokens=args.max_tokens)
    wanted = [NONE, *(scheme for scheme in schemes if scheme != NONE)]
    with progress("windows", len(wanted) * len(read.windows)) as advance:
        found = measure(model, reference, wanted, read, advance)
    _report(args, model, name, read, found)
    return EXIT_FAILED if any(m.found is None for m in found) else EXIT_OK


def computed_by(model: LoadedModel) -> str:
    return model.backend.label


def _report(args: argparse.Namespace, model: LoadedModel, name: str, read: Passage, found: Sequence[Measured]) -> None:
    from penstock.eval.schemes import as_json
    from penstock.report.files import print_json, save

    result: dict[str, Any] = {
        "model": model.name, "dtype": model.dtype, "kv_dtype": model.kv_dtype, "text": name,
        "text_bytes": read.num_bytes, "text_tokens": read.num_tokens, "window": read.window, "stride": read.stride,
        "num_windows": len(read.windows), "computed_by": computed_by(model), "schemes": [as_json(m) for m in found],
    }  # fmt: skip
    if args.json == "-":
        print_json(result)
        return
    _print(model, name, read, found)
    if args.json is not None:
        save(Path(args.json), result)


def _print(model: LoadedModel, name: str, read: Passage, found: Sequence[Measured]) -> None:
    from rich.console import Console

    from penstock.report.tables import table

    console = Console()
    # Narrow enough for 80 columns; the interval stands under what it is of.
    rows = (
        (m.scheme.name, f"{m.sizes.total_bytes / 1e6:,.2f}", f"{m.sizes.bits_per_weight:.2f}", *_cells(m))
        for m in found
    )
    columns = ("scheme", "MB", "bits", "ppl", "more", "KL", "p99", "same", "tok/s")
    console.print(table(columns, rows, title=f"{model.name}, {model.dtype}", wrap=False))
    console.print(
        f"Text: {name}, {read.num_tokens:,} tokens, {read.num_bytes:,} bytes, {len(read.windows)} windows of at most "
        f"{read.window} tokens every {read.stride}. MB: of all weights. bits: of a weight in a packed matrix, scales "
        "and padding included. ppl: perplexity; more: than without, under it 95 %. KL: nats per token from what the "
        "model itself expects, mean and 99th percentile. same: the likeliest token. tok/s: reading the text "
        "in windows, computed by " + computed_by(model) + ".",
        style="dim",
    )  # fmt: skip
    for m in found:
        if m.found is None:
            console.print(f"{m.scheme.name}: {m.error}", style="red")


def _cells(m: Measured) -> list[str]:
    if m.found is None:
        return ["failed", "", "", "", "", ""]
    speed = f"{m.tokens_per_s:,.0f}"
    score = m.found.score
    if not m.scheme.weight_bits:
        return [f"{score.perplexity:.3f}", "", "", "", "", speed]
    difference = score.perplexity - m.found.reference.perplexity
    return [
        f"{score.perplexity:.3f}",
        f"{difference:+.3f}{_between(score.difference(m.found.reference), '+.2f')}",
        f"{m.found.mean_kl:.4f}",
        f"{m.found.p99_kl:.3f}",
        f"{m.found.agreement:.1%}",
        speed,
    ]


def _between(interval: Interval | None, shape: str) -> str:
    return "" if interval is None else f"\n{interval[0]:{shape}}…{interval[1]:{shape}}"


def _write_delta(args: argparse.Namespace) -> int:
    from penstock.cli.run import with_default_model
    from penstock.config.load import from_args
    from penstock.families.registry import open_model
    from penstock.launch.hub import local_path
    from penstock.model.adapted import adaptable
    from penstock.report.files import progress
    from penstock.weights.adapters import model_sites
    from penstock.weights.delta import write_delta

    model = from_args(with_default_model(args)).model
    base, tuned = (open_model(local_path(name, model.revision)) for name in (model.model, args.delta_of))
    sites = model_sites(base.weights, base.spec, adaptable(base.spec))
    with progress("modules", len(sites)) as advance:
        found = write_delta(
            base, tuned, sites, Path(args.out), bits=args.delta_bits, group=args.delta_group, name=model.model,
            progress=advance,
        )  # fmt: skip
    lost = f"{found.lost:.1%} of the squared difference lost"
    print(f"{args.out}: {found.modules} modules, {found.num_bytes:,} bytes; {lost}")
    if found.left_out:
        names = ", ".join(found.left_out[:_SHOWN]) + (", ..." if len(found.left_out) > _SHOWN else "")
        print(f"left out: {len(found.left_out)} weights that differ and are no products of layers: {names}")
    return EXIT_OK


def _prepare(args: argparse.Namespace, schemes: Sequence[Scheme]) -> int:
    from penstock.cli.run import with_default_model
    from penstock.config.load import from_args
    from penstock.eval.prepare import packer, prepare
    from penstock.eval.scorer import load
    from penstock.ops.native.packed_file import PackedStore

    pack = packer()
    model = load(from_args(with_default_model(args)))
    store = PackedStore(Path(args.out) if args.out is not None else None)
    kept = True
    for scheme in schemes:
        key, on_disk = prepare(model, scheme, store, pack)
        print(f"{scheme.name}: {store.folder / key}.pst" if on_disk else f"{scheme.name}: could not be kept")
        kept &= on_disk
    return EXIT_OK if kept else EXIT_FAILED
