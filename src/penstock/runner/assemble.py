"""The one place that puts a model together: spec, weights and a backend become something that runs steps."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from penstock.backends.backend import AdapterRoom, Backend
from penstock.core.cache_spec import CacheGroup
from penstock.core.model_spec import ModelSpec
from penstock.model.builder import build
from penstock.model.emitter import PLAIN, Reading
from penstock.model.forward import Forward
from penstock.model.graph import Graph
from penstock.model.restoring import restoring
from penstock.ops.draws import StartingKernel
from penstock.ops.plan import Planes
from penstock.ops.stored import Weight
from penstock.plan.stages import stage_groups
from penstock.runner.device_sampler import DeviceSampler
from penstock.runner.kernel_sampler import KernelSampler
from penstock.runner.restored import RESTORED_TOKENS
from penstock.runner.sampler import Sampler

if TYPE_CHECKING:
    from penstock.parallel.comm import Comm
    from penstock.runner.logits.grammar_cache import GrammarCache


@dataclass(frozen=True, kw_only=True)
class DecoderModel:
    """A decoder, ready to be put on a backend.

    Attributes:
        groups: where its layers cache (`model.builder.build`); the first of a rank's, if others follow.
        rotation, reading: see `build`.
        comm: with the other ranks that have a part of it; None: this one has all.
        sums, whole_experts, pairwise: see `parallel.shard`.
    """

    spec: ModelSpec
    weights: Mapping[str, Weight]
    groups: tuple[CacheGroup, ...]
    max_model_len: int
    rotation: str = "none"
    reading: Reading = field(default=PLAIN)
    comm: Comm | None = None
    sums: bool = False
    whole_experts: bool = False
    pairwise: bool = False

    @property
    def graph(self) -> Graph:
        return self._part[0]

    @property
    def rows(self) -> Mapping[str, tuple[int, int]]:
        """The rows of each weight that this rank has, where it has not all of them."""
        return self._part[1]

    @cached_property
    def _part(self) -> tuple[Graph, Mapping[str, tuple[int, int]]]:
        graph = build(
            self.spec, self.weights, self.groups, max_model_len=self.max_model_len, rotation=self.rotation,
            reading=self.reading,
        )  # fmt: skip
        if self.comm is None:
            return graph, {}
        from penstock.parallel.shard import shard  # one rank needs nobody

        of_rank = partial(shard, sums=self.sums, whole_experts=self.whole_experts, pairwise=self.pairwise)
        if (pipe := self.comm.pipe) is None:
            return of_rank(graph, self.groups, self.comm)
        from penstock.parallel.comm import OneRank
        from penstock.parallel.stages import stage_of

        graph = stage_of(graph, self.groups, self.comm, pipe)
        return of_rank(graph, self.own_groups, self.comm, body=pipe.inner or OneRank())

    @property
    def own_groups(self) -> tuple[CacheGroup, ...]:
        """The groups, with the layers that this rank has."""
        pipe = None if self.comm is None else self.comm.pipe
        return self.groups if pipe is None else stage_groups(self.groups, pipe.layers)

    def on(
        self, backend: Backend, *, max_tokens: int, quantization: str = "none",
        rank_groups: Collection[CacheGroup] = (), matrices: Mapping[str, Any] | None = None,
        adapters: AdapterRoom | None = None,
    ) -> Forward:  # fmt: skip
        """`rank_groups`: all of the rank's, if others' follow its own. The rest: see `Backend.compile`."""
        return backend.compile(
            self.graph, tuple(rank_groups) or self.own_groups, max_tokens=max_tokens, quantization=quantization,
            matrices=matrices, adapters=adapters,
        )  # fmt: skip

    def part(
        self, backend: Backend, whole: Forward, layers: Collection[int], *, max_tokens: int,
        rank_groups: Collection[CacheGroup] = (),
    ) -> Forward:  # fmt: skip
        """The model without all layers but these, over the weights of `whole`, which are not held twice."""
        groups = tuple(rank_groups) or self.own_groups
        return backend.compile(self.graph.copy(layers), groups, max_tokens=max_tokens, like=whole)

    def restoring(self, backend: Backend, whole: Forward, planes: Sequence[Planes]) -> Forward:
        """What makes keys and values of hidden states in `planes` again (`model.restoring`), over the same weights."""
        graph = restoring(self.graph, self.groups, planes)
        return backend.compile(graph, self.groups, max_tokens=RESTORED_TOKENS, like=whole)


def make_sampler(backend: Backend | None, vocab_size: int, grammars: GrammarCache | None = None) -> Sampler:
    """The sampler that goes with a backend; the reference where there is none."""
    if backend is None or backend.draws is None:
        return Sampler(vocab_size, grammars)
    kernel = backend.draws(vocab_size)
    if isinstance(kernel, StartingKernel):
        return DeviceSampler(kernel, vocab_size, grammars)
    return KernelSampler(kernel, vocab_size, grammars)
