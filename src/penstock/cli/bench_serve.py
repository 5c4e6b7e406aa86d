"""`penstock bench serve`: requests against a server, sent when they are due."""

from __future__ import annotations

import argparse
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli import money
from penstock.cli.bench_server import add_dataset, add_sampling, add_server, client_of, dataset, target_of

if TYPE_CHECKING:
    from penstock.bench.http import HttpClient
    from penstock.bench.metrics import Outcome
    from penstock.bench.prompts import Dataset, Maker, Sample
    from penstock.bench.serve import Target
    from penstock.core.qoe import Expected

EXIT_OK, EXIT_FAILED = 0, 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server(parser)
    load = parser.add_argument_group("load")
    add_dataset(load, num_prompts=1000, lengths=False)
    load.add_argument("--request-rate", type=float, default=float("inf"), metavar="R", help="per second; default: inf")
    load.add_argument("--burstiness", type=float, default=1.0, metavar="B", help="1 is Poisson, less comes in clusters")
    load.add_argument("--max-concurrency", type=int, metavar="N", help="requests at once; further ones wait here")
    load.add_argument("--ramp-up-strategy", choices=("linear", "exponential"), help="change the rate over the run")
    load.add_argument("--ramp-up-start-rps", type=float, metavar="R")
    load.add_argument("--ramp-up-end-rps", type=float, metavar="R")
    add_sampling(load)
    load.add_argument("--num-warmups", type=int, default=0, metavar="N", help="requests before those that are measured")
    load.add_argument(
        "--find-rate", type=float, nargs="?", const=0.9, metavar="SHARE", help="search the highest rate, from "
        "--request-rate on, at which this share (0.9) keeps --goodput's limits, or without them no queue grows",
    )  # fmt: skip
    load.add_argument(
        "--rate-tolerance", type=float, default=0.05, metavar="T", help="of that search (default: 0.05 of the rate)"
    )
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
    out.add_argument("--warmup", type=float, metavar="S", help="seconds that steady rates leave out; default: found")
    out.add_argument(
        "--alone", type=int, default=0, metavar="N", help="ask N more requests one by one, and tell how much slower "
        "the others were, by size",
    )  # fmt: skip
    money.add_arguments(out)
    out.add_argument("--verify", type=int, default=0, metavar="N", help="ask the first N again, alone, and compare")
    out.add_argument("--save-result", action="store_true", help="write the figures as JSON")
    out.add_argument("--save-detailed", action="store_true", help="... with every request")
    out.add_argument("--result-dir", metavar="FOLDER")
    out.add_argument("--result-filename", metavar="NAME")
    out.add_argument("--label", help="a word for this run, in the JSON")
    out.add_argument("--metadata", nargs="*", default=[], metavar="K=V", help="kept in the JSON")
    out.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


async def serve(args: argparse.Namespace) -> int:
    """Returns the exit status. Raises PenstockError."""
    client = client_of(args)
    try:
        return await _measure(args, client)
    finally:
        await client.close()


async def _measure(args: argparse.Namespace, client: HttpClient) -> int:
    from penstock.bench import alone, bill, counters, report
    from penstock.bench.metrics import detail, parse_goodput, summarize
    from penstock.bench.serve import make_maker, verify
    from penstock.report import files

    goodput, metrics, percentiles = parse_goodput(args.goodput), _metrics(args), _percentiles(args)
    charged = bill.Bill.of(args.machine_price, args.power, args.carbon_intensity)
    if args.alone:
        alone.check(args.alone)
    _check_search(args)
    data = dataset(args, args.seed)
    reader, told = _reader(args)
    target = await target_of(args, client)
    target = replace(target, extra=told | target.extra)
    maker = await make_maker(client, target.model, ids=not target.is_chat)
    await _warm_up(args, client, target, data, maker)
    about = _about(args, target.backend, target.model, data.num_prompts)
    if args.find_rate is not None:
        result = about | await _find_rate(args, client, target, data, maker, goodput)
        report.print_rates(result)
        if args.save_result or args.result_filename:
            files.save(_result_path(args, target.backend, target.model), result)
        return EXIT_OK if result["sustainable_rate"] is not None else EXIT_FAILED
    samples, outcomes, duration_s, before = await _run(args, client, target, data, maker)
    after = await counters.scrape(client)
    figures = summarize(
        outcomes,
        duration_s,
        metrics=metrics,
        percentiles=percentiles,
        goodput=goodput,
        warmup_s=args.warmup,
        reader=reader,
    )
    if after.drafts is not None:
        figures |= (after.drafts - (before.drafts or type(after.drafts)())).figures()
    num_tokens = figures["total_input_tokens"], figures["total_output_tokens"]
    figures |= charged.figures(counters.since(before, after), duration_s, *num_tokens)
    if args.verify:
        figures |= await verify(client, target, samples, outcomes, args.verify)
    if args.alone:
        figures |= await alone.slowdown(client, target, maker, outcomes, args.alone, args.seed)
    result = about | {"num_prompts": len(samples)} | figures
    report.print_result(result, metrics)
    if args.save_result or args.save_detailed or args.result_filename:
        if args.save_detailed:
            result |= detail(outcomes)
        files.save(_result_path(args, target.backend, target.model), result)
    failed = not result["completed"] or result.get("verify_mismatches", 0)
    return EXIT_FAILED if failed else EXIT_OK


