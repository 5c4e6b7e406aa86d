"""FLOPs and bytes of one step, counted from a ModelSpec and a StepShape: exact integers but for three estimates.

What is counted: a product of a weight [M, N] with one row is 2MN FLOPs; an attended (query, key) pair is 4HD per layer
(QK^T and PV, 2HD each); weights are read once per step whatever its size; cached tokens are read once per sequence.
What is not: FLOPs of norms, rope, softmax and activation functions (far below 1 % of a real model's).

The estimates: the experts that a step's tokens choose (`ExpertWork`), activation bytes (every op below reads its inputs
from memory once and writes its result once, at the width of the weights) and sliding windows (a shape does not tell how
long each sequence is; the bound used is exact when all sequences are longer than the window or all are shorter).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

import msgspec

from penstock.core.cache_spec import DTYPE_BYTES
from penstock.core.matrix_format import is_product
from penstock.core.model_spec import (
    Attention,
    BlockAttention,
    EncoderAttention,
    EntryAttention,
    Experts,
    Latent,
    ModelSpec,
    SharedBlock,
    cache_specs,
    weight_shapes,
)
from penstock.core.step_shape import StepShape

_LOGIT_BYTES = 4  # logits are float32 everywhere


class Reach(NamedTuple):
    """All attention layers that look equally far back: None is to the first token, else `window` tokens.

    `flops_per_pair`: of one (query, key) pair; `bytes_per_token`: read for one cached token. Both summed over layers.
    """

    window: int | None
    flops_per_pair: int
    bytes_per_token: int

    def pairs(self, shape: StepShape) -> int:
        return shape.num_pairs if self.window is None else min(shape.num_pairs, shape.num_tokens * self.window)

    def context(self, shape: StepShape) -> int:
        if self.window is None:
            return shape.num_context
        return min(shape.num_context, shape.num_tokens + shape.num_rows * (self.window - 1))


class StepWork(NamedTuple):
    """One step's work. Units: FLOPs and bytes. `head` is the LM head; `mixer` attention and recurrences without their
    projections, which are `linear`. `state_bytes`: recurrent states, read and written."""

    linear_flops: int
    linear_bytes: int
    head_flops: int
    head_bytes: int
    mixer_flops: int
    kv_read_bytes: int
    kv_write_bytes: int
    state_bytes: int

    @property
    def flops(self) -> int:
        return self.linear_flops + self.head_flops + self.mixer_flops

    @property
    def mixer_bytes(self) -> int:
        return self.kv_read_bytes + self.kv_write_bytes + self.state_bytes

    @property
    def num_bytes(self) -> int:
        return self.linear_bytes + self.head_bytes + self.mixer_bytes


class ExpertWork(NamedTuple):
    """One sparse layer: `num_experts` of `weight_bytes` each, of which every token uses `top_k`."""

    num_experts: int
    top_k: int
    weight_bytes: int

    def read_bytes(self, num_tokens: int) -> int:
        """Bytes of the experts that a step of so many tokens is expected to touch, if tokens choose independently."""
        missed = (1.0 - self.top_k / self.num_experts) ** num_tokens
        return round(self.num_experts * (1.0 - missed)) * self.weight_bytes


class ModelWork(msgspec.Struct, frozen=True, kw_only=True):
    """What one token, logit row, pair, cached token and sequence cost; `step` adds them up.

    `weight_bytes`: all that any step reads, without the embedding table (only rows of it are read), without the LM
    head, which is read by steps with logits only: `head_weight_bytes` (a tied model's is its embedding table), and
    without `experts`, of which a step reads those that its tokens chose.
    """

    linear_flops_per_token: int
    linear_bytes_per_token: int
    weight_bytes: int
    head_flops_per_logit: int
    head_bytes_per_logit: int
    head_weight_bytes: int
    recurrent_flops_per_token: int
    kv_write_bytes_per_token: int
    state_bytes_per_row: int
    reaches: tuple[Reach, ...]
    experts: tuple[ExpertWork, ...] = ()

    def step(self, shape: StepShape) -> StepWork:
        """The work of a step. A step without tokens reads no weights."""
        t, r = shape.num_tokens, shape.num_logits
        return StepWork(
            linear_flops=t * self.linear_flops_per_token,
            linear_bytes=(self.weight_bytes if t else 0)
            + sum(layer.read_bytes(t) for layer in self.experts)
            + t * self.linear_bytes_per_token,
            head_flops=r * self.head_flops_per_logit,
            head_bytes=(self.head_weight_bytes if r else 0) + r * self.head_bytes_per_logit,
            mixer_flops=t * self.recurrent_flops_per_token
            + sum(reach.pairs(shape) * reach.flops_per_pair for reach in self.reaches),
            kv_read_bytes=sum(reach.context(shape) * reach.bytes_per_token for reach in self.reaches),
            kv_write_bytes=t * self.kv_write_bytes_per_token,
            state_bytes=shape.num_rows * self.state_bytes_per_row,
        )


def model_work(spec: ModelSpec, dtype: str, kv_dtype: str | None = None, matrix_size: float | None = None) -> ModelWork:
    """The work of a model with weights and activations of `dtype` and a cache of `kv_dtype` (None: the same).

    `matrix_size`: bytes of a number in the matrices of products, if they are quantised. Raises KeyError for a dtype
    that `core.cache_spec.DTYPE_BYTES` does not know.
    """
    size = DTYPE_BYTES[dtype]
    held = size if matrix_size is None else matrix_size
    caches = [c for kept in cache_specs(spec, kv_dtype or dtype) for c in kept]
    shapes = weight_shapes(spec)
    embed = shapes.pop("embed")
    for table in ("positions", "token_types"):
        shapes.pop(table, None)
    shapes.pop("ple_embed", None)  # a row of it is read, as of the embedding
    head = shapes.pop("lm_head", embed)
    shapes.pop("lm_head.bias", None)
    sparse = [
        ExpertWork(f.num_experts, f.top_k, int(_expert_params(f, spec.hidden_size) * held)) for f in _sparse(spec)
    ]
    dense = {name: shape for name, shape in shapes.items() if ".experts." not in name}
    matrices = sum(prod(shape) for name, shape in dense.items() if is_product(name, shape))
    # A block that layers share is multiplied with, and comes from memory, once for each of them.
    blocks = [layer.mixer for layer in spec.layers if isinstance(layer.mixer, SharedBlock)]
    again = sum(
        prod(shape)
        for i, m in enumerate(blocks)
        if any(m.block == other.block for other in blocks[:i])
        for name, shape in m.shared_shapes(spec.hidden_size).items()
        if is_product(name, shape)
    )
    matrices, stored = matrices + again, matrices
    chosen = sum(f.top_k * _expert_params(f, spec.hidden_size) for f in _sparse(spec))
    activations = sum(_layer_elements(spec, i, dense) for i in range(len(spec.layers)))
    vocab_size, hidden_size = head
    return ModelWork(
        linear_flops_per_token=2 * (matrices + chosen),
        # The embedding's row, read and written, comes on top of what the layers move.
        linear_bytes_per_token=(activations + 2 * hidden_size) * size,
        weight_bytes=(sum(prod(shape) for shape in dense.values()) - stored) * size + int(matrices * held),
        head_flops_per_logit=2 * vocab_size * hidden_size,
        head_bytes_per_logit=3 * hidden_size * size + vocab_size * _LOGIT_BYTES,
        head_weight_bytes=int(vocab_size * hidden_size * held),
        recurrent_flops_per_token=sum(layer.mixer.token_flops for layer in spec.layers if layer.mixer is not None),
        kv_write_bytes_per_token=sum(c.num_bytes for c in caches if c.per_token),
        state_bytes_per_row=sum(2 * c.num_bytes for c in caches if c.kind == "slot"),
        reaches=tuple(_reaches(spec, kv_dtype or dtype)),
        experts=tuple(sparse),
    )


def num_active_params(spec: ModelSpec) -> int:
    """Numbers in the weights that one token uses: of sparse layers, the chosen experts alone."""
    idle = sum((f.num_experts - f.top_k) * _all_expert_params(f, spec.hidden_size) for f in _sparse(spec))
    return spec.num_params - idle


def _all_expert_params(ffn: Experts, e: int) -> int:
    biases = (2 * ffn.expert.width if ffn.expert.gated else ffn.expert.width) + ffn.expert_size(e)
    return _expert_params(ffn, e) + (biases if ffn.expert.bias else 0)


def _sparse(spec: ModelSpec) -> list[Experts]:
    return [layer.ffn for layer in spec.layers if isinstance(layer.ffn, Experts)]


def _expert_params(ffn: Experts, e: int) -> int:
    return (3 if ffn.expert.gated else 2) * ffn.expert_size(e) * ffn.expert.width


def _reaches(spec: ModelSpec, kv_dtype: str) -> Iterator[Reach]:
    sums: dict[int | None, tuple[int, int]] = {}

    def add(window: int | None, flops: int, num_bytes: int) -> None:
        before = sums.get(window, (0, 0))
        sums[window] = before[0] + flops, before[1] + num_bytes

    every = cache_specs(spec, kv_dtype)
    for n, layer in enumerate(spec.layers):
        m = layer.mixer
        kept = every[n if layer.kv_from is None else layer.kv_from]
        if isinstance(m, Attention | Latent | EntryAttention | BlockAttention):
            add(m.reach, m.pair_flops, kept[0].num_bytes)
        if isinstance(m, EncoderAttention):
            add(None if m.reach is None else m.reach + 1, m.pair_flops, 0)
        if isinstance(m, EntryAttention) and m.every is not None:  # as if every token had its part of an entry
            add(None, m.entry_flops // m.every, sum(p.num_bytes for p in kept[1].page_planes) // m.every)
    for window, (flops, num_bytes) in sums.items():
        yield Reach(window, flops, num_bytes)


def _layer_elements(spec: ModelSpec, i: int, shapes: dict[str, tuple[int, ...]]) -> int:
    """Elements that one token moves through memory in layer `i`, caches excluded.

    Each product reads its input and writes its output (activation functions and head norms ride along), the two norms
    read and write the hidden state, the two sums read two and write one, the mixer reads q and writes what `o` reads.
    A chosen expert's products count like a dense feed-forward's.
    """
    prefix = f"layers.{i}."
    products = sum(sum(s) for name, s in shapes.items() if name.startswith(prefix) and is_product(name, s))
    layer = spec.layers[i]
    if isinstance(layer.ffn, Experts):
        f = layer.ffn
        products += f.top_k * (3 if f.expert.gated else 2) * (f.expert_size(spec.hidden_size) + f.expert.width)
    query = shapes.get(prefix + "q") or shapes.get(prefix + "q_b") or shapes.get(prefix + "in") or (0,)
    return products + 10 * spec.hidden_size + query[0] + shapes.get(prefix + "o", (0, 0))[1]
