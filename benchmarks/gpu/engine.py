"""The engine, loop and all, on models of real shapes: decode, prefill, and the host's part of a step."""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from benchmarks.gpu.bench import Bench, Stop
from benchmarks.gpu.ceilings import COPY, PRODUCT
from benchmarks.gpu.device_model import Machine, ask, engine_on, read_bytes
from benchmarks.gpu.shapes import spec_of

from penstock.core.adapter import AdapterRef
from penstock.core.model_spec import ModelSpec

WARM = 4
"""Decode steps before the clock runs: kernels are compiled, graphs captured."""
SPARE = 64
"""Steps that prompts of a batch may be apart."""


def stage(name: str) -> Callable[[Bench], None]:
    """Of one shape: what answers most comes first."""

    def run(bench: Bench) -> None:
        measure(bench)
        _free(bench)  # here, where nothing of a machine is alive any more

    def measure(bench: Bench) -> None:
        context, prompt, batch = (32, 24, 4) if bench.tiny else (2048, 8192, 64)
        spec, made = spec_of(name, bench.tiny), list[Machine]()
        _fits(bench, spec, batch, context)

        def make() -> None:
            began = time.perf_counter()
            made.append(engine_on(bench, spec, num_seqs=batch, num_tokens=max(prompt, context) + 2 * SPARE,
                                  in_all=max(prompt, batch * context) + 2 * batch * SPARE, budget=prompt))  # fmt: skip
            bench.sync()
            bench.figure(f"{name}.made_s", time.perf_counter() - began, "s", said="random weights, made on the device")
            bench.figure(f"{name}.weight_bytes", made[0].weight_bytes, "B")

        if bench.attempt(f"{name}.make", make):
            machine = made[0]
            bench.attempt(f"{name}.decode1", lambda: decode(bench, name, machine, 1, context))
            bench.attempt(f"{name}.host", lambda: host_share(bench, name, machine, 1, context))
            bench.attempt(f"{name}.decode{batch}", lambda: decode(bench, name, machine, batch, context))
            rows = f"{name}.rows{batch}"
            bench.attempt(rows, lambda: host_share(bench, rows, machine, batch, context))
            bench.attempt(f"{name}.prefill", lambda: prefill(bench, name, machine, prompt))

    return run


def int4(name: str) -> Callable[[Bench], None]:
    """The same shape with int4 weights, one row behind a short context: where weights are all that is read."""

    def run(bench: Bench) -> None:
        measure(bench)
        _free(bench)

    def measure(bench: Bench) -> None:
        machine = engine_on(bench, spec_of(name, bench.tiny), num_seqs=1, num_tokens=512, budget=256, codes="int4")
        label = f"{name}.int4"
        bench.figure(f"{label}.weight_bytes", machine.weight_bytes, "B", said="int4 in groups of 128; embedding and "
                     "output matrix bfloat16")  # fmt: skip
        decode(bench, label, machine, 1, 64 if bench.tiny else 128)
        host_share(bench, label, machine, 1, 64 if bench.tiny else 128)
        plain = engine_on(bench, spec_of(name, bench.tiny), num_seqs=1, num_tokens=512, budget=256)
        decode(bench, f"{name}.short", plain, 1, 64 if bench.tiny else 128)
        ratio = bench.known[f"{name}.short.decode1.step_s"] / bench.known[f"{label}.decode1.step_s"]
        bench.figure(f"{label}.over_bf16", ratio, "times", said="steps of one row, behind equal contexts")

    return run


def _fits(bench: Bench, spec: ModelSpec, batch: int, context: int) -> None:
    """Raises: Stop if the weights, twice the widest activation of a prompt and some room exceed what is free."""
    if bench.device.type != "cuda":
        return
    free, _ = torch.cuda.mem_get_info(bench.device)
    need = 2 * spec.num_params + (4 << 30)
    if need > free:
        raise Stop(f"weights of {2 * spec.num_params / 2**30:.0f} GiB, and {free / 2**30:.0f} GiB of memory are free")


