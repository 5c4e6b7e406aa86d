"""How long a step takes at least: the roofline model as a StepTimer.

Source: Williams, Waterman and Patterson, Roofline, CACM 52 (2009); its use for decoders: Yuan et al., arXiv 2402.16363.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal, NamedTuple

from penstock.core.model_spec import ModelSpec
from penstock.core.step_shape import StepShape
from penstock.plan.devices import Device
from penstock.plan.flops import ExpertWork, model_work


class Phase(NamedTuple):
    """A part of a step in which computing and moving bytes go on at the same time. Units: seconds."""

    name: str
    compute_s: float
    memory_s: float

    @property
    def seconds(self) -> float:
        return max(self.compute_s, self.memory_s)

    @property
    def limit(self) -> Literal["compute", "memory"]:
        return "compute" if self.compute_s > self.memory_s else "memory"


class RooflineTimer:
    """Step time = overhead + layers + head + attention, each the longer of its computing and its memory traffic.

    Within a phase a kernel loads the next tile while it multiplies the last one, so only the longer time counts. Phases
    follow each other (attention needs q, the head needs the last layer), so what attention leaves idle cannot serve the
    products: their times add up. All layers of a phase are taken together, which is exact when they are alike.

    `step_s` costs about a microsecond whatever the model's size: schedulers ask it a dozen times a step. It grows with
    every field of the shape. It is a lower bound: kernels that waste time, and gaps between them, are not in it.
    """

    name = "roofline"

    def __init__(
        self, spec: ModelSpec, device: Device, *, dtype: str = "bfloat16", kv_dtype: str | None = None,
        products: str | None = None, matrix_size: float | None = None,
    ) -> None:  # fmt: skip
        """`dtype` of weights and activations, `kv_dtype` of the cache (None: the same).

        Quantised: `products` names the rate of `device.flops_per_s` for products with weights (attention keeps
        `dtype`'s), `matrix_size` is bytes of a number in their matrices. Raises ConfigError if the device has no such
        figure.
        """
        flops, read = device.flops(products or dtype), device.read_bytes_per_s
        in_mixers = device.flops(dtype)
        self.work = work = model_work(spec, dtype, kv_dtype, matrix_size)
        self.overhead_s = device.step_overhead_s + len(spec.layers) * device.layer_overhead_s
        self._copy_bytes_per_s = device.host_copy_bytes_per_s
        self._layers = (
            work.linear_flops_per_token / flops,
            work.linear_bytes_per_token / read,
            work.weight_bytes / read,
        )
        self._read_bytes_per_s = read
        # Layers whose experts are alike are looked at together.
        self._experts: dict[ExpertWork, int] = Counter(work.experts)
        self._head = (
            work.head_flops_per_logit / flops,
            work.head_bytes_per_logit / read,
            work.head_weight_bytes / read,
        )
        full = [reach for reach in work.reaches if reach.window is None]
        self._mixer = (
            sum(reach.flops_per_pair for reach in full) / in_mixers,
            work.recurrent_flops_per_token / in_mixers,
            sum(reach.bytes_per_token for reach in full) / read,
            work.kv_write_bytes_per_token / read,
            work.state_bytes_per_row / read,
        )
        self._windows = tuple(
            (r, r.flops_per_pair / in_mixers, r.bytes_per_token / read) for r in work.reaches if r.window is not None
        )

    def step_s(self, shape: StepShape) -> float:
        """Seconds of a step of this shape; without tokens and logits, the overhead alone."""
        t, b, context, pairs, logits = shape
        total = self.overhead_s
        if t:
            flop, byte, weights = self._layers
            compute, memory = t * flop, weights + t * byte
            if self._experts:
                memory += self._experts_s(t)
            total += compute if compute > memory else memory
        if logits:
            flop, byte, weights = self._head
            compute, memory = logits * flop, weights + logits * byte
            total += compute if compute > memory else memory
        pair, token, read, write, state = self._mixer
        compute, memory = pairs * pair + t * token, context * read + t * write + b * state
        if self._windows:
            more = self._windowed(shape)
            compute += more[0]
            memory += more[1]
        return total + (compute if compute > memory else memory)

    def copy_s(self, num_bytes: int) -> float:
        """Seconds to move so many bytes between device and host memory, one way."""
        return num_bytes / self._copy_bytes_per_s

    def phases(self, shape: StepShape) -> tuple[Phase, Phase, Phase]:
        """The layers' products, the LM head, attention: with `overhead_s` they add up to `step_s`."""
        t, b, context, pairs, logits = shape
        flop, byte, weights = self._layers
        layers = Phase("layers", t * flop, (weights + self._experts_s(t) if t else 0.0) + t * byte)
        flop, byte, weights = self._head
        head = Phase("head", logits * flop, (weights if logits else 0.0) + logits * byte)
        pair, token, read, write, state = self._mixer
        compute, memory = self._windowed(shape)
        attention = Phase(
            "attention", compute + pairs * pair + t * token, memory + context * read + t * write + b * state
        )
        return layers, head, attention

    def _experts_s(self, num_tokens: int) -> float:
        """Seconds to read the experts that a step of so many tokens is expected to choose."""
        return sum(n * layer.read_bytes(num_tokens) for layer, n in self._experts.items()) / self._read_bytes_per_s

    def _windowed(self, shape: StepShape) -> tuple[float, float]:
        """(compute, memory) seconds of layers with a sliding window."""
        compute = memory = 0.0
        for reach, flop, byte in self._windows:
            compute += reach.pairs(shape) * flop
            memory += reach.context(shape) * byte
        return compute, memory
