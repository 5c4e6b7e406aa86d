"""Where a step's FLOPs and bytes go, operator by operator: what `plan.flops` adds up, taken apart again.

Source: Williams, Waterman and Patterson, Roofline, CACM 52 (2009); decoders by operator: Yuan et al., arXiv 2402.16363,
section 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Literal

import msgspec

from penstock.core.cache_spec import DTYPE_BYTES
from penstock.core.matrix_format import is_product
from penstock.core.model_spec import ModelSpec, SharedBlock, weight_shapes
from penstock.core.step_shape import StepShape
from penstock.plan.devices import Device
from penstock.plan.flops import ModelWork


class Operator(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of operator, all layers together. Units: FLOPs, bytes, seconds on the device.

    `limit`: which of both takes longer there; `seconds` is that one, so operators that could overlap add up to more
    than a phase of `RooflineTimer`.
    """

    name: str
    flops: int
    num_bytes: int
    seconds: float
    limit: Literal["compute", "memory"]

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.num_bytes if self.num_bytes else 0.0


def operators(
    spec: ModelSpec, work: ModelWork, shape: StepShape, device: Device, dtype: str, matrix_size: float | None = None
) -> tuple[Operator, ...]:
    """Every operator of a step, in the order of a layer; FLOPs and bytes add up to those of `work.step(shape)`.

    `work`: `model_work` of the same spec, dtype and `matrix_size`. What has no FLOPs of its own (norms, sums, the
    embedding's rows) is one line, with the rounding of quantised sizes. Raises ConfigError: the device has no rate for
    the dtype.
    """
    rate, step = device.flops(dtype), work.step(shape)
    found: list[tuple[str, int, int]] = []
    flops = num_bytes = 0
    for name, matrices in _products(spec).items():
        mine = sum(2 * prod(matrix) * times for matrix, times in matrices) * shape.num_tokens
        held = sum(prod(matrix) for matrix, _ in matrices) * (matrix_size or DTYPE_BYTES[dtype])
        moved = sum(sum(matrix) for matrix, _ in matrices) * DTYPE_BYTES[dtype] * shape.num_tokens
        total = int(held if shape.num_tokens else 0) + moved
        flops, num_bytes = flops + mine, num_bytes + total
        found.append((name, mine, total))
    experts = step.linear_flops - flops
    if work.experts:
        read = sum(layer.read_bytes(shape.num_tokens) for layer in work.experts)
        found.append(("experts", experts, read))
        num_bytes += read
    found.append(("attention", step.mixer_flops, step.mixer_bytes))
    found.append(("norms, sums", 0, step.linear_bytes - num_bytes))
    found.append(("head", step.head_flops, step.head_bytes))
    return tuple(_operator(*line, rate, device.read_bytes_per_s) for line in found if line[1] or line[2])


def _operator(name: str, flops: int, num_bytes: int, rate: float, read: float) -> Operator:
    compute_s, memory_s = flops / rate, num_bytes / read
    return Operator(
        name=name, flops=flops, num_bytes=num_bytes, seconds=max(compute_s, memory_s),
        limit="compute" if compute_s > memory_s else "memory",
    )  # fmt: skip


def _products(spec: ModelSpec) -> dict[str, list[tuple[tuple[int, ...], int]]]:
    """Name without its layer -> (shape, times that a token is multiplied with it)."""
    uses = dict(_shared_uses(spec))
    out: dict[str, list[tuple[tuple[int, ...], int]]] = {}
    head = "embed" if spec.tie_embeddings else "lm_head"
    for name, shape in weight_shapes(spec).items():
        if name in (head, "lm_head", "embed", "ple_embed") or ".experts." in name or not is_product(name, shape):
            continue
        out.setdefault(_short(name), []).append((shape, uses.get(name, 1)))
    return out


def _shared_uses(spec: ModelSpec) -> Iterator[tuple[str, int]]:
    blocks = [layer.mixer for layer in spec.layers if isinstance(layer.mixer, SharedBlock)]
    for mixer in blocks:
        for name in mixer.shared_shapes(spec.hidden_size):
            yield mixer.shared + name, sum(other.block == mixer.block for other in blocks)


def _short(name: str) -> str:
    """`layers.3.gate` is `gate`; `shared.0.q` is `shared.q`."""
    return ".".join(part for part in name.split(".") if not part.isdigit() and part != "layers")
