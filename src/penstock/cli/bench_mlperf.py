"""`penstock bench mlperf --scenario offline|server|single-stream`: MLPerf's load on a server, judged by its rules."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.bench_server import add_dataset, add_sampling, add_server, client_of, dataset, target_of

if TYPE_CHECKING:
    from penstock.bench.http import HttpClient
    from penstock.bench.mlperf import Rules

EXIT_OK, EXIT_INVALID = 0, 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from penstock.bench.mlperf import MIN_QUERIES, SCENARIOS

    rules = parser.add_argument_group("rules")
    rules.add_argument("--scenario", choices=SCENARIOS, required=True)
    rules.add_argument("--min-duration", type=float, default=600.0, metavar="S", help="default: 600, the rules' own")
    least = ", ".join(f"{name} {num}" for name, num in MIN_QUERIES.items())
    rules.add_argument("--min-query-count", type=int, metavar="N", help=f"samples at least (default: {least})")
    rules.add_argument("--target-qps", type=float, default=1.0, metavar="R", help="samples per second (default: 1)")
    rules.add_argument("--ttft-limit", type=float, default=2000.0, metavar="MS", help="server: of p99 (default: 2000)")
    rules.add_argument("--tpot-limit", type=float, default=200.0, metavar="MS", help="server: of p99 (default: 200)")
    rules.add_argument("--no-early-stopping", action="store_true", help="do not ask whether so few samples suffice")
    rules.add_argument("--output-json", type=Path, metavar="FILE", help="write the summary here")
    add_server(parser)
    load = parser.add_argument_group("load")
    add_dataset(load, num_prompts=1024, lengths=False)
    load.add_argument("--max-concurrency", type=int, metavar="N", help="requests at once; further ones wait here")
    add_sampling(load)
    load.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


async def mlperf(args: argparse.Namespace) -> int:
    """Returns the exit status: 1 for an INVALID result. Raises PenstockError."""
    from penstock.bench.mlperf import Rules

    rules = Rules(
        scenario=args.scenario, min_duration_s=args.min_duration, min_query_count=args.min_query_count,
        target_qps=args.target_qps, ttft_s=args.ttft_limit / 1e3, tpot_s=args.tpot_limit / 1e3,
        early_stopping=not args.no_early_stopping,
    )  # fmt: skip
    client = client_of(args)
    try:
        return await _measure(args, client, rules)
    finally:
        await client.close()


async def _measure(args: argparse.Namespace, client: HttpClient, rules: Rules) -> int:
    from penstock.bench import mlperf, report
    from penstock.bench.prompts import make_samples
    from penstock.bench.serve import make_maker
    from penstock.report import files

    data = dataset(args, args.seed)
    target = await target_of(args, client)
    maker = await make_maker(client, target.model, ids=not target.is_chat)
    samples = make_samples(replace(data, num_prompts=min(data.num_prompts, rules.num_samples)), maker)
    with files.progress("samples", rules.num_samples, show=not args.disable_tqdm) as advance:
        outcomes, duration_s = await mlperf.drive(
            client, target, samples, rules, seed=args.seed, max_concurrency=args.max_concurrency,
            on_done=lambda outcome: advance(),
        )  # fmt: skip
    found = mlperf.judge(rules, outcomes, duration_s) | {"model_id": target.model, "data_set_size": len(samples)}
    report.print_figures("MLPerf scenario: " + rules.scenario, _rows(found))
    if args.output_json is not None:
        files.save(args.output_json, found)
    return EXIT_OK if found["valid"] else EXIT_INVALID


def _rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    def shown(name: str) -> str:
        return "-" if found[name] is None else f"{found[name]:.4g}"

    rows = [("Result is", found["result"]), (found["metric"], shown("metric_value"))]
    rows += [(f"{name} satisfied", "Yes" if met else "NO") for name, met in found["checks"].items()]
    rows += [("Why", sentence) for sentence in found["why_invalid"]]
    names = ("samples_per_s", "tokens_per_s", "mean_latency_s", "p50_latency_s", "p90_latency_s", "p99_latency_s",
             "p99_ttft_s", "p99_tpot_s", "early_stopping_latency_s")  # fmt: skip
    return rows + [(name, shown(name)) for name in names if name in found and name != found["metric"]]
