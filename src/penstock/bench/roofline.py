"""The engine beside what this machine could do at most: memory and arithmetic as measured here, work as counted.

A point is a kind of step: one sequence far into its context, many sequences at once, a prompt. Its time is compared
with `plan.cost.RooflineTimer`, fed with this machine's own rates, so that what is left over is the engine's to win.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from penstock.backends.native.schemes import packing
from penstock.base.errors import ConfigError
from penstock.bench.bandwidth import ReadProbe
from penstock.bench.offline import local_maker
from penstock.bench.peak import Peak, blas_peak, register_peak
from penstock.core.matrix_format import NONE, parse_scheme
from penstock.core.sampling import SamplingParams
from penstock.core.step_shape import EMPTY, StepShape
from penstock.launch.llm import LLM
from penstock.ops.native.library import best_library
from penstock.plan.cost import RooflineTimer
from penstock.plan.devices import Device

TOLERATED_GAP = 0.15
"""From here on a point is flagged: it takes that much longer than the model says."""
SHORT_CONTEXT = 64
"""Tokens before the sequences whose throughput is measured: few, so that weights are what is read."""

_STORED = {"bfloat16": np.uint16, "float16": np.float16}
_PRODUCTS = "products"
"""What the device calls its rate of products with weights, which may be quantised; attention has the dtype's."""


@dataclass(frozen=True)
class Point:
    """`x`: context, sequences or prompt tokens, by `kind`. Seconds are of one step (decode, batch) or of the whole
    prompt (prefill): the median of the repeats, the fastest and the slowest. `model_s`: the least this machine needs.
    """

    kind: str
    x: int
    seconds: float
    low_s: float
    high_s: float
    model_s: float
    limit: str
    tokens_per_s: float
    read_bytes_per_s: float

    @property
    def ratio(self) -> float:
        """How many times as long as the model says."""
        return self.seconds / self.model_s

    @property
    def is_flagged(self) -> bool:
        return self.ratio > 1 + TOLERATED_GAP


@dataclass
class Roofline:
    """`about`: the machine and the model. `left_out`: points that were asked for and why they are missing."""

    about: dict[str, Any]
    points: list[Point] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def of(self, kind: str) -> list[Point]:
        return [p for p in self.points if p.kind == kind]

    def as_json(self) -> dict[str, Any]:
        points = [asdict(p) | {"ratio": p.ratio, "flagged": p.is_flagged} for p in self.points]
        return {"about": self.about, "tolerated_gap": TOLERATED_GAP, "points": points, "left_out": self.left_out}


def peaks(ops: str, dtype: str, quantization: str) -> tuple[Peak, Peak]:
    """The most that this machine does of products with weights, and of attention's.

    Natively what its registers do with the formats that the kernels are given, else numpy's float32 for both.
    """
    found: list[Peak] = []
    if ops == "native":
        library = best_library()
        isa = library.pst_isa_name().decode() if library is not None else "base"
        stored = np.dtype(_STORED.get(dtype, np.float32))
        for scheme in (parse_scheme(quantization), NONE):
            how = packing(scheme, np.zeros((1, 1), stored), isa)
            peak = register_peak(how.format, how.act)
            if peak is not None:
                found.append(peak)
    if len(found) < 2:
        return (blas_peak(),) * 2
    return found[0], found[1]


def measure(
    llm: LLM,
    *,
    contexts: Sequence[int],
    sequences: Sequence[int],
    prompts: Sequence[int],
    tokens: int = 16,
    repeats: int = 3,
    probe: ReadProbe | None = None,
    on_point: Callable[[], None] = lambda: None,
) -> Roofline:
    """All points, each between two probes of the memory. Raises ConfigError."""
    if min([tokens - 1, repeats, *contexts, *sequences, *prompts]) < 1:
        raise ConfigError("points and repeats must be at least 1, tokens at least 2", field="tokens")
    bench = _Bench(llm, tokens, repeats, probe or ReadProbe())
    todo = [("decode", x) for x in contexts] + [("batch", x) for x in sequences] + [("prefill", x) for x in prompts]
    found = Roofline(bench.about())
    try:
        for kind, x in todo:
            problem = bench.problem(kind, x)
            if problem is None:
                found.points.append(bench.point(kind, x))
            else:
                found.left_out.append(f"{kind} {x}: {problem}")
            on_point()
        return found
    finally:
        if probe is None:
            bench.probe.close()


