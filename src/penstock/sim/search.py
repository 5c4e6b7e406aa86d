"""Which batch, chunk and tensor degree give most within a latency, from lengths alone: a branch and bound.

Sequences' lengths are a distribution, and requests are never short. Two schedules have engines that do all: `chunked`
(the policy `fcfs`): every step has up to `num_seqs` decodes and up to `chunk` tokens of prompts beside them. `apart`
(the policy `prefill-first`): steps of prompts, up to `chunk` tokens, and steps of decodes take turns; who decodes waits
for the former. The third is in `sim.search_placed`. With P tokens of prompt and N of output on average, b sequences, c
tokens of prompts a step, and T(.) seconds of a step:

    chunked   requests/s = r / T(r N decodes, r P tokens),   r = min(b / (N + P/c), c / P) requests a step
              latency    = (ceil(P'/c) + 1 + N') T(b decodes, c tokens)
    apart     requests/s = 1 / (P/c T(0, c tokens) + N/b T(b decodes, 0))
              latency    = (ceil(P'/c) + 1) T(0, c) + N' T(b, 0) + ceil(N' b / N) (P/c + 1) T(0, c)

P' and N' are the lengths of a long request (`quantile`), and T of a latency is that of full steps whose contexts are
long. A box of (b, c) is bounded by what its best corners would give: T grows with every field, so no point in it has
more requests/s than the largest r over the smallest T, nor a shorter latency than the smallest of each factor. A box
that cannot meet the latency, or cannot beat what is found by more than `GAP`, is dropped; others are cut in two.

Source: ExeGPT, arXiv 2404.07947, sections 4 and 5 (search by monotonicity under a latency bound; round-robin
allocation is `apart`; its workload-aware allocation, with a tensor degree for each phase, is `sim.search_placed`).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import ceil, inf, sqrt
from typing import Protocol

import msgspec
import numpy as np

from penstock.base.errors import ConfigError, InputError
from penstock.core.model_spec import ModelSpec
from penstock.core.protocols import StepTimer
from penstock.core.step_shape import StepShape
from penstock.plan.cost import RooflineTimer
from penstock.plan.devices import Device
from penstock.sim.workload import Workload

GAP = 0.02
"""What is found is at most this much below the best."""
PLACED = "placed"
POLICIES = {"chunked": "fcfs", "apart": "prefill-first", PLACED: "fcfs"}
DECODE_BUDGET = 2048
"""Tokens of a step of an engine that makes tokens: it computes of prompts only what fills no block."""
MOST_PROMPTS = 64
"""Sequences of an engine for prompts: those whose blocks are on their way are among them."""
_ALLREDUCE_S = 1e-5
_LONG = 2.33
"""Standard deviations above the mean that a sum of contexts stays below, 99 times in 100."""


@dataclass(frozen=True)
class Lengths:
    """Of a workload. Units: tokens. `long_*`: a quantile; `context`, `context_sd`: of a sequence while it decodes."""

    prompt: float
    output: float
    long_prompt: int
    long_output: int
    longest: int
    context: float
    context_sd: float

    @classmethod
    def of(cls, workload: Workload, quantile: float = 0.99, limit: int = 100_000) -> Lengths:
        """Raises InputError for a workload without requests."""
        pairs = [(r.num_prompt, r.num_output) for r in workload.limited(limit)]
        if not pairs:
            raise InputError(f"{workload.name}: there are no requests to take lengths from", param="trace")
        prompt, output = (np.array(column, np.float64) for column in zip(*pairs, strict=True))
        # A step meets a sequence as often as it has outputs.
        middle, weight = prompt + output / 2, output / output.sum()
        context = float((middle * weight).sum())
        spread = float((weight * ((middle - context) ** 2 + output**2 / 12)).sum())
        long_prompt, long_output = (int(np.quantile(a, quantile, method="higher")) for a in (prompt, output))
        return cls(
            float(prompt.mean()), float(output.mean()), long_prompt, long_output, int((prompt + output).max()),
            context, sqrt(spread),
        )  # fmt: skip


@dataclass(frozen=True)
class Point:
    """A setting: `max_num_seqs`, tokens of prompts in a step, and what the cost model says. Units: seconds.
    `engines` of `degree` devices each; `prompt_engines` are besides, for prompts alone."""

    schedule: str
    degree: int
    num_seqs: int
    chunk: int
    requests_per_s: float
    latency_s: float
    engines: int = 1
    prompt_engines: int = 0
    prompt_degree: int = 0

    @property
    def settings(self) -> dict[str, object]:
        """As an engine takes them; one that makes tokens, where there are others for prompts."""
        budget = self.chunk + (self.num_seqs if self.schedule == "chunked" else 0)
        if self.prompt_engines:
            budget = DECODE_BUDGET
        return {
            "scheduling_policy": POLICIES[self.schedule], "max_num_seqs": self.num_seqs,
            "max_num_batched_tokens": max(budget, self.num_seqs),
        }  # fmt: skip

    @property
    def prompt_settings(self) -> dict[str, object]:
        """The same of an engine for prompts."""
        most = max(1, self.chunk)
        return {"scheduling_policy": "fcfs", "max_num_seqs": min(most, MOST_PROMPTS), "max_num_batched_tokens": most}


@dataclass(frozen=True)
class Searched:
    """`best`: None if nothing meets the latency; `fastest_s` is then the shortest there is. `num_evaluated`:
    points and boxes that the cost model was asked about."""

    best: Point | None
    num_evaluated: int
    fastest_s: float


class Searchable(Protocol):
    """Schedules of some engines. `most_seqs`: sequences of one that its memory has room for."""

    schedules: Sequence[str]
    most_seqs: int

    def point(self, schedule: str, num_seqs: int, chunk: int) -> Point: ...

    def bounds(self, schedule: str, seqs: tuple[int, int], chunk: tuple[int, int]) -> tuple[float, float]:
        """(requests/s that no point of the box exceeds, seconds that none is below); exact if it is one point."""
        ...


class Schedules:
    """The formulas above for one timer. `engines`: how many of them share the requests."""

    schedules: Sequence[str] = ("chunked", "apart")

    def __init__(
        self, lengths: Lengths, timer: StepTimer, *, degree: int = 1, engines: int = 1, most_seqs: int = 1
    ) -> None:  # fmt: skip
        self.lengths, self._timer, self.degree, self.engines = lengths, timer, degree, engines
        self.most_seqs = most_seqs

    def point(self, schedule: str, num_seqs: int, chunk: int) -> Point:
        rate, latency_s = self.bounds(schedule, (num_seqs, num_seqs), (chunk, chunk))
        return Point(schedule, self.degree, num_seqs, chunk, rate, latency_s, self.engines)

    def bounds(self, schedule: str, seqs: tuple[int, int], chunk: tuple[int, int]) -> tuple[float, float]:
        """(requests/s that no point of the box exceeds, seconds that none is below); exact if it is one point."""
        of = self._chunked if schedule == "chunked" else self._apart
        rate, latency_s = of(seqs, chunk)
        return rate * self.engines, latency_s

    def shared_by(self, engines: int) -> Schedules:
        """The same with so many engines."""
        return Schedules(
            self.lengths, self._timer, degree=self.degree, engines=engines, most_seqs=self.most_seqs
        )  # fmt: skip

    def _chunked(self, seqs: tuple[int, int], chunk: tuple[int, int]) -> tuple[float, float]:
        n, (b, b1), (c, c1) = self.lengths, seqs, chunk

        def requests(b: int, c: int) -> float:
            return min(b / (n.output + n.prompt / c), c / n.prompt)

        low = requests(b, c)
        step_s = self.step_s(low * n.output, low * n.prompt, long=False)
        full_s = self.step_s(b, c, long=True)
        return requests(b1, c1) / step_s, (ceil(n.long_prompt / c1) + 1 + n.long_output) * full_s

    def _apart(self, seqs: tuple[int, int], chunk: tuple[int, int]) -> tuple[float, float]:
        n, (b, b1), (c, c1) = self.lengths, seqs, chunk
        prompts_s, decodes_s = self.step_s(0, c, long=False), self.step_s(b, 0, long=False)
        rate = 1 / (n.prompt / c1 * prompts_s + n.output / b1 * decodes_s)
        full_s, late_s = self.step_s(0, c, long=True), self.step_s(b, 0, long=True)
        others = ceil(n.long_output * b / n.output) * (n.prompt / c1 + 1)
        return rate, (ceil(n.long_prompt / c1) + 1 + others) * full_s + n.long_output * late_s

    def step_s(self, decodes: float, prompt_tokens: float, *, long: bool) -> float:
        """Of a step with so many decodes and tokens of one prompt, at mean contexts or long ones."""
        n = self.lengths
        context = decodes * n.context + (_LONG * sqrt(decodes) * n.context_sd if long else 0.0)
        start = 0.0
        if prompt_tokens:
            start = max(0.0, n.long_prompt - prompt_tokens) if long else max(0.0, (n.prompt - prompt_tokens) / 2)
        ends = prompt_tokens / n.prompt if prompt_tokens else 0.0
        shape = StepShape(
            round(decodes + prompt_tokens), ceil(decodes + ends), round(context + start + prompt_tokens),
            round(context + prompt_tokens * start + prompt_tokens * (prompt_tokens + 1) / 2), ceil(decodes + ends),
        )  # fmt: skip
        return self._timer.step_s(shape)


def search(every: Sequence[Searchable], latency_s: float, *, max_chunk: int, step: int = 16) -> Searched:
    """The point with most requests/s whose latency is at most `latency_s`, within GAP of the best there is.

    `every`: one for each layout of the devices. Chunks are multiples of `step`. Best-first: the box that promises most
    is looked at next.
    """
    best: Point | None = None
    asked, fastest_s, ties = 0, inf, count()
    boxes: list[tuple[float, int, Searchable, str, tuple[int, int], tuple[int, int]]] = []

    def consider(of: Searchable, schedule: str, seqs: tuple[int, int], chunks: tuple[int, int]) -> None:
        nonlocal asked
        rate, least_s = of.bounds(schedule, seqs, (chunks[0] * step, chunks[1] * step))
        asked += 1
        if least_s <= latency_s:
            heapq.heappush(boxes, (-rate, next(ties), of, schedule, seqs, chunks))

    def measure(of: Searchable, schedule: str, num_seqs: int, chunk: int) -> None:
        nonlocal best, asked
        found = of.point(schedule, num_seqs, chunk * step)
        asked += 1
        if found.latency_s <= latency_s and (best is None or found.requests_per_s > best.requests_per_s):
            best = found

    most = max(1, max_chunk // step)
    for of in every:
        for schedule in of.schedules:
            measure(of, schedule, 1, most)
            consider(of, schedule, (1, max(1, of.most_seqs)), (1, most))
    while boxes:
        promised, _, of, schedule, seqs, chunks = heapq.heappop(boxes)
        if best is not None and -promised <= best.requests_per_s * (1 + GAP):
            break  # so does every box that is left
        middle = (seqs[0] + seqs[1]) // 2, (chunks[0] + chunks[1]) // 2
        measure(of, schedule, *middle)
        for part in _halves(seqs, chunks):
            consider(of, schedule, *part)
    if best is None:  # a sequence alone waits for nobody: only the chunk is left to choose
        alone = ((of, schedule, c) for of in every for schedule in of.schedules for c in range(1, most + 1))
        fastest_s = min(of.point(schedule, 1, c * step).latency_s for of, schedule, c in alone)
    return Searched(best, asked, fastest_s)


def _halves(
    seqs: tuple[int, int], chunks: tuple[int, int]
) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:  # fmt: skip
    """The box cut across the side whose ends differ by the larger factor; nothing of a single point."""
    wide = [high / low for low, high in (seqs, chunks)]
    if max(wide) == 1:
        return
    low, high = seqs if wide[0] >= wide[1] else chunks
    middle = (low + high) // 2
    for part in ((low, middle), (middle + 1, high)):
        yield (part, chunks) if wide[0] >= wide[1] else (seqs, part)


def grid(every: Sequence[Searchable], latency_s: float, *, max_chunk: int, step: int = 16) -> Searched:
    """The same by asking about every point: what `search` is judged by."""
    points = [
        of.point(schedule, b, c * step)
        for of in every
        for schedule in of.schedules
        for b in range(1, max(1, of.most_seqs) + 1)
        for c in range(1, max(1, max_chunk // step) + 1)
    ]
    good = [p for p in points if p.latency_s <= latency_s]
    best = max(good, key=lambda p: p.requests_per_s, default=None)
    return Searched(best, len(points), min(p.latency_s for p in points))


def parallel(device: Device, degree: int) -> Device:
    """`degree` devices that share every layer: rates and memory add up. See `TensorTimer` for what that costs."""
    if degree < 1:
        raise ConfigError(f"tensor degree {degree} must be at least 1", field="degrees")
    return msgspec.structs.replace(
        device,
        flops_per_s={name: rate * degree for name, rate in device.flops_per_s.items()},
        read_bytes_per_s=device.read_bytes_per_s * degree,
        memory_bytes=None if device.memory_bytes is None else device.memory_bytes * degree,
        host_copy_bytes_per_s=device.host_copy_bytes_per_s * degree,
    )


class TensorTimer:
    """The roofline of `degree` devices, and two all-reduces a layer over links as fast as those to the host.

    Source of the traffic: 2 (d - 1) / d of the activations each way (Shoeybi et al., arXiv 1909.08053, section 3);
    10 us for each all-reduce are an estimate.
    """

    name = "roofline"

    def __init__(self, spec: ModelSpec, device: Device, degree: int, *, dtype: str, kv_dtype: str | None) -> None:
        self._roofline = RooflineTimer(spec, parallel(device, degree), dtype=dtype, kv_dtype=kv_dtype)
        times = 2 * len(spec.layers) if degree > 1 else 0
        self._fixed_s = times * _ALLREDUCE_S
        self._token_s = times * 2 * (degree - 1) / degree * spec.hidden_size * 2 / device.host_copy_bytes_per_s

    def step_s(self, shape: StepShape) -> float:
        """Seconds of a step of this shape."""
        return self._roofline.step_s(shape) + self._fixed_s + shape.num_tokens * self._token_s

    def copy_s(self, num_bytes: int) -> float:
        """Seconds to move so many bytes between device and host, one way."""
        return self._roofline.copy_s(num_bytes)


def evenly(workload: Workload, requests_per_s: float) -> Workload:
    """The same requests, one after the other at even distances."""
    return replace(
        workload,
        source=lambda: (replace(r, arrival_s=i / requests_per_s) for i, r in enumerate(workload.source())),
        has_times=True, description=f"{workload.description}; {requests_per_s:.3g} a second",
    )  # fmt: skip


def all_at_once(workload: Workload) -> Workload:
    """The same requests, all there from the start: what a search's point is replayed with."""
    return replace(
        workload, source=lambda: (replace(r, arrival_s=0.0) for r in workload.source()), has_times=True,
        description=f"{workload.description}; all at once",
    )  # fmt: skip
