"""Swap against recompute, by the speed of the link to the host.

Source: vLLM, arXiv 2309.06180, sections 4.5 and 7.3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from penstock.core.model_spec import cache_spec
from penstock.report.chart import Chart, Line
from penstock.report.numbers import number, seconds
from penstock.sim.metrics import metrics
from penstock.sim.studies.study import Bench, Study, StudyTable, Tell
from penstock.sim.synthetic import synthetic

LINKS = (0.1e9, 0.5e9, 1e9, 4e9, 16e9, 64e9)
MODES = ("recompute", "swap", "auto")


def run(bench: Bench, tell: Tell) -> Study:
    """A load whose KV cannot all fit; each preemption mode over host links from 0.1 to 64 GB/s."""
    n = bench.requests(200)
    text = f"synthetic:poisson?rate=40&prompt=600&output=700&output_cv=0.5&requests={n}"
    token_bytes = sum(c.num_bytes for layer in bench.spec.layers if (c := cache_spec(layer, bench.spec.dtype)))
    memory = 12 * 1300 * token_bytes  # a dozen sequences at full length: preemption all the time
    study = Study(
        title="Swap against recompute",
        question="A preempted sequence can be computed again or brought back from host memory. Which is cheaper?",
        sources="vLLM, arXiv 2309.06180, section 4.5; row A08 of the catalogue.",
        setup=[
            f"Virtual clock; {bench.device.name} with {memory / 2**30:.1f} GiB for KV; {text}; seed {bench.seed}; "
            f"swap_space 64 GiB. Copies are charged to the step that makes them.",
        ],
    )
    table = StudyTable(
        "By link speed", ["link GB/s", "mode", "makespan", "JCT mean", "preemptions", "recomputed tokens", "swaps"]
    )
    makespans: dict[str, list[float]] = {m: [] for m in MODES}
    for link in LINKS:
        device = msgspec.structs.replace(bench.device, host_copy_bytes_per_s=link)
        local = replace(bench, device=device)
        for mode in MODES:
            tell(f"{link / 1e9:g} GB/s, {mode}")
            result, stats, _ = local.run_with_stats(
                synthetic(text, bench.seed),
                mode,
                kv_cache_memory_bytes=memory,
                preemption_mode=mode,
                swap_space=64.0,
                prefix_cache="none",
                max_model_len=4096,
            )
            m = metrics(result)
            makespans[mode].append(m["span_s"])
            table.rows.append(
                [
                    f"{link / 1e9:g}",
                    mode,
                    seconds(m["span_s"]),
                    seconds(m["latency_s"]["jct"]["mean"]),
                    f"{m['preemptions']['count']:,.0f}",
                    f"{m['preemptions']['recomputed_tokens']:,.0f}",
                    f"{stats.num_swaps:,}",
                ]
            )
    study.tables = [table]
    gbs = [link / 1e9 for link in LINKS]
    study.charts = [
        Chart(
            "Makespan by link speed",
            x_format=number,
            y_format=seconds,
            log_x=True,
            lines=[Line(m, gbs, makespans[m], style=i) for i, m in enumerate(MODES)],
            note="GB/s, logarithmic",
        )
    ]
    study.data = {"links": LINKS, "makespan_s": makespans}
    study.findings = [
        f"At {gbs[0]:g} GB/s swapping takes {makespans['swap'][0] / makespans['recompute'][0]:.2f}x the time of "
        f"recomputing, at {gbs[-1]:g} GB/s {makespans['swap'][-1] / makespans['recompute'][-1]:.2f}x.",
        f"Choosing by cost at each preemption is never worse than {worst(makespans):.2f}x the better of the two.",
    ]
    return study


def worst(makespans: Mapping[str, Sequence[float]]) -> float:
    """How much longer choosing took than the better of the two, where it took longest in proportion."""
    both = zip(makespans["auto"], makespans["recompute"], makespans["swap"], strict=True)
    return max(auto / min(recompute, swap) for auto, recompute, swap in both)