class _Bench:
    def __init__(self, llm: LLM, tokens: int, repeats: int, probe: ReadProbe) -> None:
        self.llm, self.tokens, self.repeats, self.probe = llm, tokens, repeats, probe
        self.spec, self.plan = llm.engine.spec, llm.engine.plan
        self.scheme = llm.config.model.quantization
        chosen = {d.name: str(d.value) for d in self.plan.decisions}.get("ops", llm.config.execution.ops)
        self.products, self.attention = peaks(chosen, self.plan.dtype, self.scheme)
        self._rng, self._maker = np.random.default_rng(0), local_maker(llm)

    def about(self) -> dict[str, Any]:
        read = self.probe.measure()
        return {
            "model": self.llm.config.model.model, "family": self.spec.family, "parameters": self.spec.num_params,
            "dtype": self.plan.dtype, "kv_dtype": self.plan.kv_dtype, "quantization": self.scheme,
            "weight_bytes": self.plan.weight_bytes,
            "read_bytes_per_s": read.median, "read_low": read.low, "read_high": read.high, "read_by": read.method,
            "threads": read.threads, "probe_bytes": self.probe.num_bytes, "flops_per_s": self.products.per_s,
            "flops_by": self.products.method, "attention_flops_per_s": self.attention.per_s,
            "tokens": self.tokens, "repeats": self.repeats,
        }  # fmt: skip

    def problem(self, kind: str, x: int) -> str | None:
        """Why a point cannot be measured, or None."""
        most, at_once = self.plan.max_model_len, self.plan.max_num_seqs
        length = x + self.tokens if kind == "decode" else x + 1 if kind == "prefill" else self._batch_len(x)
        if length > most:
            return f"{length} tokens are more than max_model_len {most}"
        if kind == "batch" and x > at_once:
            return f"more than max_num_seqs {at_once}"
        needed = length * (x if kind == "batch" else 1)
        if needed > self.plan.kv_capacity_tokens:
            return f"{needed} tokens do not fit into the cache of {self.plan.kv_capacity_tokens}"
        return None

    def point(self, kind: str, x: int) -> Point:
        before = self.probe.measure(3).median
        runs = [self._run(kind, x) for _ in range(self.repeats)]
        read = statistics.median((before, self.probe.measure(3).median))
        timer = self._timer(read)
        shapes = self._prefill_shapes(x) if kind == "prefill" else [runs[0][1]]
        seconds = statistics.median(s for s, _ in runs)
        done = {"decode": 1, "batch": x, "prefill": x}[kind]
        return Point(
            kind, x, seconds, min(s for s, _ in runs), max(s for s, _ in runs),
            sum(timer.step_s(shape) for shape in shapes), _limit(timer, shapes), done / seconds, read,
        )  # fmt: skip

    def _timer(self, read: float) -> RooflineTimer:
        device = Device(
            name="this machine",
            flops_per_s={_PRODUCTS: self.products.per_s, self.plan.dtype: self.attention.per_s}, read_bytes_per_s=read,
            host_copy_bytes_per_s=read / 2, step_overhead_s=0.0,
        )  # fmt: skip
        return RooflineTimer(
            self.spec, device, dtype=self.plan.dtype, kv_dtype=self.plan.kv_dtype, products=_PRODUCTS,
            matrix_size=self.plan.held.bytes_each(self.spec),
        )  # fmt: skip

    def _run(self, kind: str, x: int) -> tuple[float, StepShape]:
        if kind == "prefill":
            return self._prefill(x), EMPTY
        return self._decode(1, x) if kind == "decode" else self._decode(x, SHORT_CONTEXT)

    def _batch_len(self, sequences: int) -> int:
        """Tokens of the longest sequence: the first one goes on while the others begin."""
        return SHORT_CONTEXT + self.tokens + sequences

    def _prefill(self, length: int) -> float:
        """Seconds to the first token of a prompt that nothing knows yet."""
        stream = self.llm.stream({"prompt_token_ids": self._draw(length)}, _greedy(1))
        began_s = time.perf_counter()
        next(stream)
        took_s = time.perf_counter() - began_s
        for _ in stream:
            pass
        return took_s

    def _decode(self, num: int, context: int) -> tuple[float, StepShape]:
        """Median seconds of a step in which `num` sequences get a token each, and the shape of the middle one.

        One `next` of a stream steps for all, and the others then have their news: a round over them is one step.
        """
        params = _greedy(self.tokens + num - 1)
        streams = []
        try:
            for _ in range(num):
                streams.append(self.llm.stream({"prompt_token_ids": self._draw(context)}, params))
                next(streams[-1])
            times, shapes = [], []
            for _ in range(self.tokens - 1):
                began_s = time.perf_counter()
                outputs = [next(stream) for stream in streams]
                times.append(time.perf_counter() - began_s)
                shape = EMPTY
                for output in outputs:
                    shape = shape.plus(len(output.prompt_token_ids) + len(output.outputs[0].token_ids) - 2, 1, 1)
                shapes.append(shape)
            return statistics.median(times), shapes[len(shapes) // 2]
        finally:
            for stream in streams:
                stream.close()  # type: ignore[attr-defined]  # a generator: closing it ends its request

    def _prefill_shapes(self, length: int) -> list[StepShape]:
        """The steps of a prompt: pieces of at most `max_num_batched_tokens`, logits for the last one only."""
        piece = self.plan.max_num_batched_tokens
        starts = range(0, length, piece)
        return [EMPTY.plus(s, min(piece, length - s), int(s + piece >= length)) for s in starts]

    def _draw(self, length: int) -> list[int]:
        return [int(i) for i in self._maker.draw(self._rng, length)]


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def _limit(timer: RooflineTimer, shapes: Sequence[StepShape]) -> str:
    """What most of the modelled time goes into."""
    seconds = {"compute": 0.0, "memory": 0.0}
    for shape in shapes:
        for phase in timer.phases(shape):
            seconds[phase.limit] += phase.seconds
    return max(seconds, key=seconds.__getitem__)
