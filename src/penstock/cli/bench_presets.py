"""`penstock bench presets`: the surveys' comparison table of serving systems, with figures of one workload."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

EXIT_OK, EXIT_FAILED = 0, 1
COLUMNS = ("offload", "iteration", "prefill", "decode", "reuse", "sequences")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from penstock.config.load import add_arguments as add_engine_arguments

    parser.add_argument("--presets", default="all", metavar="LIST", help="which, with commas (default: all)")
    for flag, default, text in (
        ("--rounds", 3, "times that every preset runs"), ("--requests", 16, "requests at once"),
        ("--input-len", 128, "prompt tokens, about"), ("--output-len", 48, "generated tokens, about"),
    ):  # fmt: skip
        parser.add_argument(flag, type=int, default=default, metavar="N", help=f"{text} (default: {default})")
    parser.add_argument(
        "--request-rate", type=float, metavar="R",
        help="as many requests come again one by one, R a second (Poisson); without it none do",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="FILE.md", help="write the page here")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    add_engine_arguments(parser, model_positional=True)


def presets(args: argparse.Namespace) -> int:
    """1 if a preset's tokens are others. Raises PenstockError."""
    from rich.console import Console

    from penstock.base.errors import ConfigError
    from penstock.bench import presets as bench
    from penstock.cli.features import columns_of
    from penstock.cli.run import with_default_model
    from penstock.config.load import Given, engine_config, given_by
    from penstock.config.presets import PRESETS, preset_settings
    from penstock.launch.tuned import machine_name
    from penstock.plan.probe import probe
    from penstock.report import files
    from penstock.report.tables import table

    if min(args.rounds, args.requests, args.input_len) < 1 or args.output_len < 2:
        raise ConfigError("--rounds, --requests and --input-len must be at least 1, --output-len 2", field="rounds")
    if args.request_rate is not None and not 0 < args.request_rate < float("inf"):
        raise ConfigError("--request-rate: requests a second must be above 0 and finite", field="request_rate")
    names = list(PRESETS) if args.presets == "all" else [name.strip() for name in args.presets.split(",")]
    for name in names:
        preset_settings(name)
    given = given_by(with_default_model(args))
    if "preset" in given:
        raise ConfigError("--preset: leave it away; --presets names those that run", field="preset")
    configs = {bench.DEFAULT: engine_config(given)}
    configs |= {name: engine_config(given | {"preset": Given(name, "")}) for name in names}
    work = bench.PresetWork(args.requests, args.input_len, args.output_len, configs[bench.DEFAULT].model.seed,
                            args.request_rate)  # fmt: skip
    with files.progress("presets", args.rounds * len(configs)) as advance:
        found = bench.measure(configs, work, args.rounds, advance)
    switched = {name: columns_of(config) for name, config in configs.items()}
    lines = list(bench.rows(found, switched, COLUMNS))
    heads = [title for name, title, *_ in bench.FIGURES if args.request_rate or name not in bench.OVER_TIME]
    heads.append("same tokens")
    Console().print(table(["", *heads], bench.rows(found)))
    model = Path(configs[bench.DEFAULT].model.model).name
    result = {
        "work": vars(work), "rounds": args.rounds, "machine": machine_name(probe()), "model": model,
        "presets": {name: {"features": switched[name], **one.summary()} for name, one in found.items()},
    }  # fmt: skip
    if args.json is not None:
        files.save(args.json, result)
    if args.out is not None:
        files.save_text(args.out, page(heads, lines, result))
    return EXIT_OK if all(one.same_tokens for one in found.values()) else EXIT_FAILED


def page(heads: list[str], lines: list[list[str]], result: dict[str, Any]) -> str:
    """Markdown: what each switches on, its figures, and what it leaves out."""
    from penstock.cli.features import notes_of
    from penstock.config.presets import PRESETS

    work = result["work"]
    late = "" if work["rate"] is None else (
        f", and as many again that come one by one, {work['rate']:g} a second"
    )  # fmt: skip
    text = [
        "# Presets", "",
        "The table by which surveys compare serving systems (arXiv 2312.15234, table 2, of November 2023), as settings "
        "of one engine: `--preset NAME` switches Penstock's parts to what each system had. It is no measurement of "
        "those systems: kernels are the same for all, so figures differ by batching, memory and reuse alone. "
        "`penstock features --presets all` prints the columns from the settings themselves.", "",
        f"This page is what `penstock bench presets --out FILE.md` wrote of {result['model']} on "
        f"{result['machine']}: {work['requests']} requests at once, prompts of about {work['input_len']} tokens whose "
        f"first half is the same, about {work['output_len']} tokens of output (lognormal){late}; {result['rounds']} "
        "rounds in turns. Each figure is a median, and its ratio to the default settings' of the same round with its "
        "interval of 95 % over rounds.", "",
        "| preset | " + " | ".join(heads) + " |", "| --- |" + " --- |" * len(heads),
        *("| " + " | ".join([line[0], *line[1 + len(COLUMNS) :]]) + " |" for line in lines), "",
        "## What each switches on", "",
        "| preset | " + " | ".join(COLUMNS) + " |", "| --- |" + " --- |" * len(COLUMNS),
        *("| " + " | ".join(line[: 1 + len(COLUMNS)]) + " |" for line in lines), "",
        "## What each leaves out", "",
    ]  # fmt: skip
    for name in (line[0] for line in lines if line[0] in PRESETS):
        said = ", ".join(f"{column}: {value}" for column, value in PRESETS[name].survey.items())
        notes = "".join(f" {note[0].upper()}{note[1:]}." for note in notes_of(name))
        text.append(f"- `{name}`: {PRESETS[name].what}. The system then: {said}.{notes}")
    return "\n".join([*text, ""])
