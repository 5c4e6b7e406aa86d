"""Models in the shapes of real ones with random weights, in memory, and native programs of them beside each other."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from benchmarks.peers.make_models import DEVIATION, SHAPES

from penstock.backends.native.forward import NativeForward
from penstock.base.bf16 import F32, narrow
from penstock.core.matrix_format import parse_scheme
from penstock.core.model_spec import ModelSpec, cache_groups, weight_shapes
from penstock.families.registry import find_family
from penstock.model.builder import build
from penstock.model.fuse import PASSES
from penstock.ops.native.program import Pool
from penstock.ops.plan import GroupPlan, StepPlan
from penstock.runner.storage import Storage

Weights = dict[str, npt.NDArray[Any]]
_PERIOD = 4_194_301
"""Random numbers take long, so they repeat; a prime, so that no two rows of a matrix are equal."""


def spec_of(shape: str, *, layers: int | None = None, vocab: int | None = None, length: int | None = None) -> ModelSpec:
    """A shape of `benchmarks.peers.make_models`, with fewer layers, tokens of the vocabulary, or another length."""
    changed = {"num_hidden_layers": layers, "vocab_size": vocab, "max_position_embeddings": length}
    config = dict(SHAPES[shape]) | {name: value for name, value in changed.items() if value is not None}
    spec: ModelSpec = find_family(config).spec(config)
    return spec


def weights_of(spec: ModelSpec, dtype: str = "float32", seed: int = 0) -> Weights:
    """Normal with a deviation of 0.02, norms 1. `dtype`: float32 or bfloat16 (bits)."""
    noise = np.random.default_rng(seed).standard_normal(_PERIOD, np.float32) * np.float32(DEVIATION)
    pieces: npt.NDArray[Any] = narrow(noise) if dtype == "bfloat16" else noise
    out: Weights = {}
    at = 0
    for name, shape in weight_shapes(spec).items():
        if len(shape) == 1 and not name.endswith("bias"):
            ones = np.ones(shape, np.float32)
            out[name] = narrow(ones) if dtype == "bfloat16" else ones
            continue
        size = int(np.prod(shape))
        out[name] = np.resize(np.roll(pieces, -at), size).reshape(shape)
        at = (at + size) % _PERIOD
    return out


class Model:
    """A native program of a spec with a cache of `max_seqs` sequences of `max_len` tokens, in blocks of 32.

    Sequence `b` of a step is the b-th of the cache.
    """

    BLOCK = 32

    def __init__(
        self, spec: ModelSpec, weights: Mapping[str, npt.NDArray[Any]], pool: Pool, *, scheme: str = "none",
        kv_dtype: str = "float32", max_len: int = 512, max_seqs: int = 1, max_tokens: int = 512,
        passes: Collection[str] = PASSES,
    ) -> None:  # fmt: skip
        groups = cache_groups(spec, kv_dtype)
        graph = build(spec, dict(weights), groups, max_model_len=max_len)
        self.spec, self.max_tokens = spec, max_tokens
        self.forward = NativeForward(graph, groups, pool, parse_scheme(scheme), max_tokens=max_tokens, passes=passes)
        self._blocks = -(-max_len // self.BLOCK)
        self._layers = [len(group.layers) for group in groups]
        self.storage = Storage(groups, [self._blocks * max_seqs] * len(groups), self.BLOCK)

    @property
    def weight_bytes(self) -> int:
        """Of all packed matrices: what a step reads."""
        return sum(m.num_bytes for m in self.forward.matrices.values())

    def kv_bytes(self, context: int) -> int:
        """Read for one token that sees `context` tokens."""
        planes = [array for group in self.storage.planes for array in group.values()]
        per_page = sum(array[0].nbytes for array in planes)
        return sum(self._layers) * context * per_page // (self.BLOCK * len(self._layers))

    def step(self, ids: Sequence[Sequence[int]], starts: Sequence[int]) -> F32:
        """Logits [B, V] of the last token of each sequence: `ids[b]` follow `starts[b]` cached tokens."""
        counts = [len(part) for part in ids]
        bounds = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        positions = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, counts, strict=True)])
        lens = np.array([s + n for s, n in zip(starts, counts, strict=True)], np.int32)
        tables = tuple(
            np.arange(b * self._blocks, (b + 1) * self._blocks, dtype=np.int32)[None] for b in range(len(ids))
        )
        groups = tuple(GroupPlan(n, self.BLOCK, tables) for n in self._layers)
        plan = StepPlan(
            np.concatenate([np.asarray(part, np.int32) for part in ids]), positions.astype(np.int32), bounds, lens,
            bounds[1:] - np.int32(1), groups,
        )  # fmt: skip
        return self.forward.run(plan, self.storage.planes)

    def prefill(self, ids: Sequence[int]) -> F32:
        """Logits [V] behind a text of one sequence, in steps of `max_tokens`."""
        out = np.zeros(0, np.float32)
        for start in range(0, len(ids), self.max_tokens):
            out = self.step([ids[start : start + self.max_tokens]], [start])[0]
        return out
