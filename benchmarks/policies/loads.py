"""Loads of a size that a small model on two cores serves: drawn ones, and lengths of published traces, cut to fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

from benchmarks.policies.case import Load

from penstock.base.errors import InputError
from penstock.sim.synthetic import synthetic
from penstock.sim.traces import open_trace
from penstock.sim.workload import TimedRequest, Workload, from_list

MAX_PROMPT, MAX_OUTPUT = 1024, 256
_ROOT = Path(__file__).resolve().parents[2]
_STRIDE = 997
"""Requests of a trace between what two seeds begin with."""


def drawn(
    *, prompt: int = 128, output: int = 48, prompt_cv: float = 1.0, output_cv: float = 1.0, process: str = "poisson",
    cv: float | None = None, tenants: int = 1,
) -> Load:  # fmt: skip
    """Log-normal lengths (`*_cv` 1.5 and more: a heavy tail), arrivals of `process`; `cv` of a gamma process."""

    def load(rate: float, seed: int, n: int) -> Workload:
        numbers = f"rate={rate:.9g}" + ("" if cv is None else f"&cv={cv:g}")
        lengths = f"prompt={prompt}&output={output}&prompt_cv={prompt_cv:g}&output_cv={output_cv:g}"
        return cut(synthetic(f"synthetic:{process}?{numbers}&{lengths}&tenants={tenants}&requests={n}", seed))

    return load


def trace(file: str, *, scale: float = 0.25) -> Load:
    """Of a file of `shared/data/traces`: from a place that the seed decides, its lengths times `scale`, its arrivals
    squeezed to the rate, so that bursts stay bursts. Raises InputError if it is not there."""

    def load(rate: float, seed: int, n: int) -> Workload:
        path = trace_file(file)
        whole = open_trace(path)
        first = seed * _STRIDE
        kept = list(islice(iter(whole), first, first + n))
        if len(kept) < n:
            raise InputError(f"{path}: has no {n} requests from the {first}-th on; use a smaller seed", param="seed")
        return cut(squeezed(from_list(file, kept, block_tokens=whole.block_tokens), rate, scale))

    return load


def trace_file(file: str) -> Path:
    """Raises InputError if nobody has put it beside the repository."""
    for folder in (_ROOT.parent, _ROOT.parent.parent):
        path = folder / "shared" / "data" / "traces" / file
        if path.exists():
            return path
    raise InputError(f"shared/data/traces/{file} is not beside the repository; this load needs it", param="load")


def squeezed(workload: Workload, rate: float, scale: float) -> Workload:
    """Lengths times `scale`, arrivals from 0 on with `rate` requests a second on average. Shared prefixes shrink with
    their blocks."""
    requests = list(workload)
    first_s = requests[0].arrival_s
    span_s = requests[-1].arrival_s - first_s
    faster = (len(requests) - 1) / (span_s * rate) if span_s > 0 else 0.0
    made = [
        replace(
            r, arrival_s=(r.arrival_s - first_s) * faster, num_prompt=max(1, round(r.num_prompt * scale)),
            num_output=max(1, round(r.num_output * scale)),
        )
        for r in requests
    ]  # fmt: skip
    block = max(1, round(workload.block_tokens * scale))
    return from_list(workload.name, made, description=f"{workload.name} x {scale:g}", block_tokens=block)


def cut(workload: Workload) -> Workload:
    """Without what a small model on two cores cannot do in time: longer lengths become the longest."""

    def source() -> Iterator[TimedRequest]:
        for r in workload.source():
            yield replace(r, num_prompt=min(r.num_prompt, MAX_PROMPT), num_output=min(r.num_output, MAX_OUTPUT))

    return replace(workload, source=source)
