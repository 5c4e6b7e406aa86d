"""`penstock bench {serve,latency,throughput,roofline}`: figures of a server, or of a model on this machine."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.bench.http import HttpClient
    from penstock.bench.prompts import Dataset, Sample
    from penstock.core.qoe import Expected

EXIT_OK, EXIT_FAILED = 0, 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from penstock.config.load import add_arguments as add_engine_arguments

    kinds = parser.add_subparsers(dest="bench", metavar="{serve,latency,throughput,roofline}", required=True)
    serve = kinds.add_parser("serve", allow_abbrev=False, help="requests against a server, sent when they are due")
    _add_serve(serve)
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
    _add_dataset(throughput, num_prompts=100, lengths=True)
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


def _add_serve(parser: argparse.ArgumentParser) -> None:
    to = parser.add_argument_group("server")
    to.add_argument("--base-url", metavar="URL", help="default: http://HOST:PORT")
    to.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1")
    to.add_argument("--port", type=int, default=8000, help="default: 8000")
    to.add_argument("--backend", choices=("openai", "openai-chat"), help="default: by --endpoint, else openai")
    to.add_argument("--endpoint", metavar="PATH", help="default: that of the backend")
    to.add_argument("--model", help="default: the first one that the server names")
    to.add_argument("--api-key", metavar="KEY", help="default: from the environment, OPENAI_API_KEY")
    to.add_argument("--header", action="append", default=[], metavar="NAME=VALUE", help="a header of every request")
    to.add_argument("--insecure", action="store_true", help="do not check the server's certificate")
    to.add_argument("--ready-check-timeout-sec", type=float, default=600.0, metavar="S", help="0: no check first")
    to.add_argument("--request-timeout-sec", type=float, default=6 * 3600.0, metavar="S", help="per request")
    load = parser.add_argument_group("load")
    _add_dataset(load, num_prompts=1000, lengths=False)
    load.add_argument("--request-rate", type=float, default=float("inf"), metavar="R", help="per second; default: inf")
    load.add_argument("--burstiness", type=float, default=1.0, metavar="B", help="1 is Poisson, less comes in clusters")
    load.add_argument("--max-concurrency", type=int, metavar="N", help="requests at once; further ones wait here")
    load.add_argument("--ramp-up-strategy", choices=("linear", "exponential"), help="change the rate over the run")
    load.add_argument("--ramp-up-start-rps", type=float, metavar="R")
    load.add_argument("--ramp-up-end-rps", type=float, metavar="R")
    load.add_argument("--ignore-eos", action="store_true", help="generate all the tokens asked for")
    load.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default: 0; -1: not sent")
    load.add_argument("--extra-body", metavar="JSON", help="further fields of every request")
    load.add_argument("--seed", type=int, default=0, metavar="N")
    out = parser.add_argument_group("results")
    out.add_argument("--percentile-metrics", default="ttft,tpot,itl,e2el", metavar="NAMES", help="what the table shows")
    out.add_argument("--metric-percentiles", default="50,90,99", metavar="LIST", help="default: 50,90,99")
    out.add_argument(
        "--goodput", nargs="+", default=[], metavar="NAME:MS", help="for example ttft:200 tpot:50 e2el:2000"
    )
    out.add_argument(
        "--expected-ttft", type=float, metavar="S", help="seconds to the first token that readers expect (1)"
    )
    out.add_argument("--expected-tds", type=float, metavar="N", help="tokens per second that readers read (4.8)")
    out.add_argument("--verify", type=int, default=0, metavar="N", help="ask the first N again, alone, and compare")
    out.add_argument("--save-result", action="store_true", help="write the figures as JSON")
    out.add_argument("--save-detailed", action="store_true", help="... with every request")
    out.add_argument("--result-dir", metavar="FOLDER")
    out.add_argument("--result-filename", metavar="NAME")
    out.add_argument("--label", help="a word for this run, in the JSON")
    out.add_argument("--metadata", nargs="*", default=[], metavar="K=V", help="kept in the JSON")
    out.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


def _add_dataset(parser: Any, *, num_prompts: int, lengths: bool) -> None:
    from penstock.bench import DATASETS

    parser.add_argument("--dataset-name", choices=DATASETS, default="random", help="default: random")
    parser.add_argument("--dataset-path", metavar="FILE", help="conversations (JSON, JSONL) or a trace (CSV, JSONL)")
    parser.add_argument("--num-prompts", type=int, default=num_prompts, metavar="N", help=f"default: {num_prompts}")
    names: list[tuple[str, type, Any]] = [
        ("--random-input-len", int, 1024), ("--random-output-len", int, 128), ("--random-range-ratio", float, 0.0),
        ("--random-prefix-len", int, 0), ("--prefix-repetition-prefix-len", int, 256),
        ("--prefix-repetition-suffix-len", int, 256), ("--prefix-repetition-num-prefixes", int, 10),
        ("--prefix-repetition-output-len", int, 128), ("--trace-speed", float, 1.0),
        ("--max-input-len", int, None), ("--max-output-len", int, None),
    ]  # fmt: skip
    for flag, kind, default in names:
        told = None if default is None else f"default: {default}"
        parser.add_argument(flag, type=kind, default=default, metavar="N", help=told)
    for flag in ("--sharegpt-output-len", "--custom-output-len"):
        parser.add_argument(flag, dest="file_output_len", type=int, metavar="N", help="instead of what the file says")
    parser.add_argument("--disable-shuffle", action="store_true", help="prompts in the order of the file")
    if lengths:
        parser.add_argument("--input-len", dest="random_input_len", type=int, metavar="N", help="random prompts")
        parser.add_argument("--output-len", dest="random_output_len", type=int, metavar="N", help="random prompts")


def _dataset(args: argparse.Namespace, seed: int) -> Dataset:
    from penstock.bench.prompts import Dataset

    names = [n for n in Dataset.__dataclass_fields__ if n not in ("name", "path", "seed", "output_len")]
    given = {name: getattr(args, name) for name in names}
    return Dataset(name=args.dataset_name, path=args.dataset_path, seed=seed, output_len=args.file_output_len, **given)


def bench(args: argparse.Namespace) -> int:
    """Raises PenstockError."""
    if args.bench == "serve":
        return asyncio.run(_serve(args))
    return {"latency": _latency, "throughput": _throughput, "roofline": _roofline}[args.bench](args)


# -- serve -------------------------------------------------------------------------------------------------------


async def _serve(args: argparse.Namespace) -> int:
    from penstock.bench.http import HttpClient

    client = HttpClient(
        args.base_url or f"http://{args.host}:{args.port}",
        _headers(args),
        timeout_s=args.request_timeout_sec,
        verify=not args.insecure,
    )
    try:
        return await _measure(args, client)
    finally:
        await client.close()


async def _measure(args: argparse.Namespace, client: HttpClient) -> int:
    from penstock.bench import drafts, report, serve
    from penstock.bench.metrics import detail, parse_goodput, summarize
    from penstock.bench.prompts import make_samples
    from penstock.report import files

    goodput, metrics, percentiles = parse_goodput(args.goodput), _metrics(args), _percentiles(args)
    reader, extra = _reader(args)
    data, extra = _dataset(args, args.seed), extra | _extra(args)
    backend = args.backend or ("openai-chat" if "chat" in (args.endpoint or "") else "openai")
    model = args.model or await serve.served_model(client)
    target = serve.Target(
        backend=backend,
        endpoint=args.endpoint or serve.BACKENDS[backend],
        model=model,
        ignore_eos=args.ignore_eos,
        temperature=args.temperature if args.temperature >= 0 else None,
        extra=extra,
    )
    if args.ready_check_timeout_sec > 0:
        await serve.wait_ready(client, target, args.ready_check_timeout_sec)
    samples = make_samples(data, await serve.make_maker(client, model, ids=not target.is_chat))
    due_s = _due(args, samples)
    before = await drafts.scrape(client)
    with files.progress("requests", len(samples), show=not args.disable_tqdm) as advance:
        outcomes, duration_s = await serve.run(
            client, target, samples, due_s, max_concurrency=args.max_concurrency, on_done=lambda outcome: advance()
        )
    figures = summarize(outcomes, duration_s, metrics=metrics, percentiles=percentiles, goodput=goodput, reader=reader)
    figures |= drafts.since(before, await drafts.scrape(client))
    if args.verify:
        figures |= await serve.verify(client, target, samples, outcomes, args.verify)
    result = _about(args, backend, model, len(samples)) | figures
    report.print_result(result, metrics)
    if args.save_result or args.save_detailed or args.result_filename:
        if args.save_detailed:
            result |= detail(outcomes)
        files.save(_result_path(args, backend, model), result)
    failed = not result["completed"] or result.get("verify_mismatches", 0)
    return EXIT_FAILED if failed else EXIT_OK


def _headers(args: argparse.Namespace) -> dict[str, str]:
    from penstock.base.errors import ConfigError

    out: dict[str, str] = {}
    key = args.api_key or os.environ.get("OPENAI_API_KEY")
    if key:
        out["Authorization"] = f"Bearer {key}"
    for item in args.header:
        name, found, value = item.partition("=")
        if not found or not name:
            raise ConfigError(f"--header: {item!r} is not NAME=VALUE", field="header")
        out[name] = value
    return out


def _reader(args: argparse.Namespace) -> tuple[Expected, dict[str, float]]:
    """What readers expect, and what of it the server is told: what was given. Raises InputError."""
    from penstock.core.qoe import Expected, expected_of

    given = {"expected_ttft_s": args.expected_ttft, "expected_tds": args.expected_tds}
    reader = expected_of(args.expected_ttft, args.expected_tds, Expected()).check()
    return reader, {name: value for name, value in given.items() if value is not None}


def _extra(args: argparse.Namespace) -> dict[str, Any]:
    import json

    from penstock.base.errors import ConfigError

    try:
        extra = json.loads(args.extra_body or "{}")
    except ValueError as error:
        raise ConfigError(f"--extra-body is not JSON: {error}", field="extra_body") from None
    if not isinstance(extra, dict):
        raise ConfigError("--extra-body must be a JSON object", field="extra_body")
    return extra


def _metrics(args: argparse.Namespace) -> list[str]:
    from penstock.base.errors import ConfigError
    from penstock.bench.metrics import METRICS

    names = [name.strip() for name in args.percentile_metrics.split(",") if name.strip()]
    for name in names:
        if name not in METRICS:
            raise ConfigError(f"--percentile-metrics: {name!r} is none of {', '.join(METRICS)}", field="metrics")
    return names


def _percentiles(args: argparse.Namespace) -> list[float]:
    from penstock.base.errors import ConfigError

    try:
        values = [float(part) for part in args.metric_percentiles.split(",") if part.strip()]
    except ValueError:
        values = [-1.0]
    if not all(0 <= value <= 100 for value in values):
        raise ConfigError(
            f"--metric-percentiles: {args.metric_percentiles!r} is not like 50,90,99", field="metric_percentiles"
        )
    return values


def _due(args: argparse.Namespace, samples: list[Sample]) -> list[float]:
    """A trace's own times, unless a rate is given."""
    from penstock.bench.arrivals import Ramp, arrival_times

    if args.dataset_name == "timed_trace" and args.request_rate == float("inf") and not args.ramp_up_strategy:
        return [sample.arrival_s or 0.0 for sample in samples]
    ramp = None
    if args.ramp_up_strategy:
        ramp = Ramp(args.ramp_up_strategy, args.ramp_up_start_rps or 0.0, args.ramp_up_end_rps or 0.0)
    times = arrival_times(len(samples), args.request_rate, burstiness=args.burstiness, seed=args.seed, ramp=ramp)
    return [float(t) for t in times]


def _about(args: argparse.Namespace, backend: str, model: str, num: int) -> dict[str, Any]:
    rate: float | str = args.request_rate if args.request_rate != float("inf") else "inf"
    more = dict(item.partition("=")[::2] for item in args.metadata)
    return more | {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"), "endpoint_type": backend, "backend": backend,
        "label": args.label, "model_id": model, "tokenizer_id": model, "dataset_name": args.dataset_name,
        "num_prompts": num, "request_rate": rate, "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency, "seed": args.seed,
    }  # fmt: skip


def _result_path(args: argparse.Namespace, backend: str, model: str) -> Path:
    name: str | None = args.result_filename
    if name is None:
        short = model.rstrip("/").rsplit("/", 1)[-1]
        at_once = f"-concurrency{args.max_concurrency}" if args.max_concurrency else ""
        name = f"{backend}-{args.request_rate:g}qps{at_once}-{short}-{datetime.now():%Y%m%d-%H%M%S}.json"
    return Path(args.result_dir or ".") / name


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
    samples = make_samples(_dataset(args, seed), offline.local_maker(llm))
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
