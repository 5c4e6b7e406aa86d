"""Torch as a backend: on a GPU, and on the CPU to prove what it does there.

This module can be imported without torch, so that `why_not` can say that it is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.backends.gpu.graph_plan import graph_decision, planned_bytes, wanted_graphs
from penstock.config import EngineConfig
from penstock.core.cache_spec import CacheGroup
from penstock.core.events import Decision
from penstock.core.held_weights import HeldWeights
from penstock.core.matrix_format import parse_scheme
from penstock.core.model_spec import ModelSpec
from penstock.model.forward import Forward
from penstock.model.graph import Graph
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
        self, device: torch.device, *, kernels: bool | None = None, graphs: tuple[int, ...] | None = (), why: str = ""
    ) -> None:
        """`kernels`: attention by Triton's; by default on a GPU, where Triton is installed. `graphs`: rows for which
        decode steps are captured, None: powers of two, (): there are none, and `why`."""
        from penstock.backends.gpu.device_array import new_plane
        from penstock.backends.gpu.placed import Placement
        from penstock.backends.gpu.sample import TorchKernel
        from penstock.backends.gpu.warm import Warming

        self.device_used = device
        self.label = f"torch on {device}"
        self.new_plane = partial(new_plane, device)
        self.draws = partial(TorchKernel, device)
        self._placement = Placement(device)
        self.warming = Warming(graphs, why, self.draws)
        self.kernels = device.type != "cpu" and find_spec("triton") is not None if kernels is None else kernels

    @classmethod
    def of(cls, config: EngineConfig, num_cores: int) -> TorchBackend:
        import torch

        place = config.execution.device
        sizes, why = wanted_graphs(config)
        return cls(torch.device(place if place.startswith("cuda") else "cpu"), graphs=sizes, why=why)

    @classmethod
    def why_not(cls, config: EngineConfig, spec: ModelSpec) -> str | None:
        if find_spec("torch") is None:
            return MISSING
        problem = _no_gpu(config.execution.device)
        if problem is not None:
            return problem
        if config.execution.attention_backend != "ref":
            return f"attention_backend is {config.execution.attention_backend}, and torch has its own"
        if config.cache.kv_allocator == "virtual":
            return "kv_allocator is virtual, which is memory of the CPU; use paged"
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
        return (graph_decision(config, spec, plan),)

    def compile(
        self, graph: Graph, groups: Sequence[CacheGroup], *, max_tokens: int, quantization: str = "none",
        matrices: Mapping[str, Any] | None = None, like: Forward | None = None,
    ) -> TorchForward:  # fmt: skip
        from penstock.backends.gpu.attention import TorchAttention
        from penstock.backends.gpu.expert_ops import experts_by_kernels
        from penstock.backends.gpu.forward import TorchForward
        from penstock.backends.gpu.tables import EXACT, PLAIN

        scheme = like.scheme if isinstance(like, TorchForward) else parse_scheme(quantization)
        table = EXACT if self.device_used.type == "cpu" else PLAIN
        attention = TorchAttention()
        if self.kernels:
            from penstock.backends.gpu.kernel_attention import KernelAttention

            attention = KernelAttention()
            table = table.replaced("torch", {"experts": experts_by_kernels}, batch_invariant=table.batch_invariant)
        return TorchForward(graph, table, attention, self._placement, self.warming, scheme)

    def matrices(self, forward: Forward) -> Mapping[str, Any]:
        return {}

    def store(
        self, files: Sequence[Path], spec: ModelSpec, *, held: HeldWeights, quantization: str, num_bytes: int,
        copy: bool = True,
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
