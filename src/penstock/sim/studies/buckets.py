"""Buckets of prompts of similar length, with and without chunks. Source: Du et al., 2023; row C63 of the catalogue."""

from __future__ import annotations

from penstock.core.batch import SchedulerOutput
from penstock.report.chart import Chart, Line
from penstock.report.numbers import number, percent
from penstock.sched.policy.padding import Padding
from penstock.sim.driver import SimLimits, simulate
from penstock.sim.metrics import metrics
from penstock.sim.studies.study import Bench, Study, StudyTable, Tell
from penstock.sim.synthetic import synthetic
from penstock.sim.workload import Workload

BUCKETS = (1, 2, 4, 8, 16)
CHUNKS = (0, 256, 64)
"""Tokens of a prompt in one step at most; 0: all of it."""
SIZE = 16


def padding_of(bench: Bench, workload: Workload, bins: int, chunk: int) -> tuple[Padding, float]:
    """(what was padding, prompt and output tokens per second) of one run."""
    core, clock, plan = bench.core(
        scheduling_policy=f"multi-bin:bins={bins},size={SIZE},by=prompt,timeout_s=0.05", max_num_seqs=SIZE,
        max_num_batched_tokens=1 << 16, long_prefill_token_threshold=chunk, prefix_cache="none",
    )  # fmt: skip
    padding, submit = Padding(), core.executor.submit

    def watch(output: SchedulerOutput) -> None:
        padding.step(output, new_batch=0 < len(output.added) == len(core.scheduler.running))
        submit(output)

    core.executor.submit = watch  # type: ignore[method-assign]
    result = simulate(
        core, clock, workload, SimLimits(plan.max_model_len, plan.kv_capacity_tokens, bench.spec.vocab_size)
    )
    padding.end()
    return padding, metrics(result)["throughput"]["total_tokens_per_s"]


def run(bench: Bench, tell: Tell) -> Study:
    """One backlog of prompts of very different lengths in ever more buckets, whole and in chunks."""
    n = bench.requests(512)
    text = f"synthetic:poisson?rate=100000&prompt=400&prompt_cv=1&output=16&requests={n}"
    study = Study(
        title="Buckets against padding",
        question="How much of a padded batch is padding, if prompts of similar length are put together?",
        sources="Du et al. (2023), bucketing of requests; Sarathi-Serve (arXiv 2403.02310) for chunks.",
        setup=[
            f"Virtual clock; {bench.device.name}, roofline costs; {n} requests that are there at once, prompts of 400 "
            f"tokens on average (cv 1), outputs of 16; batches of {SIZE}; seed {bench.seed}. Nothing is padded here: "
            "counted is what padding to the longest of a batch, or of a step, would add."
        ],
    )
    table = StudyTable("By buckets", ["buckets", "chunk", "of a batch", "of a step", "tokens/s"])
    batches: list[float] = []
    steps: dict[int, list[float]] = {chunk: [] for chunk in CHUNKS}
    for bins in BUCKETS:
        for chunk in CHUNKS:
            tell(f"{bins} buckets, chunks of {chunk or 'any'} tokens")
            padding, rate = padding_of(bench, synthetic(text, bench.seed), bins, chunk)
            if chunk == 0:
                batches.append(padding.share)
            steps[chunk].append(padding.step_share)
            cells = (percent(padding.share), percent(padding.step_share), f"{rate:,.0f}")
            table.rows.append([f"{bins}", f"{chunk}" if chunk else "whole", *cells])
    study.tables = [table]
    names = {chunk: f"steps, chunks of {chunk}" if chunk else "steps, whole prompts" for chunk in CHUNKS}
    lines = [Line("batches", BUCKETS, batches)]
    lines += [Line(names[chunk], BUCKETS, steps[chunk], style=1 + i) for i, chunk in enumerate(CHUNKS)]
    study.charts = [Chart("Padding by buckets", number, percent, log_x=True, lines=lines, note="share of tokens")]
    study.data = {"buckets": BUCKETS, "batch": batches, "step": {str(chunk): line for chunk, line in steps.items()}}
    study.findings = [
        f"In one bucket {percent(batches[0])} of padded batches are padding, in {BUCKETS[-1]} {percent(batches[-1])}.",
        f"Chunks of {CHUNKS[-1]} tokens do the same to steps: {percent(steps[CHUNKS[-1]][0])} in one bucket, "
        f"{percent(steps[CHUNKS[-1]][-1])} in {BUCKETS[-1]}.",
    ]
    return study
