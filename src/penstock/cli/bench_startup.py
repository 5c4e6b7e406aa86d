"""`penstock bench startup MODEL`: how soon an engine is ready from a cold disk and a warm cache, part by part."""

from __future__ import annotations

import argparse

EXIT_OK = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from penstock.config.load import add_arguments as add_engine_arguments

    for flag, default, text in (
        ("--num-iters-cold", 3, "starts with none of the model's files in the system's cache"),
        ("--num-iters-warm", 3, "starts with all of them there"),
    ):
        parser.add_argument(flag, type=int, default=default, metavar="N", help=f"{text} (default: {default})")
    parser.add_argument("--output-json", metavar="FILE", help="write the figures here")
    add_engine_arguments(parser, model_positional=True)


def startup(args: argparse.Namespace) -> int:
    """Raises PenstockError."""
    from dataclasses import asdict
    from pathlib import Path

    from rich.console import Console

    from penstock.base.errors import ConfigError
    from penstock.bench.startup import measure, medians
    from penstock.cli.run import with_default_model
    from penstock.config.load import from_args
    from penstock.report import files
    from penstock.report.tables import table

    cold, warm = args.num_iters_cold, args.num_iters_warm
    if cold < 0 or warm < 0 or cold + warm == 0:
        raise ConfigError("--num-iters-cold and --num-iters-warm must be 0 or more, and not both 0", field="num_iters")
    config = from_args(with_default_model(args))
    with files.progress("starts", 1 + cold + warm) as advance:
        found = measure(config, cold=cold, warm=warm, on_start=advance)
    columns = {name: medians(starts) for name, starts in (("cold", found.cold), ("warm", found.warm)) if starts}
    parts = dict.fromkeys(part for column in columns.values() for part in column)
    rows = [[part, *(f"{column.get(part, 0.0):.3f}" for column in columns.values())] for part in parts]
    title = f"seconds until an engine is ready, medians; {found.num_bytes / 1e6:,.0f} MB of files"
    Console().print(table(("part", *columns), rows, title=title, left=1, box=True))
    if args.output_json:
        files.save(Path(args.output_json), asdict(found) | {"files": len(found.files)})
    return EXIT_OK
