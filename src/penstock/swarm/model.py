"""What everybody in a swarm has alike, and the parts of a model that they run.

A server reads the weights of its layers alone, a client the embedding and the head. All compute with the same native
kernels on the same types: only so does a row have the same bits whoever computes it, and a sequence goes on unchanged
on another server. What must be alike is one hash, the `identity`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from penstock.backends import BACKENDS
from penstock.backends.native.backend import NativeBackend
from penstock.backends.native.forward import NativeForward
from penstock.base.bf16 import F32
from penstock.base.errors import ConfigError, UnsupportedError
from penstock.base.hashing import digest
from penstock.config import EngineConfig, from_kwargs
from penstock.core.cache_spec import CacheGroup, without_windows
from penstock.core.held_weights import HeldWeights
from penstock.core.model_spec import cache_groups
from penstock.executor.node_wire import alike
from penstock.launch.backend import backend_of, traits_of
from penstock.launch.hub import local_path
from penstock.launch.rank import ModelFiles, open_files
from penstock.model.builder import build
from penstock.model.graph import Graph
from penstock.ops.plan import I32, GroupPlan, Planes, StepPlan
from penstock.parallel.spans import back_of, front_of, span_of
from penstock.plan.stages import stage_groups
from penstock.plan.weights import held_by
from penstock.swarm.wire import MOST_ROWS
from penstock.weights.load import load_weights

_NONE: I32 = np.zeros(0, np.int32)


@dataclass(frozen=True)
class SwarmModel:
    """A model that was opened, without its weights."""

    config: EngineConfig
    files: ModelFiles
    held: HeldWeights
    groups: tuple[CacheGroup, ...]

    @property
    def num_layers(self) -> int:
        return len(self.files.checkpoint.spec.layers)

    @property
    def width(self) -> int:
        """Numbers of a row of the residual stream."""
        return self.files.checkpoint.spec.hidden_size

    @property
    def max_model_len(self) -> int:
        return self.config.model.max_model_len or self.files.checkpoint.spec.max_position

    @cached_property
    def identity(self) -> str:
        """Hash of weights, shape, types, kernels and build. Reads the files once, unless they are remembered."""
        same = alike(str(self.files.checkpoint.path), 0, 0)
        settings = (self.config.model.quantization, self.held, [g.spec for g in self.groups], self.max_model_len)
        return digest(repr((same, settings)).encode()).hex()

    def graph(self, layers: Collection[int], *, ends: bool) -> Graph:
        """The whole graph; of weights those of `layers` are there, and with `ends` those of no layer."""
        checkpoint = self.files.checkpoint
        wanted = {f"layers.{n}." for n in layers}
        skip = {
            name for name in checkpoint.weights
            if (name.startswith("layers.") and not any(map(name.startswith, wanted)))
            or (not name.startswith("layers.") and not ends)
        }  # fmt: skip
        weights = load_weights(checkpoint.weights, checkpoint.spec, self.held, skip=skip)
        return build(checkpoint.spec, weights, self.groups, max_model_len=self.max_model_len)

    @cached_property
    def backend(self) -> NativeBackend:
        backend = backend_of(self.config)
        assert isinstance(backend, NativeBackend), "open_swarm_model asks for it"
        return backend


def open_swarm_model(path: str, **settings: Any) -> SwarmModel:
    """`settings`: of `EngineConfig`: dtype, quantization, kv_cache_dtype, max_model_len, threads, tokenizer.

    Raises: ModelError, UnsupportedError, ConfigError for a model that native kernels do not run.
    """
    config = from_kwargs(model=path, ops="native", **settings)
    files = open_files(config, local_path(config.model.model, config.model.revision))
    spec = files.checkpoint.spec
    if (problem := BACKENDS.get("native").why_not(config, spec)) is not None:
        raise ConfigError(f"a swarm computes with native kernels, and {problem}", field="ops")
    if not spec.has_head or spec.is_encoder:
        raise ConfigError("a swarm generates text, and this model makes none", field="model")
    dtype = spec.dtype if config.model.dtype == "auto" else config.model.dtype
    held = held_by(config, spec, dtype, files.checkpoint.stored, traits_of(config))
    kv_dtype = dtype if config.cache.kv_cache_dtype == "auto" else str(config.cache.kv_cache_dtype)
    return SwarmModel(config, files, held, without_windows(cache_groups(spec, kv_dtype)))


class Layers:
    """Layers `first` ... `last` - 1 with their weights; any run of them can be run by itself.

    Attributes:
        groups: where they keep keys, values and states.
    """

    def __init__(self, model: SwarmModel, first: int, last: int) -> None:
        """Raises: UnsupportedError for a model that cannot be cut there."""
        self.model, self.first, self.last = model, first, last
        self.groups = stage_groups(model.groups, range(first, last))
        self._graph = model.graph(range(first, last), ends=False)
        if any(value.width != model.width for value in self._graph.residuals):
            raise UnsupportedError("this model has several residual streams, and a swarm passes one on")
        self._whole = self._compiled(first, last, None)
        self._parts: dict[tuple[int, int], NativeForward] = {(first, last): self._whole}

    def part(self, first: int, last: int) -> NativeForward:
        """Over the same weights, which are not held twice. Raises: UnsupportedError."""
        if (first, last) not in self._parts:
            self._parts[first, last] = self._compiled(first, last, self._whole)
        return self._parts[first, last]

    def _compiled(self, first: int, last: int, like: NativeForward | None) -> NativeForward:
        graph = span_of(self._graph, self.model.groups, first, last, range(self.first, self.last))
        return self.model.backend.compile(
            graph, self.groups, max_tokens=MOST_ROWS, quantization=self.model.config.model.quantization, like=like
        )

    def run(
        self, layers: tuple[int, int], rows: F32, start: int, tables: tuple[I32, ...], planes: list[Planes],
        block_size: int,
    ) -> F32:  # fmt: skip
        """Rows [n, E] of one sequence at positions `start` ... through some layers. Mutates: `planes`."""
        plan = step_plan(np.zeros(len(rows), np.int32), start, tables, self.groups, block_size, all_rows=True)
        return self.part(*layers).run_span(plan, planes, rows)


class Ends:
    """What a client runs by itself: from token ids to rows, and from rows to logits."""

    def __init__(self, model: SwarmModel) -> None:
        """Raises: UnsupportedError for a model whose ends need more than one row at a time."""
        graph, scheme = model.graph((), ends=True), model.config.model.quantization
        self._front, self._back = (
            model.backend.compile(part, (), max_tokens=MOST_ROWS, quantization=scheme)
            for part in (front_of(graph), back_of(graph))
        )

    def rows(self, ids: I32, start: int) -> F32:
        """What the first layer reads of tokens at positions `start` ...: [n, E]."""
        return self._front.run_span(step_plan(ids, start, (), (), 1, all_rows=True), (), None)

    def logits(self, rows: F32, start: int) -> F32:
        """[V] behind the last of `rows`, which came out of the last layer."""
        ids = np.zeros(len(rows), np.int32)
        found: F32 = self._back.run_span(step_plan(ids, start, (), (), 1, all_rows=False), (), rows)[0]
        return found


def step_plan(
    ids: I32, start: int, tables: tuple[I32, ...], groups: tuple[CacheGroup, ...], block_size: int, *, all_rows: bool
) -> StepPlan:
    """Of one sequence, whose tokens at `start` ... these are. `all_rows`: results of all are wanted, or of the last."""
    count = len(ids)
    every: I32 = np.arange(count, dtype=np.int32)
    return StepPlan(
        ids, every + np.int32(start), np.array([0, count], np.int32), np.array([start + count], np.int32),
        every if all_rows else every[-1:],
        tuple(GroupPlan(g.pages_per_slab, block_size, (t,)) for g, t in zip(groups, tables, strict=True)),
    )  # fmt: skip
