"""A start for training in which looking back works from the first step.

Small models learn slowly to copy from their context: the two attention layers that it takes are of no use one without
the other, so for millions of tokens nothing pulls them into place (Olsson et al., In-context Learning and Induction
Heads, 2022). Here both are written down before training begins: the first layer tells every token which stood one,
two and three places before it; the second looks for places whose predecessors are its own last tokens, and carries on
with what stood there. All of it is ordinary weights of the spec, which training changes like any other. The idea of a
start that resembles what training ends at: Trockman & Kolter, Mimetic Initialization, 2023.
"""

from __future__ import annotations

import math

import torch

from penstock.core.model_spec import Attention, ModelSpec
from train.interpreter import SpecModule

OFFSETS = (1, 2, 3)
_PEAK = 12.0
"""What one pair of dimensions adds to the score of the wanted offset."""
_MATCH = 7.0
"""Square of the gain of queries and keys where contents are compared."""
_FAST, _SLOW = 0.05, 0.0012
"""Radians per token: dimensions that tell neighbours apart, and those in which distance hardly counts."""


def plantable(spec: ModelSpec) -> bool:
    """Whether `plant` can be used."""
    first = spec.layers[0].mixer
    return (
        isinstance(first, Attention) and first.rope is not None and first.num_heads >= len(OFFSETS)
        and len(spec.layers) > 1 and spec.layers[1].mixer == first
    )  # fmt: skip


def token_dims(spec: ModelSpec) -> int:
    """Dimensions of the residual that tokens have for themselves; behind them come the constant and the blocks."""
    mixer = spec.layers[0].mixer
    assert isinstance(mixer, Attention)
    return spec.hidden_size - len(OFFSETS) * min(mixer.head_dim, spec.hidden_size // 2 // len(OFFSETS)) - 1


def planted_weights(spec: ModelSpec) -> tuple[str, ...]:
    """Names of the matrices that `plant` writes, but for the embedding."""
    mixer = spec.layers[0].mixer
    assert isinstance(mixer, Attention)
    layers = 1 + math.ceil(len(OFFSETS) / min(mixer.num_kv_heads, len(OFFSETS)))
    return tuple(f"layers.{i}.{name}" for i in range(min(layers, len(spec.layers))) for name in "qkvo")


@torch.no_grad()
def plant(model: SpecModule, seed: int = 0) -> None:
    """Mutates the first layers and the embedding of `model`, which must begin with equal attention layers with rope.

    Shapes: the residual is split into token dims, one constant, and a block for each offset. With three kv heads or
    more, layer 1 does all the comparing; with fewer, the layers behind it help, so that enough of a token is copied.
    """
    spec = model.spec
    mixer = spec.layers[0].mixer
    if not plantable(spec):
        raise ValueError(
            f"plant needs two equal attention layers with rope and {len(OFFSETS)} query heads at the beginning"
        )
    assert isinstance(mixer, Attention)
    assert mixer.rope is not None
    e, d, per = spec.hidden_size, mixer.head_dim, mixer.num_heads // mixer.num_kv_heads
    block = min(d, e // 2 // len(OFFSETS))
    constant = token_dims(spec)  # blocks come behind it
    blocks = [constant + 1 + i * block for i in range(len(OFFSETS))]
    generator = torch.Generator().manual_seed(seed)
    w = model.named_weights()

    embed = w["embed"]
    noise = torch.empty(embed.shape).normal_(std=0.02, generator=generator)
    noise[:, :constant] *= 1.4
    noise[:, constant] = 0.2
    noise[:, constant + 1 :] *= 0.1
    embed.copy_(noise)
    token = 0.028 * math.sqrt(constant)
    first = math.sqrt(e) / math.hypot(token, 0.2)  # what the norm of layer 0 multiplies by
    look = torch.linalg.qr(torch.empty(constant, block).normal_(generator=generator))[0].T  # [block, token dims]
    freqs = [mixer.rope.theta ** (-2 * i / d) for i in range(d // 2)]

    # Layer 0: query head h looks `offset` places back; its value is a part of the token there.
    p = "layers.0."
    amplitude = math.sqrt(_PEAK * math.sqrt(d)) / (0.2 * first)
    for b, offset in enumerate(OFFSETS):
        # A kv head of its own where there are enough; all kv heads are alike, so that they can be shared.
        kv = min(b, mixer.num_kv_heads - 1)
        q, k = (kv * per + (b - kv)) * d, kv * d
        for name in "qk":
            rows = slice(q, q + d) if name == "q" else slice(k, k + d)
            w[p + name][rows] *= 0.1
        for i, freq in enumerate(freqs):
            if freq < _FAST:
                continue
            w[p + "k"][k + i, constant] = amplitude
            w[p + "q"][q + i, constant] = amplitude * math.cos(offset * freq)
            w[p + "q"][q + i + d // 2, constant] = -amplitude * math.sin(offset * freq)
        w[p + "v"][k : k + block] = 0.0
        w[p + "v"][k : k + block, :constant] = look
        got = token * first * math.sqrt(block / constant)
        for j in range(block):
            w[p + "o"][:, q + j] *= 0.1
            w[p + "o"][blocks[b] + j, q + j] = token / got

    # Layer 1: the key at a place is what stood before it, the query what stands here and before.
    heads = min(mixer.num_kv_heads, len(OFFSETS))
    for i in range(1, 1 + math.ceil(len(OFFSETS) / heads)):
        if i < len(spec.layers) and spec.layers[i].mixer == mixer:
            _compare(model, f"layers.{i}.", range((i - 1) * heads, i * heads), look, token, freqs, generator)


def _compare(
    model: SpecModule, p: str, numbers: range, look: torch.Tensor, token: float, freqs: list[float],
    generator: torch.Generator,
) -> None:  # fmt: skip
    """Make the heads of one layer compare and copy; `numbers` says which part of the tokens each of them takes."""
    w, mixer, e = model.named_weights(), model.spec.layers[0].mixer, model.spec.hidden_size
    assert isinstance(mixer, Attention)
    d, per = mixer.head_dim, mixer.num_heads // mixer.num_kv_heads
    block, constant = look.shape
    blocks = [constant + 1 + i * block for i in range(len(OFFSETS))]
    norm = math.sqrt(e) / math.sqrt(token**2 * (1 + len(OFFSETS)) + 0.04)
    slow = [x for i, freq in enumerate(freqs) if freq <= _SLOW for x in (i, i + d // 2)]
    shares = (len(slow) // 2, len(slow) * 3 // 10, len(slow) - len(slow) // 2 - len(slow) * 3 // 10)
    gain = math.sqrt(_MATCH)
    for head, number in enumerate(numbers):
        q, k = head * per * d, head * d
        w[p + "q"][q : q + d] *= 0.1
        w[p + "k"][k : k + d] *= 0.1
        dims = iter(slow)
        for b, share in enumerate(shares):
            for j in range(share):
                coordinate = (number * shares[0] + j) % block
                row = next(dims)
                w[p + "k"][k + row, blocks[b] + coordinate] = gain
                if b == 0:
                    w[p + "q"][q + row, :constant] = gain * look[coordinate] * math.sqrt(constant / block)
                else:
                    w[p + "q"][q + row, blocks[b - 1] + coordinate] = gain
        rows = torch.linalg.qr(torch.empty(constant, d).normal_(generator=generator))[0].T
        w[p + "v"][k : k + d] = 0.0
        w[p + "v"][k : k + d, :constant] = rows
        w[p + "o"][:, q : q + d] *= 0.1
        w[p + "o"][:constant, q : q + d] = rows.T * (0.8 / (token * norm))
