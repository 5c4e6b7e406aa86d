"""Torch as a backend: on a GPU, and on the CPU to prove what it does there.

This module can be imported without torch, so that `why_not` can say that it is missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.backends.backend import AdapterRoom
from penstock.backends.gpu.explain import kernel_decisions
from penstock.backends.gpu.graph_plan import graph_decision, planned_bytes, wanted_graphs
from penstock.config import EngineConfig
from penstock.core.cache_spec import CacheGroup
from penstock.core.events import Decision
from penstock.core.held_weights import HeldWeights, WeightMemory
from penstock.core.matrix_format import parse_scheme
from penstock.core.model_spec import ModelSpec
from penstock.model.adapted import adapted
from penstock.model.forward import Forward
from penstock.model.graph import Graph
from penstock.ops.attention import DEVICE_ATTENTION
from penstock.plan.devices import Device, device_preset
from penstock.plan.probe import Free
from penstock.plan.resolve import Plan

if TYPE_CHECKING:
    import torch

    from penstock.backends.gpu.forward import TorchForward

MISSING = "torch is not installed: pip install 'penstock[gpu]'"


class TorchBackend:
    """See `backends.backend.Backend`. Its models share what they have bound, array by array."""

    name = "torch"

    def __init__(
        self,
        device: torch.device,
        *,
        kernels: bool | None = None,
        attention: str = "ref",
        invariant: bool = False,
        graphs: tuple[int, ...] | None = (),
        why: str = "",
    ) -> None:
        """`kernels`: operations by Triton's; by default on a GPU, where Triton is installed. `attention`: a name of
        `ops.attention.DEVICE_ATTENTION`, or the backend's own. `invariant`: a row's bits do not depend on its company.
        `graphs`: rows for which decode steps are captured, None: powers of two, (): there are none, and `why`."""
        from penstock.backends.gpu.device_array import new_plane
        from penstock.backends.gpu.placed import Placement
        from penstock.backends.gpu.sample import TorchKernel
        from penstock.backends.gpu.warm import Warming

        self.device_used = device
        self.label = f"torch on {device}"
        self.new_plane = partial(new_plane, device)
        self._placement = Placement(device)
        self.attention, self.invariant = attention, invariant
        self.kernels = device.type != "cpu" and find_spec("triton") is not None if kernels is None else kernels
        self.draws = partial(TorchKernel, device, kernels=self.kernels)
        self.warming = Warming(graphs, why, self.draws)

    @classmethod
    def of(cls, config: EngineConfig, num_cores: int) -> TorchBackend:
        import torch

        place = config.execution.device
        sizes, why = wanted_graphs(config)
        return cls(
            torch.device(place if place.startswith("cuda") else "cpu"),
            attention=config.execution.attention_backend, invariant=config.execution.batch_invariant,
            graphs=sizes, why=why,
        )  # fmt: skip

    @classmethod
    def why_not(cls, config: EngineConfig, spec: ModelSpec) -> str | None:
        if find_spec("torch") is None:
            return MISSING
        problem = _no_gpu(config.execution.device)
        if problem is not None:
            return problem
        name = config.execution.attention_backend
        if name not in ("ref", *DEVICE_ATTENTION.names()):
            return f"attention_backend is {name}, and torch has its own"
        if name != "ref" and config.execution.batch_invariant:
            return (
                f"attention_backend {name} does not give a row the same bits in every batch; leave one of the two away"
            )
        if name != "ref" and (reason := DEVICE_ATTENTION.get(name).why_not(config, spec)) is not None:
            return str(reason)
        if config.execution.batch_invariant and config.execution.device.startswith("cuda") and not find_spec("triton"):
            return "batch_invariant needs Triton on a GPU: pip install 'penstock[gpu]'"
        if config.cache.kv_allocator in ("virtual", "vtensor"):
            return f"kv_allocator is {config.cache.kv_allocator}, which is memory of the CPU; use paged"
        if config.cache.swap_tier == "disk":
            return "swap_tier is disk, which takes pages from the CPU's memory; use host"
        if config.cache.kv_allocator == "modules":
            return "kv_allocator is modules, which is for the CPU so far; use paged"
        if config.cache.kv_selector == "infinigen" and config.execution.device.startswith("cuda"):
            return "kv_selector is infinigen, which chooses on the host in the middle of a step; use quest"
        scheme = parse_scheme(config.model.quantization)
        if scheme.row_bits:
            return f"quantization {scheme.name} rounds activations, and torch only weights (int8-wo, int4-wo)"
        return None

    @classmethod
    def why(cls) -> str:
        return "the device asks for it"

    @classmethod
    def device(cls, config: EngineConfig, num_cores: int) -> Device:
        return device_preset("cpu-ref")

    @classmethod
    def memory(cls, config: EngineConfig, spec: ModelSpec) -> Free | None:
        place = config.execution.device
        if not place.startswith("cuda"):
            return None
        import torch

        available, whole = torch.cuda.mem_get_info(torch.device(place))
        return Free(whole, max(0, available - planned_bytes(config, spec)))

    @classmethod
    def decisions(cls, config: EngineConfig, spec: ModelSpec, plan: Plan) -> tuple[Decision, ...]:
        kernels = config.execution.device.startswith("cuda") and find_spec("triton") is not None
        why = "Triton is installed" if kernels else "Triton's kernels want a GPU and Triton"
        named = config.execution.attention_backend
        own = "Triton, by torch where its kernels cannot" if kernels else "torch"
        by = own if named == "ref" else named
        said = kernel_decisions(spec, plan.held, kernels=kernels, attention=by, why=why)
        return (*said, graph_decision(config, spec, plan))

    def compile(
        self, graph: Graph, groups: Sequence[CacheGroup], *, max_tokens: int, quantization: str = "none",
        matrices: Mapping[str, Any] | None = None, like: Forward | None = None, adapters: AdapterRoom | None = None,
    ) -> TorchForward:  # fmt: skip
        from penstock.backends.gpu.attention import TorchAttention
        from penstock.backends.gpu.expert_ops import experts_by_kernels
        from penstock.backends.gpu.forward import TorchForward
        from penstock.backends.gpu.fused import fuse_for_kernels
        from penstock.backends.gpu.tables import EXACT, PLAIN

        scheme = like.scheme if isinstance(like, TorchForward) else parse_scheme(quantization)
        table = EXACT if self.device_used.type == "cpu" or self.invariant else PLAIN
        if self.kernels:
            from penstock.backends.gpu.kernel_ops import KernelTable

            if not self.invariant:  # tiles of the experts' kernel follow from how many tokens there are
                table = table.replaced("torch", {"experts": experts_by_kernels}, batch_invariant=table.batch_invariant)
            table = KernelTable(table, invariant=self.invariant)
        counts: Any = getattr(table, "counts", None) if self.kernels else Counter[str]()

        def attention() -> Any:
            if self.attention in DEVICE_ATTENTION.names():
                return DEVICE_ATTENTION.get(self.attention)(self.device_used)
            if not self.kernels:
                return TorchAttention()
            from penstock.backends.gpu.kernel_attention import KernelAttention

            return KernelAttention(prompts=not self.invariant)

        def made(graph: Graph, make: Callable[..., TorchForward] = TorchForward, **more: Any) -> TorchForward:
            own = fuse_for_kernels(graph) if self.kernels else graph
            forward = make(own, table, attention(), self._placement, self.warming, scheme, **more)
            forward.kernel_counts = counts
            return forward

        if adapters is None:
            return made(graph)
        from penstock.backends.gpu.adapted import AdaptedTorch, TorchTable, kind_of  # nobody else needs it at the start

        kind = kind_of(graph, kernels=self.kernels)
        slots = TorchTable(self.device_used, adapters.count, adapters.max_rank, kind, kernels=self.kernels,
                           exact=table.batch_invariant, counts=counts)  # fmt: skip

        def again(names: frozenset[str]) -> TorchForward:
            return made(adapted(graph, names), adapters=slots)

        return made(graph, AdaptedTorch, table=slots, again=again)

    def matrices(self, forward: Forward) -> Mapping[str, Any]:
        return {}

    def store(
        self, files: Sequence[Path], spec: ModelSpec, *, held: HeldWeights, quantization: str, num_bytes: int,
        copy: bool = True, memory: WeightMemory | None = None, part: str = "",
    ) -> None:  # fmt: skip
        return None


def _no_gpu(place: str) -> str | None:
    """What keeps `device` from being used, as an end of a sentence. Torch is imported for a GPU alone."""
    if not place.startswith("cuda"):
        return None
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        return "torch finds no GPU" if built else f"torch {torch.__version__} is built for the CPU"
    number = int(place.partition(":")[2] or 0)
    if number >= torch.cuda.device_count():
        return f"there is no GPU {number}, only {torch.cuda.device_count()} of them"
    return None
