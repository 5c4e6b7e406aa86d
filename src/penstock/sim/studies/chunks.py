"""Chunk size against TTFT and TBT. Source: Sarathi-Serve, arXiv 2403.02310, sections 4 and 5.4."""

from __future__ import annotations

from penstock.report.chart import Chart, Line
from penstock.report.numbers import seconds
from penstock.sim.metrics import metrics
from penstock.sim.studies.study import Bench, Study, StudyTable, Tell
from penstock.sim.synthetic import synthetic

SIZES = (128, 256, 512, 1024, 2048, 4096, 8192)


def run(bench: Bench, tell: Tell) -> Study:
    """One Poisson load, one step budget after the other, and prefill-first as the policy that stalls decodes."""
    n = bench.requests(600)
    text = f"synthetic:poisson?rate=6&prompt=1500&prompt_cv=1&output=150&output_cv=0.5&requests={n}"
    study = Study(
        title="Chunk size against TTFT and TBT",
        question="How large should a step be? Small ones keep decodes smooth, large ones finish prompts sooner.",
        sources="Sarathi-Serve, arXiv 2403.02310 (stall-free batching); row A10 of the catalogue.",
        setup=[f"Virtual clock; {bench.device.name}, roofline costs; {text}; seed {bench.seed}."],
    )
    columns = ["step budget", "TTFT p50", "TTFT p99", "TBT p50", "TBT p99", "TBT max", "tokens/s"]
    stall_free, prefill_first = StudyTable("Stall-free (fcfs)", columns), StudyTable("Prefill-first", columns)
    points: dict[str, dict[str, list[float]]] = {}
    for policy, table in (("fcfs", stall_free), ("prefill-first", prefill_first)):
        points[policy] = {"ttft": [], "tbt": []}
        for size in SIZES:
            tell(f"{policy}, {size} tokens per step")
            m = metrics(
                bench.run(
                    synthetic(text, bench.seed),
                    f"{policy} {size}",
                    scheduling_policy=policy,
                    max_num_batched_tokens=size,
                    max_num_seqs=min(size, 128),
                    prefix_cache="none",
                )
            )
            latency = m["latency_s"]
            points[policy]["ttft"].append(latency["ttft"]["p99"])
            points[policy]["tbt"].append(latency["tbt"]["p99"])
            table.rows.append(
                [
                    str(size),
                    *(seconds(latency["ttft"][p]) for p in ("p50", "p99")),
                    *(seconds(latency["tbt"][p]) for p in ("p50", "p99", "max")),
                    f"{m['throughput']['output_tokens_per_s']:.0f}",
                ]
            )
    study.tables = [stall_free, prefill_first]
    for key, title in (("ttft", "TTFT p99 by step budget"), ("tbt", "TBT p99 by step budget")):
        study.charts.append(
            Chart(
                title,
                y_format=seconds,
                log_x=True,
                lines=[Line(p, SIZES, points[p][key], style=i) for i, p in enumerate(points)],
                note="tokens per step, logarithmic",
            )
        )
    study.data = {"sizes": SIZES, **points}
    smooth, stalled = min(points["fcfs"]["tbt"]), min(points["prefill-first"]["tbt"])
    study.findings = [
        f"TBT p99 is {seconds(smooth)} at the best stall-free budget and {seconds(stalled)} at the best "
        f"prefill-first one ({stalled / smooth:.1f}x).",
        f"TTFT p99 falls from {seconds(points['fcfs']['ttft'][0])} at {SIZES[0]} tokens to "
        f"{seconds(min(points['fcfs']['ttft']))} at the best budget: small chunks read the weights once per chunk.",
    ]
    return study
