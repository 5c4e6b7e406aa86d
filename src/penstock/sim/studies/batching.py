"""Continuous against static and dynamic batching. Sources: Orca, OSDI 2022; row A03 to A05 of the catalogue."""

from __future__ import annotations

from penstock.report.chart import Chart, Line
from penstock.report.numbers import number, percent, seconds
from penstock.sim.metrics import metrics
from penstock.sim.studies.study import Bench, Study, StudyTable, Tell
from penstock.sim.synthetic import synthetic

RATES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
STATIC = "static:size=32"
POLICIES = (STATIC, "dynamic:timeout_s=0.5,size=32", "fcfs")


def run(bench: Bench, tell: Tell) -> Study:
    """The same loads at rising rates under three ways of forming batches."""
    n = bench.requests(300)
    study = Study(
        title="Continuous against static batching",
        question="What is it worth to let requests join and leave between iterations rather than between batches?",
        sources="Orca (Yu et al., OSDI 2022); BATCH (Ali et al., SC 2020) for dynamic batching.",
        setup=[
            f"Virtual clock; {bench.device.name}, roofline costs; Poisson arrivals, prompts of 300, outputs of 200 "
            f"tokens (cv 1); {n} requests per rate; at most 32 sequences; seed {bench.seed}."
        ],
    )
    table = StudyTable(
        "By arrival rate",
        [
            "requests/s",
            "policy",
            "output tokens/s",
            "TTFT p50",
            "JCT mean",
            "JCT p99",
            "steps",
            "rows per step",
            "wasted slots",
        ],
    )
    jct: dict[str, list[float]] = {p: [] for p in POLICIES}
    wasted: dict[str, list[float]] = {p: [] for p in POLICIES}
    rate_of: dict[str, list[float]] = {p: [] for p in POLICIES}
    for rate in RATES:
        text = f"synthetic:poisson?rate={rate}&prompt=300&output=200&output_cv=1&requests={n}"
        for policy in POLICIES:
            tell(f"{rate:g} requests/s, {policy}")
            result, _, slots = bench.run_with_stats(
                synthetic(text, bench.seed),
                policy,
                scheduling_policy=policy,
                max_num_seqs=32,
                max_num_batched_tokens=2048,
                prefix_cache="none",
            )
            m = metrics(result)
            wasted[policy].append(slots.wasted_share)
            jct[policy].append(m["latency_s"]["jct"]["mean"])
            rate_of[policy].append(m["throughput"]["output_tokens_per_s"])
            steps = m["engine"]["steps"]
            table.rows.append(
                [
                    f"{rate:g}",
                    policy.partition(":")[0],
                    f"{m['throughput']['output_tokens_per_s']:.0f}",
                    seconds(m["latency_s"]["ttft"]["p50"]),
                    seconds(m["latency_s"]["jct"]["mean"]),
                    seconds(m["latency_s"]["jct"]["p99"]),
                    f"{steps:,.0f}",
                    f"{m['throughput']['output_tokens'] / max(1, steps):.1f}",
                    percent(slots.wasted_share),
                ]
            )
    study.tables = [table]
    names = [p.partition(":")[0] for p in POLICIES]
    study.charts = [
        Chart(
            "Mean JCT by arrival rate",
            x_format=number,
            y_format=seconds,
            log_x=True,
            lines=[Line(names[i], RATES, jct[p], style=i) for i, p in enumerate(POLICIES)],
            note="requests/s, logarithmic",
        ),
        Chart(
            "Output tokens/s by arrival rate",
            x_format=number,
            y_format=number,
            log_x=True,
            lines=[Line(names[i], RATES, rate_of[p], style=i) for i, p in enumerate(POLICIES)],
            note="requests/s, logarithmic",
        ),
    ]
    study.data = {"rates": RATES, "jct_mean_s": jct, "tokens_per_s": rate_of, "wasted": wasted}
    top = len(RATES) - 1
    study.findings = [
        f"At {RATES[top]:g} requests/s continuous batching serves "
        f"{rate_of['fcfs'][top] / rate_of[STATIC][top]:.2f}x the tokens per second of static batching, with "
        f"{jct[STATIC][top] / jct['fcfs'][top]:.1f}x shorter mean JCT.",
        f"There {percent(wasted[STATIC][top])} of the slots of static batches stood empty while somebody waited for "
        f"one; with continuous batching {percent(wasted['fcfs'][top])}.",
        f"At {RATES[0]:g} requests/s, where nearly nobody queues, the ratio of mean JCT is "
        f"{jct[STATIC][0] / jct['fcfs'][0]:.1f}x.",
    ]
    return study
