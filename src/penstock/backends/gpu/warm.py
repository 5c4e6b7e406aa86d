"""A rank made warm before it is ready: decode graphs captured, and kernels compiled for every step that may come.

What is compiled later stalls all streams, so it is an error in the log, and counted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import numpy as np
import torch

from penstock.backends.gpu.device_array import DeviceArray
from penstock.backends.gpu.graphs import CudaGraphs, DecodeGraphs, Graphs, why_not
from penstock.backends.gpu.recorded import MockGraphs
from penstock.backends.gpu.step import TorchStep
from penstock.config.graphs import sizes_up_to
from penstock.model.forward import StepLimits
from penstock.ops.plan import GroupPlan, StepPlan
from penstock.ops.tree import tree_mask

_LOG = logging.getLogger("penstock")
_PROMPTS = (2, 16, 32, 64, 128)
"""Tokens of prompts whose tiles of attention have different sizes; from there on powers of two, for products."""
_LONG = 4096
"""Tokens behind which a step of single tokens is warmed."""


class CompilationWatch:
    """Hears of every kernel that Triton makes ready in this process, compiled or read from its cache on disk.

    `num`: of them; `num_late`: since the rank was `ready`, each with a line in the log. `plan`: of what runs, for it.
    """

    def __init__(self) -> None:
        self.num = self.num_late = 0
        self.ready = False
        self.plan: StepPlan | None = None

    def begin(self) -> bool:
        """Listen from now on, for as long as somebody has this object. Whether there is a compiler to listen to."""
        try:
            from triton import knobs
        except ImportError:
            return False
        before, own = knobs.runtime.jit_post_compile_hook, ref(self)

        def hook(**named: Any) -> Any:
            watch = own()
            if watch is not None:
                watch.heard(named["repr"], named.get("fn"), named.get("compile") or {})
            return None if before is None else before(**named)

        knobs.runtime.jit_post_compile_hook = hook
        return True

    def heard(self, text: str, fn: Any, compiled: Any) -> None:
        """`text`: name and types of a kernel; `compiled["constants"]`: its constants by place."""
        self.num += 1
        if not self.ready:
            return
        self.num_late += 1
        names = getattr(getattr(fn, "jit_function", None), "arg_names", None)
        constants = []
        for place, value in dict(compiled.get("constants") or {}).items():
            at = place[0] if isinstance(place, tuple) else place
            constants.append(f"{names[at] if names and isinstance(at, int) else at}={value}")
        shape = "before any step"
        if self.plan is not None:
            shape = f"in a step of {len(self.plan.seq_lens)} rows and {len(self.plan.token_ids)} tokens"
        _LOG.error(
            "a kernel was compiled after the rank was ready, and every stream waited: %s with %s, %s",
            text, ", ".join(constants) or "no constants", shape,
        )  # fmt: skip


@dataclass
class Warming:
    """What a backend's models are warmed by.

    `sizes`: rows of decode graphs, None: powers of two, (): there are none, and `why`. `draws`: makes the sampler's
    kernel for a number of tokens. `always`: also run the steps that only a GPU needs (tests).
    """

    sizes: tuple[int, ...] | None
    why: str
    draws: Callable[[int], Any]
    watch: CompilationWatch = field(default_factory=CompilationWatch)
    always: bool = False


def warm(
    forward: Any, planes: Sequence[Any], limits: StepLimits, report: Callable[[int, int], None]
) -> DecodeGraphs | str:
    """Runs steps of every kind on `forward` (a `TorchForward`), whose results nobody reads, and captures its graphs; a
    line in the log says what it took. Why there are no graphs, if so.

    Nothing may live in the planes yet. Mutates: `planes`: their spare pages; states, and blocks that are encoded as
    they fill up, of the first slabs.
    """
    start, device, settings = time.monotonic(), forward.placement.device, forward.warming
    listens = device.type == "cuda" and settings.watch.begin()
    before = torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
    graphs = _graphs(forward, planes, limits)
    many = len(graphs) if isinstance(graphs, DecodeGraphs) else 0
    plans = list(_plans(forward, limits)) if device.type == "cuda" or settings.always else []
    for done, plan in enumerate(plans):
        _run(forward, plan, planes, limits)
        report(done + 1, len(plans) + many)
    if isinstance(graphs, DecodeGraphs):
        for done in graphs.capture():
            report(len(plans) + done, len(plans) + many)
        graphs = graphs.problem or graphs
    settings.watch.ready = True
    if isinstance(graphs, str):
        said = f"no decode graphs: {graphs}"
    else:
        sizes = sorted({rows for rows, _ in graphs.captured})
        said = f"{len(graphs.captured)} decode graphs for {', '.join(map(str, sizes))} rows"
    if plans or many:
        memory = f", {(torch.cuda.memory_reserved(device) - before) >> 20} MiB" if device.type == "cuda" else ""
        kernels = f", {settings.watch.num} kernels made ready" if listens else ""
        _LOG.info("warm in %.1f s: %s, %d other steps%s%s", time.monotonic() - start, said, len(plans), kernels, memory)
    if isinstance(graphs, str) and many:
        _LOG.warning("decode graphs cannot be captured, so every step is started from the host: %s", graphs)
    return graphs


def capture_beside(forward: Any, plain: DecodeGraphs | None, planes: Sequence[Any], limits: StepLimits) -> None:
    """Graphs of a model that has come to another that has `plain` ones, whose memory they share: streams wait
    meanwhile, and a line in the log says for how long. Other steps are not run: sequences live in the planes.

    Mutates: `forward.graphs`; spare pages.
    """
    if plain is None:
        return
    start, watch = time.monotonic(), forward.warming.watch
    made = _graphs(forward, planes, limits, plain)
    ready, watch.ready = watch.ready, False
    if isinstance(made, DecodeGraphs):
        many = len(list(made.capture()))
        made = made.problem or made
    watch.ready = ready
    if isinstance(made, str):
        _LOG.warning("steps with adapters are started from the host, and not by decode graphs: %s", made)
        return
    forward.graphs = made
    _LOG.info("%d decode graphs of steps with adapters captured in %.1f s", many, time.monotonic() - start)


def _graphs(
    forward: Any, planes: Sequence[Any], limits: StepLimits, beside: DecodeGraphs | None = None
) -> DecodeGraphs | str:  # fmt: skip
    """The graphs that there should be, or why there are none. `beside`: others that never run at the same time."""
    settings: Warming = forward.warming
    sizes, device = settings.sizes, forward.placement.device
    if sizes == ():
        return settings.why
    problem = why_not(forward.code, limits.groups)
    if problem is not None:
        return problem
    new = CudaGraphs if device.type == "cuda" else lambda _: MockGraphs()
    graphs: Graphs = new(device) if beside is None else beside.graphs
    return DecodeGraphs(
        forward.compute, planes, limits.groups, block_size=limits.block_size,
        sizes=sizes_up_to(limits.max_num_seqs, sizes), max_model_len=forward.max_model_len, device=device,
        graphs=graphs, adapted=forward.adapted, kernels=getattr(forward.attention, "reads_tables", False),
    )  # fmt: skip


def _plans(forward: Any, limits: StepLimits) -> Iterator[StepPlan]:
    """Single tokens of as many sequences as there may be, prompts of several lengths, a tree of drafts."""
    most = limits.max_tokens
    for n in sorted({1, min(most, limits.max_num_seqs)}):
        yield _plan(limits, [1] * n)
    lengths = {*_PROMPTS, *(1 << i for i in range(8, most.bit_length())), most}
    for n in sorted(n for n in lengths if n <= most):
        whole, rest = divmod(n, min(n, forward.max_model_len))
        yield _plan(limits, [min(n, forward.max_model_len)] * whole + [rest] * (rest > 0))
    if limits.trees and most > 1:
        yield _plan(limits, [2], tree_mask([-1, 0])[0])


def _plan(limits: StepLimits, lengths: Sequence[int], mask: Any = None) -> StepPlan:
    """A step whose sequences have `lengths` tokens each, from position 0 on, all in slab 0."""
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    positions = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])
    seq_lens = np.array(lengths, np.int32)
    blocks = -(-max(lengths) // limits.block_size)
    tables = tuple(np.zeros((1, blocks), np.int32) for _ in lengths)
    groups = tuple(GroupPlan(g.pages_per_slab, limits.block_size, tables, g.spec.lanes) for g in limits.groups)
    return StepPlan(np.zeros_like(positions), positions, starts, seq_lens, starts[1:] - 1, groups, mask=mask)


@torch.no_grad()
def _run(forward: Any, plan: StepPlan, planes: Sequence[Any], limits: StepLimits) -> None:
    """A step that reads no page and writes to spare ones, and a draw from its logits in every way."""
    spare = [{name: DeviceArray(plane.whole) for name, plane in own.items()} for own in planes]
    step = TorchStep(plan, spare, forward.placement.device)
    none = np.full((len(plan.seq_lens), plan.groups[0].tables[0].shape[1]), -1, np.int32)
    for g, (group, own) in enumerate(zip(limits.groups, spare, strict=False)):
        if group.spec.kind != "slot" and group.spec.lanes == 1:
            pages = np.full((group.pages_per_slab, len(plan.positions)), len(next(iter(own.values()))) - 1)
            step.memo["slots_of", g] = step.on_device(pages), step.on_device(plan.positions % limits.block_size)
            step.memo["pages", g] = torch.from_numpy(none).to(forward.placement.device)
    if len(plan.positions) > 1:  # attention of few tokens reads a long context by other tiles than a short one
        step.memo["last"] = min(forward.max_model_len, _LONG) - 1
    numbers = map(step.on_device, (plan.token_ids, plan.positions, plan.logits_indices))
    logits = forward.compute(step, *numbers)
    rows = forward.warming.draws(forward.vocab_size).rows()
    for min_p, top_k, top_p in ((0.0, 0, 1.0), (0.1, 0, 1.0), (0.0, 5, 0.9)):
        rows.point(DeviceArray(logits.float()))
        rows.ask(0, 1.0, min_p, top_k, top_p, 0, 0, 0, 1)
        rows.run(len(logits))
        rows.tokens()
