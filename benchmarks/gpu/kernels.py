"""Kernels alone, against the ceilings of the same run: the attention that the backend chose, and all of `KERNELS`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import msgspec
import numpy as np
import torch
from benchmarks.gpu.bench import Bench, Stop
from benchmarks.gpu.ceilings import COPY
from benchmarks.gpu.device_model import engine_on
from benchmarks.gpu.shapes import spec_of

from penstock.backends.gpu.step import TorchStep
from penstock.ops.plan import GroupPlan, StepPlan

ATTENTION = "attention.decode"


def run(bench: Bench) -> None:
    context = 256 if bench.tiny else 32768
    for batch in (8, 1):
        bench.attempt(f"{ATTENTION}{batch}", lambda batch=batch: attention(bench, batch, context))
    bench.attempt("kernels.own", lambda: all_kernels(bench))


def attention(bench: Bench, batch: int, context: int) -> None:
    """What the backend calls for one layer of Llama-3.1-8B: a token each behind `context` tokens, scattered pages."""
    spec = spec_of("llama-3.1-8b", bench.tiny)
    spec = msgspec.structs.replace(spec, layers=spec.layers[:1])
    machine = engine_on(bench, spec, num_seqs=batch, num_tokens=context + 32, budget=16)
    call = next(call for call in machine.forward.code if call.op == "attention")
    planes, block = machine.rank.storage.planes, machine.plan.block_size
    blocks = -(-context // block)
    order = np.random.default_rng(0).permutation(machine.rank.storage.num_pages[0]).astype(np.int32)
    tables = tuple(order[b * blocks : (b + 1) * blocks][None] for b in range(batch))
    one = np.arange(batch, dtype=np.int32)
    plan = StepPlan(
        one, np.full(batch, context - 1, np.int32), np.arange(batch + 1, dtype=np.int32),
        np.full(batch, context, np.int32), one, (GroupPlan(1, block, tables),),
    )  # fmt: skip
    mixer: Any = spec.layers[0].mixer
    q = torch.randn(batch, mixer.num_heads, mixer.head_dim, device=bench.device)

    step = TorchStep(plan, planes, bench.device)

    def attend() -> Any:
        return call.fn(*(step if i == 0 else q for i in call.inputs), *call.bound, **call.named)

    with torch.inference_mode():
        took = bench.seconds(attend)
    moved = batch * context * machine.kv_bytes
    name = f"{ATTENTION}{batch}"
    bench.figure(f"{name}.s", took["median"], "s", seconds=took, said=f"{batch} tokens behind {context}, bfloat16 keys "
                 "and values; the backend's own call, its tables on the device")  # fmt: skip
    share = bench.share(name, COPY, moved / took["median"])
    bench.figure(f"{name}.copy_share", share, "of the copy bandwidth", bytes=moved)


def all_kernels(bench: Bench) -> None:
    """Every case of `penstock.backends.gpu.kernels.cases`. Raises: Stop if there are none."""
    try:
        cases: Any = import_module("penstock.backends.gpu.kernels.cases").CASES
    except ImportError as error:
        raise Stop(f"there are no kernels of Penstock's own to be had here ({error})") from None
    if bench.device.type != "cuda":
        raise Stop(f"{len(cases)} cases of kernels, which need a GPU")
    for name, case in cases.items():
        bench.attempt(f"kernel.{name}", lambda name=name, case=case: one_kernel(bench, f"kernel.{name}", case))


def one_kernel(bench: Bench, name: str, case: Any) -> None:
    """A case's time, and its share of the copy bandwidth where its bytes are the measure."""
    bench.need(1.5, "a kernel, which is compiled first,")
    took = bench.seconds(case.make(str(bench.device)), repeats=12)
    bench.figure(f"{name}.s", took["median"], "s", seconds=took, said=f"{case.kernel}; warm")
    if case.num_bytes:
        share = bench.share(name, COPY, case.num_bytes / took["median"])
        bench.figure(f"{name}.copy_share", share, "of the copy bandwidth", bytes=case.num_bytes)