def start(machine: Machine, batch: int, context: int, steps: int, adapters: Sequence[AdapterRef] = ()) -> int:
    """`batch` sequences behind `context` random tokens that nobody computed, which will take `steps` more steps; each
    with one of the `adapters`, if there are some.

    Returns the tokens that all of them have: those whose prompts were through first have some more.
    """
    core, vocab = machine.core, machine.spec.vocab_size
    machine.skips = True
    for number in range(batch):
        rules = {"adapter": adapters[number % len(adapters)]} if adapters else {}
        ask(core, number, context, steps + SPARE, vocab, **rules)
    num: Counter[str] = Counter()
    while len(num) < batch:
        num.update({out.request_id: len(out.token_ids) for out in core.step() if out.token_ids})
    machine.skips = False
    if max(num.values()) > SPARE:
        raise RuntimeError(f"the first prompt was through {max(num.values())} steps before the last")
    return batch * context + num.total()


def finish(machine: Machine) -> None:
    machine.skips = True
    while machine.core.has_work:
        machine.core.step()
    machine.skips = False


def decode(
    bench: Bench, label: str, machine: Machine, batch: int, context: int, adapters: Sequence[AdapterRef] = ()
) -> None:  # fmt: skip
    """Steps of the whole engine, `batch` rows behind `context` tokens, one token each."""
    bench.need(5, "a few steps")
    num = 4 if bench.tiny else 24
    tokens = start(machine, batch, context, WARM + num + 2, adapters)
    try:
        for _ in range(WARM):
            machine.core.step()
        bench.sync()
        samples: list[float] = []
        began = time.monotonic()
        while len(samples) < num and (len(samples) < 3 or time.monotonic() - began < 0.25 * bench.left_s()):
            start_s = time.perf_counter()
            out = machine.core.step()  # its tokens are here: with one step in flight the device is done
            samples.append(time.perf_counter() - start_s)
            produced = sum(len(o.token_ids) for o in out)
            if produced != batch:
                raise RuntimeError(f"a decode step of {batch} rows gave {produced} tokens")
    finally:
        finish(machine)
    step_s = statistics.median(samples)
    name = f"{label}.decode{batch}"
    kv = (tokens + batch * (WARM + len(samples) // 2)) * machine.kv_bytes
    kv += sum(ref.num_bytes for ref in adapters[:batch])
    moved = read_bytes(machine, batch) + kv
    said = f"{batch} rows behind {context} tokens, the median of {len(samples)} steps of the whole engine"
    bench.figure(f"{name}.step_s", step_s, "s", low=min(samples), high=max(samples), said=said)
    bench.figure(f"{name}.tokens_per_s", batch / step_s, "tokens/s")
    share = bench.share(name, COPY, moved / step_s)
    bench.figure(f"{name}.copy_share", share, "of the copy bandwidth", bytes=moved, said="weights and keys and values "
                 "read once")  # fmt: skip


def prefill(bench: Bench, label: str, machine: Machine, length: int) -> None:
    """One prompt from its arrival to its first token, computed."""
    bench.need(8, "a prompt")
    samples: list[float] = []
    began = time.monotonic()
    for number in range(4):
        ask(machine.core, 10_000 + number, length, 1, machine.spec.vocab_size)
        bench.sync()
        start_s = time.perf_counter()
        while machine.core.has_work:
            machine.core.step()
        bench.sync()
        samples.append(time.perf_counter() - start_s)
        if time.monotonic() - began > 0.3 * bench.left_s():
            break
    took = samples[1:] or samples
    if bench.left_s() > 5:

        def prompt() -> None:
            ask(machine.core, 20_000, length, 1, machine.spec.vocab_size)
            while machine.core.has_work:
                machine.core.step()

        bench.note(f"{label}.prefill.microseconds", str(_busy(bench, prompt, 1)[2]))
    flops = prefill_flops(machine.spec, length)
    best = statistics.median(took)
    said = f"{length} tokens in one step, the median of {len(took)}" + ("" if samples[1:] else "; the first, cold")
    bench.figure(f"{label}.prefill.s", best, "s", low=min(took), high=max(took), said=said)
    bench.figure(f"{label}.prefill.tokens_per_s", length / best, "tokens/s")
    share = bench.share(label, PRODUCT, flops / best)
    bench.figure(f"{label}.prefill.product_share", share, "of the product rate", flops=flops)


def prefill_flops(spec: ModelSpec, length: int) -> int:
    """Products with matrices that every token meets, attention as far as it looks, one row of logits."""
    flops = 2 * spec.vocab_size * spec.hidden_size
    for layer in spec.layers:
        mixer: Any = layer.mixer
        shapes = mixer.weight_shapes(spec.hidden_size)
        per_token = sum(shape[0] * shape[1] for shape in shapes.values() if len(shape) == 2)
        ffn: Any = layer.ffn
        experts = getattr(ffn, "top_k", 0)
        width = ffn.expert.width * experts if experts else ffn.width
        per_token += 3 * width * spec.hidden_size + (ffn.num_experts * spec.hidden_size if experts else 0)
        flops += 2 * per_token * length
        flops += 4 * mixer.num_heads * mixer.head_dim * length * (length + 1) // 2
    return flops


def host_share(
    bench: Bench, label: str, machine: Machine, batch: int, context: int, adapters: Sequence[AdapterRef] = ()
) -> None:  # fmt: skip
    """How much of a decode step the device waits for the host: 1 - busy / wall.

    Wall from steps that nobody watches, busy from the profiler's sum of all the device did in as many. Beside it the
    places where the host waited for the device, which the driver reports.
    """
    bench.need(8, "a profile of steps")
    num = 1 if bench.tiny else 8
    start(machine, batch, context, WARM + 3 * num + 2, adapters)
    core = machine.core
    try:
        for _ in range(WARM):
            core.step()
        # From tokens to tokens: a device that waits for its first step, or is let run dry at the end, is no steady one.
        start_s = time.perf_counter()
        for _ in range(num):
            core.step()
        wall_s = (time.perf_counter() - start_s) / num
        busy_s, kernels, by_kernel = _busy(bench, core.step, num)
        waits = _waits(bench, core.step)
    finally:
        finish(machine)
    bench.figure(f"{label}.kernels_per_step", kernels, "launches", microseconds=by_kernel)
    if bench.device.type != "cuda":
        bench.note(f"{label}.host_share", "the CPU is both host and device")
    else:
        bench.figure(f"{label}.host_share", max(0.0, 1.0 - busy_s / wall_s), "of a step", wall_s=wall_s, busy_s=busy_s,
                     said=f"{batch} rows behind {context} tokens")  # fmt: skip
        bench.figure(f"{label}.waits_per_step", sum(waits.values()), "waits", places=dict(waits.most_common(20)))


def _busy(bench: Bench, step: Callable[[], object], num: int) -> tuple[float, float, dict[str, float]]:
    """Per step: seconds that the device worked, its operations, and microseconds of those that took most."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = bench.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as seen:
        for _ in range(num):
            step()
        bench.sync()
    kind = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    events = [e for e in seen.events() if e.device_type == kind]
    spans = sorted((e.time_range.start, e.time_range.end) for e in events)
    took: Counter[str] = Counter()
    for event in events:
        took[event.name[:80]] += event.time_range.end - event.time_range.start
    if on_gpu and not spans:
        raise Stop("the profiler saw nothing on the device")
    busy, reached = 0.0, float("-inf")
    for first, last in spans:  # what overlaps counts once
        busy += max(0.0, last - max(first, reached))
        reached = max(reached, last)
    return busy / num / 1e6, len(spans) / num, {name: round(us / num, 1) for name, us in took.most_common(16)}


def _waits(bench: Bench, step: Callable[[], object]) -> Counter[str]:
    """Places in the code where one step made the host wait, and how often. Empty where there is no driver to ask."""
    if bench.device.type != "cuda":
        return Counter()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return Counter(f"{w.filename.rsplit('/penstock/', 1)[-1]}:{w.lineno}" for w in seen
                   if "synchroniz" in str(w.message))  # fmt: skip


def _free(bench: Bench) -> None:
    gc.collect()
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()