async def _run(
    args: argparse.Namespace, client: HttpClient, target: Target, data: Dataset, maker: Maker,
) -> tuple[list[Sample], list[Outcome], float, Any]:  # fmt: skip
    """(what was asked, what came of it, seconds, the server's counters before)."""
    from penstock.bench import counters
    from penstock.bench.prompts import make_samples
    from penstock.bench.serve import run
    from penstock.report import files

    samples = make_samples(data, maker)
    due_s = _due(args, samples)
    before = await counters.scrape(client)
    with files.progress("requests", len(samples), show=not args.disable_tqdm) as advance:
        outcomes, duration_s = await run(
            client, target, samples, due_s, max_concurrency=args.max_concurrency, on_done=lambda outcome: advance()
        )
    return samples, outcomes, duration_s, before


async def _warm_up(args: argparse.Namespace, client: HttpClient, target: Target, data: Dataset, maker: Maker) -> None:
    """Requests like those to come, but other ones: what they leave in a prefix cache helps nobody."""
    from penstock.bench.prompts import make_samples
    from penstock.bench.serve import run

    if args.num_warmups > 0:
        samples = make_samples(replace(data, num_prompts=args.num_warmups, seed=data.seed + 2**20), maker)
        await run(client, target, samples, [0.0] * len(samples), max_concurrency=args.max_concurrency)


def _check_search(args: argparse.Namespace) -> None:
    from penstock.base.errors import ConfigError

    if args.find_rate is None:
        return
    if not 0 < args.find_rate <= 1:
        raise ConfigError(f"--find-rate: a share is above 0 and at most 1, not {args.find_rate:g}", field="find_rate")
    if not 0 < args.rate_tolerance < 1:
        raise ConfigError("--rate-tolerance must be above 0 and below 1", field="rate_tolerance")
    if not 0 < args.request_rate < float("inf"):
        raise ConfigError("--find-rate starts at --request-rate: give one, such as --request-rate 1", field="find_rate")
    if args.num_prompts < 16:
        raise ConfigError("--find-rate needs 16 requests at least: --num-prompts 16", field="num_prompts")


async def _find_rate(
    args: argparse.Namespace, client: HttpClient, target: Target, data: Dataset, maker: Maker,
    goodput: dict[str, float],
) -> dict[str, Any]:  # fmt: skip
    """Every rate gets prompts of its own. Raises PenstockError if no rate is too high."""
    import asyncio

    from penstock.base.errors import PenstockError
    from penstock.bench.rates import RateTrial, trial
    from penstock.measure.search import NoLimitError, highest

    trials: list[RateTrial] = []
    loop = asyncio.get_running_loop()

    async def at(rate: float) -> RateTrial:
        again = argparse.Namespace(**(vars(args) | {"request_rate": rate, "ramp_up_strategy": None}))
        fresh = replace(data, seed=data.seed + len(trials))
        _, outcomes, _, _ = await _run(again, client, target, fresh, maker)
        found = trial(rate, outcomes, goodput, args.find_rate)
        trials.append(found)
        print(found.line, flush=True)
        return found

    def keeps(rate: float) -> bool:  # in a thread: the search asks one question after the other
        return asyncio.run_coroutine_threadsafe(at(rate), loop).result().kept

    try:
        best = await asyncio.to_thread(highest, keeps, start=args.request_rate, tolerance=args.rate_tolerance)
    except NoLimitError:
        raise PenstockError(
            "every rate is kept: no queue builds up from so few requests; raise --num-prompts"
        ) from None
    return {
        "sustainable_rate": best, "promise": args.find_rate if goodput else "no growing queue",
        "goodput_slo_ms": goodput or None, "trials": [t.as_json() for t in trials],
    }  # fmt: skip


def _reader(args: argparse.Namespace) -> tuple[Expected, dict[str, float]]:
    """What readers expect, and what of it the server is told: what was given. Raises InputError."""
    from penstock.core.qoe import Expected, expected_of

    given = {"expected_ttft_s": args.expected_ttft, "expected_tds": args.expected_tds}
    reader = expected_of(args.expected_ttft, args.expected_tds, Expected()).check()
    return reader, {name: value for name, value in given.items() if value is not None}


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
