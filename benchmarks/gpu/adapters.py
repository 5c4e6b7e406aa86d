"""Rows that have adapters, on a model of a real shape: decode steps against those of the model alone."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.device_model import Machine, engine_on
from benchmarks.gpu.engine import _free, decode, host_share
from benchmarks.gpu.shapes import spec_of

from penstock.core.adapter import AdapterRef
from penstock.core.model_spec import ModelSpec
from penstock.model.adapted import adaptable
from penstock.ops.adapters import LowRank

NAME = "llama-3.1-8b"


@cache
def _numbers(rank: int, rows: int, columns: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(rank)
    return tuple(rng.normal(0, 0.02, shape).astype(np.float16) for shape in ((rank, columns), (rows, rank)))  # type: ignore[return-value]


def parts_of(spec: ModelSpec, rank: int) -> Mapping[str, LowRank]:
    """An adapter of queries and values. All of them have these numbers, each its own memory on the device."""
    own = {name: shape for name, shape in adaptable(spec).items() if name.rpartition(".")[2] in ("q", "v")}
    return {name: LowRank(*_numbers(rank, *shape), 1.0) for name, shape in own.items()}


def machine_of(bench: Bench, spec: ModelSpec, count: int, rank: int, **how: Any) -> tuple[Machine, list[AdapterRef]]:
    """An engine that serves `count` adapters, and what they are called."""
    parts = parts_of(spec, rank)
    size = sum(part.num_bytes for part in parts.values())
    refs = [AdapterRef(b"adapter %d" % n, str(n), size) for n in range(count)]
    settings = {"enable_lora": True, "max_loras": count, "max_cpu_loras": count, "max_lora_rank": rank}
    return engine_on(bench, spec, load_adapter=lambda ref: parts, lora_memory=4.0, **settings, **how), refs


def run(bench: Bench) -> None:
    """Half of the adapters in one round, the others in the next: each row has one of its own."""
    rows, count, rank, context = (4, 8, 4, 32) if bench.tiny else (32, 64, 16, 512)
    _measure(bench, rows, context, *machine_of(bench, spec_of(NAME, bench.tiny), count, rank, num_seqs=rows,
                                               num_tokens=context + 128, budget=512))  # fmt: skip
    _free(bench)


def _measure(bench: Bench, rows: int, context: int, machine: Machine, refs: list[AdapterRef]) -> None:
    base, own = "adapters.base", "adapters.each"
    bench.attempt(base, lambda: decode(bench, base, machine, rows, context))
    for half in (refs[:rows], refs[rows:]):  # graphs are captured in the first round, and adapters come in both
        bench.attempt(own, lambda half=half: decode(bench, own, machine, rows, context, half))
    bench.attempt(base, lambda: decode(bench, base, machine, rows, context))
    figures = [f"{label}.decode{rows}.step_s" for label in (base, own)]
    share = bench.known[figures[0]] / bench.known[figures[1]]
    said = f"{rows} rows, each with another one of {len(refs)} adapters on queries and values"
    bench.figure("adapters.over_base", share, "of the base's decode speed", said=said)
    counts = machine.forward._inner.graphs.counts if machine.forward.graphs else {}
    bench.note("adapters.graphs", f"steps by rows of their graph: {dict(counts)}")
    bench.attempt("adapters.host", lambda: host_share(bench, "adapters", machine, rows, context, refs[:rows]))
