"""`penstock bench {serve,mlperf,latency,...}`: figures of a server, or of a model on this machine."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

from penstock.cli import bench_mlperf, bench_presets, bench_serve, bench_server, bench_startup

EXIT_OK, EXIT_FAILED = 0, 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from penstock.config.load import add_arguments as add_engine_arguments

    kinds = parser.add_subparsers(dest="bench", metavar="{serve,mlperf,latency,...}", required=True)
    serve = kinds.add_parser("serve", allow_abbrev=False, help="requests against a server, sent when they are due")
    bench_serve.add_arguments(serve)
    mlperf = kinds.add_parser("mlperf", allow_abbrev=False, help="MLPerf's scenarios against a server, with its rules")
    bench_mlperf.add_arguments(mlperf)
    latency = kinds.add_parser("latency", allow_abbrev=False, help="how long one batch takes, in this process")
    for flag, default, text in (
        ("--input-len", 32, "prompt tokens"), ("--output-len", 128, "generated tokens"),
        ("--batch-size", 8, "prompts at once"), ("--n", 1, "samples per prompt"),
        ("--num-iters", 30, "measured iterations"), ("--num-iters-warmup", 10, "iterations before them"),
    ):  # fmt: skip
        latency.add_argument(flag, type=int, default=default, metavar="N", help=f"{text} (default: {default})")
    latency.add_argument("--output-json", metavar="FILE", help="write the figures here")
    add_engine_arguments(latency, model_positional=True)
    throughput = kinds.add_parser("throughput", allow_abbrev=False, help="how much goes through, in this process")
    bench_server.add_dataset(throughput, num_prompts=100, lengths=True)
    throughput.add_argument("--n", type=int, default=1, metavar="N", help="samples per prompt (default: 1)")
    throughput.add_argument("--output-json", metavar="FILE", help="write the figures here")
    add_engine_arguments(throughput, model_positional=True)
    roofline = kinds.add_parser("roofline", allow_abbrev=False, help="the engine beside what this machine could do")
    for name, points, text in (
        ("--contexts", "1024,2048", "tokens of context to decode one sequence at"),
        ("--sequences", "1,4,16", "sequences to decode at once"), ("--prompts", "128,512", "prompts to prefill"),
    ):  # fmt: skip
        roofline.add_argument(name, default=points, metavar="LIST", help=f"{text} (default: {points}; '': none)")
    roofline.add_argument("--tokens", type=int, default=16, metavar="N", help="decoded per point (default: 16)")
    roofline.add_argument("--repeats", type=int, default=3, metavar="N", help="of every point (default: 3)")
    roofline.add_argument("--probe-mib", type=int, default=1024, metavar="N", help="memory read per probe (1024)")
    roofline.add_argument("--json", metavar="FILE", help="write the points here")
    roofline.add_argument("--html", metavar="FILE", help="write a page with charts here")
    add_engine_arguments(roofline, model_positional=True)
    presets = kinds.add_parser("presets", allow_abbrev=False, help="what other systems' parts do on one workload")
    bench_presets.add_arguments(presets)
    startup = kinds.add_parser(
        "startup", allow_abbrev=False, help="how soon an engine is ready, and what takes how long"
    )
    bench_startup.add_arguments(startup)


def bench(args: argparse.Namespace) -> int:
    """Raises PenstockError."""
    if args.bench == "serve":
        return asyncio.run(bench_serve.serve(args))
    if args.bench == "mlperf":
        return asyncio.run(bench_mlperf.mlperf(args))
    if args.bench == "presets":
        return bench_presets.presets(args)
    if args.bench == "startup":
        return bench_startup.startup(args)
    return {"latency": _latency, "throughput": _throughput, "roofline": _roofline}[args.bench](args)


# -- offline -----------------------------------------------------------------------------------------------------


def _llm(args: argparse.Namespace) -> Any:
    from penstock.cli.run import with_default_model
    from penstock.config.load import from_args
    from penstock.launch.llm import LLM

    return LLM.from_config(from_args(with_default_model(args)))


def _latency(args: argparse.Namespace) -> int:
    from penstock.bench import offline, report
    from penstock.report import files

    llm = _llm(args)
    with files.progress("iterations", args.num_iters + args.num_iters_warmup) as advance:
        result = offline.latency(
            llm, input_len=args.input_len, output_len=args.output_len, batch_size=args.batch_size, n=args.n,
            num_iters=args.num_iters, num_iters_warmup=args.num_iters_warmup, seed=llm.config.model.seed,
            on_iter=advance,
        )  # fmt: skip
    rows = [("mean", f"{result['avg_latency']:.4f} s")]
    rows += [(f"p{p}", f"{value:.4f} s") for p, value in result["percentiles"].items()]
    rows.append(("generated tokens per second", f"{result['output_tokens_per_second']:.1f}"))
    report.print_figures("Latency of one batch", rows + report.draft_rows(result))
    if args.output_json:
        files.save(Path(args.output_json), result)
    return EXIT_OK


def _throughput(args: argparse.Namespace) -> int:
    from penstock.bench import offline, report
    from penstock.bench.prompts import make_samples
    from penstock.report import files

    llm = _llm(args)
    seed = llm.config.model.seed
    samples = make_samples(bench_server.dataset(args, seed), offline.local_maker(llm))
    result = offline.throughput(llm, samples, n=args.n, seed=seed, use_tqdm=sys.stderr.isatty())
    rows = [
        ("requests per second", f"{result['requests_per_second']:.2f}"),
        ("all tokens per second", f"{result['tokens_per_second']:.1f}"),
        ("generated tokens per second", f"{result['output_tokens_per_second']:.1f}"),
        ("prompt tokens from the prefix cache", f"{result['prefix_cache_hit_rate'] or 0:.1%}"),
        ("elapsed", f"{result['elapsed_time']:.2f} s"),
    ]
    report.print_figures("Throughput", rows + report.draft_rows(result))
    if args.output_json:
        files.save(Path(args.output_json), result)
    return EXIT_FAILED if result["failed"] else EXIT_OK


def _roofline(args: argparse.Namespace) -> int:
    from rich.console import Console

    from penstock.bench import roofline
    from penstock.bench.bandwidth import ReadProbe
    from penstock.cli.roofline import html_page, print_tables
    from penstock.report import files

    points = {name: _whole_numbers(name, getattr(args, name)) for name in ("contexts", "sequences", "prompts")}
    llm = _llm(args)
    with (
        ReadProbe(args.probe_mib << 20) as probe,
        files.progress("points", sum(map(len, points.values()))) as advance,
    ):
        found = roofline.measure(llm, **points, tokens=args.tokens, repeats=args.repeats, probe=probe, on_point=advance)
    print_tables(found, Console())
    if args.json:
        files.save(Path(args.json), found.as_json())
    if args.html:
        files.save_text(Path(args.html), html_page(found))
    return EXIT_OK if found.points else EXIT_FAILED


def _whole_numbers(name: str, given: str) -> list[int]:
    from penstock.base.errors import ConfigError

    try:
        return [int(part) for part in given.split(",") if part.strip()]
    except ValueError:
        raise ConfigError(f"--{name}: {given!r} is not like 1024,4096", field=name) from None
