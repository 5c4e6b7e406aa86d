"""Paged against reserved memory over length distributions. Source: vLLM, arXiv 2309.06180, sections 3 and 6 (B03)."""

from __future__ import annotations

from penstock.core.model_spec import cache_spec
from penstock.report.chart import Chart, Line
from penstock.report.numbers import percent, seconds
from penstock.sim.metrics import metrics
from penstock.sim.studies.study import Bench, Study, StudyTable, Tell
from penstock.sim.synthetic import synthetic

ALLOCATORS = ("contiguous", "contiguous-pow2", "contiguous-oracle", "virtual", "paged")
CVS = (0.01, 0.5, 1.0, 2.0)
"""Spread of prompt and output lengths (standard deviation over mean): from all alike to heavy-tailed."""


def run(bench: Bench, tell: Tell) -> Study:
    """A backlog of requests at once, in memory for ten sequences of full length, under each allocator."""
    n = bench.requests(300)
    context = 4096
    token_bytes = sum(c.num_bytes for layer in bench.spec.layers if (c := cache_spec(layer, bench.spec.dtype)))
    study = Study(
        title="Paged against reserved memory",
        question="How much of the KV memory holds tokens, and how many sequences fit, if memory is reserved or paged?",
        sources="vLLM, arXiv 2309.06180; vAttention, arXiv 2405.04437; rows B02, B03 and B08 of the catalogue.",
        setup=[
            f"Virtual clock; {bench.device.name}, roofline costs; {n} requests at once, prompts and outputs of 400 "
            f"tokens on average; KV memory for ten sequences of {context} tokens, blocks of 16; no prefix cache; seed "
            f"{bench.seed}. Shares are means over all steps.",
        ],
    )
    table = StudyTable(
        "By spread of lengths",
        [
            "cv",
            "allocator",
            "used",
            "reserved",
            "internal",
            "external",
            "free",
            "peak batch",
            "makespan",
            "preemptions",
        ],
    )
    used: dict[str, list[float]] = {a: [] for a in ALLOCATORS}
    spans: dict[str, list[float]] = {a: [] for a in ALLOCATORS}
    batches: dict[str, list[float]] = {a: [] for a in ALLOCATORS}
    for cv in CVS:
        text = f"synthetic:poisson?rate=10000&prompt=400&prompt_cv={cv}&output=400&output_cv={cv}&requests={n}"
        for allocator in ALLOCATORS:
            tell(f"cv {cv:g}, {allocator}")
            result = bench.run(
                synthetic(text, bench.seed),
                allocator,
                kv_allocator=allocator,
                kv_cache_memory_bytes=10 * context * token_bytes,
                max_model_len=context,
                max_num_seqs=256,
                block_size=16,
                prefix_cache="none",
            )
            m = metrics(result)
            mean = m["kv"]["mean"]
            used[allocator].append(mean["tokens"])
            spans[allocator].append(m["span_s"])
            batches[allocator].append(m["engine"]["peak_running"])
            table.rows.append(
                [
                    f"{cv:g}",
                    allocator,
                    *(percent(mean[k]) for k in ("tokens", "reserved", "internal", "external", "free")),
                    f"{m['engine']['peak_running']:,.0f}",
                    seconds(m["span_s"]),
                    f"{m['preemptions']['count']:,.0f}",
                ]
            )
    study.tables = [table]
    study.charts = [
        Chart(
            title,
            y_format=show,
            lines=[Line(a, CVS, values[a], style=i) for i, a in enumerate(ALLOCATORS)],
            note="by coefficient of variation of lengths",
        )
        for title, values, show in (("Slots that hold a token", used, percent), ("Makespan", spans, seconds))
    ]
    study.data = {"cv": CVS, "used": used, "makespan_s": spans, "peak_batch": batches}
    at = CVS.index(1.0)
    study.findings = [
        f"With lengths of cv 1, {percent(used['paged'][at])} of the slots hold a token when paged and "
        f"{percent(used['contiguous'][at])} when the full context is reserved; the largest batch is "
        f"{batches['paged'][at] / batches['contiguous'][at]:.1f}x.",
        f"The same requests take {seconds(spans['paged'][at])} paged and {seconds(spans['contiguous'][at])} reserved.",
        "Knowing every length beforehand (oracle) still leaves reserved slots and holes between runs.",
    ]
    return study
