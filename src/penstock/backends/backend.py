"""What a backend is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from penstock.config import EngineConfig
from penstock.core.cache_spec import CacheGroup
from penstock.core.events import Decision
from penstock.core.held_weights import HeldWeights, WeightMemory
from penstock.core.model_spec import ModelSpec
from penstock.model.forward import Forward
from penstock.model.graph import Graph
from penstock.plan.devices import Device
from penstock.plan.probe import Free
from penstock.plan.resolve import Plan


class WeightStore(Protocol):
    """The weights of one model as a backend holds them, kept on disk from the first start to the next.

    `path`: the file of this model, whether it is there or not.
    """

    path: Path

    @property
    def matrices(self) -> Mapping[str, Any] | None:
        """What an earlier start has left, read when it is first asked for; None: there is nothing, or nothing sound."""
        ...

    def names(self) -> frozenset[str]:
        """The weights that are in it, and need not be loaded."""
        ...

    def prepare(self, graph: Graph) -> None:
        """Write what weights that are read while they are used are read from, matrix by matrix, if it is not there.

        Raises: ConfigError if it cannot be written, or if they may not take the memory that they need.
        """
        ...

    def keep(self, matrices: Mapping[str, Any]) -> None:
        """For the next start; a warning in the log if the disk does not take it."""
        ...


@dataclass(frozen=True)
class AdapterRoom:
    """How many adapters a step of a model may have, and their largest rank."""

    count: int
    max_rank: int


class Backend(Protocol):
    """Made once for a rank: its models share what it holds (threads, compiled code).

    `label`: who computes, for people. `draws`: makes the kernel of its sampler for a number of tokens
    (`ops.draws.DrawKernel`); None: the reference samples. `new_plane`: makes a plane of keys and values of (shape,
    dtype, what fills it); None: arrays of this process.
    """

    name: str
    label: str
    draws: Any
    new_plane: Any

    @classmethod
    def of(cls, config: EngineConfig, num_cores: int) -> Backend:
        """As the settings say. `why_not` has said None."""
        ...

    @classmethod
    def why_not(cls, config: EngineConfig, spec: ModelSpec) -> str | None:
        """What keeps it from running this model with these settings, as an end of a sentence; None: nothing does."""
        ...

    @classmethod
    def why(cls) -> str:
        """What speaks for it where it can run."""
        ...

    @classmethod
    def device(cls, config: EngineConfig, num_cores: int) -> Device:
        """What it runs on, for predictions."""
        ...

    @classmethod
    def memory(cls, config: EngineConfig, spec: ModelSpec) -> Free | None:
        """Of the device that has weights, keys and values, before anything is loaded; None: this machine's."""
        ...

    @classmethod
    def decisions(cls, config: EngineConfig, spec: ModelSpec, plan: Plan) -> tuple[Decision, ...]:
        """What it decides by itself of how this plan is run."""
        ...

    def compile(
        self, graph: Graph, groups: Sequence[CacheGroup], *, max_tokens: int, quantization: str = "none",
        matrices: Mapping[str, Any] | None = None, like: Forward | None = None, adapters: AdapterRoom | None = None,
    ) -> Forward:  # fmt: skip
        """A graph as something to run, for steps of `max_tokens` tokens; with `adapters` a
        `model.forward.AdaptingForward` (`why_not` has looked).

        `matrices`: of a WeightStore. `like`: a model that this backend made and that has all of the graph's weights,
        which are not held twice.
        """
        ...

    def matrices(self, forward: Forward) -> Mapping[str, Any]:
        """What a WeightStore keeps of a model that this backend made."""
        ...

    def store(
        self, files: Sequence[Path], spec: ModelSpec, *, held: HeldWeights, quantization: str, num_bytes: int,
        copy: bool = True, memory: WeightMemory | None = None, part: str = "",
    ) -> WeightStore | None:  # fmt: skip
        """Where weights of these files are kept as it holds them; None where making them anew is quicker.

        `num_bytes`: of all weights. `copy`: what is kept is read into memory; else it is mapped. `memory`: it is read
        while it is used. `part`: which part of the model is kept, if not all.
        """
        ...
