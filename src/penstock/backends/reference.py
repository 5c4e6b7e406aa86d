"""Models on tables of plain operations (`ops.ref`, `ops.blas`): what every other backend is compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from penstock.backends.backend import AdapterRoom
from penstock.backends.program import AdaptedProgram, Program
from penstock.config import EngineConfig
from penstock.core.cache_spec import CacheGroup
from penstock.core.events import Decision
from penstock.core.held_weights import HeldWeights, WeightMemory
from penstock.core.model_spec import ModelSpec
from penstock.core.protocols import AttentionBackend
from penstock.model.forward import Forward
from penstock.model.graph import Graph
from penstock.ops.attention import ATTENTION_BACKENDS
from penstock.ops.blas import BLAS
from penstock.ops.ref import REF
from penstock.ops.table import OpTable
from penstock.plan.devices import Device, device_preset
from penstock.plan.resolve import Plan


class ReferenceBackend:
    """See `backends.backend.Backend`."""

    name, label = "ref", "numpy"
    table: ClassVar[OpTable] = REF
    draws = new_plane = None

    def __init__(self, attention: str | AttentionBackend = "ref", table: OpTable | None = None) -> None:
        """`attention`: a name, or one of the caller's own. `table`: other operations than the backend's.

        Raises: ConfigError for an unknown attention backend.
        """
        self._attention = ATTENTION_BACKENDS.get(attention) if isinstance(attention, str) else attention
        self._table = self.table if table is None else table

    @classmethod
    def of(cls, config: EngineConfig, num_cores: int) -> ReferenceBackend:
        return cls(config.execution.attention_backend)

    @classmethod
    def why_not(cls, config: EngineConfig, spec: ModelSpec) -> str | None:
        return None

    @classmethod
    def why(cls) -> str:
        return "the reference operations are slow"

    @classmethod
    def device(cls, config: EngineConfig, num_cores: int) -> Device:
        return device_preset("cpu-ref")

    @classmethod
    def memory(cls, config: EngineConfig, spec: ModelSpec) -> None:
        return None

    @classmethod
    def decisions(cls, config: EngineConfig, spec: ModelSpec, plan: Plan) -> tuple[Decision, ...]:
        return ()

    def compile(
        self, graph: Graph, groups: Sequence[CacheGroup], *, max_tokens: int, quantization: str = "none",
        matrices: Mapping[str, Any] | None = None, like: Forward | None = None, adapters: AdapterRoom | None = None,
    ) -> Program:  # fmt: skip
        assert quantization == "none", "the reference operations take weights as they are"
        if adapters is not None:
            return AdaptedProgram(graph, self._table, self._attention, adapters.count)
        return Program(graph, self._table, self._attention)

    def matrices(self, forward: Forward) -> Mapping[str, Any]:
        return {}

    def store(
        self, files: Sequence[Path], spec: ModelSpec, *, held: HeldWeights, quantization: str, num_bytes: int,
        copy: bool = True, memory: WeightMemory | None = None, part: str = "",
    ) -> None:  # fmt: skip
        return None


class BlasBackend(ReferenceBackend):
    """One product for all rows of a step: faster, and not batch-invariant."""

    name = "blas"
    table = BLAS

    @classmethod
    def why_not(cls, config: EngineConfig, spec: ModelSpec) -> str | None:
        if config.execution.batch_invariant:
            return "batch_invariant is set, and ops blas computes all rows at once"
        return None
